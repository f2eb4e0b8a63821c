"""A controller begins: the state comes back from its records, and every deadline starts anew."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import NodeState
from everstep_controller.core.checkpoints.commits import resume_commits
from everstep_controller.core.events import ControllerStarted
from everstep_controller.core.health.eviction import look_again, rehold
from everstep_controller.core.health.examinations import date_ties
from everstep_controller.core.health.maintenance import look_ahead
from everstep_controller.core.health.outbreaks import recall
from everstep_controller.core.health.quarantine import PROBE_PASSED, PROBE_SKIPPED, begin_probation
from everstep_controller.core.jobs.job_index import job_restored
from everstep_controller.core.jobs.stragglers import watch_pace
from everstep_controller.core.liveness.correlation import FLEET, expect, mind
from everstep_controller.core.liveness.node_liveness import watch
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from everstep_controller.core.retirement import look_later
from everstep_controller.core.state import FleetState, JobLive, NodeLive
from everstep_controller.core.transition import Turn


def restore(
    policy: CorePolicy,
    fleet: FleetRecord | None = None,
    nodes: Iterable[NodeRecord] = (),
    jobs: Iterable[JobRecord] = (),
    versions: Iterable[VersionRecord] = (),
) -> FleetState:
    """The state as it was stored; with nothing stored, a new one. Send ``ControllerStarted`` first.

    ``versions``: at least each job's newest one, and its newest verified one; more do no harm. Raises
    ConfigurationError for a policy that contradicts itself.
    """
    state = FleetState(policy=policy.validate())
    state.fleet = fleet or FleetRecord()
    for record in nodes:
        state.nodes[record.node] = record
        state.live_nodes[record.node] = NodeLive()
        if record.state is NodeState.HELD and not (record.foreign or record.maintenance_until):
            record.hold = record.hold or record.sentence  # written before holds had a field of their own
        if record.reachable:
            if record.state is NodeState.SUSPECT:
                state.silent.add(record.node)
            expect(state, record.node)
            state.unmet.add(record.node)
        rehold(state, record.node)
    date_ties(state)
    lost = {node: record.lost[-1] for node, record in state.nodes.items() if record.lost}
    state.lost_lately = dict(sorted(lost.items(), key=lambda one: one[1]))
    for job in jobs:
        state.jobs[job.job] = job
        state.live_jobs[job.job] = JobLive()
        job_restored(state, job)
    for version in versions:
        _restore_version(state, version)
    return state


def _restore_version(state: FleetState, record: VersionRecord) -> None:
    job, live = state.jobs.get(record.job), state.live_jobs.get(record.job)
    if job is None or live is None or (job.ceiling is not None and record.version > job.ceiling):
        return
    if live.committed is None or record.version > live.committed:
        live.committed, live.committed_at = record.version, record.committed_at
    if record.verified_at is not None and (live.verified is None or record.version > live.verified):
        live.verified = record.version
    live.settled = live.committed


def started(turn: Turn, event: ControllerStarted) -> None:
    """Nobody could reach us while we were away: all deadlines begin now."""
    state = turn.state
    state.epoch = event.epoch or state.epoch
    state.hearing.since = state.hearing.last_at = turn.now
    state.reunion_at = turn.now + turn.policy.reunion_s
    state.reunion_by = turn.now + turn.policy.reunion_at_most_s
    if state.unmet:
        turn.wake(state.reunion_at, "reunion", FLEET)
    recall(state, turn.now)
    look_again(turn)
    mind(turn)
    for node, record in state.nodes.items():
        live = state.live_nodes[node]
        turn.wake(max(turn.now, record.returns_at), "node", node)
        if record.undecided or record.own_until or record.maintenance_until or record.state is NodeState.QUARANTINED:
            turn.wake(max(turn.now, record.maintenance_until), "care", node)
            turn.wake(turn.now, "care", node)
        if record.reachable:
            live.watched = False
            watch(turn, node)
        if any(not state.jobs[name].launchers[node].confirmed for name in live.jobs if _offers(state, name, node)):
            live.rejoin_due = turn.now + turn.policy.rejoin_grace_s
            turn.wake(live.rejoin_due, "node", node)
        if record.state is NodeState.PROBATION and record.probe not in (PROBE_PASSED, PROBE_SKIPPED):
            begin_probation(turn, node, record.sentence.partition(";")[0])
    look_later(turn)
    look_ahead(turn)
    for name, job_live in state.live_jobs.items():
        job_live.resume_due = turn.now + turn.policy.resume_deadline_s
        job_live.inherited = state.jobs[name].generation is not None and state.jobs[name].resumed_at is None
        job_live.fallback_at = turn.now + turn.policy.boundary_fallback_s
        resume_commits(turn, state.jobs[name])
        if state.jobs[name].resumed_at is not None:
            watch_pace(turn, state.jobs[name])
        for due in (turn.now, job_live.fallback_at, job_live.resume_due):
            turn.wake(due, "job", name)


def _offers(state: FleetState, job: str, node: str) -> bool:
    return node in state.jobs[job].launchers
