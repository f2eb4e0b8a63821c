"""What stands wrong now, as alerts in the form of Alertmanager's webhooks, so that its receivers understand it.

Alerts are a picture of the present, not a log: the whole picture is posted when it changes, and again every few
minutes, so that nothing needs to be remembered across a crash and a post that was lost is made good by the next.
Format: Alertmanager's configuration reference, ``webhook_config``, version 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from controller.core.state import FleetState
from everstep.vocabulary import JobState, NodeState

OUT = {NodeState.QUARANTINED: "warning", NodeState.LOST: "warning", NodeState.REPAIR: "critical"}
"""States of a node that somebody should know of, and how much they matter."""
ENDED_S = 3600.0
"""Seconds for which a job that failed is still told."""
MOST = 1000
"""Alerts in one post; how many more there are is said in ``truncatedAlerts``."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that stands wrong. ``labels`` say which one it is; ``since`` is wall seconds."""

    labels: dict[str, str]
    summary: str
    since: float

    @property
    def fingerprint(self) -> str:
        """16 hex digits by which the same alert is known again."""
        text = "\0".join(f"{name}={self.labels[name]}" for name in sorted(self.labels))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def alerts_of(state: FleetState, now: float) -> list[Alert]:
    """Everything that stands wrong, the fleet's own first."""
    return [*_fleet(state, now), *_jobs(state, now), *_nodes(state)]


def _fleet(state: FleetState, now: float) -> Iterable[Alert]:
    if state.store_away:
        yield _alert("EverstepStoreAway", "critical", f"the database is away: {state.store_away}", now)
    if state.fleet.breaker:
        yield _alert("EverstepBreakerOpen", "critical", state.fleet.breaker, state.fleet.breaker_at)


def _jobs(state: FleetState, now: float) -> Iterable[Alert]:
    for job in state.jobs.values():
        if job.state is JobState.PAUSED:
            yield _alert("EverstepJobPaused", "critical", job.sentence, job.since, job=job.job)
        elif job.state is JobState.FAILED and now - job.since < ENDED_S:
            yield _alert("EverstepJobFailed", "critical", job.sentence, job.since, job=job.job)


def _nodes(state: FleetState) -> Iterable[Alert]:
    for record in state.nodes.values():
        severity = OUT.get(record.state)
        if severity is not None:
            yield _alert(
                "EverstepNodeOut", severity, record.sentence, record.since, node=record.node, state=str(record.state)
            )


def _alert(name: str, severity: str, summary: str, since: float, **labels: str) -> Alert:
    return Alert(labels={"alertname": name, "severity": severity, **labels}, summary=summary[:1024], since=since)


def payload(firing: list[Alert], resolved: list[Alert], now: float, controller: str) -> bytes:
    """One post."""
    told = [*((alert, None) for alert in firing), *((alert, now) for alert in resolved)]
    body = {
        "version": "4",
        "groupKey": "everstep",
        "truncatedAlerts": max(0, len(told) - MOST),
        "status": "firing" if firing else "resolved",
        "receiver": "everstep",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": controller,
        "alerts": [_told(alert, ended_at, controller) for alert, ended_at in told[:MOST]],
    }
    return msgspec.json.encode(body)


def _told(alert: Alert, ended_at: float | None, controller: str) -> dict[str, object]:
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
