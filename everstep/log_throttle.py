"""Bound the log lines that anybody who connects to a port can cause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

BURST = 10
PERIOD_S = 10.0
MAX_CHARACTERS = 500
"""Longest log message, which may quote what a stranger sent."""


class LogThrottle:
    """Passes some lines of a kind in each period, and counts the others. Safe from any thread.

    The first line after a period with dropped lines is preceded by their number.

    Args:
        log: Receives the lines.
        monotonic: The clock, seconds.
        burst: Lines per period.
        period_s: Seconds of a period, which begins with its first line.
    """

    def __init__(
        self,
        log: logging.Logger,
        monotonic: Callable[[], float],
        *,
        burst: int = BURST,
        period_s: float = PERIOD_S,
    ) -> None:
        self._log = log
        self._monotonic = monotonic
        self._burst = burst
        self._every_s = period_s
        self._lock = threading.Lock()
        self._ends_at = monotonic()
        self._said = self._left_out = 0

    def __call__(self, level: int, message: str, *args: object, extra: dict[str, Any] | None = None) -> None:
        """Log a line, shortened to MAX_CHARACTERS, or count it."""
        if not self._log.isEnabledFor(level):
            return
        with self._lock:
            now, left_out = self._monotonic(), 0
            if now >= self._ends_at:
                self._ends_at = now + self._every_s
                left_out, self._said, self._left_out = self._left_out, 0, 0
            if self._said >= self._burst:
                self._left_out += 1
                return
            self._said += 1
        if left_out:
            self._log.log(level, "%d lines like the next one were left out of the log", left_out, extra=extra)
        self._log.log(level, "%s", _shortened(message % args), extra=extra)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
