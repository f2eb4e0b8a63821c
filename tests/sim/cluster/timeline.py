"""Virtual time: one heap of scheduled calls, and machines' clocks that drift and jump."""

from __future__ import annotations

import heapq
from collections.abc import Callable

START_AT = 1_700_000_000.0
"""Unix time in seconds at which every world begins."""


class Timer:
    """A scheduled call, which ``cancel`` removes."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timeline:
    """Scheduled calls in the order of their times. Calls of one time run in the order in which they were scheduled.

    Attributes:
        now: Seconds since the world began.
        calls_made: The number of calls that were made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.calls_made = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def at(self, due: float, call: Callable[[], None]) -> Timer:
        """Schedule a call at a time, or now if that time is past."""
        timer = Timer(call)
        self._order += 1
        heapq.heappush(self._heap, (max(due, self.now), self._order, timer))
        return timer

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call some seconds from now."""
        return self.at(self.now + seconds, call)

    def run(self, until: float) -> None:
        """Make all calls that are due until that time."""
        while self._heap and self._heap[0][0] <= until:
            due, _, timer = heapq.heappop(self._heap)
            if timer.call is None:
                continue
            self.now = due
            self.calls_made += 1
            timer.call()
        self.now = until


class MachineClock:
    """Implement ``everstep.clock.Clock`` for one machine, with its own rate and a wall clock that may jump."""

    def __init__(self, timeline: Timeline, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self._timeline = timeline
        self._rate = rate
        self._offset_s = offset_s

    def monotonic(self) -> float:
        return self._timeline.now * self._rate

    def wall(self) -> float:
        return START_AT + self._offset_s + self.monotonic()

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._offset_s += seconds

    def to_world_s(self, seconds: float) -> float:
        """Convert seconds of this clock to seconds of the world."""
        return seconds / self._rate
