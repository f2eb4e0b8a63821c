"""Somebody's word keeps a node out: a person's hold, a maintenance window, or a cordon that Everstep did not set.

Nothing is held against a node meanwhile, nothing is done to it, and it comes back by way of probation.
"""

from __future__ import annotations

import msgspec

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import GenerationReason, JobState, NodeState
from everstep_controller.core import records
from everstep_controller.core.events import NodeObserved, OperatorCommand
from everstep_controller.core.health import node_state, remediation_ladder
from everstep_controller.core.health.node_state import IN_SERVICE, kept_out, set_state
from everstep_controller.core.health.quarantine import begin_probation
from everstep_controller.core.jobs.generations import Cause, regroup, roster_at
from everstep_controller.core.jobs.membership import computes, jobs_seated_on, least_nodes
from everstep_controller.core.records import JobRecord, NodeRecord, Window
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn

FLEET = "fleet"
MOST_WINDOWS = 1000
"""Windows that are planned, or not over, at once."""
AGAIN_S = 1.0
"""Seconds between looks whether a window that is due may begin."""
SICK = (NodeState.QUARANTINED, NodeState.REPAIR)


# --- a person's hold ---------------------------------------------------------------------------------------------


def hold(turn: Turn, node: str, sentence: str) -> None:
    """The node stays out until somebody releases or readmits it. One that is quarantined or in repair remains so: its
    cures stop, and so does its way back."""
    record = turn.state.nodes[node]
    record.hold = sentence
    turn.node_changed(node)
    records.enter(record, turn.now, "action", sentence)
    if record.state in SICK:
        node_state.cordon(turn, node, sentence)  # nothing, where it still stands
    else:
        set_state(turn, node, NodeState.HELD, sentence)
    if record.course is not None and record.course.remedy:
        cure = record.course.ladder[record.course.rung]
        words = f"{cure} of {node} ({record.course.remedy}) was asked for before, and may still be done"
        turn.audit("remedy.under_way", words, node=node)


def let_go(turn: Turn, node: str, sentence: str) -> None:
    """The hold is over, whatever else keeps the node out."""
    turn.state.nodes[node].hold = ""
    turn.node_changed(node)
    records.enter(turn.state.nodes[node], turn.now, "action", sentence)
    come_back(turn, node, sentence)


# --- cordons of others -------------------------------------------------------------------------------------------


def observed(turn: Turn, event: NodeObserved) -> None:
    """Somebody else has taken the node out of service with the scheduler, or given it back."""
    record = turn.state.nodes.get(event.node)
    gone = record is not None and event.uncordoned != "" and record.cordoned == event.uncordoned
    if record is None or (record.foreign == event.cordoned_by and not gone):
        turn.ignore("node_observed.nothing_new")
        return
    if gone:
        _tell_of_no_cordon(turn, record)
    if record.foreign == event.cordoned_by:
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
    records.enter(record, turn.now, "action", sentence)
    turn.audit("node.observed", sentence, node=event.node)
    come_back(turn, event.node, sentence)


def _tell_of_no_cordon(turn: Turn, record: NodeRecord) -> None:
    """It is not set again by itself: whoever lifted it may have meant it. A hold sets it, and so does another state."""
    record.cordoned = ""
    turn.node_changed(record.node)
    sentence = (
        f"{record.node} is out of service here ({record.state}), and the scheduler does not show Everstep's cordon any "
        "more: it may give the node work; `everstep node hold` cordons it again, `everstep node readmit` takes it back"
    )
    records.enter(record, turn.now, "action", sentence)
    turn.audit("node.uncordoned", sentence, node=record.node)


def come_back(turn: Turn, node: str, because: str) -> None:
    """A held node that nobody's word keeps out any more returns, on probation; others are looked at again."""
    record = turn.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        turn.wake(turn.now, "care", node)
    elif record.state is not NodeState.HELD or kept_out(record, turn.now):
        return
    elif not computes(turn.state, node) and remediation_ladder.check_offences(turn, node):
        return  # one that computes was let serve with its offences: to take it out would be an eviction
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
    if order.starts_at is not None and order.starts_at > now:
        _check_plan(state, order.starts_at, order.until)
        return
    leaving = set(nodes)
    jobs = {job.job: job for node in leaving for job in jobs_seated_on(state, node) if job.state is JobState.RUNNING}
    for job in jobs.values():
        left, least = len(roster_at(state, now, job, without=leaving)), least_nodes(job)
        if left < least:
            raise Conflict(
                f"job {job.job} needs {least} nodes and {left} would be left: add nodes or stop the job first, "
                "or take fewer nodes at a time"
            )


def _check_plan(state: FleetState, starts_at: float, until: float) -> None:
    if until <= starts_at:
        raise Conflict("a maintenance window ends after it begins: give an `until` later than `starts_at`")
    if len(state.fleet.maintenance) >= MOST_WINDOWS:
        raise Conflict(f"{MOST_WINDOWS} windows are planned already: cancel some, or plan whole racks")


def check_cancel(state: FleetState, order: OperatorCommand) -> None:
    """Raises Conflict where nothing is planned for the node or rack."""
    if not any(_is_planned(one, order) for one in state.fleet.maintenance):
        raise Conflict(
            f"nothing is planned for {order.node or f'rack {order.rack}'}: a window that has begun ends by "
            "`everstep node readmit`"
        )


def _is_planned(window: Window, order: OperatorCommand) -> bool:
    same = window.node == order.node if order.node else bool(window.rack) and window.rack == order.rack
    return bool(window.starts_at) and same


def cancel(turn: Turn, order: OperatorCommand) -> None:
    """What is planned for the node or rack does not begin. A rack's plan cannot be cancelled for one node."""
    fleet = turn.state.fleet
    fleet.maintenance = [one for one in fleet.maintenance if not _is_planned(one, order)]
    turn.fleet_changed()


def _meant(state: FleetState, order: OperatorCommand) -> list[str]:
    if order.node is not None:
        return [order.node]
    return [node for node, record in state.nodes.items() if order.rack and record.domain.rack == order.rack]


def order_maintenance(turn: Turn, order: OperatorCommand, sentence: str) -> None:
    """Begins a window, or plans it."""
    fleet, until = turn.state.fleet, order.until or turn.now
    window = Window(until=until, sentence=sentence, node=order.node or "", rack="" if order.node else order.rack or "")
    fleet.maintenance = [one for one in fleet.maintenance if one.until > turn.now]
    turn.fleet_changed()
    if order.starts_at is not None and order.starts_at > turn.now:
        fleet.maintenance.append(msgspec.structs.replace(window, starts_at=order.starts_at))
        turn.wake(order.starts_at, "maintenance", FLEET)
        return
    fleet.maintenance.append(window)
    _begin(turn, window)


def look_ahead(turn: Turn) -> None:
    """This controller begins: so do windows whose time has come, before anybody is heard, and treated; others are
    looked at when theirs comes."""
    check_begin(turn)
    for window in turn.state.fleet.maintenance:
        if window.starts_at:
            turn.wake(max(turn.now, window.starts_at), "maintenance", FLEET)


def check_begin(turn: Turn) -> None:
    """At a deadline: windows whose time has come begin, unless they are over. While the database is away they wait: who
    follows would not know that they have begun."""
    fleet = turn.state.fleet
    due = [one for one in fleet.maintenance if 0.0 < one.starts_at <= turn.now]
    if not due:
        return
    if turn.state.store_away:
        turn.wake(turn.now + AGAIN_S, "maintenance", FLEET)
        return
    begun = [msgspec.structs.replace(one, starts_at=0.0) for one in due if one.until > turn.now]
    fleet.maintenance = [*(one for one in fleet.maintenance if one not in due), *begun]
    turn.fleet_changed()
    for window in begun:
        subject = window.node or f"rack {window.rack}"
        turn.audit("maintenance.begun", f"maintenance of {subject} begins, as planned", node=window.node or None)
    _begin(turn, *begun)


def _begin(turn: Turn, *windows: Window) -> None:
    """Nodes leave their jobs at boundaries, those of all windows at once: none takes another's place. Until the end
    nothing that they say or do not say is held against them."""
    entering = [(node, one) for one in windows for node, record in turn.state.nodes.items() if _covers(one, record)]
    nodes = {node for node, _ in entering}
    jobs = {job.job: (job, window) for node, window in entering for job in jobs_seated_on(turn.state, node)}
    for node, window in entering:
        enter_maintenance(turn, node, window)
    for job, window in jobs.values():
        if job.generation is not None and not job.generation.seated.isdisjoint(nodes):
            _leave(turn, job, window.sentence)


def planned_for(state: FleetState, record: NodeRecord) -> list[Window]:
    """Windows that will begin for the node, the next one first."""
    planned = (one for one in state.fleet.maintenance if one.starts_at and _covers(one, record))
    return sorted(planned, key=lambda one: one.starts_at)


def window_of(state: FleetState, record: NodeRecord, now: float) -> Window | None:
    """The longest maintenance window that the node is in."""
    begun = (one for one in state.fleet.maintenance if one.starts_at <= now < one.until)
    meant = (one for one in begun if _covers(one, record))
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
    records.enter(record, turn.now, "action", window.sentence)
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
    if (window := window_of(turn.state, record, turn.now)) is not None:  # the next one begins as this one ends
        enter_maintenance(turn, node, window)
        return
    record.maintenance_until = 0.0
    turn.node_changed(node)
    if any(one.until <= turn.now for one in turn.state.fleet.maintenance):
        turn.state.fleet.maintenance = [one for one in turn.state.fleet.maintenance if one.until > turn.now]
        turn.fleet_changed()
    turn.audit("node.maintenance_over", f"the maintenance window of {node} is over", node=node)
    come_back(turn, node, f"the maintenance of {node} is over")


def end_early(turn: Turn, node: str) -> None:
    """Takes the node out of its windows before the end; a rack's goes on for the others, and what is planned stays."""
    record, fleet = turn.state.nodes[node], turn.state.fleet
    record.maintenance_until = 0.0
    turn.node_changed(node)
    begun = [window for window in fleet.maintenance if not window.starts_at and _covers(window, record)]
    if begun:
        kept = (window for window in fleet.maintenance if window not in begun or window.node != node)
        fleet.maintenance = [
            msgspec.structs.replace(window, without=(*window.without, node)) if window in begun else window
            for window in kept
        ]
        turn.fleet_changed()
