"""Wait for a condition of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 120.0
EVERY_S = 0.02
"""Seconds between two checks. Some checks ask a server, which limits requests per second."""


def until(condition: Callable[[], T | None], description: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first true result of ``condition``. Raises AssertionError with ``description`` after the deadline."""
    end = time.perf_counter() + deadline_s
    while not (result := condition()):
        assert time.perf_counter() < end, f"not within {deadline_s} s: {description}"
        time.sleep(EVERY_S)
    return result
