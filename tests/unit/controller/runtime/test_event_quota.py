"""One node that floods the audit log does not push out the lines of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from everstep_controller.core import events as ev
from everstep_controller.core.effects import AuditEntry
from everstep_controller.core.policy import CorePolicy
from everstep_controller.runtime import event_quota
from everstep_controller.runtime.event_quota import SUPPRESSED, EventQuota, causing_node, record_suppressed
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from tests.support.controllers import VIEWER, InProcess, Speaker, get, post, registration
from tests.support.report_stream import finding
from tests.support.waiting import until

BURST = 20


class Book:
    """What was noted."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    def add_audit_entry(self, entry: AuditEntry) -> None:
        self.entries.append(entry)


def test_event_quota_admits_burst_then_steady_rate() -> None:
    quota = EventQuota(BURST, 0.125)
    assert [quota.is_allowed("n1", "finding", 100.0) for _ in range(BURST + 1)] == [*[True] * BURST, False]
    assert [quota.is_allowed("n1", "finding", 100.0 + at) for at in range(1, 41)].count(True) == 5
    assert quota.is_allowed("n1", "user_error", 140.0)
    assert quota.is_allowed("n2", "finding", 140.0)


def test_event_quota_reports_suppressed_events_once() -> None:
    suppressed: list[int] = []
    quota, book = EventQuota(BURST, 0.1, lambda: suppressed.append(1)), Book()
    for kind, count in (("finding", BURST + 7), ("user_error", BURST + 9)):
        for _ in range(count):
            quota.is_allowed("n1", kind, 100.0)
    assert len(suppressed) == 16
    assert (record_suppressed(quota, book, 160.0), record_suppressed(quota, book, 160.0)) == (1, 0)
    (line,) = book.entries
    assert (line.kind, line.node, line.data) == (SUPPRESSED, "n1", {"user_error": "9", "finding": "7"})
    assert "9 of user_error, 7 of finding were left out" in line.sentence


def test_event_quota_forgets_idle_nodes() -> None:
    quota = EventQuota(BURST, 0.1)
    for number in range(1000):
        quota.is_allowed(f"n{number}", "finding", 100.0)
    quota.take_suppressed(105.0)
    assert len(quota._allowances) == 1000
    quota.take_suppressed(111.0)
    assert len(quota._allowances) == 0


def test_event_cause_is_the_reporting_node() -> None:
    assert causing_node(ev.AgentRegistered(register=registration("n1", 1))) == "n1"
    assert causing_node(ev.NodeDisconnected(node="n1", incarnation=1)) == "n1"
    assert causing_node(ev.OperatorCommand(action=ev.OperatorAction.HOLD, actor="olga", node="n1")) == ""
    assert causing_node(ev.Tick()) == ""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(event_quota, "REPORT_INTERVAL_S", 0.02)
    every_finding = msgspec.structs.replace(CorePolicy.lab_preset(), finding_burst_count=1_000_000)
    served = InProcess(
        f"sqlite:///{tmp_path / 'c.db'}",
        policy=every_finding,
        audit_entries_per_node_burst=BURST,
        audit_entries_per_node_per_s=1e-6,
    )
    with TestClient(served) as client:
        yield client


def events(client: TestClient, node: str, kind: str) -> list[op.Event]:
    return list(get(client, f"/v1/events?node={node}&kind={kind}&limit=1000", op.EventList).events)


@pytest.mark.promise("audit-orders")
def test_event_flood_of_one_node_is_suppressed_and_counted(client: TestClient) -> None:
    wild, other = Speaker(client, "n1"), Speaker(client, "n2")
    wild.register()
    other.register()
    wild.report(*(finding(number) for number in range(3 * BURST)))
    post(client, "/v1/nodes/n1/hold", op.ReasonOnlyRequest(reason="look at it"), op.ChangeResult)
    other.report(finding(1))
    assert len(events(client, "n1", "finding")) == BURST
    assert len(events(client, "n1", "operator.hold")) == 1
    assert len(events(client, "n2", "finding")) == 1
    until(lambda: bool(events(client, "n1", SUPPRESSED)), "the event that tells of it")
    (told,) = events(client, "n1", SUPPRESSED)
    assert told.detail == {"finding": str(2 * BURST)}
    assert f"everstep_controller_events_suppressed_total {2 * BURST}.0" in client.get("/metrics", headers=VIEWER).text
    shown = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert len(shown.findings) == 3 * BURST
