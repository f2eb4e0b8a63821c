"""LBFGS, whose state belongs to all parameters at once: in a fresh process, in other layouts, and if it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everstep.errors import NotRestorable
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.processes.fork_pool import ForkPool

WIDTH = 4
"""torch flattens what is sharded evenly only."""


class Job:
    def __init__(self, *, sharded: bool, layers: int = 2, backwards: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if sharded:
            fully_shard(self.model)
        parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.LBFGS(parameters[:: -1 if backwards else 1], lr=0.5, history_size=4, max_iter=3)
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer})

    def step(self, number: int) -> float:
        x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(number))

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = (self.model(x) - y).square().mean()
            loss.backward()
            result: torch.Tensor = loss.detach()
            return result

        return float(self.optimizer.step(closure))

    def restore(self, other: Job) -> None:
        """Load the state of ``other``, whose parameters are laid out like this job's, or are whole on one rank."""
        tensors = other.state.tensors()
        live = {tensor.name: tensor.local for tensor in tensors}
        layouts = [other.state.layout(tensors, 0, 1)]
        catalog = build_manifest(0, layouts, divide_state(layouts, ["n1"], 1)[0], 1 << 16).catalog
        python = MergedState([decode(other.state.capture().data())], self.state.python_names())
        self.state.require_python(python)
        with torch.no_grad():
            for index, target in self.state.restore_targets(catalog):
                target.local.copy_(live[catalog[index].name])
        self.state.load_python(python)

    def weights(self) -> list[torch.Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in self.model.parameters()]


def check_same_training(before: Job, after: Job) -> None:
    for number in range(3):
        before.step(number)
    after.restore(before)
    for number in range(3, 6):
        assert before.step(number) == after.step(number)
    assert all(torch.equal(a, b) for a, b in zip(before.weights(), after.weights(), strict=True))


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_lbfgs_continues_exactly_with_any_sharding(alone: None, sharded: bool, into: bool) -> None:
    before, after = Job(sharded=sharded), Job(sharded=into)
    check_same_training(before, after)
    (state,) = after.optimizer.state.values()
    assert all(isinstance(tensor, DTensor) is into for tensor in (state["d"], state["H_diag"], *state["old_dirs"]))


def run_on_two_ranks(rank: int, port: int) -> None:
    """Check the same training on one of two ranks, in a process of its own."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    check_same_training(Job(sharded=True), Job(sharded=True))
    dist.destroy_process_group()


def test_lbfgs_continues_exactly_on_two_fsdp2_ranks(forks: ForkPool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in [forks.start(run_on_two_ranks, rank, store.port) for rank in range(2)]:
        rank.result()


@pytest.mark.parametrize("other", [{"layers": 1}, {"backwards": True}], ids=["a part", "another order"])
def test_lbfgs_refuses_other_parameters_by_name(other: dict[str, Any]) -> None:
    before = Job(sharded=False)
    before.step(0)
    with pytest.raises(NotRestorable, match=r"optimizer is an LBFGS, whose state concatenates all of its parameters"):
        Job(sharded=False, **other).restore(before)
