"""Alerts in the form of Alertmanager's webhooks: posted on change, and repeated now and then."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.errors import ConfigurationError, Unavailable
from everstep.vocabulary import Action, FindingKind, Mode
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import FindingCleared, FindingRaised
from everstep_controller.config import ControllerSettings
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction, SchedulerStateChanged
from everstep_controller.core.needs import list_needs
from everstep_controller.remediation import alerts as alerting
from everstep_controller.remediation.alerts import (
    MAX_ALERTS_PER_POST,
    REPEAT_S,
    RETRY_S,
    Alert,
    AlertNotifier,
    active_alerts,
    build_posts,
    possibly_notified,
)
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus, DryRunRemediator
from everstep_controller.remediation.service import CordonObserver
from everstep_controller.remediation.webhook import HttpReceiver
from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.rows import AlertRow, LoadedState
from tests.support.documents.markdown import anchors
from tests.support.fleet.controllers import AgentClient, InProcess, post
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import uncorrectable_ecc, xid

ROOT = Path(__file__).parents[4]


class Inbox:
    """A receiver of alerts. ``takes``: how many more posts it answers with 200; None is all."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.status = 200
        self.takes: int | None = None
        self._came = threading.Condition()
        self.tokens: set[str | None] = set()
        inbox = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.tokens.add(self.headers["Authorization"])
                self.send_response(inbox._take(body))
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/alerts"

    def _take(self, body: dict[str, Any]) -> int:
        if self.status != 200 or self.takes == 0:
            return max(self.status, 503)
        self.takes = self.takes and self.takes - 1
        with self._came:
            self.posts.append(body)
            self._came.notify_all()
        return 200

    def wait_for(self, status: str) -> None:
        """Wait until the newest alert of a node has this status."""
        with self._came:
            assert self._came.wait_for(lambda: self._newest() == status, 30.0), self.posts

    def _newest(self) -> str:
        of_nodes = [alert for body in self.posts for alert in body["alerts"] if "node" in alert["labels"]]
        return str(of_nodes[-1]["status"]) if of_nodes else ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


class Watch:
    """Alerting over a fleet with successive leaders. ``kept``: the rows in its database."""

    def __init__(self, inbox: Inbox) -> None:
        self.fleet = CoreFleet()
        self.fleet.start(4, 1)
        self.failures = 0
        self.kept: dict[str, AlertRow] = {}
        self.trouble: Exception | None = None
        self.leads = True
        self._inbox = inbox
        self._epoch = 0
        self.begin()

    def begin(self) -> None:
        """A controller begins to lead, after the one before if there was one."""
        self._epoch += 1
        loaded = LoadedState(
            epoch=self._epoch,
            batch=0,
            fleet=None,
            nodes={},
            active_findings={},
            jobs={},
            outbox=[],
            acknowledged_reports={},
            poisoned=frozenset(),
            newest_event=0,
            newest_at=self.fleet.now,
            versions=[],
            alerts=list(self.kept.values()),
        )
        self.alerting = AlertNotifier(
            self._inbox.url,
            token="a token",
            controller="http://c:1",
            state=self.fleet.state,
            now=lambda: self.fleet.now,
            write=self._write,
            notified=possibly_notified(loaded),
            check_leading=self._check_leading,
            on_failure=self._failed,
        )

    async def _write(self, rows: list[AlertRow], over: list[str]) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.kept |= {row.fingerprint: row for row in rows}
        for fingerprint in over:
            self.kept.pop(fingerprint, None)

    def _check_leading(self) -> None:
        if not self.leads:
            raise Unavailable("it was stopped")

    def _failed(self) -> None:
        self.failures += 1

    def look(self) -> None:
        asyncio.run(self.alerting.check())


def _names(post: dict[str, Any]) -> list[tuple[str, str]]:
    return [(alert["labels"]["alertname"], alert["status"]) for alert in post["alerts"]]


def test_alert_of_evicted_node_fires_repeats_and_resolves(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.raise_finding("n2", xid())
    watch.look()
    watch.look()
    assert [_names(post) for post in inbox.posts] == [[("EverstepNodeOutOfService", "firing")]]
    (alert,) = inbox.posts[0]["alerts"]
    assert alert["labels"]["node"] == "n2"
    assert "XID 79" in alert["annotations"]["summary"]
    assert inbox.posts[0]["version"] == "4"
    watch.fleet.now += REPEAT_S + 1
    watch.look()
    assert len(inbox.posts) == 2
    del watch.fleet.state.nodes["n2"]
    watch.look()
    assert _names(inbox.posts[2]) == [("EverstepNodeOutOfService", "resolved")]
    assert inbox.posts[2]["status"] == "resolved"
    assert inbox.tokens == {"Bearer a token"}


def test_failed_alert_post_is_retried(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.raise_finding("n2", xid())
    inbox.status = 503
    watch.look()
    watch.look()
    assert watch.failures == 1
    inbox.status = 200
    watch.fleet.now += RETRY_S
    watch.look()
    assert [_names(post) for post in inbox.posts] == [[("EverstepNodeOutOfService", "firing")]]


def test_alerts_list_outage_breaker_and_paused_job(inbox: Inbox) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.state.fleet.breaker_reason, fleet.state.database.outage = "the budget is used up", "the disk is full"
    fleet.leave("n1")
    alerts = active_alerts(fleet.state, fleet.now)
    names = [alert.labels["alertname"] for alert in alerts]
    assert names == ["EverstepDatabaseUnavailable", "EverstepBreakerOpen", "EverstepJobPaused"]
    assert set(alerts[-1].labels) == {"alertname", "severity", "run"}  # as the rules for Prometheus name a job


def test_alert_of_evicted_node_names_its_holder() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.raise_finding("n2", xid())
    fleet.order(OperatorAction.HOLD, node="n2")
    (alert,) = active_alerts(fleet.state, fleet.now)
    assert alert.summary.endswith("evicted; ada ordered to hold n2: because")


def test_alerts_list_needs_and_recovering_nodes() -> None:
    fleet = CoreFleet()
    fleet.register(*(f"n{number}" for number in range(1, 41)))
    fleet.raise_finding("n1", msgspec.structs.replace(uncorrectable_ecc(), mode=Mode.OBSERVE))
    hot = {"kind": FindingKind.GPU_TEMPERATURE, "action": Action.DRAIN, "message": "95 C"}
    fleet.raise_finding("n2", msgspec.structs.replace(uncorrectable_ecc(), **hot))
    alerts = active_alerts(fleet.state, fleet.now)
    assert [(alert.labels["alertname"], alert.labels["node"], alert.needs_person) for alert in alerts] == [
        ("EverstepCriticalFinding", "n1", True),
        ("EverstepNodeOutOfService", "n2", False),
    ]
    assert [need.subject for need in list_needs(fleet.state, fleet.now)] == ["n1"]


def test_runbook_has_a_heading_for_each_alert() -> None:
    headings = anchors((ROOT / "docs" / "how-to" / "runbook.md").read_text())
    for name in alerting.ALERT_NAMES.values():
        assert alerting.runbook_url("https://x", name).partition("#")[2] in headings, name


def test_alerts_link_to_the_address_of_the_documentation() -> None:
    (line,) = [line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if line.startswith("site_url:")]
    assert ControllerSettings().notifications.docs_url == line.split()[1]


def _many(kind: str, count: int) -> list[Alert]:
    return [Alert(labels={"alertname": kind, "node": f"n{i}"}, summary="s", since=0.0) for i in range(count)]


def test_alert_posts_are_bounded_with_resolved_first() -> None:
    made = list(build_posts(_many("X", MAX_ALERTS_PER_POST), _many("Y", MAX_ALERTS_PER_POST + 7), 1.0, "http://c"))
    bodies = [json.loads(body) for body, _ in made]
    assert [len(body["alerts"]) for body in bodies] == [MAX_ALERTS_PER_POST, MAX_ALERTS_PER_POST, 7]
    states = [(alert["labels"]["alertname"], alert["status"]) for body in bodies for alert in body["alerts"]]
    assert states == [("Y", "resolved")] * (MAX_ALERTS_PER_POST + 7) + [("X", "firing")] * MAX_ALERTS_PER_POST
    assert len({alert["fingerprint"] for body in bodies for alert in body["alerts"]}) == 2 * MAX_ALERTS_PER_POST + 7
    assert {(body["status"], body["truncatedAlerts"]) for body in bodies} == {("firing", 0)}
    assert [len(resolved) for _, resolved in made] == [MAX_ALERTS_PER_POST, 7, 0]


@pytest.mark.promise("alerts-resolved")
def test_resolved_alerts_are_all_posted_despite_failures(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.kept = {
        alert.fingerprint: AlertRow(fingerprint=alert.fingerprint, doc=json.dumps(_plain(alert)))
        for alert in _many("X", 2 * MAX_ALERTS_PER_POST + 5)
    }
    watch.begin()
    inbox.takes = 1
    watch.look()
    assert (watch.failures, len(inbox.posts)) == (1, 1)
    inbox.takes = None
    watch.fleet.now += RETRY_S
    watch.look()
    ended = [alert["fingerprint"] for post in inbox.posts for alert in post["alerts"]]
    assert len(ended) == len(set(ended)) == 2 * MAX_ALERTS_PER_POST + 5 + 1  # and that the database is there
    assert watch.kept == {}
    watch.look()
    assert len(inbox.posts) == 3


def _plain(alert: Alert) -> dict[str, Any]:
    return {"labels": alert.labels, "summary": alert.summary, "since": alert.since}


@pytest.mark.promise("alerts-resolved")
def test_alert_resolved_between_leaders_is_posted_by_successor(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.raise_finding("n2", xid())
    began = watch.fleet.now
    watch.look()
    (fingerprint,) = watch.kept
    watch.fleet.now += 5.0
    del watch.fleet.state.nodes["n2"]
    watch.begin()
    watch.look()
    by_name = {alert["labels"]["alertname"]: alert for alert in inbox.posts[1]["alerts"]}
    assert (by_name["EverstepNodeOutOfService"]["status"], by_name["EverstepNodeOutOfService"]["fingerprint"]) == (
        "resolved",
        fingerprint,
    )
    assert _seconds(by_name["EverstepNodeOutOfService"]["startsAt"]) == began
    assert watch.kept == {}
    watch.begin()
    watch.look()
    assert _names(inbox.posts[2]) == [("EverstepDatabaseUnavailable", "resolved")]


@pytest.mark.promise("alerts-resolved")
def test_alert_is_stored_until_its_end_is_accepted(inbox: Inbox) -> None:
    watch = Watch(inbox)
    inbox.status = 503
    watch.fleet.raise_finding("n2", xid())
    watch.look()
    assert (len(watch.kept), inbox.posts) == (1, [])  # an answer that was lost looks the same
    del watch.fleet.state.nodes["n2"]
    watch.fleet.now += RETRY_S
    watch.look()
    assert len(watch.kept) == 1
    inbox.status = 200
    watch.fleet.now += RETRY_S
    watch.look()
    assert [_names(post) for post in inbox.posts] == [[("EverstepNodeOutOfService", "resolved")]]
    assert watch.kept == {}


def test_outage_alert_reports_true_start_and_end(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="the disk is full"))
    began = watch.fleet.now
    watch.trouble = DatabaseUnavailable("the disk is full")
    watch.fleet.raise_finding("n2", xid())
    watch.look()
    watch.fleet.now += REPEAT_S + 1
    watch.fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="it is full still"))
    watch.look()
    assert [_seconds(post["alerts"][0]["startsAt"]) for post in inbox.posts] == [began, began]
    assert watch.kept == {}
    watch.trouble = None
    watch.fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    watch.look()
    assert _names(inbox.posts[2])[0] == ("EverstepDatabaseUnavailable", "resolved")
    assert _seconds(inbox.posts[2]["alerts"][0]["startsAt"]) == began
    assert {alert.labels["alertname"] for alert in active_alerts(watch.fleet.state, watch.fleet.now)} == {
        json.loads(row.doc)["labels"]["alertname"] for row in watch.kept.values()
    }


def _seconds(when: str) -> float:
    return datetime.fromisoformat(when).timestamp()


@pytest.mark.promise("alerts-resolved")
def test_alert_resolved_while_alerting_was_off_is_posted(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "CHECK_INTERVAL_S", 0.02)
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database, alert_url=inbox.url)) as client:
        agent = AgentClient(client, "n1")
        agent.register()
        agent.report(FindingRaised(finding=xid()))
        inbox.wait_for("firing")
    with TestClient(InProcess(database)) as client:
        agent.client = client
        agent.report(FindingCleared(key=xid().key))
        post(client, "/v1/nodes/n1/readmit", op.ReasonOnlyRequest(reason="a new board"), op.ChangeResult)
    with TestClient(InProcess(database, alert_url=inbox.url)):
        inbox.wait_for("resolved")


def test_invalid_alert_receiver_is_refused() -> None:
    async def write(_told: list[AlertRow], _over: list[str]) -> None:
        raise AssertionError

    state = CoreFleet().state
    with pytest.raises(ConfigurationError, match="cannot be used as a receiver of alerts"):
        AlertNotifier(
            "ftp://x", token="", controller="", state=state, now=lambda: 0.0, write=write, on_failure=lambda: None
        )
    with pytest.raises(ConfigurationError, match="cannot be used as a webhook"):
        HttpReceiver("http://pager.example:77000/x", "a webhook")


class Shown(DryRunRemediator):
    """A scheduler that shows ``nodes``. ``broken``: how often it fails before, as no remediator should."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, CordonStatus] = {}
        self.broken = 0

    def cordon_status(self, nodes: Any) -> dict[str, CordonStatus]:
        if self.broken > 0:
            self.broken -= 1
            raise UnicodeDecodeError("utf-8", b"\xfc", 0, 1, "invalid start byte")
        return self.nodes


def test_observer_retries_after_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    fleet, shown, changes, failures = CoreFleet(), Shown(), list[SchedulerStateChanged](), list[int]()
    fleet.start(1)
    shown.nodes = {"n1": CordonStatus(cordoned_by="ada", reason="a fan")}
    shown.broken = 2

    async def story() -> None:
        seen = asyncio.Event()

        async def tell(event: SchedulerStateChanged) -> None:
            changes.append(event)
            fleet.feed(event)
            seen.set()

        observer = CordonObserver(shown, fleet.state, tell, on_failure=lambda: failures.append(1))
        tasks = [asyncio.create_task(observer.run(every_s=0.0)), asyncio.create_task(seen.wait())]
        async with asyncio.timeout(60):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert done == {tasks[1]}
        tasks[0].cancel()
        await asyncio.wait(tasks)

    asyncio.run(story())
    assert [event.cordoned_by for event in changes] == ["ada"]
    assert len(failures) == 2
    assert "invalid start byte" in caplog.text


def test_observer_reports_own_cordon_removed_by_others() -> None:
    fleet, shown, changes, busy = CoreFleet(), Shown(), list[SchedulerStateChanged](), set[str]()
    fleet.start(5)

    async def tell(event: SchedulerStateChanged) -> None:
        changes.append(event)
        fleet.feed(event)

    observer = CordonObserver(shown, fleet.state, tell, is_idle=lambda node: node not in busy)
    for node in ("n1", "n2", "n3", "n4"):
        fleet.order(OperatorAction.HOLD, node=node)
    busy.add("n2")  # its cordon is still being asked for
    shown.nodes = {node: CordonStatus() for node in ("n1", "n5")}  # not seen yet: it may never have been taken
    asyncio.run(observer.observe())
    assert changes == []
    shown.nodes = {node: CordonStatus(cordoned_by=CORDON_OWNER) for node in ("n1", "n2", "n3", "n4")}
    asyncio.run(observer.observe())
    shown.nodes = {node: CordonStatus() for node in ("n1", "n2", "n5")}
    shown.nodes["n3"] = CordonStatus(cordoned_by=CORDON_OWNER)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="gone", trace="away"))
    asyncio.run(observer.observe())
    assert changes == []
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False, trace="back"))
    asyncio.run(observer.observe())  # n4 is not known there, or not told of
    asyncio.run(observer.observe())
    assert [(event.node, bool(event.lifted_cordon_id)) for event in changes] == [("n1", True)]
