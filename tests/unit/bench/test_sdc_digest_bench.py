"""The bench of digests: its faults change bits, and its rows are judged as they should be."""

from __future__ import annotations

import random

import pytest
import torch

from bench import sdc_digest


@pytest.mark.parametrize("kind", sdc_digest.FAULTS)
def test_faults_hit_only_their_places(kind: str) -> None:
    chance = random.Random(1)
    clean = torch.randn(sdc_digest.WIDTH**2).view(torch.int32)
    changed = 0
    for _ in range(50):
        where = sdc_digest.places(chance)
        bits = clean.clone()
        sdc_digest.FAULTS[kind](bits, where, chance)
        hit = (bits != clean).nonzero().flatten().tolist()
        assert set(hit) <= {*where, where[0] ^ 1}
        changed += bool(hit)
    assert changed > 10


def test_weighted_sum_misses_nothing_and_xor_does() -> None:
    rows = {row.name: row for row in sdc_digest.misses(20)}
    assert rows["all: missed by weighted sum"].met == "aim"
    assert (rows["lanes swapped: missed by XOR (torch.hash_tensor)"].value or 0) == 100.0


def test_rates_are_judged_by_a_copy_of_the_same_bytes() -> None:
    rows = sdc_digest.rates(1 << 20, 1)
    assert [row.floor is None for row in rows] == [True, False, False, False, True, False]
