"""A rank that restores what it wrote itself does so through the mapping that it wrote through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.restorer import Restoration, RestoreResult
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import RestoreRule
from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.vaults import JOB, vaults


def mappings_of(path: Path) -> int:
    """How many times this process has mapped a file."""
    return sum(line.endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


class Survivor:
    """A process that goes from one generation into the next."""

    def __init__(self, client: VaultClient, path: Path) -> None:
        self.client = client
        self.path = path
        self.model = nn.Linear(64, 64)

    def stores(self, number: int, step: int) -> None:
        state, spec = TrackedState({"model": self.model}), generation(number)
        snapshots = Snapshotter(self.client, state, spec, spec.roster[0], dist.HashStore(), lambda _: None)
        with torch.no_grad():
            self.model.weight.fill_(step)
        snapshots.begin(step)
        snapshots.wait()
        snapshots.close(finish=True)

    def restores(self, number: int) -> RestoreResult:
        with torch.no_grad():
            self.model.weight.fill_(-1)
        spec = generation(number, restore=RestoreRule())
        self.restoration = Restoration(self.client, spec, spec.roster[0], dist.HashStore())
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
    survivor.stores(1, 1)
    assert survivor.restores(2).version == Version(1, 1)
    assert survivor.model.weight.unique().tolist() == [1.0]
    survivor.stores(2, 2)
    assert survivor.restores(3).version == Version(2, 2)
    assert mappings_of(survivor.path) == 1


def test_replaced_segment_is_mapped_again(survivor: Survivor) -> None:
    survivor.stores(1, 1)
    old = survivor.client.map_segment(str(survivor.path))
    larger = survivor.client.open_segment(JOB, 0, 4 * old.view.slot_bytes)
    assert larger is not old
    assert survivor.client.map_segment(str(survivor.path)) is larger
    assert isinstance(larger.view, SegmentView)
    assert survivor.restores(2).version == Version(1, 1)


def test_new_process_maps_the_segment_of_its_predecessor(survivor: Survivor) -> None:
    survivor.stores(1, 1)
    with pytest.raises(FileNotFoundError):
        survivor.client.map_segment(f"{survivor.path}-of-nobody")
    again = VaultClient(survivor.client._path)
    try:
        successor = Survivor(again, survivor.path)
        assert successor.restores(2).version == Version(1, 1)
        assert again.open_segment(JOB, 0, 1) is again.map_segment(str(survivor.path))
    finally:
        again.close()
