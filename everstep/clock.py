"""Pass time as an argument: only ``everstep.system_clock`` reads the machine's clock."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Clock(Protocol):
    """The source of time that code receives as an argument."""

    def wall(self) -> float:
        """Return seconds since the epoch; may jump. For display, and across machines."""

    def monotonic(self) -> float:
        """Return seconds since some start; never goes back. For deadlines and durations in one process."""


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, wall: float = 1_700_000_000.0, monotonic: float = 0.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward. Raises ValueError for a negative step: use ``jump_wall`` for that."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {seconds} s; use jump_wall")
        self._wall += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Move the wall clock alone, as NTP or an operator would."""
        self._wall += seconds


class Backoff(msgspec.Struct, frozen=True):
    """The waits between retries. Full jitter (a uniform draw below an exponential ceiling) spreads a fleet that lost
    its controller at the same instant; the floor keeps one unlucky draw from hammering."""

    floor_s: float = 0.02
    ceiling_s: float = 5.0
    factor: float = 2.0

    def delay_s(self, attempt: int, uniform: float) -> float:
        """Return the seconds before retry number ``attempt`` (0 is the first), given ``uniform`` drawn from [0, 1)."""
        return self.floor_s + (self.limit_s(attempt) - self.floor_s) * uniform

    def limit_s(self, attempt: int) -> float:
        """Return the longest wait before retry number ``attempt``: without jitter, for a single client."""
        return min(self.ceiling_s, self.floor_s * self.factor ** min(attempt, 60))
