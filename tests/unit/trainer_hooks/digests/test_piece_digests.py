"""Digests of single tensors that add up to the digest of all."""

from __future__ import annotations

import random

import pytest
import torch

from everstep_trainer.digests.digest import SMALL_BYTES, combined_digest, to_unsigned
from everstep_trainer.digests.piece_digests import digest_at, digest_at_places, places_of, separate_digests

MASK = (1 << 64) - 1


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(7, 3),
        torch.randn(SMALL_BYTES // 4 + 5),
        torch.randn(5).bfloat16(),
        torch.tensor(3.5),
        torch.randint(0, 256, (4099,), dtype=torch.uint8),
        torch.randn(3, 3, dtype=torch.complex128),
        torch.randn(300, 400).t(),
        torch.randn(11).bfloat16(),
        torch.tensor([True, False, True]),
        torch.arange(9),
    ]


@pytest.mark.parametrize("is_native", [True, False])
def test_separate_digests_add_up_to_the_combined_digest(monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    if not is_native:
        monkeypatch.setattr("everstep_trainer.digests.piece_digests.copy_hash", None)
    assert to_unsigned(separate_digests(tensors()).sum()) == to_unsigned(combined_digest(tensors()))
    assert not separate_digests([]).numel()


@pytest.mark.parametrize("seed", range(8))
def test_any_of_the_tensors_have_the_sum_of_their_digests(seed: int) -> None:
    every = tensors()
    places = places_of((tensor.dtype, tensor.nbytes) for tensor in every)
    digests = separate_digests(every).tolist()
    chosen = random.Random(seed).sample(range(len(every)), 1 + seed)
    found = digest_at_places([every[n] for n in chosen], [places[n] for n in chosen])
    assert to_unsigned(found) == sum(digests[n] for n in chosen) & MASK
    assert [digest_at(every[n], places[n]).item() for n in chosen] == [digests[n] for n in chosen]
