"""Files in shared memory: room for one is proved before it is made, and its pages are there before it is used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.errors import ConfigurationError, OutOfSlotMemory
from everstep.vault_note import LOCK_FILE

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: makes writable pages without changing what is in them. Python 3.11 has no name for it."""

POPULATE_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Budget:
    """How many bytes may still be made under a directory. Safe to use from any thread."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._lock = threading.Lock()
        self._promised = 0

    @contextmanager
    def admit(self, need: int, what: str) -> Iterator[None]:
        """Holds ``need`` bytes while a file is made. Raises OutOfSlotMemory, with the arithmetic, for want of room."""
        with self._lock:
            self._check(need, what)
            self._promised += need
        try:
            yield
        finally:
            with self._lock:
                self._promised -= need

    def _check(self, need: int, what: str) -> None:
        used = self.used_bytes() + self._promised
        if self._limit is not None and used + need > self._limit:
            raise OutOfSlotMemory(
                f"{what} needs {need} bytes; {used} of --memory-limit {self._limit} are in use, "
                f"{self._limit - used} are free: raise the limit or keep fewer slots"
            )
        free = self._left_bytes() - self._promised
        if need > free:
            raise OutOfSlotMemory(
                f"{what} needs {need} bytes; {self._directory} has {free} free and {used} in use by slots: "
                "enlarge that file system, or keep fewer slots"
            )

    def used_bytes(self) -> int:
        """What the files under the directory take now."""
        found = (Path(folder) / name for folder, _, names in os.walk(self._directory) for name in names)
        return sum(_size(path) for path in found if path.name != LOCK_FILE)

    def free_bytes(self) -> int:
        """What could be made now: the limit and the machine allow it, and nobody is making it already."""
        with self._lock:
            free = self._left_bytes()
            if self._limit is not None:
                free = min(free, self._limit - self.used_bytes())
            return max(0, free - self._promised)

    def _left_bytes(self) -> int:
        """What the file system, and on a memory file system the machine, has left."""
        found = os.statvfs(self._directory)
        return min(found.f_bavail * found.f_frsize, _available_memory())


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _available_memory() -> int:
    """The kernel's MemAvailable, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigurationError("/proc/meminfo does not say MemAvailable; the vault needs Linux 3.14 or later")


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
            "enlarge it, or keep fewer slots"
        ) from error


def populate(mapping: mmap.mmap) -> None:
    """Makes the pages of a writable shared mapping, contents unchanged, without holding Python's lock.

    ``mmap.madvise`` would hold it: first touch runs at 0.6 GB/s, and a thread that waits for the lock would stand
    still. Where the kernel is too old to do it, each page is read, which on a memory file system makes it too.
    """
    first = ctypes.c_char.from_buffer(mapping)
    start, length = ctypes.addressof(first), len(mapping)
    for offset in range(0, length, POPULATE_BYTES):
        piece = min(POPULATE_BYTES, length - offset)
        if _libc.madvise(start + offset, piece, MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                return
            _read_pages(mapping, offset, piece)


def _read_pages(mapping: mmap.mmap, offset: int, length: int) -> None:
    for page in range(offset, offset + length, mmap.PAGESIZE):
        mapping[page]
