"""The time that decisions are made in: like the wall clock, but it neither jumps nor goes back."""

from __future__ import annotations

from everstep.clock import Clock


class SteadyTime:
    """The wall clock as it was at the start, plus monotonic time since.

    Args:
        clock: the machine's clocks.
        not_before: wall seconds of the newest thing ever recorded; a clock that was set back meanwhile does not
            bring times before it.
    """

    def __init__(self, clock: Clock, not_before: float = 0.0) -> None:
        self._clock = clock
        self._offset = max(clock.wall(), not_before) - clock.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, by the wall clock of the start."""
        return self._clock.monotonic() + self._offset
