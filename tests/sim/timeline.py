"""Virtual time: one heap of calls to come, and clocks that drift and jump over it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

START = 1_700_000_000.0
"""Wall seconds at which every world begins."""


class Timer:
    """A call to come. ``cancel`` makes it nothing."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timeline:
    """Calls in the order of their times; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.played = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def at(self, due: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._order += 1
        heapq.heappush(self._heap, (max(due, self.now), self._order, timer))
        return timer

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        return self.at(self.now + seconds, call)

    def run(self, until: float) -> None:
        """Plays everything that is due until then."""
        while self._heap and self._heap[0][0] <= until:
            due, _, timer = heapq.heappop(self._heap)
            if timer.call is None:
                continue
            self.now = due
            self.played += 1
            timer.call()
        self.now = until


class MachineClock:
    """What one machine's clocks show (``everstep.clock.Clock``): a rate of their own, and a wall clock that jumps."""

    def __init__(self, timeline: Timeline, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self._timeline = timeline
        self._rate = rate
        self._offset_s = offset_s

    def monotonic(self) -> float:
        return self._timeline.now * self._rate

    def wall(self) -> float:
        return START + self._offset_s + self.monotonic()

    def jump_wall(self, seconds: float) -> None:
        self._offset_s += seconds

    def real_s(self, seconds: float) -> float:
        """How long ``seconds`` of this clock are in the world's time."""
        return seconds / self._rate
