"""What a vault may still take of a node's memory."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep_agent.vault.memory import shared_memory
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import MemoryBudget, PlannedFile

from everstep.errors import EverstepError, OutOfSlotMemory, Unavailable
from everstep.layout.slots import segment_bytes
from tests.support.vaults import DEADLINE_S, JOB

PAGES = 1 << 20
ONE = segment_bytes(1, PAGES)


class BeingMade:
    """A segment whose making stands still between two of its steps, with all its pages there, until ``finish``."""

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
    first = BeingMade(store, own(0), monkeypatch)
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
    """A machine with room for two segments, on which nothing else takes memory."""

    def left() -> int:
        return 2 * ONE - sum(p.stat().st_blocks * 512 for p in shared.rglob("*") if p.is_file())

    monkeypatch.setattr(shared_memory, "_available_memory", left)
    store = SegmentStore(shared, "n1", None)
    first = BeingMade(store, own(0), monkeypatch)
    try:
        assert store.budget.free_bytes() == ONE
        store.open(own(1), PAGES, 1)
        with pytest.raises(OutOfSlotMemory, match="has 0 free"):
            store.open(own(2), PAGES, 1)
    finally:
        first.finish()
    assert store.budget.free_bytes() == 0


def test_unallocated_pages_of_a_new_file_are_reserved(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``make_huge`` leaves it: as long as it will be, and with hardly any pages."""
    monkeypatch.setattr(shared_memory, "_available_memory", lambda: 10 * mmap.PAGESIZE)
    budget, path = MemoryBudget(shared, None), shared / "slots"
    with budget.reserve(path, 6 * mmap.PAGESIZE, "slots"):
        with path.open("wb") as file:
            file.write(bytes(mmap.PAGESIZE))
            file.truncate(6 * mmap.PAGESIZE)
        assert budget.free_bytes() == 5 * mmap.PAGESIZE


def test_concurrent_parts_of_one_file_count_as_one_file(tmp_path: Path) -> None:
    budget, path = MemoryBudget(tmp_path, 100_000), tmp_path / "landing"
    with budget.reserve(path, 30_000, "its first part"), budget.reserve(path, 80_000, "its second part"):
        assert budget.free_bytes() == 20_000
        path.write_bytes(bytes(80_000))
        assert budget.free_bytes() == 20_000
    assert budget.free_bytes() == 20_000


def test_path_reserved_again_after_its_rename_is_released(tmp_path: Path) -> None:
    budget, draft = MemoryBudget(tmp_path, 100_000), tmp_path / "draft"
    with budget.reserve(draft, 30_000, "the first"):
        draft.write_bytes(b"")
        budget.rename(draft, tmp_path / "slots")
        again = budget.reserve(draft, 50_000, "the second")
        again.__enter__()
    assert budget.free_bytes() == 50_000
    again.__exit__(None, None, None)
    assert budget.free_bytes() == 100_000


def test_directory_over_the_limit_has_nothing_free(tmp_path: Path) -> None:
    (tmp_path / "slots").write_bytes(bytes(60_000))
    budget = MemoryBudget(tmp_path, 50_000)
    assert budget.free_bytes() == 0
    with (
        pytest.raises(OutOfSlotMemory, match="60000 of the memory limit 50000 are in use, 0 are free"),
        budget.reserve(tmp_path / "a", 1, "a byte"),
    ):
        pass


def test_free_bytes_without_limit_is_the_machine_memory(tmp_path: Path) -> None:
    budget = MemoryBudget(tmp_path, None)
    with budget.reserve(tmp_path / "a", budget.free_bytes() // 2, "half of it"):
        pass
    with (
        pytest.raises(OutOfSlotMemory, match=r"enlarge that file system|raise the memory limit"),
        budget.reserve(tmp_path / "a", 1 << 60, "all"),
    ):
        pass


@pytest.mark.promise("memory-limit")
def test_replaced_or_forgotten_segment_is_freed_at_once(shared: Path) -> None:
    """It may be hundreds of gigabytes, and a quiet vault looks for cycles of garbage once in a long while."""
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

        def refuse(*args: object, **how: object) -> None:
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
    assert MemoryBudget(places, None).free_bytes() == 44 << 20
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    budget = MemoryBudget(places, None)
    assert budget.free_bytes() == 12 << 20
    with pytest.raises(OutOfSlotMemory, match="stay free for the script's data loaders: enlarge /dev/shm"):
        budget.require_room([PlannedFile(places / "own-0", 13 << 20)], "a slot", "keep fewer")
    Room.f_bavail = 20 << 20  # the loaders take more than their share
    assert budget.free_bytes() == 0
