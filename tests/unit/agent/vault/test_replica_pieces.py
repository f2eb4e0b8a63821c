"""Replicated state is stored in parts, and each rank stores other parts.

A corrupt part of a slot is repaired from slots of other ranks, at whichever offset they hold the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.ids import Version
from everstep.layout.manifests import Manifest, decode_manifest
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.sealed_slots import fill_slots
from tests.support.vaults.vault_process import RankMemory, Vaults, map_segment, vaults

V = Version(2, 9)
SCRUB = ("--scrub-interval-s", "0.02")
NO_SCRUB = ("--scrub-interval-s", "0")


class ReplicatedModel(nn.Module):
    """A model with more than a chunk for each of three ranks, and padding behind its tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.large = nn.Linear(1900, 1900)
        self.odd = nn.Linear(133, 131)


class Fleet:
    """Ranks on nodes n1, n2, ..., each with a sealed share of the replicated state; the vault of n1 is scrubbed."""

    def __init__(self, running: Vaults, folder: Path, nodes: tuple[str, ...]) -> None:
        state = TrackedState({"model": ReplicatedModel()})
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
        """Return the next finding of n1's vault."""
        finding = self.vaults.supervisors["n1"].finding().finding.finding
        assert (finding.kind, finding.subject) == (FindingKind.SLOT_CORRUPT, "job/rank0/2:9")
        return finding.message

    def wait_for_repair(self, *places: int) -> None:
        for place in places:
            self.flip(place)
        message = self.found()
        assert "; repaired from " in message, message
        until(lambda: bytes(self.ranks[0].view.payload(0)) == self.payloads[0], "the slot is as it was sealed")
        self.ranks[0].view.verify(0)


@pytest.fixture
def fleet(program_forks: ForkPool, tmp_path: Path) -> Iterator[Fleet]:
    with vaults(program_forks) as running:
        yield Fleet(running, tmp_path, ("n1", "n2", "n3"))


def spots(manifest: Manifest) -> list[tuple[int, int]]:
    """The offsets at which each piece begins and ends."""
    return [(s.offset, s.offset + s.box.volume * manifest.catalog[s.tensor].itemsize) for s in manifest.stored]


@pytest.mark.promise("bit-flips")
def test_every_piece_is_repaired_from_other_replicas(fleet: Fleet) -> None:
    pieces = spots(fleet.manifest())
    assert len(fleet.payloads[0]) > CHUNK_BYTES + 1
    fleet.wait_for_repair(*(end - 1 for _, end in pieces))
    for begin, _ in pieces[:2]:
        fleet.wait_for_repair(begin)
    across = next((begin, end) for begin, end in pieces if begin < CHUNK_BYTES < end)
    assert across[0] < CHUNK_BYTES - 1
    fleet.wait_for_repair(CHUNK_BYTES - 1, CHUNK_BYTES)


def test_unchanged_chunk_is_repaired_from_the_version_before(fleet: Fleet) -> None:
    """A chunk of frozen layers is the same in both versions, so its repair needs no other node."""
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
    """On a single node the ranks store each byte once, so only the live state has a second copy."""
    with vaults(program_forks) as running:
        fleet = Fleet(running, tmp_path, ("n1", "n1"))
        fleet.flip(fleet.manifest().stored[0].offset)
        assert "the slot is discarded" in fleet.found()
        later = Version(2, 10)
        for rank in (0, 1):
            fleet.fill(rank, later, slot=1)
        answer = running.all[0].client().inventory()
        assert [(slot.rank, slot.version) for slot in answer.slots] == [(0, later), (1, V), (1, later)]
