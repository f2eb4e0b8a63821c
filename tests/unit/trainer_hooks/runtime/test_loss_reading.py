"""A reported loss, which a thread reads that can tell nobody of an error."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.runtime.progress import LatestLoss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def test_numbers_of_every_kind_are_read():
    reading = LatestLoss()
    assert reading.value() is None
    for loss in (
        2.5,
        torch.tensor(2.5),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
        torch.tensor(2.5).requires_grad_(),
    ):
        reading.update(loss)
        assert reading.value() == 2.5


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(0), torch.tensor(1j)])
def test_non_scalar_loss_is_refused_when_reported(loss):
    reading = LatestLoss()
    reading.update(1.5)
    with pytest.raises(ValueError, match=r"run\.report takes one real number"):
        reading.update(loss)
    assert reading.value() == 1.5


def test_distributed_loss_is_read_without_a_collective(alone: None):
    mesh = init_device_mesh("cpu", (1,))
    reading = LatestLoss()
    reading.update(distribute_tensor(torch.tensor(0.5), mesh, [Replicate()]))
    assert reading.value() == 0.5
    with pytest.raises(ValueError, match="full_tensor"):
        reading.update(distribute_tensor(torch.ones(1), mesh, [Shard(0)]))
