"""Samples of the machine around the GPUs. Nothing here raises or blocks the poll."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from everstep.clock import Clock
from everstep_agent.drivers import sysfs
from everstep_agent.sensors.samples import HostSample, PathSample, PortSample

PROCESSES_EVERY = 30
"""Polls between walks over all processes: a thousand of them cost some ten milliseconds."""

PATH_CHECK_INTERVAL_S = 10.0


class HostSensor:
    """Memory, load and processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._polls = 0
        self._counts: sysfs.ProcessCounts | None = None

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
                stuck_processes=None if self._counts is None else self._counts.uninterruptible,
                zombies=None if self._counts is None else self._counts.zombies,
                load=sysfs.load_average(self._root),
            )
        except (OSError, ValueError, KeyError, IndexError) as error:
            return HostSample(error=f"{type(error).__name__}: {error}")


class PathSensor:
    """Free space, queried in a thread: a dead NFS server blocks the caller for ever."""

    def __init__(self, paths: tuple[str, ...], root: Path, clock: Clock) -> None:
        self._local = paths
        self._root = root
        self._clock = clock
        self._pending_since: dict[str, float] = {}
        self._free_fractions: dict[str, float] = {}
        self._network: frozenset[str] = frozenset()
        self._next_check_at = 0.0

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
        for path in local:
            self._pending_since[path] = now
        if local:
            threading.Thread(target=self._check_paths, args=(local,), daemon=True).start()
        for path in self._network - self._pending_since.keys():
            self._pending_since[path] = now
            threading.Thread(target=self._check_paths, args=([path],), daemon=True).start()

    def _check_paths(self, paths: list[str]) -> None:
        for path in paths:
            try:
                status = os.statvfs(path)
                self._free_fractions[path] = status.f_bavail / max(1, status.f_blocks)
            except OSError:
                self._free_fractions.pop(path, None)
            self._pending_since.pop(path, None)


# Network ports. Nothing raises: a port that vanishes is reported as down.

COUNTERS_EVERY = 10
"""Polls between readings of all counters; a link's state is read at every poll."""


class NetworkSensor:
    """InfiniBand and Ethernet ports under ``root``; remembers the ports that were ever up."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._polls = 0
        self._readings: list[sysfs.PortReading] = []
        self._was_up: dict[str, sysfs.PortReading] = {}

    def poll(self) -> tuple[PortSample, ...]:
        readings = self._readings = self._read()
        self._was_up |= {reading.name: reading for reading in readings if reading.up}
        samples = []
        for reading in readings:
            values = reading._asdict()
            del values["sysfs_folder"]
            samples.append(PortSample(was_up=reading.name in self._was_up, **values))
        vanished = self._was_up.keys() - {reading.name for reading in readings}
        for last in (self._was_up[name] for name in sorted(vanished)):
            samples.append(PortSample(name=last.name, kind=last.kind, up=False, was_up=True, identity=last.identity))
        return tuple(samples)

    def _read(self) -> list[sysfs.PortReading]:
        self._polls += 1
        if self._polls % COUNTERS_EVERY != 1:
            return [now for port in self._readings if (now := sysfs.refresh_port(port)) is not None]
        return [*sysfs.infiniband_ports(self._root), *sysfs.ethernet_ports(self._root)]
