"""Samples of the machine around the GPUs. Nothing here raises or blocks the poll."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.samples import HostSample, PathSample

PROCESSES_EVERY = 30
"""Polls between walks over all processes: a thousand of them cost some ten milliseconds."""

PRESSURE_EVERY = 10
"""Polls between readings of averages over five minutes."""

PATH_CHECK_INTERVAL_S = 10.0

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its free space is read
"""The memory file system, in which data loaders pass batches and the vault keeps its slots."""

BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (stat(2))."""


@dataclass
class HostSensor:
    """Memory, load, processes, pressure and open files."""

    _root: Path
    _polls: int = 0
    _counts: sysfs.ProcessCounts | None = None
    _averages: HostSample = field(default_factory=HostSample)

    def poll(self) -> HostSample:
        try:
            if self._polls % PROCESSES_EVERY == 0:
                self._counts = sysfs.count_processes(self._root)
            if self._polls % PRESSURE_EVERY == 0:
                self._averages = self._read_averages()
            self._polls += 1
            total, available = sysfs.memory_bytes(self._root)
            return msgspec.structs.replace(
                self._averages,
                uptime_s=sysfs.uptime_s(self._root),
                memory_available_fraction=available / total,
                memory_total_bytes=total,
                stuck_processes=self._counts.uninterruptible if self._counts else None,
                zombies=self._counts.zombies if self._counts else None,
                load=sysfs.load_average(self._root),
            )
        except (OSError, ValueError, KeyError, IndexError) as error:
            return HostSample(error=f"{type(error).__name__}: {error}")

    def _read_averages(self) -> HostSample:
        return HostSample(
            cpu_pressure=sysfs.pressure(self._root, "cpu", "some"),
            memory_pressure=sysfs.pressure(self._root, "memory", "full"),
            io_pressure=sysfs.pressure(self._root, "io", "full"),
            open_files_fraction=sysfs.open_files_fraction(self._root),
        )


@dataclass
class PathSensor:
    """Free space and inodes, queried in a thread: a dead NFS server blocks the caller for ever.

    ``_vault_folder`` holds the vault's files, whose growth in the memory file system is expected.
    """

    _local: tuple[str, ...]
    _root: Path
    _clock: Clock
    _vault_folder: Path | None = None
    _pending_since: dict[str, float] = field(default_factory=dict)
    _answers: dict[str, PathSample] = field(default_factory=dict)
    _network: frozenset[str] = frozenset()
    _memory: frozenset[str] = frozenset()
    _next_check_at: float = 0.0

    def poll(self) -> tuple[PathSample, ...]:
        """Return the newest answers; start new queries if the last ones are answered and old enough."""
        now = self._clock.monotonic()
        if now >= self._next_check_at:
            self._next_check_at = now + PATH_CHECK_INTERVAL_S
            self._start_checks(now)
        pending = dict(self._pending_since)
        return tuple(
            msgspec.structs.replace(
                self._answers.get(path) or PathSample(path=path),
                silent_s=now - pending[path] if path in pending else 0.0,
            )
            for path in sorted({*self._local, *self._network, *self._memory})
        )

    def _start_checks(self, now: float) -> None:
        try:
            self._network = frozenset(sysfs.network_mounts(self._root))
            self._memory = frozenset([SHARED_MEMORY] if sysfs.is_memory_mount(self._root, SHARED_MEMORY) else [])
        except (OSError, ValueError):
            self._network = self._memory = frozenset()
        local = [path for path in {*self._local, *self._memory} if path not in self._pending_since]
        remote = self._network - self._pending_since.keys() - set(local)
        for paths in (local, *([path] for path in remote)):
            if paths:
                self._pending_since |= dict.fromkeys(paths, now)
                threading.Thread(target=self._check_paths, args=(paths,), daemon=True).start()

    def _check_paths(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._answers[path] = self._judge_space(path, os.statvfs(path))
            except OSError:
                self._answers.pop(path, None)
            self._pending_since.pop(path, None)

    def _judge_space(self, path: str, status: os.statvfs_result) -> PathSample:
        """Return the free parts. A read-only image is always full, and some file systems have no size."""
        if status.f_flag & os.ST_RDONLY or not status.f_blocks:
            return PathSample(path=path)
        inodes = status.f_favail / status.f_files if status.f_files else None
        if path not in self._memory:
            return PathSample(path=path, free_fraction=status.f_bavail / status.f_blocks, free_inode_fraction=inodes)
        of_others = status.f_blocks - _allocated_bytes(self._vault_folder, path) // status.f_frsize
        free = status.f_bavail / of_others if of_others > 0 else None
        return PathSample(path=path, free_memory_fraction=free, free_inode_fraction=inodes)


def _allocated_bytes(folder: Path | None, mount: str) -> int:
    """Return the memory that the files below the folder use, if it lies in the mount."""
    total = 0
    if folder is not None and folder.is_relative_to(mount):
        for place, _, files in os.walk(folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(f"{place}/{name}").st_blocks * BLOCK_BYTES
    return total
