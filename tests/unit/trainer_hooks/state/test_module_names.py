"""A tensor has one name under any wrapper: a job that shrinks to one rank has no replicas any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.state.layout import Sharing
from everstep_trainer.state.tracked_state import TrackedState

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, as it compiles
]


class Nested(nn.Module):
    """A model with parts that have the names of wrappers' parts."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.modules_too = nn.ModuleList([nn.Linear(2, 2, bias=False)])


def names(*wrapped: nn.Module) -> list[str]:
    (model,) = wrapped
    return sorted(tensor.name for tensor in TrackedState({"model": model}).tensors())


NESTED = ["model.module.bias", "model.module.weight", "model.modules_too.0.weight"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        DistributedDataParallel,
        torch.compile,
        lambda model: torch.compile(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(torch.compile(model)),
        lambda model: DistributedDataParallel(checkpoint_wrapper(model)),
    ],
)
@pytest.mark.slow
def test_wrappers_add_nothing_to_names(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    assert names(wrap(Nested())) == NESTED


@pytest.mark.parametrize(("broadcasts", "sharing"), [(True, Sharing.FIRST_RANK), (False, Sharing.PER_RANK)])
def test_broadcast_buffers_belong_to_rank_0_in_any_wrapper(broadcasts: bool, sharing: Sharing) -> None:
    norm = nn.BatchNorm1d(2)
    state = TrackedState({"model": torch.compile(DistributedDataParallel(norm, forward_sync_buffers=broadcasts))})
    norm.get_buffer("running_mean").add_(1)
    (moved,) = (tensor for tensor in state.tensors() if tensor.name == "model.running_mean")
    assert moved.sharing is sharing
