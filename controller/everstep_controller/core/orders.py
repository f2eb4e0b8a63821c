"""Check and carry out operators' orders; an invalid one is refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import Action, Decision, GenerationReason, NodeState
from everstep_controller.core import maintenance, retirement
from everstep_controller.core.events import OperatorAction, OperatorCommand, ProbeRequested
from everstep_controller.core.health import offences
from everstep_controller.core.health.diagnostics import start_probe
from everstep_controller.core.health.eviction import drop_deferral, find_job_short_of_nodes, reset_breaker
from everstep_controller.core.health.node_state import send_to_repair, set_state
from everstep_controller.core.health.quarantine import begin_probation, begin_quarantine
from everstep_controller.core.jobs import ending, lifecycle
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.losses import regroup_jobs_without
from everstep_controller.core.records import QUARANTINE_STATES
from everstep_controller.core.seats.job_index import clear_exclusion, offer_to_jobs
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_node_count

_JOB_ORDERS = (OperatorAction.STOP_JOB, OperatorAction.RESIZE_JOB)


def check_command(state: FleetState, command: OperatorCommand, now: float) -> None:
    """Raise NotFound or Conflict, with advice, for an order that cannot be carried out."""
    if command.action in _JOB_ORDERS:
        _check_job(state, command)
    elif command.action is OperatorAction.RESET_BREAKER:
        if not state.fleet.breaker_reason:
            raise Conflict("the breaker is not latched: evictions are allowed")
    elif command.action is OperatorAction.CANCEL_MAINTENANCE:
        maintenance.check_cancel(state, command)
    elif command.action is OperatorAction.MAINTENANCE and command.node is None:
        maintenance.check_maintenance(state, command, now)
    else:
        _check_node(state, command)
        if command.action is OperatorAction.MAINTENANCE:
            maintenance.check_maintenance(state, command, now)


def _check_job(state: FleetState, command: OperatorCommand) -> None:
    job = state.jobs.get(command.job or "")
    if job is None:
        raise NotFound(f"no job {command.job}")
    if job.is_ended:
        raise Conflict(f"job {job.job} is already {job.status.state}")
    if command.action is OperatorAction.RESIZE_JOB:
        least, most = job.spec.min_nodes, job.spec.max_nodes
        if command.node_limit is None or not least <= command.node_limit <= most:
            raise Conflict(f"job {job.job} runs on {least} to {most} nodes, not on {command.node_limit}")


def _check_node(state: FleetState, command: OperatorCommand) -> None:
    record = state.nodes.get(command.node or "")
    if record is None:
        raise NotFound(f"no node {command.node}: `everstep nodes` lists them")
    if command.action is OperatorAction.READMIT:
        if record.state is NodeState.LOST:
            raise Conflict(f"{record.node} is lost: it returns by itself once its agent reports again")
        if record.scheduling.external_cordon_by:
            by = record.scheduling.external_cordon_by
            raise Conflict(f"{record.node} is cordoned by {by}: lift that cordon, and the node returns by itself")
        if record.state in (NodeState.HEALTHY, NodeState.SUSPECT) and not _is_excluded(state, record.node):
            raise Conflict(f"{record.node} is {record.state} and in service")
    elif command.action is OperatorAction.FORGET and (why := retirement.reason_to_keep(state, record.node)):
        raise Conflict(why)
    elif command.action is OperatorAction.RELEASE and not record.scheduling.hold_reason:
        raise Conflict(
            f"no operator holds {record.node}: run `everstep node readmit` to end any other reason why it is out"
        )
    leaves = command.action in (OperatorAction.DRAIN, OperatorAction.REPAIR)
    if leaves and (why := find_job_short_of_nodes(state, record.node)):
        raise Conflict(f"{why}: add a node or stop the job first, or evict {record.node} and let the job pause")


def _is_excluded(state: FleetState, node: str) -> bool:
    """Return whether a job excludes the node although the node is in service."""
    for name in state.node_runtime[node].jobs:
        job = state.jobs[name]
        launcher = job.membership.launchers.get(node)
        unable = launcher is not None and not launcher.usable and not job.is_ended
        if unable or node in job.membership.excluded_nodes or node in job.membership.replaced_stragglers:
            return True
    return False


def check_probe_request(state: FleetState, request: ProbeRequested) -> None:
    """Raise NotFound or Conflict for a probe that cannot run."""
    if len(set(request.nodes)) < 2 or len(set(request.nodes)) != len(request.nodes):
        raise Conflict("a probe needs two or more different nodes")
    for node in request.nodes:
        if node not in state.nodes:
            raise NotFound(f"no node {node}: `everstep nodes` lists them")
        if node not in state.liveness.reachable_nodes:
            raise Conflict(f"{node} is unreachable")


def execute_command(transition: Transition, command: OperatorCommand) -> None:
    """Carry out an order that ``check_command`` has accepted."""
    because = f": {command.reason}" if command.reason else ""
    sentence = f"{command.actor} ordered {_describe_command(command, transition.now)}{because}"
    data = {"actor": command.actor, "reason": command.reason}
    transition.log_event(f"operator.{command.action}", sentence, node=command.node, job=command.job, data=data)
    if command.action is OperatorAction.RESET_BREAKER:
        reset_breaker(transition)
    elif command.job is not None and command.action is OperatorAction.STOP_JOB:
        ending.stop_job(transition, transition.state.jobs[command.job], f"stopped by {command.actor}{because}")
    elif command.job is not None and command.action is OperatorAction.RESIZE_JOB and command.node_limit is not None:
        lifecycle.resize_job(transition, transition.state.jobs[command.job], command.node_limit, command.actor)
    elif command.action is OperatorAction.MAINTENANCE:
        maintenance.order_window(transition, command, sentence)
    elif command.action is OperatorAction.CANCEL_MAINTENANCE:
        maintenance.cancel_maintenance(transition, command)
    elif command.node is not None:
        _NODE_ORDERS[command.action](transition, command.node, sentence)


def _describe_command(command: OperatorCommand, now: float) -> str:
    """Describe the order: the action and its subject."""
    if command.action is OperatorAction.RESET_BREAKER:
        return "a reset of the breaker"
    if command.action is OperatorAction.MAINTENANCE:
        subject = command.node or f"rack {command.rack}"
        begins = max(now, command.starts_at or now)
        ahead = f", {begins - now:.0f} s from now," if begins > now else ""
        return f"maintenance of {subject}{ahead} for {(command.until or now) - begins:.0f} s"
    if command.action is OperatorAction.CANCEL_MAINTENANCE:
        return f"to cancel the maintenance planned for {command.node or f'rack {command.rack}'}"
    if command.action is OperatorAction.RESIZE_JOB:
        return f"to limit job {command.job} to {format_node_count(command.node_limit or 0)}"
    if command.action is OperatorAction.STOP_JOB:
        return f"to stop job {command.job}"
    return f"to {command.action} {command.node}"


def execute_probe(transition: Transition, request: ProbeRequested) -> None:
    """Run a probe that judges no node."""
    because = f": {request.reason}" if request.reason else ""
    sentence = f"{request.actor} ordered a probe of {', '.join(request.nodes)}{because}"
    transition.log_event("operator.probe", sentence, data={"actor": request.actor, "reason": request.reason})
    start_probe(transition, request.nodes, tested_node=None, backend=request.backend)


def _drain(transition: Transition, node: str, sentence: str) -> None:
    was_out = transition.state.nodes[node].state in QUARANTINE_STATES
    maintenance.hold_node(transition, node, sentence)
    if not was_out:  # a node in quarantine or repair has left its jobs, or is about to
        _leave(transition, node, sentence, boundary=True)


def _repair(transition: Transition, node: str, sentence: str) -> None:
    send_to_repair(transition, node, sentence)
    _leave(transition, node, sentence, boundary=True)


def _evict(transition: Transition, node: str, sentence: str) -> None:
    quarantine = transition.state.nodes[node].quarantine
    causes, cleared = quarantine.causes, quarantine.cause_cleared_at  # kept if the node is out already
    begin_quarantine(transition, node, sentence, (), action=Action.DRAIN, offence_weight=0.0)
    quarantine.causes, quarantine.cause_cleared_at, quarantine.needs_operator = causes, cleared, True
    transition.add_verdict(node, Decision.EVICT, sentence, action=Action.DRAIN)
    _leave(transition, node, sentence, boundary=False)


def _leave(transition: Transition, node: str, sentence: str, *, boundary: bool) -> None:
    cause = RegroupCause(GenerationReason.OPERATOR, sentence, transition.trace, at_boundary=boundary)
    regroup_jobs_without(transition, node, cause)


def _readmit(transition: Transition, node: str, sentence: str) -> None:
    record = transition.state.nodes[node]
    was_kept = record.scheduling.maintenance_until > transition.now
    record.quarantine.needs_operator, record.quarantine.probe_failures = False, 0
    record.health.defective_gpus, record.health.digest_tie_nodes, record.liveness.loss_times = [], [], []
    record.audits.strikes = []
    transition.clear_findings(node)
    record.scheduling.hold_reason, record.health.undecided_findings = "", {}
    record.scheduling.notice_reason = ""  # its finding is accepted below
    record.health.accepted_findings = list(record.health.agent_findings)
    if record.state is NodeState.REPAIR:
        offences.clear_offences(record)
    maintenance.end_maintenance_early(transition, node)
    drop_deferral(transition, node)
    for name in transition.state.node_runtime[node].jobs:
        clear_exclusion(transition, name, node)
        job = transition.state.jobs[name]
        if (launcher := job.membership.launchers.get(node)) is not None:
            launcher.make_usable()
    transition.add_verdict(node, Decision.READMIT, sentence)
    if not record.liveness.reachable:
        why = f"{sentence}; the node is unreachable and returns once its agent reports again"
        set_state(transition, node, NodeState.LOST, why)
    elif record.state in QUARANTINE_STATES or was_kept or record.quarantine.plan is not None:
        begin_probation(transition, node, sentence)
    else:
        set_state(transition, node, NodeState.HEALTHY, sentence)
        offer_to_jobs(transition, node)


_NODE_ORDERS: dict[OperatorAction, Callable[[Transition, str, str], None]] = {
    OperatorAction.HOLD: maintenance.hold_node,
    OperatorAction.RELEASE: maintenance.release_hold,
    OperatorAction.DRAIN: _drain,
    OperatorAction.REPAIR: _repair,
    OperatorAction.EVICT: _evict,
    OperatorAction.READMIT: _readmit,
    OperatorAction.FORGET: retirement.forget_node,
}
