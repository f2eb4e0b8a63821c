"""Entry points of the decision core: one event in, a list of effects out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from everstep.errors import Unavailable
from everstep.vocabulary import Finding, GenerationReason, JobState, NodeState, Severity
from everstep.wire.v1 import training
from everstep.wire.v1.vault_reports import VersionProtected, VersionSpilled
from everstep_controller.core import events, maintenance, orders, retirement
from everstep_controller.core.checkpoints.commits import replace_late_candidate
from everstep_controller.core.checkpoints.parity import advance_protection, handle_version_protected
from everstep_controller.core.checkpoints.storage import advance_spill, handle_version_spilled
from everstep_controller.core.effects import Effect
from everstep_controller.core.health import node_state, quarantine
from everstep_controller.core.health.eviction import reconsider_deferred_scope
from everstep_controller.core.jobs import ending, generations, hangs, joining, leaving, lifecycle, losses
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.hangs import settle_pending_regroup
from everstep_controller.core.judgement import audit_outcomes, case_outcomes, findings
from everstep_controller.core.judgement.audits import handle_audits_clean
from everstep_controller.core.liveness import node_liveness, peer_loss, registration, rejoin
from everstep_controller.core.liveness.correlation import announce_correlated_silence
from everstep_controller.core.liveness.suspicion import observer_stall_s, record_message
from everstep_controller.core.records import DIAGNOSTICS_DONE, JobRecord, NodeRecord
from everstep_controller.core.startup import handle_controller_started
from everstep_controller.core.state import DeadlineKind, FleetState, NodeRuntime, ScopeKind
from everstep_controller.core.transition import DeadlineCheck, RecordedRead, Transition, pop_due

_DEADLINE_PRIORITY = {DeadlineKind.SILENCE: 0, DeadlineKind.MAINTENANCE: 1}
"""Order of deadlines that are due at once. Suspects are found first, so that later checks give them no seat.
Maintenance windows begin next, so that later checks leave their nodes alone."""
_NODE_OR_JOB = (DeadlineKind.SILENCE, DeadlineKind.NODE, DeadlineKind.NODE_TREATMENT, DeadlineKind.JOB)
"""Deadlines whose subject is a node or a job."""
MIN_LAG_S = 0.01
"""Smaller lags of the observer, in seconds, are ignored."""


class HeartbeatResult(Enum):
    """Outcome of a heartbeat without findings."""

    UNKNOWN = "unknown"
    """The node or its incarnation is unknown, or its findings are missing (the heartbeat is then recorded): answer with
    ``resend``."""
    UNEVENTFUL = "uneventful"
    """The heartbeat is recorded, and nothing follows from it."""
    NEEDS_EVENT = "needs_event"
    """Something follows, and nothing has changed yet: pass it on as ``HeartbeatChanged`` without findings."""


def handle(state: FleetState, event: events.Event, now: float) -> list[Effect]:
    """Apply ``event`` to ``state``, deterministically, and return the effects to carry out, in order.

    ``now`` is in seconds since the epoch and neither jumps nor goes back: the shell's wall clock at its start plus the
    monotonic time since. Late disconnections and late signs of life are counted and dropped without an error.

    Raises:
        NotFound: The node or job is unknown.
        StaleGeneration: The event belongs to another incarnation than the registered one.
        Conflict: An operator's order cannot be carried out now.
        Unavailable: The database is unavailable.
        All of them are raised before anything changes.
    """
    return run_transition(state, event, now).finish()


def run_transition(
    state: FleetState, event: events.Event, now: float, recorded: Sequence[RecordedRead] | None = None
) -> Transition:
    """Apply ``event`` and return the transition, with its ``reads``. ``recorded`` replays reads of an earlier run."""
    _reject_invalid(state, event, now)
    entropy = event.entropy if isinstance(event, events.ReportArrived) else ""
    transition = Transition(state, now, _trace(event), entropy, recorded)
    _EVENTS[type(event)](transition, event)
    for phase in PHASES:
        phase(transition)
    return transition


def apply_heartbeat(
    state: FleetState, node: str, incarnation: int, now: float, ranks: tuple[training.RankProgress, ...] = ()
) -> HeartbeatResult:
    """Record a heartbeat without findings, unless something follows from it. O(ranks of the node)."""
    record, live = state.nodes.get(node), state.node_runtime.get(node)
    if record is None or live is None or record.identity.incarnation != incarnation:
        return HeartbeatResult.UNKNOWN
    if _needs_transition(state, record, live) or lifecycle.may_have_crossed_boundary(state, ranks):
        return HeartbeatResult.NEEDS_EVENT
    record_message(state.policy, state.observer, live.heartbeats, now)
    live.heartbeats.clean_heartbeats += 1
    lifecycle.record_progress(state, node, ranks, now)
    return HeartbeatResult.UNEVENTFUL if live.has_full_findings else HeartbeatResult.UNKNOWN


def can_defer_findings(
    state: FleetState, node: str, reported: Sequence[Finding], ranks: tuple[training.RankProgress, ...] = ()
) -> bool:
    """Return whether findings may wait for a moment: they are mild or known, and no recovery depends on them."""
    record, live = state.nodes.get(node), state.node_runtime.get(node)
    if record is None or live is None or _needs_transition(state, record, live):
        return False
    crossed = lifecycle.may_have_crossed_boundary(state, ranks)
    return not crossed and all(_is_mild(record, finding) for finding in reported)


def can_defer_reports(state: FleetState, node: str, reports: Sequence[training.AnyReport]) -> bool:
    """Return whether reports may wait for a moment, by the rule of ``can_defer_findings``."""
    if not all(isinstance(body, training.FindingRaised | training.FindingCleared) for body in reports):
        return False
    raised = [body.finding for body in reports if isinstance(body, training.FindingRaised)]
    return can_defer_findings(state, node, raised)


def _is_mild(record: NodeRecord, finding: Finding) -> bool:
    current = record.health.agent_findings.get(finding.key)
    return finding.severity is not Severity.CRITICAL or (current is not None and current.severity is Severity.CRITICAL)


def job_to_rejoin(state: FleetState, node: str, ranks: Iterable[training.RankProgress]) -> str:
    """Return the first job that the node's launcher must rejoin, because its ranks know more than the core; else ""."""
    for progress in ranks:
        job = state.jobs.get(progress.job)
        if job is None or node not in job.membership.launchers or progress.generation > job.progress.last_number:
            return progress.job
    return ""


def next_deadline(state: FleetState) -> float | None:
    """Return the time of the next Tick, or None if there is nothing to wait for. A time in the past means at once."""
    return state.deadline_queue.heap[0][0] if state.deadline_queue.heap else None


def _needs_transition(state: FleetState, record: NodeRecord, live: NodeRuntime) -> bool:
    if live.disconnected_at is not None or not record.liveness.reachable or record.state is NodeState.SUSPECT:
        return True
    if record.state is not NodeState.PROBATION or record.quarantine.diagnostics not in DIAGNOSTICS_DONE:
        return False
    return live.heartbeats.clean_heartbeats + 1 >= state.policy.readmission.probation_heartbeats


def _reject_invalid(state: FleetState, event: events.Event, now: float) -> None:
    match event:
        case events.AgentRegistered():
            registration.check_registration(state, event.register)
        case events.HeartbeatChanged() | events.ReportArrived():
            registration.check_incarnation(state, event.node, event.incarnation)
        case events.OperatorCommand():
            _refuse_during_outage(state)
            orders.check_command(state, event, now)
        case events.ProbeRequested():
            _refuse_during_outage(state)
            orders.check_probe_request(state, event)


def _trace(event: events.Event) -> str:
    if not isinstance(event, events.ReportArrived):
        return event.trace
    body = event.body
    own = body.finding.trace if isinstance(body, training.FindingRaised) else getattr(body, "trace", "")
    return own or event.trace


def _handle_tick(transition: Transition, event: events.Tick) -> None:
    state = transition.state
    lag_s = event.lag_s if event.lag_s >= MIN_LAG_S else 0.0
    lag = state.controller_lag
    lag.seconds = max(lag_s, lag.seconds - max(0.0, transition.now - lag.measured_at))
    lag.measured_at = transition.now
    if lag_s > observer_stall_s(state.policy):
        state.observer.receiving_since = transition.now
    transition.is_uneventful = state.controller_lag.seconds == 0.0
    for recorded in transition.recorded_checks or ():
        _handle_deadline(transition, recorded.kind, recorded.subject)
    most = len(state.deadline_queue.heap)
    while due := list(itertools.islice(iter(lambda: pop_due(state, transition.now), None), most)):
        most -= len(due)
        for kind, subject in sorted(due, key=lambda one: _DEADLINE_PRIORITY.get(one[0], len(_DEADLINE_PRIORITY))):
            if transition.recorded_checks is None or kind is not DeadlineKind.SILENCE:
                _handle_deadline(transition, kind, subject)


def _handle_deadline(transition: Transition, kind: DeadlineKind, subject: str) -> None:
    if kind in _NODE_OR_JOB and subject not in transition.state.nodes and subject not in transition.state.jobs:
        return  # the subject is forgotten
    before = len(transition.reads)
    transition.reads.append(DeadlineCheck(subject, kind))
    if _DEADLINE_HANDLERS[kind](transition, subject):
        del transition.reads[before:]
    else:
        transition.is_uneventful = False


def _advance_job(transition: Transition, name: str) -> None:
    job, live = transition.state.jobs[name], transition.state.job_runtime[name]
    live.regroup.node_offered_at = None
    audit_outcomes.judge_audit_cases(transition, job)
    if job.is_ended:
        return
    if job.status.state is JobState.PAUSED or leaving.leaving_launchers(job):
        advance_spill(transition, job)
        leaving.settle(transition, job)
        if job.is_running:
            return
    if job.is_running:
        if live.regroup.pending is not None and transition.now >= live.regroup.pending.due:
            settle_pending_regroup(transition, job)
        generations.settle_boundary(transition, job)
        replace_late_candidate(transition, job)
        lifecycle.skip_failing_replica_nodes(transition, job)
        advance_spill(transition, job)
        advance_protection(transition, job)
    lifecycle.advance_job(transition, job)


def _handle_heartbeat(transition: Transition, event: events.HeartbeatChanged) -> None:
    transition.state.node_runtime[event.node].heartbeats.clean_heartbeats += 1
    node_liveness.mark_seen(transition, event.node)
    for progress in event.ranks:
        job = transition.state.jobs.get(progress.job)
        if job is not None and lifecycle.is_beyond_boundary(job, progress):
            generations.note_beyond_boundary(
                transition, job, event.node, progress.rank, progress.generation, progress.step
            )
    lifecycle.record_progress(transition.state, event.node, event.ranks, transition.now)
    if event.findings is not None:
        findings.replace_agent_findings(transition, event.node, event.findings)


def _handle_disconnected(transition: Transition, event: events.NodeDisconnected) -> None:
    record = transition.state.nodes.get(event.node)
    if record is None or record.identity.incarnation != event.incarnation:
        transition.count_ignored("disconnected.stale")
        return
    node_liveness.handle_disconnected(transition, event.node)


def _handle_nodes_seen(transition: Transition, event: events.NodeSeen) -> None:
    for node, incarnation in ((event.node, event.incarnation), *event.others):
        record = transition.state.nodes.get(node)
        if record is None or record.identity.incarnation != incarnation:
            transition.count_ignored("node_seen.stale")
        else:
            node_liveness.mark_seen(transition, node)


# Database outages. Decisions that must survive this controller are refused while the database is unavailable. Nodes are
# still suspected and lost, and running jobs regroup, because a successor learns these facts again. Evictions are
# deferred and judged again when the database is back.


def _refuse_during_outage(state: FleetState) -> None:
    """Raise Unavailable for orders that only the database could keep."""
    if state.database.outage:
        raise Unavailable(
            f"the database is unavailable ({state.database.outage}), so the order could not be recorded: repeat it "
            "once the database is back"
        )


def _handle_database_change(transition: Transition, event: events.DatabaseAvailabilityChanged) -> None:
    """Handle the start or the end of an outage."""
    state = transition.state
    if event.is_unavailable:
        begins, state.database.outage = not state.database.outage, event.reason or "it does not answer"
        if begins:
            state.database.outage_since = transition.now
            transition.log_event(
                "database.unavailable",
                f"the database is unavailable ({state.database.outage}): running jobs continue and regroup; until it "
                "is back, no node is evicted, no version is committed, no job starts and no order is accepted",
            )
        for name in event.unsent_jobs:
            _reissue_generation(transition, name)
    elif state.database.outage:
        transition.log_event(
            "database.available", f"the database is available again (it was unavailable: {state.database.outage})"
        )
        state.database.outage = ""
        for live in state.job_runtime.values():
            live.regroup.unannounced_generation = 0
        for job in state.jobs.values():
            if not job.is_ended:
                transition.schedule_job(transition.now, job.job)
        transition.freed_scopes[ScopeKind.DATABASE.scope()] = None


def _reissue_generation(transition: Transition, name: str) -> None:
    """Give a running job's unsent generation a number that no other controller can give."""
    job = transition.state.jobs.get(name)
    spec = job.generation if job is not None else None
    if job is None or spec is None or not job.is_running:
        return
    if spec.reason is GenerationReason.FORMED or job.outgoing_generation is not None:
        transition.state.job_runtime[name].regroup.unannounced_generation = spec.number
        return
    sentence = f"generation {spec.number} was decided but never announced, because the database became unavailable"
    others = frozenset(transition.state.nodes) - spec.seated_nodes
    generations.regroup(transition, job, RegroupCause(spec.reason, sentence, spec.trace, nodes_to_exclude=others))


def _handle_report(transition: Transition, event: events.ReportArrived) -> None:
    node_liveness.mark_seen(transition, event.node)
    body, node = event.body, event.node
    match body:
        case training.LauncherJoined():
            joining.handle_launcher_joined(transition, node, body)
        case training.FindingRaised():
            findings.add_agent_finding(transition, node, body.finding)
        case training.FindingCleared():
            findings.clear_agent_finding(transition, node, body.key)
        case training.ProbeFinished():
            case_outcomes.handle_probe_finished(transition, node, body)
        case _ if (job := transition.state.jobs.get(body.job)) is None:
            transition.count_ignored("report.unknown_job")
        case _:
            _REPORTS[type(body)](transition, job, node, body)


_REPORTS: dict[type[Any], Callable[[Transition, JobRecord, str, Any], None]] = {
    training.LauncherLeft: losses.handle_launcher_left,
    training.LauncherLeaving: leaving.handle_launcher_leaving,
    training.PeerConnectionLost: peer_loss.handle_peer_lost,
    training.RankLost: leaving.unless_leaving(losses.handle_rank_lost),
    training.CollectiveFailed: leaving.unless_leaving(losses.handle_collective_failed),
    training.RankStalled: leaving.unless_leaving(hangs.handle_rank_stalled),
    training.RankUnresponsive: leaving.unless_leaving(hangs.handle_rank_unresponsive),
    training.VersionSealed: case_outcomes.handle_sealed,
    training.AuditStatement: audit_outcomes.handle_audit_statement,
    training.AuditsClean: handle_audits_clean,
    training.Resumed: lifecycle.handle_resumed,
    training.UserError: leaving.unless_leaving(lifecycle.handle_user_error),
    training.RankFinished: leaving.unless_leaving(ending.handle_rank_finished),
    VersionSpilled: handle_version_spilled,
    VersionProtected: handle_version_protected,
}


PHASES: tuple[Callable[[Transition], None], ...] = (
    # The controller's findings are judged once all of them are known: a tie of digests raises one on several nodes.
    findings.judge_controller_findings,
    # A node that entered probation, above or in the event, has its findings judged before its first diagnostic.
    findings.judge_returning_nodes,
    # A heartbeat is clean only if no finding of the same event stands against its node.
    quarantine.reconsider_seen_on_probation,
    # The step above may find nodes that are about to become healthy with a finding.
    findings.judge_returning_nodes,
    # Nodes that were lost together cost each job one regroup.
    losses.regroup_after_losses,
    # Everything above can free a budget or spare a node of a job.
    findings.retry_deferred_evictions,
    # A node whose deferred eviction was dropped may take a seat again.
    joining.offer_after_deferral,
    # Last, because any step above can make a node available to a paused job.
    generations.schedule_paused_job_checks,
)
"""Steps that follow the handling of each event, in this order."""


def _for_fleet(handle: Callable[[Transition], None]) -> Callable[[Transition, str], None]:
    return lambda transition, _fleet: handle(transition)


_DEADLINE_HANDLERS: dict[DeadlineKind, Callable[[Transition, str], bool | None]] = {
    DeadlineKind.SILENCE: node_liveness.handle_silence_deadline,
    DeadlineKind.MAINTENANCE: _for_fleet(maintenance.begin_due_windows),
    DeadlineKind.NODE: node_liveness.handle_node_deadline,
    DeadlineKind.NODE_TREATMENT: case_outcomes.advance_treatment,
    DeadlineKind.PROBE: case_outcomes.settle_overdue_probe,
    DeadlineKind.BLAME_CASE: case_outcomes.advance_blame_case,
    DeadlineKind.JOB: _advance_job,
    DeadlineKind.CORRELATED_SILENCE: _for_fleet(announce_correlated_silence),
    DeadlineKind.REJOIN_WINDOW: _for_fleet(rejoin.end_rejoin_window),
    DeadlineKind.DEFERRED_EVICTIONS: reconsider_deferred_scope,
    DeadlineKind.RETENTION: _for_fleet(retirement.apply_retention),
}
"""The handler of each kind of deadline. It returns True if nothing follows: the node was heard in time."""

_EVENTS: dict[type[Any], Callable[[Transition, Any], None]] = {
    events.ControllerStarted: handle_controller_started,
    events.Tick: _handle_tick,
    events.AgentRegistered: lambda transition, event: registration.register(transition, event.register),
    events.HeartbeatChanged: _handle_heartbeat,
    events.ReportArrived: _handle_report,
    events.NodeDisconnected: _handle_disconnected,
    events.NodeSeen: _handle_nodes_seen,
    events.DatabaseAvailabilityChanged: _handle_database_change,
    events.RemediationFinished: node_state.handle_remediation_finished,
    events.SchedulerStateChanged: maintenance.handle_scheduler_change,
    events.OperatorCommand: orders.execute_command,
    events.ProbeRequested: orders.execute_probe,
}
