"""The door of the decision core: one event in, a list of effects out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from everstep.vocabulary import Finding, JobState, NodeState, Severity
from everstep.wire.v1.training import (
    AnyReport,
    CollectiveFailed,
    FindingCleared,
    FindingRaised,
    LauncherJoined,
    LauncherLeft,
    PeerLost,
    ProbeFinished,
    RankFinished,
    RankLost,
    RankProgress,
    RankStalled,
    RankUnresponsive,
    Resumed,
    Sealed,
    UserError,
)
from everstep.wire.v1.vault_orders import VersionProtected, VersionSpilled
from everstep_controller.core import invariants, orders, retirement
from everstep_controller.core.checkpoints.commits import check_candidate
from everstep_controller.core.checkpoints.parity import check_protection, version_protected
from everstep_controller.core.checkpoints.replica_failures import check_homes
from everstep_controller.core.checkpoints.storage import check_spill, version_spilled
from everstep_controller.core.database_outage import refuse_while_away, store_changed
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import (
    ActionReported,
    AgentRegistered,
    ControllerStarted,
    Event,
    HeartbeatChanged,
    NodeDisconnected,
    NodeHeard,
    NodeObserved,
    OperatorCommand,
    ProbeRequested,
    ReportArrived,
    StoreChanged,
    Tick,
)
from everstep_controller.core.health import examinations, maintenance, remediation_ladder
from everstep_controller.core.health import findings as pictures
from everstep_controller.core.health.eviction import check_held
from everstep_controller.core.health.examinations import check_care, check_case, check_probe, probe_reported
from everstep_controller.core.health.quarantine import PROBE_PASSED, PROBE_SKIPPED, heard_on_probation
from everstep_controller.core.jobs import hangs, joining, lifecycle, losses
from everstep_controller.core.jobs.generations import check_boundary, heard_beyond_boundary, note_waiting
from everstep_controller.core.jobs.hangs import settle
from everstep_controller.core.jobs.membership import ENDED
from everstep_controller.core.jobs.progress import is_beyond_boundary, left_in_order, take_progress
from everstep_controller.core.liveness import node_liveness, registration
from everstep_controller.core.liveness.correlation import announce
from everstep_controller.core.liveness.node_liveness import deaf_after_s, take_word
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.startup import restore, started
from everstep_controller.core.state import FleetState, NodeLive
from everstep_controller.core.transition import Looked, Read, Turn, pop_due

__all__ = [
    "Heard",
    "check_invariants",
    "handle",
    "lacks",
    "next_deadline",
    "picture_can_wait",
    "reports_can_wait",
    "restore",
    "take",
    "touch",
]


_FIRST = {"silence": 0, "maintenance": 1}
"""Of what is due at once: who is doubted gets no seat below, and to whom a window has come nothing is done any more."""
_OF_NO_ONE = ("probe", "case", "correlation", "reunion", "held", "retention", "maintenance")
"""Deadlines of neither a node nor a job."""
NO_LAG_S = 0.01
"""Seconds; an observer that lags by less is on time."""


class Heard(Enum):
    """What a heartbeat that tells of no findings means."""

    UNKNOWN = "unknown"
    """The node or this life of it is not known here, or (its word is noted) its findings are not: answer with
    ``resend``."""
    QUIET = "quiet"
    """It is noted, and nothing follows from it."""
    NEWS = "news"
    """Something follows from it, and nothing was changed yet: hand it over as ``HeartbeatChanged`` without findings."""


def handle(state: FleetState, event: Event, now: float) -> list[Effect]:
    """Applies ``event``: changes ``state`` and returns what is to be done, in order. Deterministic.

    ``now``: seconds since the epoch that neither jump nor go back (the shell's wall clock at its start, plus
    monotonic time since).

    Raises NotFound (unknown node or job), StaleGeneration (another life of the node than the registered one), Conflict
    (an operator's order that cannot be carried out now) or Unavailable (while the database is away), always before
    anything was changed. A node's disconnection or sign of life that comes too late is no error: it is counted and
    dropped.
    """
    return take(state, event, now).finish()


def take(state: FleetState, event: Event, now: float, recorded: Sequence[Read] | None = None) -> Turn:
    """``handle`` for those who also want ``Turn.reads``, or have them from the first time (``recorded``)."""
    _refuse(state, event, now)
    turn = Turn(state, now, _trace(event), event.entropy if isinstance(event, ReportArrived) else "", recorded)
    _EVENTS[type(event)](turn, event)
    pictures.judge_own(turn)
    pictures.judge_returning(turn)
    heard_on_probation(turn)
    pictures.judge_returning(turn)
    if turn.departed:
        losses.regroup_departed(turn)
    if state.held:
        pictures.reconsider(turn)
    joining.offer_released(turn)
    note_waiting(turn)
    return turn


def touch(state: FleetState, node: str, incarnation: int, now: float, ranks: tuple[RankProgress, ...] = ()) -> Heard:
    """Takes a heartbeat that tells of no findings, unless something follows from it. O(ranks of the node)."""
    record, live = state.nodes.get(node), state.live_nodes.get(node)
    if record is None or live is None or record.incarnation != incarnation:
        return Heard.UNKNOWN
    if _beat_matters(state, record, live) or left_in_order(state, ranks):
        return Heard.NEWS
    take_word(state.policy, state.hearing, live.pulse, now)
    live.pulse.beats += 1
    take_progress(state, node, ranks, now)
    return Heard.QUIET if live.picture else Heard.UNKNOWN


def picture_can_wait(
    state: FleetState, node: str, findings: Sequence[Finding], ranks: tuple[RankProgress, ...] = ()
) -> bool:
    """Whether a picture may rest for a moment: nobody's recovery and no suspicion hangs on it, and it tells of mild
    findings, or of those that stand already. Changes nothing."""
    record, live = state.nodes.get(node), state.live_nodes.get(node)
    if record is None or live is None or _beat_matters(state, record, live) or left_in_order(state, ranks):
        return False
    return all(_is_mild(record, finding) for finding in findings)


def reports_can_wait(state: FleetState, node: str, reports: Sequence[AnyReport]) -> bool:
    """The same of reports."""
    findings = [body.finding for body in reports if isinstance(body, FindingRaised)]
    if not all(isinstance(body, FindingRaised | FindingCleared) for body in reports):
        return False
    return picture_can_wait(state, node, findings)


def _is_mild(record: NodeRecord, finding: Finding) -> bool:
    standing = record.findings.get(finding.key)
    return finding.severity is not Severity.CRITICAL or (
        standing is not None and standing.severity is Severity.CRITICAL
    )


def lacks(state: FleetState, node: str, ranks: Iterable[RankProgress]) -> str:
    """A job among those of ``ranks`` of which the node's launcher must say again what it offers, since more has
    happened than is known here; empty for none."""
    for progress in ranks:
        job = state.jobs.get(progress.job)
        if job is None or node not in job.launchers or progress.generation > job.last_number:
            return progress.job
    return ""


def next_deadline(state: FleetState) -> float | None:
    """When to send the next Tick, in ``now``'s terms; in the past: at once. None: nothing to wait for."""
    return state.deadlines[0][0] if state.deadlines else None


def check_invariants(state: FleetState) -> None:
    """Raises AssertionError, naming what does not hold. Cheap enough for simulation after every event."""
    invariants.check(state)


# --- inside ------------------------------------------------------------------------------------------------------


def _beat_matters(state: FleetState, record: NodeRecord, live: NodeLive) -> bool:
    if live.gone_at is not None or not record.reachable or record.state is NodeState.SUSPECT:
        return True
    if record.state is not NodeState.PROBATION or record.probe not in (PROBE_PASSED, PROBE_SKIPPED):
        return False
    return live.pulse.beats + 1 >= state.policy.probation_beats


def _refuse(state: FleetState, event: Event, now: float) -> None:
    match event:
        case AgentRegistered():
            registration.check_register(state, event.register)
        case HeartbeatChanged() | ReportArrived():
            registration.check_life(state, event.node, event.incarnation)
        case OperatorCommand():
            refuse_while_away(state)
            orders.check_command(state, event, now)
        case ProbeRequested():
            refuse_while_away(state)
            orders.check_probe(state, event)
        case _:
            pass


def _trace(event: Event) -> str:
    if not isinstance(event, ReportArrived):
        return event.trace
    body = event.body
    own = body.finding.trace if isinstance(body, FindingRaised) else getattr(body, "trace", "")
    return own or event.trace


def _tick(turn: Turn, event: Tick) -> None:
    state = turn.state
    lag_s = event.lag_s if event.lag_s >= NO_LAG_S else 0.0
    state.slack_s = max(lag_s, state.slack_s - max(0.0, turn.now - state.slack_at))
    state.slack_at = turn.now
    if lag_s > deaf_after_s(state.policy):
        state.hearing.since = turn.now
    turn.quiet = state.slack_s == 0.0
    for looked in turn.looks or ():
        if looked.of in state.nodes or looked.of in state.jobs or looked.kind in _OF_NO_ONE:
            _look(turn, looked.kind, looked.of)
    most = len(state.deadlines)
    while due := list(itertools.islice(iter(lambda: pop_due(state, turn.now), None), most)):
        most -= len(due)
        for kind, subject in sorted(due, key=lambda one: _FIRST.get(one[0], len(_FIRST))):
            if turn.looks is None or kind != "silence":
                _look(turn, kind, subject)


def _look(turn: Turn, kind: str, subject: str) -> None:
    if kind not in _OF_NO_ONE and subject not in turn.state.nodes and subject not in turn.state.jobs:
        return  # it is forgotten
    before = len(turn.reads)
    turn.reads.append(Looked(subject, kind))
    if kind == "silence" and node_liveness.check_silence(turn, subject):
        del turn.reads[before:]
        return
    turn.quiet = False
    if kind == "node":
        node_liveness.check_node(turn, subject)
    elif kind == "probe":
        check_probe(turn, subject)
    elif kind == "care":
        check_care(turn, subject)
    elif kind == "case":
        check_case(turn, subject)
    elif kind == "job":
        _check_job(turn, turn.state.jobs[subject])
    elif kind == "correlation":
        announce(turn)
    elif kind == "reunion":
        node_liveness.reunion_over(turn)
    elif kind == "held":
        check_held(turn, subject)
    elif kind == "maintenance":
        maintenance.check_begin(turn)
    elif kind == "retention":
        retirement.look(turn)


def _check_job(turn: Turn, job: JobRecord) -> None:
    live = turn.state.live_jobs[job.job]
    live.offered_at = None
    if job.state in ENDED:
        return
    if job.state is JobState.RUNNING:
        if live.pending is not None and turn.now >= live.pending.due:
            settle(turn, job)
        check_boundary(turn, job)
        check_candidate(turn, job)
        check_homes(turn, job)
        check_spill(turn, job)
        check_protection(turn, job)
    lifecycle.check_job(turn, job)


def _heartbeat(turn: Turn, event: HeartbeatChanged) -> None:
    turn.state.live_nodes[event.node].pulse.beats += 1
    node_liveness.heard(turn, event.node)
    for progress in event.ranks:
        job = turn.state.jobs.get(progress.job)
        if job is not None and is_beyond_boundary(job, progress):
            heard_beyond_boundary(turn, job, event.node, progress.rank, progress.generation, progress.step)
    take_progress(turn.state, event.node, event.ranks, turn.now)
    if event.findings is not None:
        pictures.take_picture(turn, event.node, event.findings)


def _disconnected(turn: Turn, event: NodeDisconnected) -> None:
    record = turn.state.nodes.get(event.node)
    if record is None or record.incarnation != event.incarnation:
        turn.ignore("disconnected.stale")
        return
    node_liveness.disconnected(turn, event.node)


def _node_heard(turn: Turn, event: NodeHeard) -> None:
    for node, incarnation in ((event.node, event.incarnation), *event.others):
        record = turn.state.nodes.get(node)
        if record is None or record.incarnation != incarnation:
            turn.ignore("heard.stale")
        else:
            node_liveness.heard(turn, node)


def _report(turn: Turn, event: ReportArrived) -> None:
    node_liveness.heard(turn, event.node)
    body, node = event.body, event.node
    match body:
        case LauncherJoined():
            joining.launcher_joined(turn, node, body)
        case FindingRaised():
            pictures.take_finding(turn, node, body.finding)
        case FindingCleared():
            pictures.clear_finding(turn, node, body.key)
        case ProbeFinished():
            probe_reported(turn, node, body)
        case _:
            _job_report(turn, node, body)


_REPORTS: dict[type[Any], Callable[[Turn, JobRecord, str, Any], None]] = {
    LauncherLeft: losses.launcher_left,
    PeerLost: node_liveness.peer_lost,
    RankLost: losses.rank_lost,
    CollectiveFailed: losses.collective_failed,
    RankStalled: hangs.rank_stalled,
    RankUnresponsive: hangs.rank_unresponsive,
    Sealed: examinations.seal_arrived,
    Resumed: lifecycle.rank_resumed,
    UserError: lifecycle.user_error,
    RankFinished: lifecycle.rank_finished,
    VersionSpilled: version_spilled,
    VersionProtected: version_protected,
}


def _job_report(turn: Turn, node: str, body: Any) -> None:
    job = turn.state.jobs.get(body.job)
    if job is None:
        turn.ignore("report.unknown_job")
        return
    _REPORTS[type(body)](turn, job, node, body)


_EVENTS: dict[type[Any], Callable[[Turn, Any], None]] = {
    ControllerStarted: started,
    Tick: _tick,
    AgentRegistered: lambda turn, event: registration.register(turn, event.register),
    HeartbeatChanged: _heartbeat,
    ReportArrived: _report,
    NodeDisconnected: _disconnected,
    NodeHeard: _node_heard,
    StoreChanged: store_changed,
    ActionReported: remediation_ladder.reported,
    NodeObserved: maintenance.observed,
    OperatorCommand: orders.command,
    ProbeRequested: orders.probe,
}
