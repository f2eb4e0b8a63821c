"""Non-persistent buffers: those that training changes are stored, constants and caches are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.copy import SnapshotSources
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state import unstored_buffers as module
from everstep_trainer.state.layout import Sharing
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import lone_rank


class Net(nn.Module):
    """With a running value, a constant table and a cache, none of them persistent."""

    running: torch.Tensor
    table: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("running", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def in_place(model: Net) -> None:
    model.running.lerp_(torch.ones(8), 0.1)


def by_replacement(model: Net) -> None:
    model.running = 0.9 * model.running + 0.1


def grow(model: Net) -> None:
    model.register_buffer("cache", torch.zeros(len(model.cache) + 1), persistent=False)


def rewrite_equal(model: Net) -> None:
    model.table.copy_(torch.arange(64.0))
    model.register_buffer("table", torch.arange(64.0), persistent=False)


def names(state: TrackedState) -> set[str]:
    return {tensor.name for tensor in state.tensors() if "linear" not in tensor.name}


@pytest.mark.promise("running-buffers")
@pytest.mark.parametrize("change", [in_place, by_replacement])
def test_running_buffer_is_stored_from_its_first_change(change: Callable[[Net], None]) -> None:
    model = Net()
    state = TrackedState({"model": model})
    assert names(state) == set()
    assert state.is_unchanged()
    change(model)
    assert not state.is_unchanged()
    (found,) = (tensor for tensor in state.tensors() if tensor.name == "model.running")
    assert found.sharing is Sharing.PER_RANK
    change(model)
    assert torch.equal(found.current(), model.running)
    assert names(state) == {"model.running"}


@pytest.mark.parametrize("change", [grow, rewrite_equal])
def test_cache_and_constant_are_not_stored(change: Callable[[Net], None]) -> None:
    model = Net()
    state = TrackedState({"model": model})
    for _ in range(3):
        change(model)
        state.is_unchanged()
        assert names(state) == set()


def test_large_changing_buffer_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "MAX_STORED_BYTES", 16)
    model = Net()
    state = TrackedState({"model": model})
    for _ in range(3):
        in_place(model)
        assert names(state) == set()
    assert caplog.text.count("model.running changes in training, is a non-persistent buffer, and too large") == 1


@pytest.mark.promise("running-buffers")
def test_running_buffer_returns_with_its_version_or_without(program_forks: ForkPool) -> None:
    with lone_rank(program_forks) as rank:
        spec, model = generation(1), Net()
        snapshots = Snapshotter(
            rank.client, TrackedState({"model": model}), spec, spec.roster[0], HashStore(), lambda _: None
        )
        snapshots.begin(1)
        for step in (2, 3, 4):
            snapshots.wait()
            in_place(model)
            snapshots.begin(step)
        snapshots.wait()
        snapshots.close(finish=True)
        for number, floor, running in ((2, None, model.running), (3, None, model.running)):
            again = Net()
            state = TrackedState({"model": again})
            spec = generation(number, restore=RestoreRule(floor=floor))
            result = Restoration(rank.client, spec, spec.roster[0], HashStore()).fill(state)
            assert result.version == Version(1, 4)
            assert torch.equal(again.running, running)
            assert state.running_buffers == {"model.running"}
            assert names(state) == {"model.running"}


def test_version_without_the_buffer_is_restored(program_forks: ForkPool) -> None:
    with lone_rank(program_forks) as rank:
        spec, model = generation(1), Net()
        snapshots = Snapshotter(
            rank.client, TrackedState({"model": model}), spec, spec.roster[0], HashStore(), lambda _: None
        )
        snapshots.begin(1)
        snapshots.wait()
        snapshots.close(finish=True)
        again = Net()
        state, spec = TrackedState({"model": again}), generation(2, restore=RestoreRule())
        in_place(again)
        state.is_unchanged()
        assert state.running_buffers
        assert Restoration(rank.client, spec, spec.roster[0], HashStore()).fill(state).version == Version(1, 1)
        assert state.running_buffers == set()


def normalized() -> tuple[nn.Sequential, TrackedState, SnapshotSources]:
    """A model whose running statistics were seen to change, and what is copied of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    state = TrackedState({"model": model})
    model(torch.randn(8, 4))
    sources = SnapshotSources(state.tensors(), None)
    assert len(sources._volatile) == 6, "means, variances and counts of both"
    return model, state, sources


def norm_of(model: nn.Sequential) -> nn.BatchNorm1d:
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    return norm


def test_buffer_replacing_another_is_copied() -> None:
    model, state, sources = normalized()
    norm_of(model).running_mean = torch.full((4,), 7.0)
    assert state.is_unchanged(), "of the same form"
    sources.stage()
    assert sources._staged[sources._volatile[0][0]].tolist() == [7.0] * 4


def test_buffer_with_new_memory_is_copied_from_there() -> None:
    model, _, sources = normalized()
    model.get_buffer("1.running_mean").data = torch.full((4,), 5.0)
    sources.stage()
    assert sources._staged[sources._volatile[0][0]].tolist() == [5.0] * 4


@pytest.mark.parametrize("value", [None, torch.zeros(5), torch.zeros(4, dtype=torch.float64)])
def test_buffer_of_another_form_is_a_change(value: torch.Tensor | None) -> None:
    model, state, _ = normalized()
    norm_of(model).running_mean = value
    assert not state.is_unchanged()
