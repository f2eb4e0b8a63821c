"""Time as an argument: nothing outside ``everstep.system_clock`` reads the machine's clock itself."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Clock(Protocol):
    """What code that needs the time is given."""

    def wall(self) -> float:
        """Seconds since the epoch; may jump. For what is shown to people and crosses machines."""

    def monotonic(self) -> float:
        """Seconds since some start; never goes back. For deadlines and durations inside one process."""


class ManualClock:
    """A clock that stands still until told to move; for tests and simulation."""

    def __init__(self, wall: float = 1_700_000_000.0, monotonic: float = 0.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward. Raises ValueError for a negative step: use ``jump_wall`` for that."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {seconds} s; use jump_wall")
        self._wall += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Moves the wall clock alone, as NTP or an operator would."""
        self._wall += seconds


# ---- backoff
# Jittered exponential back-off, pure: the random number is an argument.


class Backoff(msgspec.Struct, frozen=True):
    """How long to wait before the n-th retry.

    Full jitter (a uniform draw below an exponential ceiling) spreads a fleet that lost its controller at the same
    instant; the floor keeps one unlucky draw from hammering.
    """

    floor_s: float = 0.02
    ceiling_s: float = 5.0
    factor: float = 2.0

    def delay_s(self, attempt: int, uniform: float) -> float:
        """Seconds before retry number ``attempt`` (0 is the first), given ``uniform`` drawn from [0, 1)."""
        return self.floor_s + (self.limit_s(attempt) - self.floor_s) * uniform

    def limit_s(self, attempt: int) -> float:
        """The most that it waits before retry number ``attempt``: without jitter, for who waits alone."""
        return min(self.ceiling_s, self.floor_s * self.factor ** min(attempt, 60))
