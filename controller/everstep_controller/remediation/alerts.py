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
from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.health.outbreaks import active_outbreaks
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

ALERT_SEVERITY_BY_STATE = {NodeState.QUARANTINED: "warning", NodeState.LOST: "warning", NodeState.REPAIR: "critical"}
"""Node states that raise an alert, and their severities."""
ENDED_JOB_S = 3600.0
"""Seconds for which a failed job raises an alert."""
MAX_ALERTS_PER_POST = 1000
"""Maximum alerts in one post; more go into further posts."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One problem."""

    labels: dict[str, str]  # identify the alert
    summary: str
    since: float  # wall seconds

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the alert."""
        text = "\0".join(f"{name}={self.labels[name]}" for name in sorted(self.labels))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def active_alerts(state: FleetState, now: float) -> list[Alert]:
    """Return all active alerts, the fleet's own first."""
    return [*_fleet(state), *_jobs(state, now), *_nodes(state)]


def database_alert(reason: str, since: float) -> Alert:
    """Return the alert about an outage, the only one that cannot be stored before it is posted."""
    return _alert("EverstepDatabaseUnavailable", "critical", f"the database is unavailable: {reason}", since)


def _fleet(state: FleetState) -> Iterable[Alert]:
    if state.database_outage:
        yield database_alert(state.database_outage, state.database_outage_since)
    if state.fleet.breaker_reason:
        yield _alert("EverstepBreakerOpen", "critical", state.fleet.breaker_reason, state.fleet.breaker_tripped_at)
    for one in active_outbreaks(state):
        summary = f"{one.sentence(len(state.nodes))}. {one.advice()}"
        yield _alert("EverstepOutbreak", "critical", summary, one.since, finding=one.name)


def _jobs(state: FleetState, now: float) -> Iterable[Alert]:
    for job in state.jobs.values():
        status = job.status
        if status.state is JobState.PAUSED:
            yield _alert("EverstepJobPaused", "critical", status.sentence, status.since, run=job.job)
        elif status.state is JobState.FAILED and now - status.since < ENDED_JOB_S:
            yield _alert("EverstepJobFailed", "critical", status.sentence, status.since, run=job.job)


def _nodes(state: FleetState) -> Iterable[Alert]:
    for record in state.nodes.values():
        severity = ALERT_SEVERITY_BY_STATE.get(record.state)
        if severity is not None:
            summary = "; ".join(filter(None, (record.sentence, record.scheduling.hold_reason)))
            labels = {"node": record.node, "state": str(record.state)}
            yield _alert("EverstepNodeOutOfService", severity, summary, record.since, **labels)


def _alert(name: str, severity: str, summary: str, since: float, **labels: str) -> Alert:
    return Alert(labels={"alertname": name, "severity": severity, **labels}, summary=summary[:1024], since=since)


def possibly_notified(loaded: LoadedState) -> list[Alert]:
    """Return the alerts that earlier controllers may have posted without their end: the stored ones, and an outage."""
    kept = [msgspec.json.decode(row.doc, type=Alert) for row in loaded.alerts]
    return [*kept, database_alert("", loaded.newest_at)] if loaded.epoch > 1 else kept


def build_posts(
    firing: list[Alert], resolved: list[Alert], now: float, controller: str
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
            "alerts": [_alertmanager_alert(alert, ended_at, controller) for alert, ended_at in page],
        }
        yield msgspec.json.encode(body), [alert.fingerprint for alert, ended_at in page if ended_at is not None]


def _alertmanager_alert(alert: Alert, ended_at: float | None, controller: str) -> dict[str, object]:
    return {
        "status": "firing" if ended_at is None else "resolved",
        "labels": alert.labels,
        "annotations": {"summary": alert.summary},
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
        for body, ended in build_posts(firing, resolved, now, self.controller):
            self.check_leading()
            await asyncio.to_thread(call_guarded, self._post, body)
            for name in ended:
                del self._notified[name]
        self._failing, self._due = False, now + REPEAT_S

    async def _remember(self) -> None:
        """Bring the stored alerts up to date, except during an outage. Raises Unavailable if another one leads."""
        begun = [alert for name, alert in self._notified.items() if self._stored.get(name) != alert.since]
        over = [name for name in self._stored if name not in self._notified]
        if self.state.database_outage or not (begun or over):
            return
        rows = [AlertRow(fingerprint=one.fingerprint, doc=msgspec.json.encode(one).decode()) for one in begun]
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
