"""What people order. Refused before anything changes, or carried out with their name and reason in the log."""

from __future__ import annotations

from collections.abc import Callable

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import Action, Decision, GenerationReason, NodeState
from everstep_controller.core import retirement
from everstep_controller.core.events import OperatorAction, OperatorCommand, ProbeRequested
from everstep_controller.core.health import evidence, maintenance
from everstep_controller.core.health.diagnostics import start_probe
from everstep_controller.core.health.eviction import needed_by, release, reset_breaker
from everstep_controller.core.health.evidence import clear_own
from everstep_controller.core.health.node_state import set_state
from everstep_controller.core.health.quarantine import begin_probation, begin_quarantine
from everstep_controller.core.health.remediation_ladder import to_repair
from everstep_controller.core.jobs import lifecycle
from everstep_controller.core.jobs.generations import Cause
from everstep_controller.core.jobs.joining import offer_to_jobs
from everstep_controller.core.jobs.losses import forgive, node_left_jobs
from everstep_controller.core.jobs.membership import ENDED
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import nodes

_JOB_ORDERS = (OperatorAction.STOP_JOB, OperatorAction.RESIZE_JOB)
_OUT = (NodeState.QUARANTINED, NodeState.REPAIR)


# --- refusals ----------------------------------------------------------------------------------------------------


def check_command(state: FleetState, command: OperatorCommand, now: float) -> None:
    """Raises NotFound or Conflict, with what to do instead, for an order that cannot be carried out."""
    if command.kind in _JOB_ORDERS:
        _check_job(state, command)
    elif command.kind is OperatorAction.RESET_BREAKER:
        if not state.fleet.breaker:
            raise Conflict("the breaker is not latched: evictions are allowed")
    elif command.kind is OperatorAction.CANCEL_MAINTENANCE:
        maintenance.check_cancel(state, command)
    elif command.kind is OperatorAction.MAINTENANCE and command.node is None:
        maintenance.check_maintenance(state, command, now)
    else:
        _check_node(state, command)
        if command.kind is OperatorAction.MAINTENANCE:
            maintenance.check_maintenance(state, command, now)


def _check_job(state: FleetState, command: OperatorCommand) -> None:
    job = state.jobs.get(command.job or "")
    if job is None:
        raise NotFound(f"no job {command.job}")
    if job.state in ENDED:
        raise Conflict(f"job {job.job} is {job.state} already")
    if command.kind is OperatorAction.RESIZE_JOB:
        least, most = job.spec.min_nodes, job.spec.max_nodes
        if command.size is None or not least <= command.size <= most:
            raise Conflict(f"job {job.job} runs on {least} to {most} nodes, not on {command.size}")


def _check_node(state: FleetState, command: OperatorCommand) -> None:
    record = state.nodes.get(command.node or "")
    if record is None:
        raise NotFound(f"no node {command.node}: `everstep nodes` lists them")
    if command.kind is OperatorAction.READMIT:
        if record.state is NodeState.LOST:
            raise Conflict(f"{record.node} is lost: it comes back by itself when its agent is heard")
        if record.foreign:
            raise Conflict(
                f"{record.node} is cordoned by {record.foreign}: lift that cordon, and it comes back by itself"
            )
        if record.state in (NodeState.HEALTHY, NodeState.SUSPECT) and not _excluded(state, record.node):
            raise Conflict(f"{record.node} is {record.state} and in service")
    elif command.kind is OperatorAction.FORGET and (why := retirement.why_kept(state, record.node)):
        raise Conflict(why)
    elif command.kind is OperatorAction.RELEASE and not record.hold:
        raise Conflict(f"nobody holds {record.node}: `everstep node readmit` ends whatever else keeps it out")
    if command.kind in (OperatorAction.DRAIN, OperatorAction.REPAIR) and (why := needed_by(state, record.node)):
        raise Conflict(f"{why}: add a node or stop the job first, or evict {record.node} and let the job pause")


def _excluded(state: FleetState, node: str) -> bool:
    """Whether a job does without the node, although it is in service."""
    for name in state.live_nodes[node].jobs:
        job = state.jobs[name]
        launcher = job.launchers.get(node)
        unable = launcher is not None and not launcher.able and job.state not in ENDED
        if unable or node in job.excluded or node in job.slow:
            return True
    return False


def check_probe(state: FleetState, request: ProbeRequested) -> None:
    """Raises NotFound or Conflict for a probe that cannot be run."""
    if len(set(request.nodes)) < 2 or len(set(request.nodes)) != len(request.nodes):
        raise Conflict("a probe needs two or more different nodes")
    for node in request.nodes:
        if node not in state.nodes:
            raise NotFound(f"no node {node}: `everstep nodes` lists them")
        if node not in state.reachable:
            raise Conflict(f"{node} is out of reach")


# --- orders ------------------------------------------------------------------------------------------------------


def command(turn: Turn, order: OperatorCommand) -> None:
    """Carries out an order that ``check_command`` let pass."""
    because = f": {order.reason}" if order.reason else ""
    sentence = f"{order.actor} ordered {_what(order, turn.now)}{because}"
    data = {"actor": order.actor, "reason": order.reason}
    turn.audit(f"operator.{order.kind}", sentence, node=order.node, job=order.job, data=data)
    if order.kind is OperatorAction.RESET_BREAKER:
        reset_breaker(turn)
    elif order.job is not None and order.kind is OperatorAction.STOP_JOB:
        lifecycle.stop(turn, turn.state.jobs[order.job], order.actor, order.reason)
    elif order.job is not None and order.kind is OperatorAction.RESIZE_JOB and order.size is not None:
        lifecycle.resize(turn, turn.state.jobs[order.job], order.size, order.actor)
    elif order.kind is OperatorAction.MAINTENANCE:
        maintenance.order_maintenance(turn, order, sentence)
    elif order.kind is OperatorAction.CANCEL_MAINTENANCE:
        maintenance.cancel(turn, order)
    elif order.node is not None:
        _NODE_ORDERS[order.kind](turn, order.node, sentence)


def _what(order: OperatorCommand, now: float) -> str:
    """The order in words: what is to be done, and to whom."""
    if order.kind is OperatorAction.RESET_BREAKER:
        return "a reset of the breaker"
    if order.kind is OperatorAction.MAINTENANCE:
        subject = order.node or f"rack {order.rack}"
        begins = max(now, order.starts_at or now)
        ahead = f", {begins - now:.0f} s from now," if begins > now else ""
        return f"maintenance of {subject}{ahead} for {(order.until or now) - begins:.0f} s"
    if order.kind is OperatorAction.CANCEL_MAINTENANCE:
        return f"to cancel the maintenance planned for {order.node or f'rack {order.rack}'}"
    if order.kind is OperatorAction.RESIZE_JOB:
        return f"to bound job {order.job} to {nodes(order.size or 0)}"
    if order.kind is OperatorAction.STOP_JOB:
        return f"to stop job {order.job}"
    return f"to {order.kind} {order.node}"


def probe(turn: Turn, request: ProbeRequested) -> None:
    """Runs a probe that judges nobody."""
    because = f": {request.reason}" if request.reason else ""
    sentence = f"{request.actor} ordered a probe of {', '.join(request.nodes)}{because}"
    turn.audit("operator.probe", sentence, data={"actor": request.actor, "reason": request.reason})
    start_probe(turn, request.nodes, candidate=None, backend=request.backend)


def _drain(turn: Turn, node: str, sentence: str) -> None:
    was_out = turn.state.nodes[node].state in _OUT
    maintenance.hold(turn, node, sentence)
    if not was_out:  # it has left its jobs, or is about to
        _leave(turn, node, sentence, boundary=True)


def _repair(turn: Turn, node: str, sentence: str) -> None:
    to_repair(turn, node, sentence)
    _leave(turn, node, sentence, boundary=True)


def _evict(turn: Turn, node: str, sentence: str) -> None:
    record = turn.state.nodes[node]
    causes, cleared = record.causes, record.cleared  # of one that is out already
    begin_quarantine(turn, node, sentence, (), action=Action.DRAIN, offence=0.0)
    record.causes, record.cleared, record.needs_operator = causes, cleared, True
    turn.verdict(node, Decision.EVICT, sentence, action=Action.DRAIN)
    _leave(turn, node, sentence, boundary=False)


def _leave(turn: Turn, node: str, sentence: str, *, boundary: bool) -> None:
    cause = Cause(reason=GenerationReason.OPERATOR, sentence=sentence, trace=turn.trace, boundary=boundary)
    node_left_jobs(turn, node, cause)


def _readmit(turn: Turn, node: str, sentence: str) -> None:
    record = turn.state.nodes[node]
    was_kept = record.maintenance_until > turn.now
    record.needs_operator, record.condemned, record.against, record.lost = False, [], [], []
    clear_own(turn, node)
    record.hold, record.undecided, record.vouched = "", {}, list(record.findings)
    if record.state is NodeState.REPAIR:
        evidence.absolve(record)
    maintenance.end_early(turn, node)
    release(turn, node)
    record.probe_failures = 0
    for name in turn.state.live_nodes[node].jobs:
        forgive(turn, name, node)
        job = turn.state.jobs[name]
        if (launcher := job.launchers.get(node)) is not None:
            launcher.able, launcher.why_not, launcher.missing, launcher.late = True, "", [], 0
    turn.verdict(node, Decision.READMIT, sentence)
    if not record.reachable:
        set_state(turn, node, NodeState.LOST, f"{sentence}; it is out of reach and comes back when it is heard")
    elif record.state in _OUT or was_kept or record.course is not None:
        begin_probation(turn, node, sentence)
    else:
        set_state(turn, node, NodeState.HEALTHY, sentence)
        offer_to_jobs(turn, node)


_NODE_ORDERS: dict[OperatorAction, Callable[[Turn, str, str], None]] = {
    OperatorAction.HOLD: maintenance.hold,
    OperatorAction.RELEASE: maintenance.let_go,
    OperatorAction.DRAIN: _drain,
    OperatorAction.REPAIR: _repair,
    OperatorAction.EVICT: _evict,
    OperatorAction.READMIT: _readmit,
    OperatorAction.FORGET: retirement.forget_node,
}
