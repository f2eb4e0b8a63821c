"""How fast a vault may send: one pace for all its transfers together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.clock import Clock

BURST_S = 0.05
"""Of sending that passes at once after a rest, so that a thread that wakes late does not lose its share."""


class Pace:
    """Threads ask before they send, and are held until their bytes fit. Safe to use from any thread.

    Args:
        bytes_per_s: None for no bound.
    """

    def __init__(self, bytes_per_s: float | None, clock: Clock, sleep: Callable[[float], object] = time.sleep) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()

    @property
    def bounded(self) -> bool:
        return self._bytes_per_s is not None

    def take(self, count: int) -> None:
        """Returns when ``count`` bytes may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            begin = max(now - BURST_S, self._free_at)
            self._free_at = begin + count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)
