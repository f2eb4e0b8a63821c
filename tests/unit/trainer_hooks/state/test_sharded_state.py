"""Tracked objects that list their own shards, for frameworks without DTensors."""

from __future__ import annotations

import pytest
import torch

from everstep.layout.manifests import Box, TensorInfo
from everstep_trainer.restore.restorer import StateBackup
from everstep_trainer.slots.fetch import NeededBox, plan_reads
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.sliced_state import LENGTH, SlicedState


def tracked(rank: int = 0, world: int = 1, *, exclude: tuple[str, ...] = ()) -> tuple[SlicedState, TrackedState]:
    sliced = SlicedState(rank, world)
    return sliced, TrackedState({"zero": sliced}, exclude)


def catalog_of(world: int) -> tuple[TensorInfo, ...]:
    """Return the catalog of a version by ranks that have made an update."""
    states = []
    for rank in range(world):
        sliced, state = tracked(rank, world)
        sliced.update()
        states.append(state.layout(state.tensors(), rank, world))
    shares = divide_state(states, [f"n{rank}" for rank in range(world)], 1)
    return build_manifest(0, states, shares[0], 0).catalog


def test_shards_are_named_below_the_object() -> None:
    sliced, state = tracked(1, 3)
    (only,) = state.tensors()
    assert (only.name, only.shape, only.box) == ("zero.master", (LENGTH,), Box((4,), (4,)))
    assert not state.is_complete()
    sliced.update()
    assert {tensor.name for tensor in state.tensors()} == {"zero.master", "zero.exp_avg", "zero.exp_avg_sq"}
    assert state.is_complete()


def test_new_state_of_a_shard_is_detected() -> None:
    sliced, state = tracked()
    state.tensors()
    assert state.is_unchanged()
    sliced.update()
    assert not state.is_unchanged()
    state.tensors()
    assert state.is_unchanged()
    sliced.optimizer.state[sliced.master[0]]["exp_avg"] = torch.zeros(LENGTH)
    assert not state.is_unchanged()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1), (1, 4)])
def test_shards_are_found_at_another_world_size(before: int, after: int) -> None:
    layouts = []
    for rank in range(before):
        sliced, state = tracked(rank, before)
        sliced.update()
        layouts.append(state.layout(state.tensors(), rank, before))
    shares = divide_state(layouts, [f"n{rank}" for rank in range(before)], 1)
    manifests = [build_manifest(rank, layouts, share, 0) for rank, share in enumerate(shares)]
    for rank in range(after):
        sliced, state = tracked(rank, after)
        targets = state.restore_targets(manifests[0].catalog)
        names = {target.name for _, target in targets}
        assert names == ({"zero.master", "zero.exp_avg", "zero.exp_avg_sq"} if sliced.start < LENGTH else set())
        reads = plan_reads([NeededBox(index, target.box) for index, target in targets], manifests)
        assert sum(read.box.volume for read in reads) == len(targets) * min(sliced.size, LENGTH - sliced.start)


def test_failed_restore_leaves_no_state_behind() -> None:
    sliced, state = tracked()
    backup = StateBackup(state, with_values=True)
    for _, target in state.restore_targets(catalog_of(1)):
        target.local.fill_(-1.0)
    assert sliced.optimizer.state
    backup.undo()
    assert not sliced.optimizer.state
    assert torch.equal(sliced.master[0], torch.arange(10.0))
