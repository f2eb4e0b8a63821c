"""Jittered exponential back-off, pure: the random number is an argument."""

from __future__ import annotations

import msgspec


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
