"""A job whose objects list their own shards, started from its own checkpoint on storage at another world size."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from everstep.ids import Version
from everstep_agent.spill.__main__ import execute
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.sliced_state import LENGTH, SlicedState
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone

VERSION = Version(2, 7)


def stored(folder: Path, world: int) -> Path:
    """Return the folder in which ranks that have made an update stored their state."""
    states = []
    for rank in range(world):
        sliced = SlicedState(rank, world)
        sliced.optimizer.param_groups[0]["lr"] = 0.25
        sliced.update()
        states.append(TrackedState({"model": nn.Linear(2, 2), "zero": sliced}))
    order = fill_slots(folder / "slots", states, VERSION)
    assert execute(msgspec.structs.replace(order, url=str(folder / "out"))).complete
    return folder / "out"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_start_from_storage_at_another_world_size(tmp_path: Path, world: int) -> None:
    place = stored(tmp_path, world=3)
    whole = SlicedState(0, 1)
    whole.optimizer.param_groups[0]["lr"] = 0.25
    whole.update()
    expected = {shard.name: shard.local.clone() for shard in whole.shards()}
    for rank in range(world):
        sliced = SlicedState(rank, world)
        objects = {"model": nn.Linear(2, 2), "zero": sliced}
        assert load_checkpoint_alone(place, objects, TrackedState(objects), rank, world) == VERSION.step
        shards = list(sliced.shards())
        assert {shard.name for shard in shards} == (set(expected) if sliced.start < LENGTH else set())
        for shard in shards:
            (start,), (length,) = shard.box.offset, shard.box.size
            assert torch.equal(shard.local, expected[shard.name].narrow(0, start, length)), shard.name
        assert sliced.optimizer.param_groups[0]["lr"] == 0.25
