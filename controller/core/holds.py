"""Somebody's word keeps a node out: a maintenance window, or a cordon that Everstep did not set. Both are respected.

Nothing is held against a node meanwhile, nothing is done to it, and it comes back by way of probation.
"""

from __future__ import annotations

import msgspec

from controller.core import casebook
from controller.core.events import NodeObserved, OperatorCommand
from controller.core.generations import Cause, regroup
from controller.core.membership import jobs_seated_on, least_nodes, next_seats
from controller.core.quarantine import begin_probation
from controller.core.records import JobRecord, NodeRecord, Window
from controller.core.standing import kept_out, set_state
from controller.core.state import FleetState
from controller.core.turn import Turn
from everstep.errors import Conflict, NotFound
from everstep.vocabulary import GenerationReason, JobState, NodeState

IN_SERVICE = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION)


# --- cordons of others -------------------------------------------------------------------------------------------


def observed(turn: Turn, event: NodeObserved) -> None:
    """Somebody else has taken the node out of service with the scheduler, or given it back."""
    record = turn.state.nodes.get(event.node)
    if record is None or record.foreign == event.cordoned_by:
        turn.ignore("node_observed.nothing_new")
        return
    before, record.foreign = record.foreign, event.cordoned_by
    turn.node_changed(event.node)
    if event.cordoned_by:
        because = f" ({event.reason})" if event.reason else ""
        sentence = (
            f"{event.node} is cordoned by {event.cordoned_by}{because}: it takes no new work until that is lifted"
        )
        if record.state in IN_SERVICE:
            set_state(turn, event.node, NodeState.HELD, sentence)
    else:
        sentence = f"{before} has lifted the cordon of {event.node}"
    casebook.enter(record, turn.now, "action", sentence)
    turn.audit("node.observed", sentence, node=event.node)
    come_back(turn, event.node, sentence)


def come_back(turn: Turn, node: str, because: str) -> None:
    """A held node that nobody's word keeps out any more returns, on probation; others are looked at again."""
    record = turn.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        turn.wake(turn.now, "care", node)
    elif record.state is not NodeState.HELD or kept_out(record, turn.now):
        return
    elif record.reachable:
        begin_probation(turn, node, because)
    else:
        set_state(turn, node, NodeState.LOST, f"{because}; it is out of reach and comes back when it is heard")


# --- maintenance -------------------------------------------------------------------------------------------------


def check_maintenance(state: FleetState, order: OperatorCommand, now: float) -> None:
    """Raises NotFound or Conflict for a window that cannot be."""
    nodes = _meant(state, order)
    if not nodes:
        raise NotFound(f"no node in rack {order.rack}: `everstep nodes` shows the racks")
    if order.until is None or order.until <= now:
        raise Conflict("a maintenance window needs an end in the future: give `until`, in seconds since the epoch")
    leaving = {node for node in nodes if state.nodes[node].state is not NodeState.HELD}
    jobs = {job.job: job for node in leaving for job in jobs_seated_on(state, node) if job.state is JobState.RUNNING}
    for job in jobs.values():
        left, least = len(next_seats(state, job, without=leaving)), least_nodes(job)
        if left < least:
            raise Conflict(
                f"job {job.job} needs {least} nodes and {left} would be left: add nodes or stop the job first, "
                "or take fewer nodes at a time"
            )


def _meant(state: FleetState, order: OperatorCommand) -> list[str]:
    if order.node is not None:
        return [order.node]
    return [node for node, record in state.nodes.items() if order.rack and record.domain.rack == order.rack]


def begin_maintenance(turn: Turn, order: OperatorCommand, sentence: str) -> None:
    """Nodes leave their jobs at boundaries; until the end nothing that they say or do not say is held against them."""
    fleet, until = turn.state.fleet, order.until or turn.now
    window = Window(until=until, sentence=sentence, node=order.node or "", rack="" if order.node else order.rack or "")
    fleet.maintenance = [*(one for one in fleet.maintenance if one.until > turn.now), window]
    turn.fleet_changed()
    nodes = _meant(turn.state, order)
    jobs = {job.job: job for node in nodes for job in jobs_seated_on(turn.state, node)}
    for node in nodes:
        enter_maintenance(turn, node, window)
    for job in jobs.values():
        if job.generation is not None and not job.generation.seated.isdisjoint(nodes):
            _leave(turn, job, sentence)


def window_of(state: FleetState, record: NodeRecord, now: float) -> Window | None:
    """The longest maintenance window that the node is in."""
    meant = (one for one in state.fleet.maintenance if one.until > now and _covers(one, record))
    return max(meant, key=lambda one: one.until, default=None)


def _covers(window: Window, record: NodeRecord) -> bool:
    if window.node:
        return window.node == record.node
    return bool(window.rack) and window.rack == record.domain.rack and record.node not in window.without


def enter_maintenance(turn: Turn, node: str, window: Window) -> None:
    """The node is in the window from now on; who had seats on it is for the caller."""
    record = turn.state.nodes[node]
    record.maintenance_until = max(record.maintenance_until, window.until)
    turn.node_changed(node)
    turn.wake(record.maintenance_until, "care", node)
    casebook.enter(record, turn.now, "action", window.sentence)
    if record.state not in IN_SERVICE:
        return
    set_state(turn, node, NodeState.HELD, window.sentence)


def _leave(turn: Turn, job: JobRecord, sentence: str) -> None:
    """The job goes on without all nodes of the window at once, at its next boundary."""
    if job.state is JobState.RUNNING:
        regroup(turn, job, Cause(reason=GenerationReason.OPERATOR, sentence=sentence, trace=turn.trace, boundary=True))


def check_end(turn: Turn, node: str) -> None:
    """At the end of its window a node comes back, where nothing else keeps it out."""
    record = turn.state.nodes[node]
    if not record.maintenance_until or turn.now < record.maintenance_until:
        return
    record.maintenance_until = 0.0
    turn.node_changed(node)
    if turn.state.fleet.maintenance and all(one.until <= turn.now for one in turn.state.fleet.maintenance):
        turn.state.fleet.maintenance = []
        turn.fleet_changed()
    turn.audit("node.maintenance_over", f"the maintenance window of {node} is over", node=node)
    come_back(turn, node, f"the maintenance of {node} is over")


def end_early(turn: Turn, node: str) -> None:
    """Takes the node out of its windows before the end; a rack's goes on for the others."""
    record, fleet = turn.state.nodes[node], turn.state.fleet
    record.maintenance_until = 0.0
    turn.node_changed(node)
    if any(_covers(window, record) for window in fleet.maintenance):
        others = (window for window in fleet.maintenance if window.node != node)
        fleet.maintenance = [
            msgspec.structs.replace(window, without=(*window.without, node)) if _covers(window, record) else window
            for window in others
        ]
        turn.fleet_changed()
