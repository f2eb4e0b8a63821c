"""Samples of the machine around the GPUs. Nothing here raises or blocks the poll."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from everstep.clock import Clock
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.samples import HostSample, PathSample

PROCESSES_EVERY = 30
"""Polls between walks over all processes: a thousand of them cost some ten milliseconds."""

PATH_CHECK_INTERVAL_S = 10.0


@dataclass
class HostSensor:
    """Memory, load and processes."""

    _root: Path
    _polls: int = 0
    _counts: sysfs.ProcessCounts | None = None

    def poll(self) -> HostSample:
        try:
            if self._polls % PROCESSES_EVERY == 0:
                self._counts = sysfs.count_processes(self._root)
            self._polls += 1
            total, available = sysfs.memory_bytes(self._root)
            return HostSample(
                uptime_s=sysfs.uptime_s(self._root),
                memory_available_fraction=available / total,
                memory_total_bytes=total,
                stuck_processes=self._counts.uninterruptible if self._counts else None,
                zombies=self._counts.zombies if self._counts else None,
                load=sysfs.load_average(self._root),
            )
        except (OSError, ValueError, KeyError, IndexError) as error:
            return HostSample(error=f"{type(error).__name__}: {error}")


@dataclass
class PathSensor:
    """Free space, queried in a thread: a dead NFS server blocks the caller for ever."""

    _local: tuple[str, ...]
    _root: Path
    _clock: Clock
    _pending_since: dict[str, float] = field(default_factory=dict)
    _free_fractions: dict[str, float] = field(default_factory=dict)
    _network: frozenset[str] = frozenset()
    _next_check_at: float = 0.0

    def poll(self) -> tuple[PathSample, ...]:
        """Return the newest answers; start new queries if the last ones are answered and old enough."""
        now = self._clock.monotonic()
        if now >= self._next_check_at:
            self._next_check_at = now + PATH_CHECK_INTERVAL_S
            self._start_checks(now)
        pending = dict(self._pending_since)
        return tuple(
            PathSample(
                path=path,
                free_fraction=self._free_fractions.get(path),
                silent_s=now - pending[path] if path in pending else 0.0,
            )
            for path in sorted({*self._local, *self._network})
        )

    def _start_checks(self, now: float) -> None:
        try:
            self._network = frozenset(sysfs.network_mounts(self._root))
        except (OSError, ValueError):
            self._network = frozenset()
        local = [path for path in self._local if path not in self._pending_since]
        remote = self._network - self._pending_since.keys() - set(local)
        for paths in (local, *([path] for path in remote)):
            if paths:
                self._pending_since |= dict.fromkeys(paths, now)
                threading.Thread(target=self._check_paths, args=(paths,), daemon=True).start()

    def _check_paths(self, paths: list[str]) -> None:
        for path in paths:
            try:
                status = os.statvfs(path)
                self._free_fractions[path] = status.f_bavail / max(1, status.f_blocks)
            except OSError:
                self._free_fractions.pop(path, None)
            self._pending_since.pop(path, None)
