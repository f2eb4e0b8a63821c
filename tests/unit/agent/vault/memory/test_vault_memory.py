"""The memory of a node that a vault may still take."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import EverstepError, OutOfSlotMemory, Unavailable
from everstep.layout.segment_header import segment_bytes
from everstep_agent.vault.memory import shared_memory
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import MemoryBudget, PlannedFile
from tests.support.vaults.vault_process import DEADLINE_S, JOB

PAGES = 1 << 20
ONE = segment_bytes(1, PAGES)


class UnfinishedSegment:
    """A segment whose creation stops between two steps, with all its pages allocated, until ``finish``."""

    def __init__(self, store: SegmentStore, key: SegmentKey, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go_on, stands = threading.Event(), threading.Event()
        populate: Callable[..., None] = shared_memory.populate

        def held(mapping: object) -> None:
            if threading.current_thread() is self._thread:
                stands.set()
                assert self._go_on.wait(DEADLINE_S)
            populate(mapping)

        monkeypatch.setattr(shared_memory, "populate", held)
        self._thread = threading.Thread(target=store.open, args=(key, PAGES, 1))
        self._thread.start()
        assert stands.wait(DEADLINE_S)

    def finish(self) -> None:
        self._go_on.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def own(number: int) -> SegmentKey:
    return SegmentKey(JOB, "own", number)


def test_free_bytes_is_the_room_left_under_the_limit(tmp_path: Path) -> None:
    budget = MemoryBudget(tmp_path, 100_000)
    (tmp_path / "slots").write_bytes(bytes(60_000))
    assert budget.free_bytes() == 40_000
    with budget.reserve(tmp_path / "a", 30_000, "a segment"):
        assert budget.free_bytes() == 10_000
        with (
            pytest.raises(OutOfSlotMemory, match="10000 are free"),
            budget.reserve(tmp_path / "b", 10_001, "another"),
        ):
            pass
    assert budget.free_bytes() == 40_000


@pytest.mark.promise("memory-limit")
def test_segment_in_creation_counts_once_against_the_limit(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(shared, "n1", 2 * ONE)
    first = UnfinishedSegment(store, own(0), monkeypatch)
    try:
        assert (store.budget.used_bytes(), store.budget.free_bytes()) == (ONE, ONE)
        store.open(own(1), PAGES, 1)
        with pytest.raises(OutOfSlotMemory, match=rf"{2 * ONE} of the memory limit {2 * ONE} are in use, 0 are free"):
            store.open(own(2), PAGES, 1)
    finally:
        first.finish()
    assert (store.budget.used_bytes(), store.budget.free_bytes()) == (2 * ONE, 0)


@pytest.mark.promise("memory-limit")
def test_allocated_pages_of_a_new_segment_are_not_counted_twice(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has room for two segments, and no other program takes memory."""

    def left() -> int:
        return 2 * ONE - sum(p.stat().st_blocks * 512 for p in shared.rglob("*") if p.is_file())

    monkeypatch.setattr(shared_memory, "_available_memory", left)
    store = SegmentStore(shared, "n1", None)
    first = UnfinishedSegment(store, own(0), monkeypatch)
    try:
        assert store.budget.free_bytes() == ONE
        store.open(own(1), PAGES, 1)
        with pytest.raises(OutOfSlotMemory, match="has 0 free"):
            store.open(own(2), PAGES, 1)
    finally:
        first.finish()
    assert store.budget.free_bytes() == 0


def test_directory_over_the_limit_has_nothing_free(tmp_path: Path) -> None:
    (tmp_path / "slots").write_bytes(bytes(60_000))
    budget = MemoryBudget(tmp_path, 50_000)
    assert budget.free_bytes() == 0
    with (
        pytest.raises(OutOfSlotMemory, match="60000 of the memory limit 50000 are in use, 0 are free"),
        budget.reserve(tmp_path / "a", 1, "a byte"),
    ):
        pass


@pytest.mark.promise("memory-limit")
def test_replaced_or_forgotten_segment_is_freed_at_once(shared: Path) -> None:
    """A segment may have hundreds of gigabytes, and an idle vault rarely collects garbage."""
    store = SegmentStore(shared, "n1", None)
    gc.disable()
    try:
        for slot_bytes, slots in ((PAGES, 3), (2 * PAGES, 3), (3 * PAGES, 2)):
            store.open(own(0), slot_bytes, slots, [])
            assert _mapped(shared) == 1
        store.delete_job(JOB)
        assert _mapped(shared) == 0
    finally:
        gc.enable()


def _mapped(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("call", ["open", "mkdir", "posix_fallocate"])
@pytest.mark.parametrize(
    ("number", "kind", "mend"),
    [
        (errno.EMFILE, Unavailable, "too many open files; raise LimitNOFILE"),
        (errno.ENFILE, Unavailable, "too many open files.* fs.file-max"),
        (errno.EFBIG, OutOfSlotMemory, "larger than LimitFSIZE.*, or keep fewer slots"),
        (errno.ENOSPC, OutOfSlotMemory, "enlarge .*, or keep fewer slots|fewer --replicas"),
        (errno.EDQUOT, OutOfSlotMemory, ", or keep fewer slots|fewer --replicas"),
    ],
)
def test_kernel_refusal_during_creation_states_a_fix(
    shared: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[EverstepError], mend: str, call: str
) -> None:
    store = SegmentStore(shared, "n1", None)
    with monkeypatch.context() as patch:

        def refuse(*args: object, **options: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(os, call, refuse)
        with pytest.raises(kind, match=mend):
            store.open(own(0), PAGES, 5)
    assert not [*shared.glob("**/.own-0")]
    assert store.open(own(0), PAGES, 5).view.slots == 5


@pytest.mark.parametrize(
    ("total", "share"), [(64 << 20, 32 << 20), (1 << 30, 512 << 20), (16 << 30, 1 << 30), (512 << 30, 32 << 30)]
)
def test_share_of_others_is_half_of_a_small_file_system(total: int, share: int) -> None:
    assert shared_memory.bytes_left_to_others(total) == share


def test_vault_leaves_a_share_of_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tmp_path / "everstep-0" / "run"
    size = 64 << 20

    class Room:
        f_frsize, f_blocks, f_bavail = 1, size, size - (20 << 20)

    monkeypatch.setattr(os, "statvfs", lambda _: Room)
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "elsewhere")
    assert MemoryBudget(places, None).free_bytes() == 44 << 20
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    budget = MemoryBudget(places, None)
    assert budget.free_bytes() == 12 << 20
    with pytest.raises(OutOfSlotMemory, match="stay free for the script's data loaders: enlarge /dev/shm"):
        budget.require_room([PlannedFile(places / "own-0", 13 << 20)], "a slot", "keep fewer")
    Room.f_bavail = 20 << 20  # the loaders take more than their share
    assert budget.free_bytes() == 0


@pytest.mark.promise("memory-fits")
def test_request_over_group_limit_is_refused_with_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(tmp_path, None)
    monkeypatch.setattr(shared_memory, "cgroup_available_bytes", lambda: 70_000)
    assert budget.free_bytes() == 70_000
    with (
        pytest.raises(OutOfSlotMemory, match=r"needs 70001 bytes; .* has 70000 free .*: raise the memory limit of the"),
        budget.reserve(tmp_path / "slots", 70_001, "five slots"),
    ):
        pass
    monkeypatch.setattr(shared_memory, "cgroup_available_bytes", lambda: -5)
    assert budget.free_bytes() == 0
