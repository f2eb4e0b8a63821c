"""Tell whether the kernel killed a rank for want of memory, from counters of control groups and from the kernel log.

A SIGKILL by a person looks the same to the launcher. Each kill that the kernel counts in the rank's group explains the
end of one process, within seconds. The kernel log names the process, where this agent may read it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime

from everstep.clock import Clock
from everstep.host.cgroups import CGROUP_ROOT, memory_limit_bytes, oom_kill_count, process_group
from everstep_agent.drivers.kmsg import KernelLog

POLL_INTERVAL_S = 0.5
"""Seconds between two readings of the counters."""
EXPLAINS_S = 2.0
"""Seconds for which a counted kill may explain the end of a rank; an older one was another process."""
MAX_WATCHED = 1024
"""Number of processes whose control groups are remembered."""
MAX_LOG_READS = 64
"""Maximum number of portions that are read of the kernel log at once."""
KILLED = re.compile(
    r"[Oo]ut of memory.*: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)(?:.*anon-rss:(?P<rss>\d+)kB)?"
)
"""What the kernel writes of a kill, for a whole machine and for a memory cgroup (Linux, mm/oom_kill.c)."""


class OomKills:
    """Follow the kills of the kernel in the control groups of ranks.

    Args:
        clock: Clock of the agent.
        kernel_log: The kernel log, a device or a file; empty for none. A pipe has another reader and is left alone.
        cgroups: Where the control groups are mounted.
        processes: Where the files of processes are.
    """

    def __init__(
        self, clock: Clock, kernel_log: str = "", cgroups: Path = CGROUP_ROOT, processes: Path = Path("/proc")
    ) -> None:
        self._clock, self._cgroups, self._processes = clock, cgroups, processes
        self._groups: dict[int, Path | None] = {}
        self._counts: dict[Path, int] = {}
        self._unexplained: dict[Path, list[float]] = {}
        self._polled_at = 0.0
        self._log = _open_log(kernel_log)
        self._killed: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Note the control group of a rank's process while it lives."""
        group = process_group(self._cgroups, self._processes / str(pid) / "cgroup")
        self._groups[pid] = group
        while len(self._groups) > MAX_WATCHED:  # processes that ended in order are never asked about
            del self._groups[next(iter(self._groups))]
        if group is not None and group not in self._counts and (count := oom_kill_count(group)) is not None:
            self._counts[group] = count

    def poll(self, pids: Iterable[int]) -> None:
        """Read the counters, at most every ``POLL_INTERVAL_S``; ``pids`` are the ranks that live."""
        now = self._clock.monotonic()
        if now - self._polled_at < POLL_INTERVAL_S:
            return
        self._polled_at = now
        living = set(pids)
        for group in {self._groups[pid] for pid in living if pid in self._groups}:
            if group is not None:
                self._read(group, now)

    def explain(self, pid: int) -> str:
        """Return what the kernel killed the process for, as a clause; "" if it did not, or if nothing tells."""
        group, now = self._groups.pop(pid, None), self._clock.monotonic()
        self._read_log()
        used_kb = self._killed.pop(pid, None)
        counted = False
        if group is not None:
            self._read(group, now)
            recent = [at for at in self._unexplained.get(group, []) if now - at <= EXPLAINS_S]
            counted, self._unexplained[group] = bool(recent), recent[1:]
        if used_kb is None and not counted:
            return ""
        used = f"it used {_gib(used_kb * 1024)}, and " if used_kb else ""
        limit = memory_limit_bytes(group) if group is not None else None
        if limit is not None:
            return f"{used}its control group may use {_gib(limit)}"
        return f"{used}the machine has {_gib(self._machine_bytes())}"

    def _read(self, group: Path, now: float) -> None:
        count = oom_kill_count(group)
        if count is None:
            return
        more = count - self._counts.get(group, count)
        self._counts[group] = count
        self._unexplained.setdefault(group, []).extend([now] * min(more, 64))

    def _read_log(self) -> None:
        for _ in range(MAX_LOG_READS if self._log is not None else 0):
            assert self._log is not None
            lines = self._log.read()
            for line in lines:
                if found := KILLED.search(line):
                    self._killed[int(found["pid"])] = int(found["rss"] or 0)
            if not lines:
                return

    def _machine_bytes(self) -> int:
        lines = (self._processes / "meminfo").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)


def _open_log(path: str) -> KernelLog | None:
    """Return the kernel log from now on; None if it cannot be read besides the sensors."""
    try:
        mode = os.stat(path).st_mode if path else 0
    except OSError:
        return None
    if not (stat.S_ISCHR(mode) or stat.S_ISREG(mode)):
        return None
    log = KernelLog(path, not_before_s=clock_gettime(CLOCK_BOOTTIME))
    for _ in range(MAX_LOG_READS):  # what is older than the agent is passed over without lines
        log.read()
    return None if log.error else log


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
