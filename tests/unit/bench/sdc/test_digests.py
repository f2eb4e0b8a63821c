"""The bench of digests: its faults change bits, and its rows are judged by the right limits."""

from __future__ import annotations

import random

import pytest
import torch

from bench.sdc import digests


@pytest.mark.parametrize("kind", digests.FAULTS)
def test_faults_hit_only_their_places(kind: str) -> None:
    chance = random.Random(1)
    clean = torch.randn(digests.WIDTH**2).view(torch.int32)
    changed = 0
    for _ in range(50):
        where = digests.places(chance)
        bits = clean.clone()
        digests.FAULTS[kind](bits, where, chance)
        hit = (bits != clean).nonzero().flatten().tolist()
        assert set(hit) <= {*where, where[0] ^ 1}
        changed += bool(hit)
    assert changed > 10


def test_weighted_sum_misses_nothing_and_xor_does() -> None:
    rows = {row.name: row for row in digests.misses(20)}
    assert rows["all: missed by weighted sum"].met == "aim"
    assert (rows["lanes swapped: missed by XOR (torch.hash_tensor)"].value or 0) == 100.0
