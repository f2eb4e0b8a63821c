"""Files in shared memory: check for room before creating one, and allocate its pages before use."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple

from everstep.errors import ConfigurationError, OutOfSlotMemory, PermissionDenied, Unavailable
from everstep.host.cgroups import cgroup_available_bytes
from everstep.layout.vault_status import LOCK_FILE

MADV_POPULATE_WRITE = 23
"""Makes writable pages without changing their content (Linux 5.14 and later). Python 3.11 has no name for it."""

POPULATE_BYTES = 64 << 20
KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Flags from linux/falloc.h."""

_SEGMENTS = ("own-", "replica-", "parity-")
"""Name prefixes of segments, which get all pages when they are made and may later give some back."""

ADVICE_FEWER_SLOTS = "keep fewer slots: run.track(slots=2)"
ADVICE_FEWER_COPIES = "fewer --replicas"
ADVICE_LARGER_FILE_SYSTEM = "enlarge that file system"
ADVICE_LARGER_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory mounted there)"
)
ADVICE_LARGER_CGROUP = "raise the memory limit of the container (control group) that the vault runs in"

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the file system that data loaders share with the vault
MIN_SHARE_OF_OTHERS_BYTES = 1 << 30


def bytes_left_to_others(total: int) -> int:
    """Return how many bytes of a /dev/shm of ``total`` bytes the vault never takes.

    Data loaders hand their batches over there, and NCCL its buffers. A process that writes to a page that does not fit
    any more dies of SIGBUS. Half of a small /dev/shm stays free, as in a container with the default of 64 MiB; of a
    larger one 1 GiB, or a sixteenth.
    """
    return min(total // 2, max(MIN_SHARE_OF_OTHERS_BYTES, total // 16))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class PlannedFile(NamedTuple):
    """A planned file: its draft name, size in bytes, and bytes freed before it is made."""

    draft: Path
    size_bytes: int
    freed_bytes: int = 0


class MemoryBudget:
    """The bytes that may still be allocated under a directory; files being made count in full. Safe for all threads."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        self._directory, self._limit = directory, limit
        self._lock = threading.Lock()
        self._reserved_sizes: dict[Path, list[int]] = {}

    @contextmanager
    def reserve(
        self, path: Path, size: int, description: str, freed_bytes: int = 0, advice: str = ADVICE_FEWER_SLOTS
    ) -> Iterator[None]:
        """Allow ``path`` to be made, or to grow, to ``size`` bytes inside this context. Raises OutOfSlotMemory."""
        with self._lock:
            counted = self._file_sizes()
            need = size - counted.get(path, 0)
            if need > 0:
                self._require(need, freed_bytes, sum(counted.values()), description, advice)
            self._reserved_sizes.setdefault(path, []).append(size)
        try:
            yield
        except OSError as error:
            raise _creation_error(error, description, advice) from error
        finally:
            with self._lock:
                sizes = self._reserved_sizes.get(path, [])
                if size in sizes:  # not after ``rename``, when the path may be reserved again with another size
                    sizes.remove(size)
                if not sizes:
                    self._reserved_sizes.pop(path, None)

    def rename(self, draft: Path, path: Path) -> None:
        """Give a finished file its name, atomically, so that it is not counted under both."""
        with self._lock:
            draft.rename(path)
            self._reserved_sizes.pop(draft, None)

    def require_room(self, files: Sequence[PlannedFile], description: str, advice: str, reserved: float = 0.0) -> None:
        """Check that the files fit beside existing ones and those being made. ``advice``: what to do if no memory can
        be added; ``reserved``: share of the free memory left to other processes. Raises OutOfSlotMemory."""
        with self._lock:
            counted = self._file_sizes()
            missing = [file for file in files if file.size_bytes > counted.get(file.draft, 0)]
            need, freed = sum(file.size_bytes for file in missing), sum(file.freed_bytes for file in missing)
            if need:
                self._require(need, freed, sum(counted.values()), description, advice, reserved)

    def _require(self, need: int, freed: int, used: int, description: str, advice: str, reserved: float = 0.0) -> None:
        used -= freed
        if self._limit is not None and used + need > self._limit:
            raise OutOfSlotMemory(
                f"{description} needs {need} bytes; {used} of the memory limit {self._limit} are in use, "
                f"{max(0, self._limit - used)} are free: raise the agent's --vault-memory-limit-bytes, or {advice}"
            )
        unpromised, larger = self._unreserved_bytes()
        free = unpromised + freed
        kept = int(reserved * free)
        if need > free - kept:
            note = f", of which {kept} are reserved for the training," if kept else ""
            raise OutOfSlotMemory(
                f"{description} needs {need} bytes; {self._directory} has {free} free{note} and {used} in use by "
                f"slots: {larger}, or {advice}"
            )

    def _file_sizes(self) -> dict[Path, int]:
        """Return each file's present or, while it is made, final size in bytes."""
        found = (Path(folder) / name for folder, _, names in os.walk(self._directory) for name in names)
        counted = {path: _size(path) for path in found if path.name != LOCK_FILE}
        return counted | {path: max(counted.get(path, 0), *sizes) for path, sizes in self._reserved_sizes.items()}

    def _unreserved_bytes(self) -> tuple[int, str]:
        """Return the bytes left, less those still to be taken by files being made, and how to get more."""
        to_come = sum(max(0, max(sizes) - allocated_bytes(path)) for path, sizes in self._reserved_sizes.items())
        available, larger = self._available_bytes()
        return available - to_come, larger

    def used_bytes(self) -> int:
        """Return the bytes of the files under the directory, including those being made."""
        with self._lock:
            return sum(self._file_sizes().values())

    def free_bytes(self) -> int:
        """Return the bytes that could be allocated now within the limit and the machine's memory."""
        with self._lock:
            free, _ = self._unreserved_bytes()
            if self._limit is not None:
                free = min(free, self._limit - sum(self._file_sizes().values()))
            return max(0, free)

    def _available_bytes(self) -> tuple[int, str]:
        """Return the least of the bytes left in file system, machine and control group, and how to get more."""
        places = (self._directory, *self._directory.parents)
        found = os.statvfs(next(path for path in places if path.exists()))
        room, larger = found.f_bavail * found.f_frsize, ADVICE_LARGER_FILE_SYSTEM
        if SHARED_MEMORY in places:
            share = bytes_left_to_others(found.f_blocks * found.f_frsize)
            room = max(0, room - share)
            larger = f"{share} bytes of /dev/shm stay free for the script's data loaders: {ADVICE_LARGER_SHARED_MEMORY}"
        available = [(min(room, _available_memory()), larger)]
        group = cgroup_available_bytes()
        return min(available if group is None else [*available, (max(0, group), ADVICE_LARGER_CGROUP)])


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return min(found.st_size, found.st_blocks * 512) if path.name.startswith(_SEGMENTS) else found.st_size


def allocated_bytes(path: Path) -> int:
    """Return the file's allocated bytes; ``st_size`` ignores holes and missing pages (``allocate_huge_pages``)."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _creation_error(error: OSError, description: str, advice: str) -> Exception:
    """Return the error for a file that cannot be made, with advice by the kernel's error number."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Unavailable(
            f"{description} cannot be created: too many open files; raise LimitNOFILE of the agent's unit (ulimit -n), "
            "or sysctl fs.file-max for the whole machine"
        )
    causes = {
        errno.EFBIG: "the file is larger than LimitFSIZE of the agent's unit (ulimit -f) allows: raise that limit",
        errno.ENOMEM: "the vault may not map more memory: raise sysctl vm.max_map_count or LimitAS (ulimit -v)",
        errno.ENOSPC: f"the file system is full: {ADVICE_LARGER_FILE_SYSTEM}, or its inodes (df -i)",
        errno.EDQUOT: "the quota of the file system is used up: raise it",
    }
    cause = causes.get(error.errno or 0)
    return OutOfSlotMemory(f"{description} cannot be created: {cause}, or {advice}") if cause else error


def _available_memory() -> int:
    """Return the kernel's MemAvailable in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigurationError("/proc/meminfo has no MemAvailable; the vault needs Linux 3.14 or later")


def free_pages(descriptor: int, start: int, length: int) -> None:
    """Free whole pages of a file, which read as zeroes from then on. Raises OSError."""
    if _libc.fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, start, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def allocate(descriptor: int, length: int, description: str, start: int = 0) -> None:
    """Allocate ``length`` bytes of a file from ``start``, so that no write there can fail. Raises OutOfSlotMemory."""
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        found = os.fstatvfs(descriptor)
        raise OutOfSlotMemory(
            f"{description} needs {length} bytes; its file system has {found.f_bavail * found.f_frsize} free: "
            f"enlarge it, or {ADVICE_FEWER_SLOTS}"
        ) from error


def populate(mapping: mmap.mmap, stop: threading.Event | None = None) -> None:
    """Make the pages of a writable shared mapping, contents unchanged, until soon after ``stop`` is set.
    ``mmap.madvise`` would hold Python's lock. An old kernel gets reads, which make pages too."""
    first = ctypes.c_char.from_buffer(mapping)
    start, length = ctypes.addressof(first), len(mapping)
    for offset in range(0, length, POPULATE_BYTES):
        if stop is not None and stop.is_set():
            return
        piece = min(POPULATE_BYTES, length - offset)
        if _libc.madvise(start + offset, piece, MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                return
            for page in range(offset, offset + piece, mmap.PAGESIZE):
                mapping[page]


# Pages: huge ones, and near the rank's own processors. A copy into 4 KiB pages spends part of its time on page tables;
# memory of the other socket is read at the speed of the link. The kernel decides both, and takes advice.

log = logging.getLogger(__name__)

MADV_HUGEPAGE = 14
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
"""From linux/mempolicy.h. *Preferred* takes other nodes' memory when that node is full: slots there beat no slots."""
MAX_NUMA_NODES = 1024
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The system call's number; glibc has no name for it, and libnuma would be another dependency."""
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGE_MOUNT_OPTIONS = ("huge=advise", "huge=within_size", "huge=always")
_libc.syscall.restype = ctypes.c_long


def has_huge_pages(directory: Path, mounts: str | None = None, setting: str | None = None) -> bool:
    """Return whether ``directory`` gives huge pages on request. ``mounts``, ``setting``: the kernel's files."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    within = os.path.realpath(directory)
    best, kind, options = "", "", ""
    for line in text.splitlines():
        _, mount, mount_kind, mount_options, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if (within + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind, options = mount, mount_kind, mount_options
    if setting is None:
        setting = _SHMEM_ENABLED.read_text() if _SHMEM_ENABLED.exists() else ""
    if kind != "tmpfs" or "[deny]" in setting:
        return False
    return "[force]" in setting or any(option in _HUGE_PAGE_MOUNT_OPTIONS for option in options.split(","))


def allocate_huge_pages(descriptor: int, length: int) -> None:
    """Make the pages of a new, empty file there, huge ones if possible. ``allocate`` reports if memory is short."""
    os.ftruncate(descriptor, length)
    with mmap.mmap(descriptor, length) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        _libc.madvise(ctypes.addressof(first), length, MADV_HUGEPAGE)
        del first  # a mapping with an exported pointer cannot be closed
        populate(mapping)


@contextmanager
def prefer_numa_node(node: int | None) -> Iterator[None]:
    """Take pages made by this thread from NUMA node ``node`` (None: any) while it has any; refusals are logged."""
    is_set = node is not None and 0 <= node < MAX_NUMA_NODES and _set_policy(MPOL_PREFERRED, 1 << node) == 0
    if node is not None and not is_set:
        log.warning("slots are not bound to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        if is_set:
            _set_policy(MPOL_DEFAULT, 0)


def _set_policy(mode: int, nodes: int) -> int:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        ctypes.set_errno(38)  # ENOSYS
        return -1
    mask = nodes.to_bytes(MAX_NUMA_NODES // 8, "little") if nodes else None
    most = ctypes.c_ulong(MAX_NUMA_NODES + 1 if nodes else 0)
    return int(_libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, most))


# Prefaulting: make the pages of segments in threads while the segments are already being filled.


class Prefaulter:
    """Threads that make the pages of files; they end before a segment gives memory back. Safe for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Path, tuple[threading.Thread, threading.Event]] = {}

    def start(self, path: Path, mapping: mmap.mmap) -> None:
        """Make the pages of ``mapping``, which belongs to the present or future file ``path``."""
        stopped = threading.Event()
        thread = threading.Thread(target=populate, args=(mapping, stopped), daemon=True, name="populate")
        with self._lock:
            self._running[path] = thread, stopped
            thread.start()

    def stop(self, path: Path) -> None:
        """Return when no more pages of the files at or below ``path`` are made."""
        with self._lock:
            ended = [self._running.pop(file) for file in list(self._running) if file.is_relative_to(path)]
        for _, stopped in ended:
            stopped.set()
        for thread, _ in ended:
            thread.join()


# Scratch files: plain files below the segment directory, named by ranks, and never a segment.

_SEGMENT_NAMES = ("own-", "replica-", "parity-", ".")


def write_scratch(
    directory: Path, path: str, offset: int, length: int, budget: MemoryBudget, pieces: Iterable[tuple[int, memoryview]]
) -> None:
    """Write pieces, each at its place in the ``length`` bytes from ``offset`` of a scratch file."""
    if offset < 0:
        raise PermissionDenied(f"into_offset {offset} is before the file's beginning")
    descriptor = _open_beneath(directory, path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PermissionDenied(f"{path} is not a regular file")
        if offset + length >= 1 << 62:
            raise OutOfSlotMemory(f"{path} cannot have {offset + length} bytes")
        if length:
            with budget.reserve(Path(path), offset + length, path):
                # only its own part, so that others in the same file need not wait for the whole
                allocate(descriptor, length, path, offset)
        for at, piece in pieces:
            while piece:
                written = os.pwrite(descriptor, piece, offset + at)
                piece, at = piece[written:], at + written
    finally:
        os.close(descriptor)


def _open_beneath(directory: Path, into: str) -> int:
    """Open ``into`` component by component, so that no symbolic link below ``directory`` is followed."""
    path = PurePath(into)
    if not path.is_relative_to(directory) or ".." in path.parts or path == directory:
        raise PermissionDenied(f"{into} is not below the segment directory {directory}")
    *folders, name = path.relative_to(directory).parts
    if name.startswith(_SEGMENT_NAMES):
        raise PermissionDenied(f"{into} has the name of a segment; use another name for scratch files")
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise PermissionDenied(f"{into} cannot be opened below {directory}: {error.strerror}") from error
    finally:
        os.close(folder)
