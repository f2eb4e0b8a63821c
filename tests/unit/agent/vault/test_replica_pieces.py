"""State that ranks hold alike is stored in parts, by each rank other ones: what rots in a slot comes back from those of
the others, wherever in theirs it lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from everstep.ids import Version
from everstep.layout.manifests import BLOB_LENGTH_BYTES, Manifest, decode_manifest
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from tests.support.forked import ForkPool
from tests.support.spilling import fill_slots
from tests.support.vaults import JOB, RankMemory, Vaults, map_segment, vaults
from tests.support.waiting import until

V = Version(2, 9)
SCRUB = ("--scrub-interval-s", "0.02")
NO_SCRUB = ("--scrub-interval-s", "0")


class Held(nn.Module):
    """More than a chunk for each of three ranks, and pieces with padding behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.large = nn.Linear(1900, 1900)
        self.odd = nn.Linear(133, 131)


class Fleet:
    """Ranks on nodes n1, n2, ... with a sealed share each of what all hold alike; n1 is scrubbed."""

    def __init__(self, running: Vaults, folder: Path, nodes: tuple[str, ...]) -> None:
        state = TrackedState({"model": Held()})
        order = fill_slots(folder, state, V, world=len(nodes), nodes=len(set(nodes)), digests=True)
        self.vaults = running
        by_node = {node: running.start(node, *(SCRUB if node == "n1" else NO_SCRUB)) for node in dict.fromkeys(nodes)}
        running.configure()
        self.payloads, self.manifests, self.ranks = [], [], []
        for source, node in zip(order.sources, nodes, strict=True):
            view = map_segment(Path(source.path))
            self.payloads.append(bytes(view.payload(0)))
            self.manifests.append(view.manifest(0))
            room = slot_bytes_for(len(self.manifests[-1]), len(self.payloads[-1]))
            self.ranks.append(RankMemory(by_node[node].client(), source.rank, nodes[: source.rank].count(node), room))
            self.fill(source.rank, V)

    def fill(self, rank: int, version: Version, slot: int = 0) -> None:
        self.ranks[rank].fill(slot, version, self.payloads[rank], self.manifests[rank])

    def manifest(self, rank: int = 0) -> Manifest:
        return decode_manifest(self.manifests[rank])

    def flip(self, at: int, rank: int = 0) -> None:
        self.ranks[rank].view.payload(0)[at] ^= 64

    def found(self) -> str:
        """What n1's vault tells next."""
        finding = self.vaults.supervisors["n1"].finding().finding.finding
        assert (finding.kind, finding.subject) == (FindingKind.SLOT_CORRUPT, "job/rank0/2:9")
        return finding.message

    def comes_back(self, *places: int) -> None:
        for place in places:
            self.flip(place)
        told = self.found()
        assert "; repaired from " in told, told
        until(lambda: bytes(self.ranks[0].view.payload(0)) == self.payloads[0], "the slot is as it was sealed")
        self.ranks[0].view.verify(0)


@pytest.fixture
def fleet(program_forks: ForkPool, tmp_path: Path) -> Iterator[Fleet]:
    with vaults(program_forks) as running:
        yield Fleet(running, tmp_path, ("n1", "n2", "n3"))


def spots(manifest: Manifest) -> list[tuple[int, int]]:
    """Where each piece begins and ends."""
    return [(s.offset, s.offset + s.box.volume * manifest.catalog[s.tensor].itemsize) for s in manifest.stored]


@pytest.mark.promise("bit-flips")
def test_every_piece_is_repaired_from_other_replicas(fleet: Fleet) -> None:
    pieces = spots(fleet.manifest())
    assert len(fleet.payloads[0]) > CHUNK_BYTES + 1
    fleet.comes_back(*(end - 1 for _, end in pieces))
    for begin, _ in pieces[:2]:
        fleet.comes_back(begin)
    across = next((begin, end) for begin, end in pieces if begin < CHUNK_BYTES < end)
    assert across[0] < CHUNK_BYTES - 1
    fleet.comes_back(CHUNK_BYTES - 1, CHUNK_BYTES)


def test_python_state_is_repaired_from_equal_ranks(fleet: Fleet) -> None:
    fleet.comes_back(fleet.manifest().blob_offset + BLOB_LENGTH_BYTES + 3)


def test_gap_between_pieces_is_repaired(fleet: Fleet) -> None:
    manifest = fleet.manifest()
    blob = (manifest.blob_offset, manifest.blob_offset + BLOB_LENGTH_BYTES + manifest.blob_capacity)
    digests = (manifest.digests_offset, sum(manifest.digests_range))
    taken = sorted([*spots(manifest), blob, digests])
    gap = next(end for (_, end), (begin, _) in itertools.pairwise(taken) if end < begin)
    fleet.comes_back(gap)


def test_pieces_are_repaired_from_the_same_node(fleet: Fleet) -> None:
    for rank in (1, 2):
        room = fleet.ranks[rank].view.slot_bytes
        beside = RankMemory(fleet.vaults.all[0].client(), rank, local_rank=rank, slot_bytes=room)
        beside.fill(0, V, fleet.payloads[rank], fleet.manifests[rank])
        fleet.vaults.all[rank].kill()
    fleet.flip(fleet.manifest().stored[0].offset)
    assert fleet.found().endswith("repaired from n1")


def test_unchanged_chunk_is_repaired_from_the_version_before(fleet: Fleet) -> None:
    """Frozen layers and the like: whatever else of the slot there is, and whoever is away."""
    fleet.fill(0, Version(2, 8), slot=1)
    for vault in fleet.vaults.all[1:]:
        vault.kill()
    fleet.flip(CHUNK_BYTES + 4)
    assert fleet.found().endswith("repaired from own-0's 2:8 here")


def test_piece_corrupt_on_both_nodes_discards_the_slot(fleet: Fleet) -> None:
    mine = fleet.manifest().stored[0]
    for rank in (1, 2):
        for stored in fleet.manifest(rank).stored:
            if (stored.tensor, stored.box) == (mine.tensor, mine.box):
                fleet.flip(stored.offset + 9, rank)
    fleet.flip(mine.offset + 9)
    assert "the slot is discarded" in fleet.found()
    until(lambda: fleet.ranks[0].view.header(0) is None, "the slot is free")


def test_single_node_loses_the_slot_until_the_next_snapshot(program_forks: ForkPool, tmp_path: Path) -> None:
    """There the ranks store each byte once: only the live state has it again."""
    with vaults(program_forks) as running:
        fleet = Fleet(running, tmp_path, ("n1", "n1"))
        fleet.flip(fleet.manifest().stored[0].offset)
        assert "the slot is discarded" in fleet.found()
        later = Version(2, 10)
        for rank in (0, 1):
            fleet.fill(rank, later, slot=1)
        answer = running.all[0].client().ask(local.Inventory, job=JOB)
        assert isinstance(answer, local.InventoryAnswer)
        assert [(slot.rank, slot.version) for slot in answer.slots] == [(0, later), (1, V), (1, later)]
