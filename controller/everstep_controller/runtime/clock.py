"""The time that decisions are made in: close to the wall clock, without its jumps, and never running backwards."""

from __future__ import annotations

import asyncio
from collections import deque

from everstep.clock import Clock

SLEW_INTERVAL_S = 10.0
"""Seconds between two calls of ``follow``."""
SLEW = 0.1
"""Largest share by which this time runs faster or slower than monotonic time. A deadline may be off by as much, which
is less than the deadlines' own margins; an error of a minute is gone in ten."""
MAX_SLEWED_S = 3600.0
"""A wall clock that is farther ahead than this is not followed. It is more likely wrong than right, and a restart of
the controller settles it (``everstep_controller.runtime.clock_check``)."""


class SteadyTime:
    """Monotonic time since the start, counted from the wall clock of the start, and led back to the wall clock slowly.

    Deadlines and timestamps share this time. It advances with monotonic time, so a jump of the wall clock fires no
    deadline and delays none by more than ``SLEW``. ``follow`` changes its speed, never its value, so it does not run
    backwards.

    Args:
        clock: the machine's clocks.
        not_before: wall seconds of the newest time in the database. The time starts there where the wall clock is
            behind it.
    """

    def __init__(self, clock: Clock, not_before: float = 0.0) -> None:
        self._clock = clock
        self._rate = 1.0
        self._anchor = clock.monotonic()
        self._value = max(clock.wall(), not_before)

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._value + (self._clock.monotonic() - self._anchor) * self._rate

    def seconds_until(self, due: float) -> float:
        """Monotonic seconds until ``now`` is ``due``; 0.0 where that has passed."""
        return max(0.0, due - self.now()) / self._rate

    def ahead_s(self) -> float:
        """Seconds by which this time is ahead of the wall clock; negative where it is behind."""
        return self.now() - self._clock.wall()

    def slew(self) -> None:
        """Sets the speed for the next ``FOLLOW_EVERY_S``, so that at their end this time and the wall clock agree, or
        differ by less."""
        monotonic = self._clock.monotonic()
        self._value += (monotonic - self._anchor) * self._rate
        self._anchor = monotonic
        ahead_s = self._value - self._clock.wall()
        slower = ahead_s / SLEW_INTERVAL_S if ahead_s > -MAX_SLEWED_S else 0.0
        self._rate = 1.0 - max(-SLEW, min(SLEW, slower))


# ---- lag
# How late this process is itself: an observer that lags must not call others late.

INTERVAL_S = 0.1
WINDOW_SAMPLES = 10


class LagMeter:
    """Samples how late the event loop runs a callback that was due, ten times a second; remembers one second."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begins to sample on the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        """Ends sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        self._samples.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()

    def recent_s(self) -> float:
        """The worst lateness of the last second, and of the sample that is overdue now."""
        overdue = max(0.0, asyncio.get_running_loop().time() - self._due) if self._timer is not None else 0.0
        return max((*self._samples, overdue))
