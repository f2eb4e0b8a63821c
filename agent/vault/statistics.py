"""What the vault has done, counted."""

from __future__ import annotations

import threading
from collections import Counter

COUNTERS = (
    "replicated_slots",
    "replicated_bytes",
    "received_slots",
    "received_bytes",
    "received_manifests",
    "reused_bytes",
    "superseded",
    "served_bytes",
    "fetched_bytes",
    "parity_slots",
    "parity_bytes",
    "decoded_bytes",
    "spilled_slots",
    "spilled_bytes",
    "scrubbed_slots",
    "scrubbed_bytes",
    "corrupt_slots",
    "corrupt_transfers",
)
"""All there are; each is there from the start, so that a rate over it is never undefined."""


class Tally:
    """Counters, and refusals by error code. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._refused: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to one of COUNTERS. Raises KeyError for another name."""
        with self._lock:
            if name not in self._counters:
                raise KeyError(name)
            self._counters[name] += amount

    def refuse(self, code: str) -> None:
        """Counts a refusal by an error's code."""
        with self._lock:
            self._refused[code] += 1

    def read(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters, and refusals by code, as they are now."""
        with self._lock:
            return dict(self._counters), dict(self._refused)
