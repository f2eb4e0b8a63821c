"""Where the time of a regrouping went."""

from __future__ import annotations

from time import perf_counter


class Timeline:
    """Seconds by phase, one phase after the other without gaps; they sum up to the time from start to finish."""

    def __init__(self, began: float | None = None) -> None:
        self._last = perf_counter() if began is None else began
        self.phases_s: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """The time since the last call (or the start) belongs to ``phase``; more of the same phase adds up."""
        now = perf_counter()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + now - self._last
        self._last = now

    def set_apart(self, phase: str, of: str, seconds: float) -> None:
        """So much of the phase ``of``, which has ended, was ``phase``; nothing where there was none of it."""
        seconds = min(seconds, self.phases_s[of])
        if seconds > 0.0:
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
            self.phases_s[of] -= seconds
