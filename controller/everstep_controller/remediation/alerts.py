"""Post active alerts when they change, and again periodically.

An alert is stored before it is first posted, and deleted once a receiver has taken its end. The next controller posts
the end of stored alerts. An end may be posted twice, but is never omitted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from datetime import UTC, datetime

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import Unavailable
from everstep.printable_text import escape_control
from everstep.vocabulary import NodeState
from everstep.wire.v1.operator import Need
from everstep_controller.core.needs import NeedKind, list_needs, out_of_service
from everstep_controller.core.state import FleetState
from everstep_controller.remediation.remediator import call_guarded
from everstep_controller.remediation.webhook import HttpReceiver
from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.rows import AlertRow, LoadedState

# ---- alerts
# The format is that of Alertmanager's webhooks, version 4 (configuration reference, ``webhook_config``).
#
# Alerts describe the present and are no log: all active alerts are posted when they change, and again every few
# minutes, so the next post makes up for a lost one. Ended alerts are no longer active, so every alert that may have
# been posted is kept in the database until its end was posted.

ALERT_NAMES = {
    NeedKind.DATABASE_OUTAGE: "EverstepDatabaseUnavailable",
    NeedKind.BREAKER: "EverstepBreakerOpen",
    NeedKind.OUTBREAK: "EverstepOutbreak",
    NeedKind.JOB_PAUSED: "EverstepJobPaused",
    NeedKind.JOB_FAILED: "EverstepJobFailed",
    NeedKind.JOB_NOTICE: "EverstepJobNotice",
    NeedKind.DEFERRED_EVICTION: "EverstepEvictionDeferred",
    NeedKind.CRITICAL_FINDING: "EverstepCriticalFinding",
    NeedKind.QUARANTINE: "EverstepNodeOutOfService",
    NeedKind.REPAIR: "EverstepNodeOutOfService",
    NeedKind.LOST: "EverstepNodeOutOfService",
    NeedKind.DRY_RUN: "EverstepNodeOutOfService",
}
"""Name of the alert of each kind of need. A node out of service has one alert, whether it needs a person or not."""
RUNBOOK_HEADINGS = {
    "EverstepBreakerOpen": "everstepevictionbreakeropen",
    "EverstepEvictionDeferred": "everstepevictionsdeferred",
    "EverstepCriticalFinding": "everstepnodecriticalfinding",
    "EverstepJobFailed": "everstepneedsperson",
    "EverstepJobNotice": "everstepneedsperson",
    "EverstepNodeOutOfService": "everstepneedsperson",
}
"""Headings of the runbook for alerts whose own name is not one."""
RUNBOOK = "how-to/runbook.html"
"""The runbook's page below ``docs_url``."""
OUT_STATES = (NodeState.QUARANTINED, NodeState.LOST)
"""States that raise an alert even while the node returns by itself."""
MAX_ALERTS_PER_POST = 1000
"""Maximum alerts in one post; more go into further posts."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One problem."""

    labels: dict[str, str]  # identify the alert
    summary: str
    since: float  # wall seconds
    description: str = ""  # what to do, and the command to begin with
    needs_person: bool = True

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the alert."""
        text = "\0".join(f"{name}={self.labels[name]}" for name in sorted(self.labels))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def active_alerts(state: FleetState, now: float) -> list[Alert]:
    """Return an alert for everything that needs a person, and for the other nodes that are out of service."""
    needs = list_needs(state, now)
    named = {need.node for need in needs}
    alerts = [_alert(state, need) for need in needs]
    for record in state.nodes.values():
        if record.state in OUT_STATES and record.node not in named:
            alerts.append(_alert(state, out_of_service(record), needs_person=False))
    return alerts


def database_alert(reason: str, since: float) -> Alert:
    """Return the alert about an outage, the only one that cannot be stored before it is posted."""
    labels = {"alertname": ALERT_NAMES[NeedKind.DATABASE_OUTAGE], "severity": "critical"}
    return Alert(labels=labels, summary=f"the database is unavailable: {reason}"[:1024], since=since)


def _alert(state: FleetState, need: Need, *, needs_person: bool = True) -> Alert:
    name = ALERT_NAMES[NeedKind(need.kind)]
    labels = {"alertname": name, "severity": need.severity, "node": need.node, "run": need.job}
    labels |= {"gpu": need.gpu, "finding": need.finding}
    if name == "EverstepNodeOutOfService":
        labels["state"] = str(state.nodes[need.node].state)
    return Alert(
        labels={label: value for label, value in labels.items() if value},
        summary=escape_control(need.reason[:1024]),
        since=need.since,
        description=f"{need.advice} Begin with: {need.command}" if need.command else need.advice,
        needs_person=needs_person,
    )


def runbook_url(docs_url: str, alertname: str) -> str:
    """Return the address of the alert's heading in the runbook."""
    return f"{docs_url.rstrip('/')}/{RUNBOOK}#{RUNBOOK_HEADINGS.get(alertname, alertname.lower())}"


def possibly_notified(loaded: LoadedState) -> list[Alert]:
    """Return the alerts that earlier controllers may have posted without their end: the stored ones, and an outage."""
    kept = [msgspec.json.decode(row.doc, type=Alert) for row in loaded.alerts]
    return [*kept, database_alert("", loaded.newest_at)] if loaded.epoch > 1 else kept


def build_posts(
    firing: list[Alert], resolved: list[Alert], now: float, controller: str, docs_url: str = ""
) -> Iterator[tuple[bytes, list[str]]]:
    """Yield posts of all alerts, at most MAX_ALERTS_PER_POST each, with the fingerprints of those that it resolves.

    Resolved alerts come first.
    """
    alerts = [*((alert, now) for alert in resolved), *((alert, None) for alert in firing)]
    for start in range(0, len(alerts), MAX_ALERTS_PER_POST):
        page = alerts[start : start + MAX_ALERTS_PER_POST]
        body = {
            "version": "4",
            "groupKey": "everstep",
            "truncatedAlerts": 0,
            "status": "firing" if firing else "resolved",
            "receiver": "everstep",
            "groupLabels": {},
            "commonLabels": {},
            "commonAnnotations": {},
            "externalURL": controller,
            "alerts": [_alertmanager_alert(alert, ended_at, controller, docs_url) for alert, ended_at in page],
        }
        yield msgspec.json.encode(body), [alert.fingerprint for alert, ended_at in page if ended_at is not None]


def _alertmanager_alert(alert: Alert, ended_at: float | None, controller: str, docs_url: str) -> dict[str, object]:
    annotations = {"summary": alert.summary, "needs_person": "yes" if alert.needs_person else "no"}
    if alert.description:
        annotations["description"] = alert.description
    if docs_url:
        annotations["runbook_url"] = runbook_url(docs_url, alert.labels["alertname"])
    return {
        "status": "firing" if ended_at is None else "resolved",
        "labels": alert.labels,
        "annotations": annotations,
        "startsAt": _when(alert.since),
        "endsAt": "0001-01-01T00:00:00Z" if ended_at is None else _when(ended_at),
        "generatorURL": controller,
        "fingerprint": alert.fingerprint,
    }


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0
"""Seconds between checks for alerts."""
REPEAT_S = 300.0
"""Seconds after which unchanged alerts are posted again, while any is active."""
RETRY_S = 10.0
"""Seconds between a failed post and the next attempt."""

Write = Callable[[list[AlertRow], list[str]], Awaitable[None]]
"""Stores alerts and deletes those with the fingerprints; durable on return. Raises the errors of ``DatabaseStore``."""


@dataclass(eq=False, repr=False)
class AlertNotifier:
    """Watches ``state`` and posts alerts until cancelled."""

    # An Alertmanager-compatible receiver. Raises ConfigurationError for other schemes than http and https.
    url: InitVar[str]
    _: KW_ONLY
    token: str
    controller: str  # this controller's URL, as a link for people
    docs_url: str = ""  # address of the documentation, for links to the runbook
    state: FleetState
    now: Callable[[], float]
    write: Write
    notified: InitVar[Iterable[Alert]] = ()  # alerts that earlier controllers may have posted without their end
    # Raises Unavailable if this controller is not certain to lead: after a pause, another may have resolved its
    # alerts.
    check_leading: Callable[[], None] = lambda: None
    on_failure: Callable[[], None]  # called for each failed post

    def __post_init__(self, url: str, notified: Iterable[Alert]) -> None:
        self._receiver = HttpReceiver(url, "a receiver of alerts")
        self._notified = {alert.fingerprint: alert for alert in notified}
        self._stored = {name: alert.since for name, alert in self._notified.items()}
        self._due = 0.0
        self._failing = False

    async def run(self) -> None:
        """Check and post until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Check once, and post if due."""
        now = self.now()
        firing = {alert.fingerprint: alert for alert in active_alerts(self.state, now)}
        resolved = [alert for name, alert in self._notified.items() if name not in firing]
        changed = bool(resolved) or not firing.keys() <= self._notified.keys()
        due = now >= self._due or (changed and not self._failing)
        if due:
            self._notified |= firing  # before posting: without an answer they may still have been taken
        try:
            await self._remember()
            if due and (firing or resolved):
                await self._notify(list(firing.values()), resolved, now)
                await self._remember()
        except Unavailable as error:
            log.warning("alerts could not be posted: %s", error)
            self.on_failure()
            self._failing, self._due = True, now + RETRY_S

    async def _notify(self, firing: list[Alert], resolved: list[Alert], now: float) -> None:
        """Post all alerts. Raises Unavailable at the first failed post."""
        for body, ended in build_posts(firing, resolved, now, self.controller, self.docs_url):
            self.check_leading()
            await asyncio.to_thread(call_guarded, self._post, body)
            for name in ended:
                del self._notified[name]
        self._failing, self._due = False, now + REPEAT_S

    async def _remember(self) -> None:
        """Bring the stored alerts up to date, except during an outage. Raises Unavailable if another one leads."""
        begun = [alert for name, alert in self._notified.items() if self._stored.get(name) != alert.since]
        over = [name for name in self._stored if name not in self._notified]
        if self.state.database.outage or not (begun or over):
            return
        rows = [AlertRow(fingerprint=alert.fingerprint, doc=msgspec.json.encode(alert).decode()) for alert in begun]
        try:
            await self.write(rows, over)
        except (DatabaseUnavailable, SQLAlchemyError) as error:
            log.warning("posted alerts could not be stored for the next controller yet: %s", error)
            return
        self._stored = {name: alert.since for name, alert in self._notified.items()}

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        status, _ = self._receiver.request("POST", headers, body)
        if status >= 300:
            raise Unavailable(f"{self._receiver.host} answered {status}")
