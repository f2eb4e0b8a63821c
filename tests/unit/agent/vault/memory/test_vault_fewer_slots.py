"""A segment is replaced by one with fewer slots: kept slots are copied, and the other memory is freed first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.wire.v1.local import CheckCapacity, SegmentRequirement
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.reporting import FindingReporter
from everstep_agent.vault.service import check_room
from tests.support.vaults.vault_process import JOB

SLOT = 64 * PAGE_BYTES
OLD = segment_bytes(5, SLOT)
KEY = SegmentKey(JOB, "replica", 0)


def five(directory: Path, limit: int | None = None) -> tuple[SegmentStore, SegmentFile]:
    """Return a segment of five slots with the versions 1 to 5, in a store with the memory limit ``limit``."""
    return _full(directory, limit, 5)


def two(directory: Path, limit: int | None) -> tuple[SegmentStore, SegmentFile]:
    return _full(directory, limit, 2)


def _full(directory: Path, limit: int | None, slots: int) -> tuple[SegmentStore, SegmentFile]:
    store = SegmentStore(directory, "n1", limit)
    segment = store.open(KEY, SLOT, slots)
    for step in range(1, slots + 1):
        segment.view.begin(step - 1, 0, Version(1, step), b"manifest", 1000)[:] = bytes([step]) * 1000
        segment.view.seal(step - 1)
    return store, segment


def steps(segment: SegmentFile) -> list[int]:
    for slot, _ in segment.sealed():
        segment.view.verify(slot)
    return sorted(header.version.step for _, header in segment.sealed())


@pytest.mark.parametrize(("keep", "stay"), [((), [4, 5]), ((2,), [2, 5]), ((2, 3), [2, 3]), ((2, 3, 1), [2, 3])])
def test_replaced_segment_carries_kept_then_newest_slots(shared: Path, keep: tuple[int, ...], stay: list[int]) -> None:
    store, _ = five(shared)
    fewer = store.open(KEY, SLOT + PAGE_BYTES, 2, [Version(1, step) for step in keep])
    assert (fewer.view.slots, fewer.view.slot_bytes) == (2, SLOT + PAGE_BYTES)
    assert steps(fewer) == stay
    assert store.budget.used_bytes() == segment_bytes(2, SLOT + PAGE_BYTES)


def test_segment_with_more_slots_than_requested_is_reused(shared: Path) -> None:
    store, segment = five(shared)
    assert store.open(KEY, PAGE_BYTES, 1) is segment
    assert store.plan_file(KEY, SLOT, 5) is None
    assert store.open(KEY, PAGE_BYTES, 5, ()) is segment


@pytest.mark.promise("memory-fits")
def test_foreseen_memory_for_two_larger_slots_is_exact(shared: Path) -> None:
    """A loss may double a rank's share on a node whose memory is filled by five slots."""
    larger = 2 * SLOT
    need = OLD - 3 * SLOT + segment_bytes(2, larger)
    for limit, fits in ((need, True), (need - 1, False)):
        store, segment = five(shared, limit=max(limit, OLD))
        store.budget._limit = limit
        wanted = store.plan_file(KEY, larger, 2)
        assert wanted is not None
        if fits:
            store.budget.require_room([wanted], "two slots", "less")
            assert steps(store.open(KEY, larger, 2, [Version(1, 1)])) == [1, 5]
        else:
            with pytest.raises(OutOfSlotMemory):
                store.budget.require_room([wanted], "two slots", "less")
            with pytest.raises(OutOfSlotMemory, match=r"are free: raise .*, or fewer --replicas$"):
                store.open(KEY, larger, 2, [Version(1, 1)])
            assert steps(segment) == [1, 2, 3, 4, 5], "a refused replacement must free no slot"
        assert [path.name for path in (shared / JOB).iterdir()] == ["replica-0"]
        store.delete_job(JOB)


def test_two_larger_slots_need_room_beside_the_kept_slot_only(shared: Path) -> None:
    """This follows a loss, on a node with enough memory for two slots only."""
    need = segment_bytes(2, SLOT) - SLOT + segment_bytes(2, 2 * SLOT)
    for limit, fits in ((need, True), (need - 1, False)):
        store, segment = two(shared, limit)
        wanted = store.plan_file(KEY, 2 * SLOT, 2, [Version(1, 1)])
        assert wanted is not None
        if fits:
            store.budget.require_room([wanted], "two slots", "less")
            assert steps(store.open(KEY, 2 * SLOT, 2, [Version(1, 1)])) == [1]
        else:
            with pytest.raises(OutOfSlotMemory):
                store.budget.require_room([wanted], "two slots", "less")
            with pytest.raises(OutOfSlotMemory):
                store.open(KEY, 2 * SLOT, 2, [Version(1, 1)])
            assert steps(segment) == [1, 2], "a refused replacement must free no slot"
        store.delete_job(JOB)


def test_two_slots_without_a_named_version_both_stay(shared: Path) -> None:
    store, _ = two(shared, None)
    assert steps(store.open(KEY, 2 * SLOT, 2)) == [1, 2]


def test_replicas_of_an_old_roster_release_uncommitted_slots(shared: Path) -> None:
    """Ranks have other numbers after a loss. Earlier replicas keep only their committed slots, and keep those whole."""
    store, copies = five(shared)
    tier = store.open(SegmentKey(JOB, "replica", 99), PAGE_BYTES, 1)
    tier.view.begin(0, 99, Version(1, 1), b"", 8)[:] = b"not mine"
    tier.view.seal(0)
    store.budget._limit = store.budget.used_bytes() + segment_bytes(2, SLOT) - 3 * SLOT
    needs = (SegmentRequirement(replica=True, number=1, slot_bytes=SLOT, slots=2),)
    shortages: list[str] = []
    findings = cast(
        FindingReporter, SimpleNamespace(report_memory_shortage=lambda _job, message: shortages.append(message))
    )
    with pytest.raises(OutOfSlotMemory, match="fewer --replicas"):
        check_room(store, findings, CheckCapacity(request=1, job=JOB, needs=needs))
    assert (len(shortages), steps(copies)) == (1, [1, 2, 3, 4, 5])
    check_room(
        store,
        findings,
        CheckCapacity(request=2, job=JOB, needs=needs, reclaim_below_rank=99, keep=(Version(1, 2), Version(1, 5))),
    )
    assert (len(shortages), steps(copies), steps(tier)) == (1, [2, 5], [1])
    assert store.open(SegmentKey(JOB, "replica", 1), SLOT, 2, ()).view.slots == 2
