"""When a rank's silence is worth a report.

A rank's signal thread ticks ten times a second. Silence has three causes: the process was stopped (SIGSTOP, a cgroup
freezer), its thread does not get Python's lock (a long call in C that holds it, which ends by itself), or the whole
machine is starved, this agent with it. The first shows in the kernel's state letter and is told soon; the second is
given longer; the third is seen by the lateness of our own look and is not held against the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agent.local_losses import LossOutside
from agent.local_seats import RankSeat
from everstep.clock import Clock
from everstep.wire.v1.training import RankUnresponsive

STOPPED = "T"
"""Stopped by a signal. A tracer's stop ("t") is short when a profiler samples, and is treated as mere silence."""


class SilenceWatch:
    """Looks at the ranks of one node; reports each silence once in each generation.

    Args:
        silence_s: after this long without a word, look at the process; report it if it is stopped.
        unresponsive_after_s: after this long report it whatever its state.
    """

    def __init__(
        self,
        clock: Clock,
        outside: LossOutside,
        counts: Counter[str],
        silence_s: float,
        unresponsive_after_s: float,
    ) -> None:
        self._clock = clock
        self._outside = outside
        self._counts = counts
        self._silence_s = silence_s
        self._unresponsive_after_s = unresponsive_after_s

    def look(self, seats: Iterable[RankSeat], own_lag_s: float) -> None:
        """One look at all ranks. ``own_lag_s``: how much later it comes than it should have."""
        now = self._clock.monotonic()
        for seat in seats:
            seat.heard_at = min(now, seat.heard_at + own_lag_s)
            silent_s = now - seat.heard_at
            if silent_s >= self._silence_s and self._matters(seat):
                self._judge(seat, silent_s)

    def _matters(self, seat: RankSeat) -> bool:
        """Ranks of the roster that have ticked, are expected to, and were not reported yet."""
        expected = seat.tick is not None and not seat.condemned and not seat.is_done and seat.job.stopped is None
        return expected and seat.rank is not None and seat.silence_told != seat.generation

    def _judge(self, seat: RankSeat, silent_s: float) -> None:
        state = seat.peer.process_state()
        if state != STOPPED and silent_s < self._unresponsive_after_s:
            return
        assert seat.generation is not None
        assert seat.rank is not None
        seat.silence_told = seat.generation
        self._counts["ranks_unresponsive"] += 1
        self._outside.report(
            RankUnresponsive(
                job=seat.job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=seat.generation,
                rank=seat.rank,
                local_rank=seat.local_rank,
                silent_s=round(silent_s, 3),
                process_state=state,
            )
        )
