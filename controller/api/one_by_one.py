"""What may take a while is done one thing in each turn of the event loop, so that beats are answered in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Soon = Callable[[Callable[[], None]], None]


class OneByOne:
    """Keeps the order. For the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __call__(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        work = self._waiting[0]
        try:
            work()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)
