"""A controller whose clock is behind its own records: it was set back, or another machine's was ahead.

One life of a controller counts monotonic seconds. The next one may find times in the records that have not come yet,
and would wait for them: a job would not grow and nobody would leave quarantine until then. What is said to have
happened later than now happened now, and what was to come comes as long after now.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from controller.core.state import FleetState, JobRecord, NodeRecord
from controller.core.turn import Turn

BEHIND_S = 1.0
"""Seconds between two machines' clocks that are not worth a word, nor a correction."""


def come_to_terms(turn: Turn) -> None:
    """Brings times of the future in the records into line with the clock, where they show that it went back."""
    state, now = turn.state, turn.now
    behind_s = max(_happened(state), default=now) - now
    if behind_s <= BEHIND_S:
        return
    for record in state.nodes.values():
        _mend_node(record, now, behind_s)
        turn.node_changed(record.node)
    for job in state.jobs.values():
        _mend_job(job, now)
        live = state.live_jobs[job.job]
        live.committed_at = min(live.committed_at, now)
        turn.job_changed(job.job)
    fleet = state.fleet
    fleet.remedied, fleet.breaker_at = _past(fleet.remedied, now), min(fleet.breaker_at, now)
    fleet.evicted = [msgspec.structs.replace(one, at=min(one.at, now)) for one in fleet.evicted]
    turn.fleet_changed()
    sentence = f"this controller's clock is {behind_s:.0f} s behind its records: times of the future there count as now"
    turn.audit("controller.clock_behind", sentence)


def _happened(state: FleetState) -> Iterator[float]:
    """Times that the records tell of as gone by."""
    for record in state.nodes.values():
        yield from (record.since, record.registered_at)
    for job in state.jobs.values():
        yield from (job.since, job.opened_at, job.resumed_at or 0.0)
    yield from (one.at for one in state.fleet.evicted)


def _past(times: list[float], now: float) -> list[float]:
    return [min(at, now) for at in times]


def _mend_node(record: NodeRecord, now: float, behind_s: float) -> None:
    record.since, record.registered_at = min(record.since, now), min(record.registered_at, now)
    record.booted_at, record.offended_at = min(record.booted_at, now), min(record.offended_at, now)
    record.evictions, record.remedied = _past(record.evictions, now), _past(record.remedied, now)
    record.reports = {name: [(min(at, now), bad) for at, bad in seen] for name, seen in record.reports.items()}
    record.steps = {name: [(min(at, now), rung) for at, rung in seen] for name, seen in record.steps.items()}
    record.cleared = {key: min(at, now) for key, at in record.cleared.items()}
    record.returns_at -= behind_s if record.returns_at > now else 0.0
    course = record.course
    if course is not None:
        course.remedy_due -= behind_s if course.remedy_due > now else 0.0
        course.settles_at -= behind_s if course.settles_at > now else 0.0


def _mend_job(job: JobRecord, now: float) -> None:
    job.created_at, job.since, job.opened_at = min(job.created_at, now), min(job.since, now), min(job.opened_at, now)
    job.resumed_at = None if job.resumed_at is None else min(job.resumed_at, now)
    job.gave_at, job.ties = min(job.gave_at, now), _past(job.ties, now)
    job.losses = {node: _past(times, now) for node, times in job.losses.items()}
