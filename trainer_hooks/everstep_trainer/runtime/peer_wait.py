"""Measure how long this rank waits for others in collectives, to tell a slow rank from those that wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class CollectiveTimer:
    """Times the blocks inside ``measure`` and passes the seconds to ``on_wait``; for one thread.

    A collective on a GPU is timed by two events on the current stream. They are read once they have passed, without a
    wait, so the seconds may be reported a step late.
    """

    def __init__(self, on_wait: Callable[[float], object]) -> None:
        self._on_wait = on_wait
        self._pending: deque[tuple[Any, Any]] = deque()  # torch.cuda.Event; its methods carry no types

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Time a collective on tensors of ``device``; one that raises is not reported."""
        if device.type != "cuda":
            began = perf_counter()
            yield
            self._on_wait(perf_counter() - began)
            return
        stream = torch.cuda.current_stream(device)
        began_at = stream.record_event(_timed_event())
        yield
        self._pending.append((began_at, stream.record_event(_timed_event())))
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._on_wait(first.elapsed_time(last) / 1000.0)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
