"""The exchange of gradients in buckets gives the same bits for any buckets, which depend on the model alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep_trainer.parallel.exchange import bucket_indices
from tests.support.ranks.kept_ranks import KeptRanks
from tests.unit.trainer_hooks.parallel.exchanged_training import MODELS, train_each

ODD_MB = (0.0005, 0.0021, 0.0037, 256)
"""Of models of some kilobytes: most parameters in a bucket of their own, to one bucket."""

NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=NIGHTLY), pytest.param(5, marks=NIGHTLY)])
def test_bits_do_not_depend_on_bucket_size(kept_ranks: KeptRanks, world: int) -> None:
    for program in [name for name in MODELS if name != "large"]:
        outcomes = kept_ranks.call(world, train_each, program, ODD_MB)
        expected = outcomes[0][0]
        assert outcomes == [(expected, [expected] * len(ODD_MB))] * world, program


@pytest.mark.parametrize("world", [pytest.param(2, marks=NIGHTLY), 3])
def test_bits_of_large_model_equal_those_of_one_bucket(kept_ranks: KeptRanks, world: int) -> None:
    sizes = (1, 8, 11.3, 25, 256)
    outcomes = kept_ranks.call(world, train_each, "large", sizes)
    expected = outcomes[0][0]
    assert outcomes == [(expected, [expected] * len(sizes))] * world


def test_buckets_begin_with_the_last_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    found = bucket_indices(list(model.parameters()), [80])
    assert found == [[5, 4], [3, 2], [1, 0]]


def test_bucket_has_parameters_of_one_dtype() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    found = bucket_indices([torch.zeros(4, dtype=kind) for kind in kinds], [1 << 20])
    assert found == [[3, 1], [2, 0]]
