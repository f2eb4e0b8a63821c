"""How late this process is itself: an observer that lags must not call others late."""

from __future__ import annotations

import asyncio
from collections import deque

INTERVAL_S = 0.1
WINDOW = 10


class LagMeter:
    """Samples how late the event loop runs a callback that was due, ten times a second; remembers one second."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begins to sample on the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        """Ends sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        self._samples.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()

    def recent_s(self) -> float:
        """The worst lateness of the last second, and of the sample that is overdue now."""
        overdue = max(0.0, asyncio.get_running_loop().time() - self._due) if self._timer is not None else 0.0
        return max((*self._samples, overdue))
