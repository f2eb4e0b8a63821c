"""Corrupt bytes in a slot are repaired from any other holder, but only with the correct bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import DigestMismatch, NotFound
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, SegmentView, slot_bytes_for
from everstep.vocabulary import Finding, FindingKind
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder
from everstep_agent.vault.job_table import MAX_HOLDERS_PER_RANK, MAX_LIKELY_HOLDERS, JobTable
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, SECRET, RankMemory, Vaults, map_segment, noise

V = Version(1, 1)
SIZE = 2 * CHUNK_BYTES + 1000
PAYLOAD = noise(SIZE)
SCRUB = ("--scrub-interval-s", "0.02")
NO_SCRUB = ("--scrub-interval-s", "0")


def owner(fleet: Vaults) -> RankMemory:
    """Rank 3 on the first node, with a sealed slot of three chunks."""
    rank = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    rank.fill(0, V, PAYLOAD)
    return rank


def copied(rank: RankMemory, *nodes: str) -> None:
    assert rank.replicated(0, V, nodes).nodes == nodes


def replica(fleet: Vaults, node: int) -> SegmentView:
    return map_segment(Path(fleet.all[node].segment_dir, JOB, "replica-3"))


def found(fleet: Vaults, node: str) -> Finding:
    """Return the next finding of the node's vault."""
    finding = fleet.supervisors[node].finding().finding.finding
    assert (finding.kind, finding.subject) == (FindingKind.SLOT_CORRUPT, "job/rank3/1:1")
    return finding


def is_whole(view: SegmentView) -> bool:
    """Wait until the slot is repaired, since several corrupt chunks may be found one after another."""
    until(lambda: hashes_right(view), "the slot is whole again")
    return bytes(view.payload(0)) == PAYLOAD


def hashes_right(view: SegmentView) -> bool:
    try:
        view.verify(0)
    except DigestMismatch:
        return False
    return True


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("at", [[7], [CHUNK_BYTES + 1], [0, CHUNK_BYTES, SIZE - 1]], ids=["first", "second", "all"])
def test_corrupt_chunk_of_a_rank_is_repaired_from_its_copy(fleet: Vaults, at: list[int]) -> None:
    fleet.start("n1", *SCRUB), fleet.start("n2", *NO_SCRUB)
    fleet.configure()
    rank = owner(fleet)
    copied(rank, "n2")
    for place in at:
        rank.view.payload(0)[place] ^= 32
    assert "repaired from n2" in found(fleet, "n1").message
    assert is_whole(rank.view)


def test_corrupt_chunk_of_a_copy_is_repaired_from_its_rank(fleet: Vaults) -> None:
    fleet.start("n1", *NO_SCRUB), fleet.start("n2", *SCRUB)
    fleet.configure()
    copied(owner(fleet), "n2")
    view = replica(fleet, 1)
    view.payload(0)[CHUNK_BYTES + 5] ^= 1
    assert "repaired from n1" in found(fleet, "n2").message
    assert is_whole(view)


def test_corrupt_manifest_is_repaired_from_a_copy(fleet: Vaults) -> None:
    fleet.start("n1", *SCRUB), fleet.start("n2", *NO_SCRUB)
    fleet.configure()
    rank = owner(fleet)
    copied(rank, "n2")
    header = rank.view.header(0)
    assert header is not None
    rank.view._buffer[rank.view._manifest_range(0, header).start] ^= 1
    assert "repaired from n2" in found(fleet, "n1").message
    assert rank.view.manifest(0) == b"manifest"


def test_slot_with_a_corrupt_copy_is_discarded(fleet: Vaults) -> None:
    fleet.start("n1", *SCRUB), fleet.start("n2", *NO_SCRUB)
    fleet.configure()
    rank = owner(fleet)
    copied(rank, "n2")
    replica(fleet, 1).payload(0)[3] ^= 1
    rank.view.payload(0)[5] ^= 1
    assert "the slot is discarded" in found(fleet, "n1").message
    assert "the slot is discarded" in found(fleet, "n2").message
    assert rank.view.header(0) is None


@pytest.mark.promise("bit-flips")
def test_repair_rejects_different_bytes_of_the_same_version(fleet: Vaults) -> None:
    fleet.start("n1", *SCRUB), fleet.start("n2", *NO_SCRUB)
    fleet.configure()
    rank = owner(fleet)
    other = RankMemory(fleet.all[1].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    other.fill(0, V, noise(SIZE, seed=2))
    rank.view.payload(0)[5] ^= 1
    assert "the slot is discarded" in found(fleet, "n1").message
    assert rank.view.header(0) is None


def table_of_job(nodes: int) -> JobTable:
    made = JobTable()
    holders = tuple(Holder(node=f"n{i}", vault=f"127.0.0.1:{i + 1}") for i in range(nodes))
    made.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=holders))
    return made


def test_repair_asks_a_bounded_number_of_likely_holders() -> None:
    known = table_of_job(100)
    for node in ("n70", "n80", "n70", "elsewhere"):
        known.note_holder(JOB, 3, node)
    assert known.likely_holders(JOB, 3, exclude="n0")[:3] == ["n70", "n80", "n1"]
    assert len(known.likely_holders(JOB, 3, exclude="n0")) == MAX_LIKELY_HOLDERS
    assert known.likely_holders(JOB, 4, exclude="n0")[0] == "n1"


def test_remembered_share_holders_are_bounded_and_forgotten() -> None:
    known = table_of_job(100)
    for i in range(20):
        known.note_holder(JOB, 3, f"n{i}")
    assert len(known._seen_holders[JOB, 3]) == MAX_HOLDERS_PER_RANK
    known.forget(JOB)
    known.note_holder(JOB, 3, "n1")
    assert known._seen_holders == {}
    with pytest.raises(NotFound):
        known.likely_holders(JOB, 3, exclude="n0")
