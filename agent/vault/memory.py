"""Files in shared memory: room for one is proved before it is made, and its pages are there before it is used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agent.vault.control_group import group_left_bytes
from everstep.errors import ConfigurationError, OutOfSlotMemory, Unavailable
from everstep.vault_note import LOCK_FILE

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: makes writable pages without changing what is in them. Python 3.11 has no name for it."""

POPULATE_BYTES = 64 << 20
KEEP_SIZE, PUNCH_HOLE = 1, 2
"""linux/falloc.h"""

_SEGMENTS = ("own-", "replica-", "parity-")
"""How segments' names begin. They have all their pages when they are made, and then may give some back."""

FEWER_SLOTS = "keep fewer slots: run.track(slots=2)"
FEWER_COPIES = "fewer --replicas"
LARGER_FILE_SYSTEM = "enlarge that file system"
LARGER_GROUP = "raise the memory limit of the container (control group) that the vault runs in"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Wanted(NamedTuple):
    """A file to be made: under which name first, the one it gets, its bytes, and those that go before it is made."""

    draft: Path
    path: Path
    size: int
    freed: int = 0


class Budget:
    """How many bytes may still be made under a directory. Safe to use from any thread.

    A file that is being made counts as large as it will be, once: what of it has its pages already is missing from the
    machine's free memory, and what has not is still to come off it.
    """

    def __init__(self, directory: Path, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._lock = threading.Lock()
        self._growing: dict[Path, list[int]] = {}

    @contextmanager
    def admit(self, path: Path, size: int, what: str, freed: int = 0, otherwise: str = FEWER_SLOTS) -> Iterator[None]:
        """Inside, the file ``path`` may be made, or grow, to ``size`` bytes, once ``freed`` bytes of others are free.

        Raises OutOfSlotMemory, with the arithmetic, for want of room, also where making it shows that; Unavailable for
        want of descriptors. ``otherwise`` as in ``foresee``.
        """
        with self._lock:
            self._check(path, size, what, freed, otherwise)
            self._growing.setdefault(path, []).append(size)
        try:
            yield
        except OSError as error:
            raise _said(error, what, otherwise) from error
        finally:
            with self._lock:
                self._settle(path, size)

    def rename(self, draft: Path, path: Path) -> None:
        """Gives a file its name when it is made: in one, so that nobody counts it under both."""
        with self._lock:
            draft.rename(path)
            self._growing.pop(draft, None)

    def _settle(self, path: Path, size: int) -> None:
        sizes = self._growing.get(path, [])
        if size in sizes:
            sizes.remove(size)
        if not sizes:
            self._growing.pop(path, None)

    def _check(self, path: Path, size: int, what: str, freed: int, otherwise: str) -> None:
        counted = self._counted()
        need = size - counted.get(path, 0)
        if need > 0:
            self._require(need, freed, sum(counted.values()), what, otherwise)

    def foresee(self, wanted: Sequence[Wanted], what: str, otherwise: str, margin: float = 0.0) -> None:
        """Whether files could be made beside all that is here. Those that are being made already are needed no more.

        ``otherwise``: what to do where there is no more memory to be had. ``margin``: the part of the machine's free
        memory that shall be left to others. Raises OutOfSlotMemory.
        """
        with self._lock:
            counted = self._counted()
            missing = [file for file in wanted if file.size > counted.get(file.draft, 0)]
            need, freed = sum(file.size for file in missing), sum(file.freed for file in missing)
            if need:
                self._require(need, freed, sum(counted.values()), what, otherwise, margin)

    def _require(self, need: int, freed: int, used: int, what: str, otherwise: str, margin: float = 0.0) -> None:
        used -= freed
        if self._limit is not None and used + need > self._limit:
            raise OutOfSlotMemory(
                f"{what} needs {need} bytes; {used} of --memory-limit {self._limit} are in use, "
                f"{max(0, self._limit - used)} are free: raise it (the agent's --vault-memory-limit-bytes), "
                f"or {otherwise}"
            )
        unpromised, larger = self._unpromised()
        free = unpromised + freed
        left = int(margin * free)
        if need > free - left:
            kept = f", of which {left} are left to the training," if left else ""
            raise OutOfSlotMemory(
                f"{what} needs {need} bytes; {self._directory} has {free} free{kept} and {used} in use by slots: "
                f"{larger}, or {otherwise}"
            )

    def _counted(self) -> dict[Path, int]:
        """Each file's bytes: as many as it has, or as it will have when it is made."""
        found = (Path(folder) / name for folder, _, names in os.walk(self._directory) for name in names)
        counted = {path: _size(path) for path in found if path.name != LOCK_FILE}
        for path, sizes in self._growing.items():
            counted[path] = max(counted.get(path, 0), *sizes)
        return counted

    def _unpromised(self) -> tuple[int, str]:
        """What is left, less what files that are being made have not taken yet; and how to get more of it.

        Their pages are counted before what is left: one that is made in between counts as still to come.
        """
        to_come = sum(max(0, max(sizes) - taken_bytes(path)) for path, sizes in self._growing.items())
        left, larger = self._left()
        return left - to_come, larger

    def used_bytes(self) -> int:
        """What the files under the directory take, those that are being made included."""
        with self._lock:
            return sum(self._counted().values())

    def free_bytes(self) -> int:
        """What could be made now: the limit and the machine allow it, and nobody is making it already."""
        with self._lock:
            free, _ = self._unpromised()
            if self._limit is not None:
                free = min(free, self._limit - sum(self._counted().values()))
            return max(0, free)

    def _left(self) -> tuple[int, str]:
        """The least of what file system, machine (on a memory file system) and control group have left; see above."""
        found = os.statvfs(next(path for path in (self._directory, *self._directory.parents) if path.exists()))
        left = [(min(found.f_bavail * found.f_frsize, _available_memory()), LARGER_FILE_SYSTEM)]
        group = group_left_bytes()
        return min(left if group is None else [*left, (max(0, group), LARGER_GROUP)])


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return min(found.st_size, found.st_blocks * 512) if path.name.startswith(_SEGMENTS) else found.st_size


def taken_bytes(path: Path) -> int:
    """Bytes of the file that have their blocks; ``st_size`` says nothing of those (``pages.make_huge``, holes)."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _said(error: OSError, what: str, otherwise: str) -> Exception:
    """What to do where a file cannot be made, by what the kernel said."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        whose = "the vault has" if error.errno == errno.EMFILE else "all processes of the machine have"
        mend = "LimitNOFILE of the agent's unit, or ulimit -n" if error.errno == errno.EMFILE else "sysctl fs.file-max"
        return Unavailable(
            f"{what} cannot be made, since {whose} as many files open as may be: raise that limit ({mend})"
        )
    mends = {
        errno.EFBIG: "no file of the vault may be so large: raise that (LimitFSIZE of the agent's unit, ulimit -f)",
        errno.ENOMEM: "the vault may map no more: raise its limits (sysctl vm.max_map_count, LimitAS, ulimit -v)",
        errno.ENOSPC: f"its file system has no room for another file: {LARGER_FILE_SYSTEM}, or its inodes (df -i)",
        errno.EDQUOT: "the quota of its file system is used up: raise it",
    }
    mend = mends.get(error.errno or 0, "")
    return OutOfSlotMemory(f"{what} cannot be made, since {mend}, or {otherwise}") if mend else error


def _available_memory() -> int:
    """The kernel's MemAvailable, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigurationError("/proc/meminfo does not say MemAvailable; the vault needs Linux 3.14 or later")


def give_back(descriptor: int, start: int, length: int) -> None:
    """Frees the pages of a part of a file, which reads as zeroes from then on. Whole pages. Raises OSError."""
    if _libc.fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, start, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def allocate(descriptor: int, length: int, what: str, start: int = 0) -> None:
    """Gives ``length`` bytes of a file from ``start`` on their blocks, so that no write there can fail.

    Raises OutOfSlotMemory.
    """
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        found = os.fstatvfs(descriptor)
        raise OutOfSlotMemory(
            f"{what} needs {length} bytes; its file system has {found.f_bavail * found.f_frsize} free: "
            f"enlarge it, or {FEWER_SLOTS}"
        ) from error


def populate(mapping: mmap.mmap, stopped: threading.Event | None = None) -> None:
    """Makes the pages of a writable shared mapping, contents unchanged, without holding Python's lock.

    Soon after ``stopped`` is set it makes no more.

    ``mmap.madvise`` would hold it: first touch runs at 0.6 GB/s, and a thread that waits for the lock would stand
    still. Where the kernel is too old to do it, each page is read, which on a memory file system makes it too.
    """
    first = ctypes.c_char.from_buffer(mapping)
    start, length = ctypes.addressof(first), len(mapping)
    for offset in range(0, length, POPULATE_BYTES):
        if stopped is not None and stopped.is_set():
            return
        piece = min(POPULATE_BYTES, length - offset)
        if _libc.madvise(start + offset, piece, MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                return
            _read_pages(mapping, offset, piece)


def _read_pages(mapping: mmap.mmap, offset: int, length: int) -> None:
    for page in range(offset, offset + length, mmap.PAGESIZE):
        mapping[page]
