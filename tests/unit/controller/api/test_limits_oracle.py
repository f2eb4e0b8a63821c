"""Rate limits against buckets that are filled drop by drop.

The limiter keeps one number for each key, the time at which its bucket would be full. The bucket here is one: so many
drops, and with each tick of the clock as many more as fit. All times are binary fractions, so that both are exact.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from everstep_controller.api.auth import TokenBuckets
from hypothesis import given
from hypothesis import strategies as st

from everstep.clock import ManualClock

TICK_S = 1 / 8
keys = st.sampled_from("ab")
requests = st.lists(st.tuples(st.integers(0, 40), keys, st.integers(1, 12)), max_size=40)


class _Bucket:
    """One drop a tick falls into it."""

    def __init__(self, most: int) -> None:
        self.most = self.drops = most

    def tick(self) -> None:
        self.drops = min(self.most, self.drops + 1)

    def take(self, drops: int) -> int:
        """0, or how many ticks short of so many drops it is."""
        if drops > self.drops:
            return drops - self.drops
        self.drops -= drops
        return 0


@pytest.mark.promise("overload")
@given(st.sampled_from([0.5, 1.0, 2.0, 8.0]), st.sampled_from([0.5, 1.0, 2.0, 5.0]), requests)
def test_rate_limit_matches_drop_by_drop_bucket(
    per_s: float, burst_s: float, asked: list[tuple[int, str, int]]
) -> None:
    clock = ManualClock()
    limit: TokenBuckets[str] = TokenBuckets(per_s, burst_s, clock.monotonic)
    of_one_request = round(1 / (per_s * TICK_S))
    buckets: dict[str, _Bucket] = defaultdict(lambda: _Bucket(int(burst_s / TICK_S)))
    for ticks, key, count in asked:
        clock.advance(ticks * TICK_S)
        for bucket in buckets.values():
            for _ in range(ticks):
                bucket.tick()
        assert limit.take(key, count) == buckets[key].take(count * of_one_request) * TICK_S
