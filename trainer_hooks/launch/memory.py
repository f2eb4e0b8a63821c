"""Memory that a worker has touched is kept, and a standby touches some in advance.

A recovery builds a model anew. With glibc's defaults every tensor above 128 KiB is a mapping of its own, returned when
it is freed and faulted in page by page when the next generation asks again: 0.5 GB/s on a virtual machine where memory
that is already there is written at 20. For the host memory of 2.1 M parameters under AdamW with their gradients and
buckets that was more than half of a recovery.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20
"""glibc's own bound (HEAP_MAX_SIZE / 2): larger blocks are mappings of their own whatever we say."""
KEPT = 4 << 30
PIECE = 16 << 20
AT_ONCE = 64 << 20
TOUCH_AT_MOST = 1 << 30
"""A standby of a rank with more host memory than this touches this much: it costs memory while nobody needs it."""


def keep_freed_memory() -> bool:
    """Lets malloc keep what is freed, up to 4 GiB. Returns False where the C library has no mallopt."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, min(KEPT, 2**31 - 1)), (M_TOP_PAD, PIECE))
    return all(library.mallopt(name, value) for name, value in settings)


def touch_ahead(wanted: int) -> int:
    """Makes malloc hold ``wanted`` bytes of memory that is there; returns how many. Call it in the main thread.

    They come from the heap that the main thread's tensors will come from, and go back to it.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(min(wanted, TOUCH_AT_MOST) // PIECE)]
    for piece in pieces:
        if piece:
            ctypes.memset(piece, 0, PIECE)
    for piece in reversed(pieces):
        if piece:
            library.free(piece)
    return sum(PIECE for piece in pieces if piece)


def anonymous_bytes(pid: int | None = None) -> int:
    """Resident anonymous memory of a process; 0 where it is gone."""
    try:
        lines = Path("/proc", str(pid or os.getpid()), "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def largest_sibling() -> int:
    """The resident anonymous memory of the largest rank that the same fork server made; 0 where there is none."""
    server = os.getppid()
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:
        return 0
    return max((anonymous_bytes(int(child)) for child in children if _plays_a_rank(child)), default=0)


def _plays_a_rank(pid: str) -> bool:
    try:
        return Path("/proc", pid, "comm").read_text().startswith("everstep-rank")
    except OSError:
        return False


class Waiting:
    """A standby's memory while it waits: it follows that of the ranks, 64 MiB at a time."""

    def __init__(self) -> None:
        self._touched = 0

    def follow(self) -> None:
        """Touches what the ranks have and this process has not; a rank's pages shared with the server count on both
        sides and cancel out."""
        missing = min(largest_sibling() - anonymous_bytes(), AT_ONCE)
        if missing >= PIECE and self._touched < TOUCH_AT_MOST:
            self._touched = touch_ahead(self._touched + missing)
