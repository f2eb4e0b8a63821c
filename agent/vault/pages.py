"""What kind of pages a slot's memory is made of, and near which processors: huge ones and the rank's own, where had.

A copy into 4 KiB pages spends a part of its time in the tables that find them; memory of the other socket is read at
the speed of the link between the two. Both are choices of the kernel that it takes advice on.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.vault.memory import populate

log = logging.getLogger(__name__)

MADV_HUGEPAGE = 14
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
"""linux/mempolicy.h. *Preferred* takes other nodes' memory when that node is full: slots there beat no slots."""
MOST_NUMA_NODES = 1024
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The system call's number (glibc has no name for it; libnuma is another library to need)."""
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_WHEN_ADVISED = ("huge=advise", "huge=within_size", "huge=always")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def has_huge_pages(directory: Path, mounts: str | None = None, setting: str | None = None) -> bool:
    """Whether the file system of ``directory`` gives huge pages to who asks for them.

    That is how it was mounted, unless the kernel is set to force them on every memory file system, or to deny them.
    Its other settings are for memory without a mount that is seen.

    Args:
        mounts: what /proc/self/mounts says; read where it is not given.
        setting: what shmem_enabled in /sys/kernel/mm/transparent_hugepage says; read where it is not given.
    """
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    within = os.path.realpath(directory)
    best, kind, options = "", "", ""
    for line in text.splitlines():
        _, where, what, found, *_ = line.split(" ")
        where = where.replace("\\040", " ")
        if (within + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best):
            best, kind, options = where, what, found
    chosen = _shmem_setting() if setting is None else setting
    if kind != "tmpfs" or "[deny]" in chosen:
        return False
    return "[force]" in chosen or any(option in _HUGE_WHEN_ADVISED for option in options.split(","))


def _shmem_setting() -> str:
    """``always within_size advise [never] deny force``; nothing where the kernel has no huge pages of its own."""
    try:
        return _SHMEM_ENABLED.read_text()
    except OSError:
        return ""


def make_huge(descriptor: int, length: int) -> None:
    """Makes the pages of a new, empty file on such a file system: huge ones as far as there are any.

    For want of memory it stops; ``memory.allocate`` then says what is missing.
    """
    os.ftruncate(descriptor, length)
    with mmap.mmap(descriptor, length) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        _libc.madvise(ctypes.addressof(first), length, MADV_HUGEPAGE)
        del first  # a mapping whose memory is pointed at cannot be closed
        populate(mapping)


@contextmanager
def near(node: int | None) -> Iterator[None]:
    """Pages that this thread makes meanwhile come from NUMA node ``node``, as long as it has any. None: from anywhere.

    Where the kernel refuses (no such node, a container that may not ask), it is said and done without.
    """
    if node is None or not _prefer(node):
        yield
        return
    try:
        yield
    finally:
        _set_policy(MPOL_DEFAULT, 0)


def _prefer(node: int) -> bool:
    if 0 <= node < MOST_NUMA_NODES and _set_policy(MPOL_PREFERRED, 1 << node) == 0:
        return True
    log.warning("slots are not bound to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    return False


def _set_policy(mode: int, nodes: int) -> int:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        ctypes.set_errno(38)  # ENOSYS
        return -1
    mask = nodes.to_bytes(MOST_NUMA_NODES // 8, "little") if nodes else None
    most = ctypes.c_ulong(MOST_NUMA_NODES + 1 if nodes else 0)
    return int(_libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, most))
