"""A flipped bit in a segment's header costs no slot, and is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.ids import Version
from everstep.layout.segment_header import HEADER_BYTES
from everstep.layout.slot_header import RECORD_OFFSETS, SlotState
from everstep.layout.slots import _REPAIR_FLAG_VALUE, SegmentView, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.segments import DamageReport, SegmentKey, SegmentStore
from tests.support.vaults.vault_process import DEADLINE_S, JOB, RankMemory, Vaults, map_segment

KEY = SegmentKey(JOB, "own", 0)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def store_with_a_slot(directory: Path) -> Path:
    """Return the file of a store that has ended, with five slots, one of them sealed."""
    directory.mkdir(mode=0o700)
    path = SegmentStore(directory, "n1", None).open(KEY, slot_bytes_for(16, 100), 5).path
    fill(map_segment(path), 3)
    return path


def fill(view: SegmentView, slot: int) -> None:
    view.begin(slot, 2, Version(1, 9), b"manifest", 100)[:] = bytes(range(100))
    view.seal(slot)


def adopt(store: SegmentStore) -> int:
    """Take the segments over as a restarted vault does; return the number of good slots."""
    adoption = SegmentAdoption(store)
    adoption.adopt_segments()
    adoption.start()
    try:
        found, unchecked = adoption.inventory(JOB, DEADLINE_S)
    finally:
        adoption.stop()
    assert unchecked == 0
    return len(found)


@pytest.mark.promise("bit-flips")
def test_flipped_header_bit_costs_no_slot_at_restart(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    for at in range(HEADER_BYTES):
        for bit in range(8):
            flip(path, at, bit)
            store = SegmentStore(tmp_path / "segments", "n1", None)
            reports: list[DamageReport] = []
            assert adopt(store) == 1, (at, bit)
            store.set_damage_handler(reports.append)
            (report,) = reports
            repaired = f"the header of {path} was damaged and has been rewritten; its slots are intact"
            assert report.message == repaired, (at, bit)
            segment = store.get(KEY)
            assert segment is not None
            segment.view.verify(3)
            assert map_segment(path).header_was_repaired is False, (at, bit)


def test_unreadable_segment_is_given_up_and_reported(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    path.write_bytes(bytes(path.stat().st_size))
    store = SegmentStore(tmp_path / "segments", "n1", None)
    reports: list[str] = []
    assert adopt(store) == 0
    store.set_damage_handler(lambda damage: reports.append(damage.message))
    assert len(reports) == 1
    assert "is discarded" in reports[0]
    assert not path.exists()


def test_corrupt_slot_at_restart_is_reported(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    map_segment(path).payload(3)[7] ^= 1
    store = SegmentStore(tmp_path / "segments", "n1", None)
    reports: list[str] = []
    assert adopt(store) == 0
    store.set_damage_handler(lambda damage: reports.append(damage.subject))
    assert reports == ["job/rank2/1:9"]


def test_slot_with_both_headers_damaged_is_reported_at_restart(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    for at in record_places(path, 3):
        flip(path, at, 0)
    store = SegmentStore(tmp_path / "segments", "n1", None)
    reports: list[str] = []
    assert adopt(store) == 0
    store.set_damage_handler(lambda damage: reports.append(damage.subject))
    assert reports == ["job/own-0/slot3"]
    assert map_segment(path).read_records(3).state is SlotState.EMPTY


def test_interrupted_repair_does_not_block_refilling_the_slot(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    view = map_segment(path)
    view._flag(3, _REPAIR_FLAG_VALUE)
    assert adopt(SegmentStore(tmp_path / "segments", "n1", None)) == 1
    fill(view, 3)
    view.verify(3)


def test_segment_under_a_wrong_name_is_given_up(tmp_path: Path) -> None:
    path = store_with_a_slot(tmp_path / "segments")
    path.rename(path.parent / "own-1")
    store = SegmentStore(tmp_path / "segments", "n1", None)
    reports: list[str] = []
    assert adopt(store) == 0
    store.set_damage_handler(lambda damage: reports.append(damage.message))
    assert "is discarded: the file holds the segment job/own-0" in reports[0]


def record_places(path: Path, slot: int) -> tuple[int, ...]:
    base = map_segment(path).segment.slot_offset(slot)
    return tuple(base + place for place in RECORD_OFFSETS)


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("at", [0, 8, 12, 16, 18])
def test_rank_finds_its_slots_despite_a_flipped_header_bit(fleet: Vaults, at: int) -> None:
    vault = fleet.start("n1")
    supervisor = fleet.configure()["n1"]
    before = RankMemory(vault.client(), rank=2)
    fill(before.view, 3)
    flip(before.path, at, 4)
    after = RankMemory(vault.client(), rank=2)
    after.view.verify(3)
    assert (after.view.slots, after.view.slot_bytes) == (before.view.slots, before.view.slot_bytes)
    found = supervisor.finding().finding
    assert (found.job, found.finding.kind, found.finding.subject) == (JOB, FindingKind.SLOT_CORRUPT, "job/own-0")
    assert versions(fleet) == {Version(1, 9)}


def test_repair_at_restart_is_reported_to_the_next_supervisor(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=2)
    fill(rank.view, 3)
    vault.kill()
    flip(rank.path, 17, 1)
    vault.start()
    assert fleet.configure()["n1"].finding().finding.finding.subject == "job/own-0"
    assert versions(fleet) == {Version(1, 9)}


def versions(fleet: Vaults) -> set[Version]:
    answer = fleet.all[0].client().inventory()
    return {slot.version for slot in answer.slots}
