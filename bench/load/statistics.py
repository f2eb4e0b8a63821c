"""Percentiles that can be put together over several processes: counts over logarithmic bins, 1 % wide."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

SMALLEST_S = 1e-6
PER_E = 100.0
"""Bins for a factor of e: each is 1 % wide."""
BINS = 1800
"""Up to a minute."""


def summary(values: array[float]) -> dict[str, Any]:
    """Counts by bin (only those that are not empty), and the largest value."""
    if not len(values):
        return {"bins": {}, "max": 0.0}
    logs = np.log(np.maximum(np.frombuffer(values, dtype=np.float64), SMALLEST_S) / SMALLEST_S) * PER_E
    found, counts = np.unique(np.minimum(logs.astype(np.int64), BINS), return_counts=True)
    return {"bins": {str(place): int(count) for place, count in zip(found, counts, strict=True)}, "max": max(values)}


class Distribution:
    """Several summaries together."""

    def __init__(self, summaries: list[dict[str, Any]]) -> None:
        self._counts = np.zeros(BINS + 1, dtype=np.int64)
        self.largest = max((float(summary["max"]) for summary in summaries), default=0.0)
        for summary in summaries:
            for place, count in summary["bins"].items():
                self._counts[int(place)] += count

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def quantile(self, share: float) -> float:
        """The value that ``share`` of all do not exceed, seconds; 0.0 where there is none."""
        if not self.count:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._counts), share * self.count))
        return float(SMALLEST_S * np.exp((place + 1) / PER_E))
