"""Keep the time that decisions use: close to the wall clock, without its jumps, and never running backwards."""

from __future__ import annotations

import asyncio
from collections import deque

from everstep.clock import Clock

SLEW_INTERVAL_S = 10.0
"""Seconds between two calls of ``slew``."""
SLEW = 0.1
"""Largest share by which this time runs faster or slower than monotonic time. Deadlines may be off by as much, which is
less than their margins. An error of one minute is corrected in ten minutes."""
MAX_SLEWED_S = 3600.0
"""A wall clock farther ahead than this is not followed, because it is probably wrong. A restart of the controller
resolves the difference (``everstep_controller.runtime.clock_check``)."""


class SteadyTime:
    """Time that starts at the wall clock, advances with monotonic time, and slowly converges to the wall clock.

    Deadlines and timestamps share this time. A jump of the wall clock triggers no deadline early, and delays none by
    more than ``SLEW``. ``slew`` changes the speed, never the value, so this time does not run backwards.

    Args:
        clock: the machine's clocks.
        not_before: newest time in the database, in wall seconds. This time starts there if the wall clock is behind.
    """

    def __init__(self, clock: Clock, not_before: float = 0.0) -> None:
        self._clock = clock
        self._rate = 1.0
        self._anchor = clock.monotonic()
        self._value = max(clock.wall(), not_before)

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return self._value + (self._clock.monotonic() - self._anchor) * self._rate

    def seconds_until(self, due: float) -> float:
        """Return monotonic seconds until ``now`` reaches ``due``; 0.0 if that has passed."""
        return max(0.0, due - self.now()) / self._rate

    def ahead_s(self) -> float:
        """Return seconds by which this time is ahead of the wall clock; negative if it is behind."""
        return self.now() - self._clock.wall()

    def slew(self) -> None:
        """Set the speed for the next ``SLEW_INTERVAL_S`` so that this time approaches the wall clock."""
        monotonic = self._clock.monotonic()
        self._value += (monotonic - self._anchor) * self._rate
        self._anchor = monotonic
        ahead_s = self._value - self._clock.wall()
        slower = ahead_s / SLEW_INTERVAL_S if ahead_s > -MAX_SLEWED_S else 0.0
        self._rate = 1.0 - max(-SLEW, min(SLEW, slower))


# ---- event loop lag
# A controller whose own event loop lags must not declare nodes late.

INTERVAL_S = 0.1
WINDOW_SAMPLES = 10


class LagMeter:
    """Samples the event loop's lateness ten times per second, over the last second."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin sampling on the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        """End sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        self._samples.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()

    def recent_s(self) -> float:
        """Return the worst lateness of the last second in seconds, including a sample that is overdue now."""
        overdue = max(0.0, asyncio.get_running_loop().time() - self._due) if self._timer is not None else 0.0
        return max((*self._samples, overdue))
