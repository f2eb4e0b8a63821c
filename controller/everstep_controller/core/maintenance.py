"""Keep nodes out of service by order: an operator's hold, a maintenance window or another party's cordon."""

from __future__ import annotations

import msgspec

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import GenerationReason, NodeState
from everstep_controller.core.events import OperatorCommand, SchedulerStateChanged
from everstep_controller.core.health import node_state
from everstep_controller.core.health.node_state import out_of_service_reason, set_state
from everstep_controller.core.health.quarantine import begin_probation, repair_if_repeat_offender
from everstep_controller.core.jobs.generations import RegroupCause, regroup, roster_at
from everstep_controller.core.records import IN_SERVICE, QUARANTINE_STATES, HistoryKind, MaintenanceWindow, NodeRecord
from everstep_controller.core.seats.membership import is_computing, jobs_seated_on
from everstep_controller.core.state import FLEET, DeadlineKind, FleetState
from everstep_controller.core.transition import Transition

MAX_WINDOWS = 1000
"""Maximum number of windows that are planned or under way."""
RETRY_S = 1.0
"""Seconds between attempts to begin a due window during a database outage."""


def hold_node(transition: Transition, node: str, sentence: str) -> None:
    """Keep the node out until it is released or readmitted. Remediation and readmission of an ill node stop."""
    record = transition.state.nodes[node]
    record.scheduling.hold_reason = sentence
    transition.append_history(node, HistoryKind.ACTION, sentence)
    if record.state in QUARANTINE_STATES:
        node_state.cordon(transition, node, sentence)  # no effect if the cordon still stands
    else:
        set_state(transition, node, NodeState.HELD, sentence)
    plan = record.quarantine.plan
    if plan is not None and plan.pending_remediation_id:
        words = f"{plan.ladder[plan.ladder_step]} of {node} ({plan.pending_remediation_id}) was requested before and "
        words += "may still be carried out"
        transition.log_event("remediation.in_progress", words, node=node)


def release_hold(transition: Transition, node: str, sentence: str) -> None:
    """End the hold; other reasons may still keep the node out."""
    transition.state.nodes[node].scheduling.hold_reason = ""
    transition.append_history(node, HistoryKind.ACTION, sentence)
    try_return_to_probation(transition, node, sentence)


def handle_scheduler_change(transition: Transition, event: SchedulerStateChanged) -> None:
    """Handle another party's cordon, or its end."""
    record = transition.state.nodes.get(event.node)
    gone = record is not None and event.lifted_cordon_id != "" and record.scheduling.cordon_id == event.lifted_cordon_id
    if record is None or (record.scheduling.external_cordon_by == event.cordoned_by and not gone):
        transition.count_ignored("scheduler_state.unchanged")
        return
    if gone:
        _note_missing_cordon(transition, record)
    if record.scheduling.external_cordon_by == event.cordoned_by:
        return
    before, record.scheduling.external_cordon_by = record.scheduling.external_cordon_by, event.cordoned_by
    if event.cordoned_by:
        because = f" ({event.reason})" if event.reason else ""
        sentence = (
            f"{event.node} is cordoned by {event.cordoned_by}{because}: it gets no new work until the cordon is lifted"
        )
        if record.state in IN_SERVICE:
            set_state(transition, event.node, NodeState.HELD, sentence)
    else:
        sentence = f"{before} lifted the cordon of {event.node}"
    transition.append_history(event.node, HistoryKind.ACTION, sentence)
    transition.log_event("node.scheduler_changed", sentence, node=event.node)
    try_return_to_probation(transition, event.node, sentence)


def _note_missing_cordon(transition: Transition, record: NodeRecord) -> None:
    """Note that Everstep's cordon has vanished. It is not set again, since its removal may be intended."""
    record.scheduling.cordon_id, record.scheduling.cordon_failed = "", False
    record.scheduling.is_cordon_dry_run = False
    sentence = (
        f"{record.node} is out of service ({record.state}), but Everstep's cordon is missing in the scheduler, which "
        "may give the node work; run `everstep node hold` to cordon it again, or `everstep node readmit` to return it"
    )
    transition.append_history(record.node, HistoryKind.ACTION, sentence)
    transition.log_event("node.uncordoned", sentence, node=record.node)


def try_return_to_probation(transition: Transition, node: str, reason: str) -> None:
    """Return a held node to probation if no order keeps it out any more; recheck a quarantined one."""
    record = transition.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        transition.schedule_treatment(transition.now, node)
    elif record.state is not NodeState.HELD or out_of_service_reason(record, transition.now):
        return
    elif not is_computing(transition.state, node) and repair_if_repeat_offender(transition, node):
        return  # a node with a seat was allowed to serve with its offences: taking it out would be an eviction
    elif record.liveness.reachable:
        begin_probation(transition, node, reason)
    else:
        sentence = f"{reason}; the node is unreachable and returns once its agent reports again"
        set_state(transition, node, NodeState.LOST, sentence)


def check_maintenance(state: FleetState, command: OperatorCommand, now: float) -> None:
    """Raise NotFound or Conflict for a window that cannot be held."""
    if command.node is not None:
        nodes = {command.node}
    else:
        nodes = {n for n, node in state.nodes.items() if command.rack and node.identity.domain.rack == command.rack}
    if not nodes:
        raise NotFound(f"no node in rack {command.rack}: `everstep nodes` shows the racks")
    if command.until is None or command.until <= now:
        raise Conflict("a maintenance window needs an end in the future: give `until`, in seconds since the epoch")
    if command.starts_at is not None and command.starts_at > now:
        if command.until <= command.starts_at:
            raise Conflict("a maintenance window ends after it begins: give an `until` later than `starts_at`")
        if len(state.fleet.maintenance_windows) >= MAX_WINDOWS:
            raise Conflict(f"{MAX_WINDOWS} windows are planned already: cancel some, or plan whole racks")
        return
    jobs = {job.job: job for node in sorted(nodes) for job in jobs_seated_on(state, node) if job.is_running}
    for job in jobs.values():
        left, least = len(roster_at(state, now, job, without=nodes)), job.min_seats
        if left < least:
            raise Conflict(
                f"job {job.job} needs {least} nodes and {left} would be left: add nodes or stop the job first, "
                "or take fewer nodes at a time"
            )


def check_cancel(state: FleetState, command: OperatorCommand) -> None:
    """Raise Conflict if nothing is planned for the node or rack."""
    if not any(_is_planned(window, command) for window in state.fleet.maintenance_windows):
        raise Conflict(
            f"nothing is planned for {command.node or f'rack {command.rack}'}: a window that has begun ends by "
            "`everstep node readmit`"
        )


def _is_planned(window: MaintenanceWindow, command: OperatorCommand) -> bool:
    same = window.node == command.node if command.node else bool(window.rack) and window.rack == command.rack
    return bool(window.starts_at) and same


def cancel_maintenance(transition: Transition, command: OperatorCommand) -> None:
    """Cancel the windows planned for the node or rack. A rack's window cannot be cancelled for one node."""
    fleet = transition.state.fleet
    fleet.maintenance_windows = [window for window in fleet.maintenance_windows if not _is_planned(window, command)]
    transition.mark_fleet_changed()


def order_window(transition: Transition, command: OperatorCommand, sentence: str) -> None:
    """Begin or plan a window."""
    fleet, until = transition.state.fleet, command.until or transition.now
    window = MaintenanceWindow(
        until=until, sentence=sentence, node=command.node or "", rack="" if command.node else command.rack or ""
    )
    fleet.maintenance_windows = [window for window in fleet.maintenance_windows if window.until > transition.now]
    transition.mark_fleet_changed()
    if command.starts_at is not None and command.starts_at > transition.now:
        fleet.maintenance_windows.append(msgspec.structs.replace(window, starts_at=command.starts_at))
        transition.schedule(command.starts_at, DeadlineKind.MAINTENANCE, FLEET)
        return
    fleet.maintenance_windows.append(window)
    _begin_windows(transition, window)


def resume_windows(transition: Transition) -> None:
    """After a restart, begin due windows before any node is heard and treated, and schedule the others."""
    begin_due_windows(transition)
    for window in transition.state.fleet.maintenance_windows:
        if window.starts_at:
            transition.schedule(max(transition.now, window.starts_at), DeadlineKind.MAINTENANCE, FLEET)


def begin_due_windows(transition: Transition) -> None:
    """Begin windows whose time has come. They wait for the end of a database outage, so that a successor knows."""
    fleet = transition.state.fleet
    due = [window for window in fleet.maintenance_windows if 0.0 < window.starts_at <= transition.now]
    if not due:
        return
    if transition.state.database.outage:
        transition.schedule(transition.now + RETRY_S, DeadlineKind.MAINTENANCE, FLEET)
        return
    begun = [msgspec.structs.replace(window, starts_at=0.0) for window in due if window.until > transition.now]
    fleet.maintenance_windows = [*(window for window in fleet.maintenance_windows if window not in due), *begun]
    transition.mark_fleet_changed()
    for window in begun:
        subject = window.node or f"rack {window.rack}"
        sentence = f"maintenance of {subject} begins, as planned"
        transition.log_event("maintenance.started", sentence, node=window.node or None)
    _begin_windows(transition, *begun)


def _begin_windows(transition: Transition, *windows: MaintenanceWindow) -> None:
    """Take the nodes of all windows out of their jobs at once, so that none takes another's place."""
    entering = [
        (node, window)
        for window in windows
        for node, record in transition.state.nodes.items()
        if _covers(window, record)
    ]
    nodes = {node for node, _ in entering}
    jobs = {job.job: (job, window) for node, window in entering for job in jobs_seated_on(transition.state, node)}
    for node, window in entering:
        enter_maintenance(transition, node, window)
    for job, window in jobs.values():
        if job.is_running and job.generation is not None and not job.generation.seated_nodes.isdisjoint(nodes):
            cause = RegroupCause(GenerationReason.OPERATOR, window.sentence, transition.trace, at_boundary=True)
            regroup(transition, job, cause)


def planned_windows(state: FleetState, record: NodeRecord) -> list[MaintenanceWindow]:
    """Return the windows planned for the node, next one first."""
    planned = (window for window in state.fleet.maintenance_windows if window.starts_at and _covers(window, record))
    return sorted(planned, key=lambda one: one.starts_at)


def current_window(state: FleetState, record: NodeRecord, now: float) -> MaintenanceWindow | None:
    """Return the window that the node is in; the longest one if there are several."""
    begun = (window for window in state.fleet.maintenance_windows if window.starts_at <= now < window.until)
    meant = (window for window in begun if _covers(window, record))
    return max(meant, key=lambda one: one.until, default=None)


def _covers(window: MaintenanceWindow, record: NodeRecord) -> bool:
    if window.node:
        return window.node == record.node
    in_rack = bool(window.rack) and window.rack == record.identity.domain.rack
    return in_rack and record.node not in window.readmitted_early


def enter_maintenance(transition: Transition, node: str, window: MaintenanceWindow) -> None:
    """Put the node into the window. The caller regroups the jobs that have seats on it."""
    record = transition.state.nodes[node]
    record.scheduling.maintenance_until = max(record.scheduling.maintenance_until, window.until)
    transition.schedule_treatment(record.scheduling.maintenance_until, node)
    transition.append_history(node, HistoryKind.ACTION, window.sentence)
    if record.state in IN_SERVICE:
        set_state(transition, node, NodeState.HELD, window.sentence)


def end_if_due(transition: Transition, node: str) -> None:
    """At the end of its window, return the node unless something else keeps it out."""
    record = transition.state.nodes[node]
    if not record.scheduling.maintenance_until or transition.now < record.scheduling.maintenance_until:
        return
    window = current_window(transition.state, record, transition.now)
    if window is not None:  # the next window begins as this one ends
        enter_maintenance(transition, node, window)
        return
    record.scheduling.maintenance_until = 0.0
    transition.mark_node_changed(node)
    fleet = transition.state.fleet
    if any(window.until <= transition.now for window in fleet.maintenance_windows):
        fleet.maintenance_windows = [window for window in fleet.maintenance_windows if window.until > transition.now]
        transition.mark_fleet_changed()
    transition.log_event("node.maintenance_ended", f"the maintenance window of {node} is over", node=node)
    try_return_to_probation(transition, node, f"the maintenance of {node} is over")


def end_maintenance_early(transition: Transition, node: str) -> None:
    """Take the node out of its current windows. A rack's window continues for others, and planned windows remain."""
    record, fleet = transition.state.nodes[node], transition.state.fleet
    record.scheduling.maintenance_until = 0.0
    transition.mark_node_changed(node)
    begun = [window for window in fleet.maintenance_windows if not window.starts_at and _covers(window, record)]
    if begun:
        fleet.maintenance_windows = [
            msgspec.structs.replace(window, readmitted_early=(*window.readmitted_early, node))
            if window in begun
            else window
            for window in fleet.maintenance_windows
            if window not in begun or window.node != node
        ]
        transition.mark_fleet_changed()
