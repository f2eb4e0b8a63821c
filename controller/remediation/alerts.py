"""What stands wrong now, as alerts in the form of Alertmanager's webhooks, so that its receivers understand it.

Alerts are a picture of the present, not a log: the whole picture is posted when it changes, and again every few
minutes, so that a post that was lost is made good by the next. What a picture cannot show is what has ended since the
one before, so whatever may have been told is kept in the database until its end was told.
Format: Alertmanager's configuration reference, ``webhook_config``, version 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from controller.core.outbreaks import standing
from controller.core.state import FleetState
from controller.store.records import Loaded
from everstep.vocabulary import JobState, NodeState

OUT = {NodeState.QUARANTINED: "warning", NodeState.LOST: "warning", NodeState.REPAIR: "critical"}
"""States of a node that somebody should know of, and how much they matter."""
ENDED_S = 3600.0
"""Seconds for which a job that failed is still told."""
MOST = 1000
"""Alerts in one post; what is more goes into further ones."""


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
    return [*_fleet(state), *_jobs(state, now), *_nodes(state)]


def store_away(reason: str, since: float) -> Alert:
    """The one alert that cannot be kept in the database before it is told."""
    return _alert("EverstepStoreAway", "critical", f"the database is away: {reason}", since)


def _fleet(state: FleetState) -> Iterable[Alert]:
    if state.store_away:
        yield store_away(state.store_away, state.store_away_at)
    if state.fleet.breaker:
        yield _alert("EverstepBreakerOpen", "critical", state.fleet.breaker, state.fleet.breaker_at)
    for one in standing(state):
        words = f"{one.sentence(len(state.nodes))}. {one.advice()}"
        yield _alert("EverstepOutbreak", "critical", words, one.since, finding=one.name)


def _jobs(state: FleetState, now: float) -> Iterable[Alert]:
    for job in state.jobs.values():
        if job.state is JobState.PAUSED:
            yield _alert("EverstepJobPaused", "critical", job.sentence, job.since, run=job.job)
        elif job.state is JobState.FAILED and now - job.since < ENDED_S:
            yield _alert("EverstepJobFailed", "critical", job.sentence, job.since, run=job.job)


def _nodes(state: FleetState) -> Iterable[Alert]:
    for record in state.nodes.values():
        severity = OUT.get(record.state)
        if severity is not None:
            words = f"{record.sentence}; {record.hold}" if record.hold else record.sentence
            yield _alert("EverstepNodeOut", severity, words, record.since, node=record.node, state=str(record.state))


def _alert(name: str, severity: str, summary: str, since: float, **labels: str) -> Alert:
    return Alert(labels={"alertname": name, "severity": severity, **labels}, summary=summary[:1024], since=since)


def maybe_told(loaded: Loaded) -> list[Alert]:
    """What earlier lives may have told without its end: what they kept, and that the database was away, if they ended
    while it was."""
    kept = [msgspec.json.decode(row.doc, type=Alert) for row in loaded.alerts]
    return [*kept, store_away("", loaded.newest_at)] if loaded.epoch > 1 else kept


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """One post, and the fingerprints of the alerts whose end it tells."""

    body: bytes
    over: tuple[str, ...]


def posts(firing: list[Alert], resolved: list[Alert], now: float, controller: str) -> Iterator[Post]:
    """The whole picture, at most MOST alerts in a post; what has ended comes first."""
    told = [*((alert, now) for alert in resolved), *((alert, None) for alert in firing)]
    for start in range(0, len(told), MOST):
        page = told[start : start + MOST]
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
            "alerts": [_told(alert, ended_at, controller) for alert, ended_at in page],
        }
        over = tuple(alert.fingerprint for alert, ended_at in page if ended_at is not None)
        yield Post(body=msgspec.json.encode(body), over=over)


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
