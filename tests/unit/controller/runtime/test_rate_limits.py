"""Compare token buckets with buckets filled drop by drop, and test each node's quota of event log entries."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from everstep_controller.core.policy import CorePolicy
from everstep_controller.runtime import rate_limits
from everstep_controller.runtime.rate_limits import (
    NODE_LINES,
    SUPPRESSED,
    EventQuota,
    NodeLog,
    TokenBuckets,
)
from everstep_controller.runtime.transaction import Transaction
from tests.support.fleet.controllers import VIEWER, AgentClient, InProcess, get, post
from tests.support.fleet.report_stream import finding
from tests.support.processes.waiting import until

BURST = 20


def test_rate_limit_buckets_have_bounded_memory() -> None:
    buckets: TokenBuckets[int] = TokenBuckets(1.0, 5.0, max_keys=100)
    for key in range(10_000):
        buckets.take(key, 0.0)
        assert len(buckets) <= 101
    for key in range(101):
        buckets.take(key, 10.0)
    buckets.take(-1, 20.0)
    assert len(buckets) <= 101


def test_node_log_limits_each_node_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 1_790_000_000.0
    log_line = NodeLog(logging.getLogger("nodes"), lambda: now)
    for number in range(100):
        log_line(logging.INFO, "n1", "n1 registered %s", number)
    log_line(logging.INFO, "n2", "n2 registered")
    assert caplog.messages == [*(f"n1 registered {number}" for number in range(NODE_LINES)), "n2 registered"]
    caplog.clear()
    now += 11.0
    log_line(logging.WARNING, "n1", "%s", "x" * 900_000)
    assert caplog.messages[0] == "90 lines about node n1 were left out of the log"
    assert len(caplog.messages[1]) < 600


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
    now = 0.0
    limit: TokenBuckets[str] = TokenBuckets(per_s, burst_s)
    of_one_request = round(1 / (per_s * TICK_S))
    buckets: dict[str, _Bucket] = defaultdict(lambda: _Bucket(int(burst_s / TICK_S)))
    for ticks, key, count in asked:
        now += ticks * TICK_S
        for bucket in buckets.values():
            for _ in range(ticks):
                bucket.tick()
        assert limit.take(key, now, count) == buckets[key].take(count * of_one_request) * TICK_S


def test_event_quota_admits_burst_then_steady_rate() -> None:
    quota = EventQuota(BURST, 0.125)
    assert [quota.is_allowed("n1", "finding", 100.0) for _ in range(BURST + 1)] == [*[True] * BURST, False]
    assert [quota.is_allowed("n1", "finding", 100.0 + at) for at in range(1, 41)].count(True) == 5
    assert quota.is_allowed("n1", "user_error", 140.0)
    assert quota.is_allowed("n2", "finding", 140.0)


def test_event_quota_reports_suppressed_events_once() -> None:
    suppressed: list[int] = []
    quota = EventQuota(BURST, 0.1, lambda: suppressed.append(1))
    transaction = Mock(spec=Transaction)
    for kind, count in (("finding", BURST + 7), ("user_error", BURST + 9)):
        for _ in range(count):
            quota.is_allowed("n1", kind, 100.0)
    assert len(suppressed) == 16
    assert [quota.record_suppressed(transaction, 160.0) for _ in range(2)] == [1, 0]
    ((line,), _) = transaction.add_event_log_entry.call_args
    assert (line.kind, line.node, line.data) == (SUPPRESSED, "n1", {"user_error": "9", "finding": "7"})
    assert "9 of user_error, 7 of finding were left out" in line.sentence


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(rate_limits, "REPORT_INTERVAL_S", 0.02)
    every_finding = CorePolicy.lab_preset().with_values(findings={"burst_count": 1_000_000})
    served = InProcess(
        f"sqlite:///{tmp_path / 'c.db'}",
        policy=every_finding,
        events_per_node_burst=BURST,
        events_per_node_per_s=1e-6,
    )
    with TestClient(served) as client:
        yield client


def events(client: TestClient, node: str, kind: str) -> list[op.Event]:
    return list(get(client, f"/v1/events?node={node}&kind={kind}&limit=1000", op.EventList).events)


@pytest.mark.promise("event-log-orders")
def test_event_flood_of_one_node_is_suppressed_and_counted(client: TestClient) -> None:
    wild, other = AgentClient(client, "n1"), AgentClient(client, "n2")
    wild.register()
    other.register()
    wild.report(*(finding(number) for number in range(3 * BURST)))
    post(client, "/v1/nodes/n1/hold", op.ReasonOnlyRequest(reason="look at it"), op.ChangeResult)
    other.report(finding(1))
    assert len(events(client, "n1", "finding")) == BURST
    assert len(events(client, "n1", "operator.hold")) == 1
    assert len(events(client, "n2", "finding")) == 1
    until(lambda: bool(events(client, "n1", SUPPRESSED)), "the event that tells of it")
    (suppressed,) = events(client, "n1", SUPPRESSED)
    assert suppressed.detail == {"finding": str(2 * BURST)}
    assert f"everstep_controller_events_suppressed_total {2 * BURST}.0" in client.get("/metrics", headers=VIEWER).text
    shown = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert len(shown.findings) == 3 * BURST
