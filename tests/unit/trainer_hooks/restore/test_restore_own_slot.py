"""A surviving rank restores its own slot through the mapping through which it wrote the slot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import Holder, RestoreRule
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_trainer.restore.agreement import RestoreOutcome, combine_outcomes, encode_live_tensors
from everstep_trainer.restore.restorer import Restoration, RestoreResult, slot_distance
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import JOB, vaults


def mappings_of(path: Path) -> int:
    """Return the number of times that this process has mapped the file."""
    return sum(line.endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


class Survivor:
    """A process that survives from one generation to the next."""

    def __init__(self, client: VaultClient, path: Path) -> None:
        self.client = client
        self.path = path
        self.model = nn.Linear(64, 64)

    def store(self, number: int, step: int) -> None:
        state, spec = TrackedState({"model": self.model}), generation(number)
        snapshots = Snapshotter(self.client, state, spec, spec.roster[0], HashStore(), lambda _: None)
        with torch.no_grad():
            self.model.weight.fill_(step)
        snapshots.begin(step)
        snapshots.wait()
        snapshots.close(finish=True)

    def restore(self, number: int) -> RestoreResult:
        with torch.no_grad():
            self.model.weight.fill_(-1)
        spec = generation(number, restore=RestoreRule())
        self.restoration = Restoration(self.client, spec, spec.roster[0], HashStore())
        return self.restoration.fill(TrackedState({"model": self.model}))


@pytest.fixture
def survivor(program_forks: ForkPool) -> Iterator[Survivor]:
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            yield Survivor(client, fleet.segments / "n1" / JOB / "own-0")
        finally:
            client.close()


def test_surviving_rank_maps_its_segment_once(survivor: Survivor) -> None:
    survivor.store(1, 1)
    assert survivor.restore(2).version == Version(1, 1)
    assert survivor.model.weight.unique().tolist() == [1.0]
    survivor.store(2, 2)
    assert survivor.restore(3).version == Version(2, 2)
    assert mappings_of(survivor.path) == 1


def test_new_process_maps_the_segment_of_its_predecessor(survivor: Survivor) -> None:
    survivor.store(1, 1)
    with pytest.raises(FileNotFoundError):
        survivor.client.map_segment(f"{survivor.path}-missing")
    again = VaultClient(survivor.client._path)
    try:
        successor = Survivor(again, survivor.path)
        assert successor.restore(2).version == Version(1, 1)
        assert again.open_segment(JOB, 0, 1) is again.map_segment(str(survivor.path))
    finally:
        again.close()


RACKS = {"n1": "r1", "n2": "r2", "n3": "r1", "n4": "r2", "n5": ""}


def _slot(node: str, rank: int, *, replica: bool = False, group: ParityGroup | None = None) -> SlotInfo:
    return SlotInfo(
        node=node,
        rank=rank,
        version=Version(1, 1),
        path="p",
        slot=0,
        replica=replica,
        manifest_digest="d",
        parity_group=group,
    )


def test_the_nearest_holder_comes_first() -> None:
    spec = generation(1, ranks=[(node, 0) for node in ("n1", "n2", "n3", "n4")])
    holders = tuple(Holder(node=node, vault="127.0.0.1:1", rack=rack) for node, rack in RACKS.items())
    spec = msgspec.structs.replace(spec, holders=holders)
    group = ParityGroup(group=0, members=((0, "n1"), (1, "n2")), parity=("n4", "n5"))
    wanted = [
        _slot("n1", 0),
        _slot("n1", 2, replica=True),
        _slot("n3", 2),
        _slot("n3", 0, replica=True),
        _slot("n2", 1),
        _slot("n4", 3),
        _slot("n4", 0, replica=True),
        _slot("n5", 0),
        _slot("n4", 0, group=group),
    ]
    shuffled = random.Random(3).sample(wanted, len(wanted))
    assert sorted(shuffled, key=lambda slot: slot_distance(spec, spec.roster[0], slot)) == wanted


NAMES = tuple(f"t{i:02}" for i in range(20))


@given(st.lists(st.sets(st.integers(0, len(NAMES) - 1)), min_size=1, max_size=5))
def test_each_tensor_must_be_live_on_some_rank(live: list[set[int]]) -> None:
    verdict = combine_outcomes(
        [RestoreOutcome(True, live_tensors=encode_live_tensors(indices, len(NAMES))) for indices in live], NAMES
    )
    gone = [name for index, name in enumerate(NAMES) if not any(index in indices for indices in live)]
    assert verdict.succeeded
    if gone:
        assert f"{len(gone)} tensors are gone from all ranks ({', '.join(gone[:3])})" in verdict.error
        assert "give an optimizer all parameters from the start" in verdict.error
    else:
        assert not verdict.error


def test_error_of_one_rank_reaches_all_ranks() -> None:
    verdict = combine_outcomes(
        [RestoreOutcome(True), RestoreOutcome(False, error="rank 1: other model"), RestoreOutcome(True)], NAMES
    )
    assert (verdict.succeeded, verdict.error) == (False, "rank 1: other model")
