"""Tell whether the ranks of a node wait for its cores, so that other work takes them from training."""

from __future__ import annotations

import os
from pathlib import Path
from threading import get_native_id

from everstep.clock import Clock

SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")
"""Nanoseconds that the reading thread has run and has waited for a core, by the kernel's accounts."""
CROWDED_SHARE = 0.02
"""Share of its time that a training thread waits for a core, from which the cores are full. Beside idle cores it waits
for less than a hundredth; four ranks on two cores wait for a third of their time."""


class CoreContention:
    """Whether the ranks of one node wait for its cores; for the training thread.

    Args:
        ranks: The number of ranks on this node.
        clock: The clock of the time that a wait is compared with.
        cores: Those that the process may use. Default: as the kernel says.
        statistics: See SCHEDULER_STATISTICS. Without the file, ranks with fewer than two cores each count as waiting.
    """

    def __init__(
        self, ranks: int, clock: Clock, *, cores: int | None = None, statistics: Path = SCHEDULER_STATISTICS
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._clock, self._statistics = clock, statistics
        self._is_crowded_by_number = 2 * ranks > cores
        self.ranks_per_core = max(1.0, ranks / cores)
        """What a second of CPU in each rank costs all of them, in seconds."""
        self._last = self._read()

    def is_crowded(self) -> bool:
        """Return whether the calling thread has waited for a core since the last call, for long enough to matter."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None or last[0] != self._last[0]:
            return self._is_crowded_by_number
        passed_s, waited_s = self._last[1] - last[1], self._last[2] - last[2]
        return waited_s > CROWDED_SHARE * passed_s

    def _read(self) -> tuple[int, float, float] | None:
        """Return the calling thread, the time, and how long it has waited for cores; None if that is not known."""
        try:
            waited_ns = int(self._statistics.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return get_native_id(), self._clock.monotonic(), waited_ns / 1e9
