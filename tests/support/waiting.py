"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 120.0
EVERY_S = 0.02
"""Between looks: some ask a server, which counts what one identity asks in a second."""


def until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first true result of ``condition``. Past the deadline AssertionError says ``what`` was waited for."""
    end = time.perf_counter() + deadline_s
    while not (result := condition()):
        assert time.perf_counter() < end, f"not within {deadline_s} s: {what}"
        time.sleep(EVERY_S)
    return result
