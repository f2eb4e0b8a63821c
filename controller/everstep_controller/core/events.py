"""What happens to the fleet. Frozen and tagged, so that a log of events can be written and replayed.

``trace`` on an event is the shell's own, made when the event arose; a report or finding that carries its own trace
keeps that. Randomness enters only here: ``ReportArrived.entropy``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.ids import Incarnation, JobId, NodeId, TraceId
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import Register
from everstep.wire.v1.training import AnyReport, RankProgress


class EventBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """What every event carries: ``trace``, the id of the stimulus and of all that follows from it."""

    trace: TraceId = ""


class ControllerStarted(EventBase, frozen=True, kw_only=True, tag=True):
    """First event after ``restore``, or after a take-over: all deadlines start anew, nobody is late for our absence.

    ``epoch``: which life of a controller over its database this is; larger than all before.
    """

    epoch: int = 0


class Tick(EventBase, frozen=True, kw_only=True, tag=True):
    """The time that ``next_deadline`` named has come.

    ``lag_s``: how late the shell is itself (scheduled against actual time, and age of the oldest unread request);
    an observer that lags lengthens every deadline by as much before it doubts others.
    """

    lag_s: float = 0.0


class AgentRegistered(EventBase, frozen=True, kw_only=True, tag=True):
    """An agent began a life, or introduced itself again in the same one."""

    register: Register


class HeartbeatChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """A heartbeat that says something new; one that does not goes to ``fleet.touch`` instead."""

    node: NodeId
    incarnation: Incarnation
    findings: tuple[Finding, ...] | None = None
    ranks: tuple[RankProgress, ...] = ()


class ReportArrived(EventBase, frozen=True, kw_only=True, tag=True):
    """One report of a node. The shell has dropped numbers it had taken before.

    ``entropy``: 64 hex digits from the shell's random source, of a launcher that joins; becomes a job's secret when the
    report creates one.
    """

    node: NodeId
    incarnation: Incarnation
    number: int
    body: AnyReport
    entropy: str


class NodeDisconnected(EventBase, frozen=True, kw_only=True, tag=True):
    """The node's session ended without our doing. Not yet a loss: agents restart, networks blink."""

    node: NodeId
    incarnation: Incarnation


class NodeSeen(EventBase, frozen=True, kw_only=True, tag=True):
    """Any authenticated word of a node that this controller had not heard since it began, or that was disconnected,
    suspect or lost. ``others``: more of them, each in the life that it spoke for, heard in the same moment."""

    node: NodeId
    incarnation: Incarnation
    others: tuple[tuple[NodeId, Incarnation], ...] = ()


class DatabaseAvailabilityChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """The database went away, or is back with everything written that was decided meanwhile.

    While it is away nothing that must survive this controller may be decided: nobody is evicted, no version is
    committed, no job begins. Running jobs regroup, under numbers that no other controller can give
    (``everstep_controller.core.jobs.generations``). ``unsent``: jobs whose newest generation was decided in the
    transaction that
    failed. Nobody was told of it, and its number may be given again by another controller: they get another one.
    """

    is_unavailable: bool
    reason: str = ""
    unsent_jobs: tuple[JobId, ...] = ()


class RemediationFinished(EventBase, frozen=True, kw_only=True, tag=True):
    """A remediation that ``effects.RequestRemediation`` asked for has come to its end.

    ``ok``: it was carried out and read back; else ``detail`` says why it was given up. ``dry_run``: nothing was done,
    and it counts as done.
    """

    remediation_id: str
    node: NodeId
    succeeded: bool
    detail: str = ""
    dry_run: bool = False


class SchedulerStateChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """What the scheduler shows of a node differs from what it showed before.

    ``cordoned_by``: somebody other than Everstep has taken it out of service (a person, another program), with
    ``reason``; empty when nobody has, or no longer. ``uncordoned``: the remedy by which Everstep took it out of
    service, where nothing keeps it out there any more.
    """

    node: NodeId
    cordoned_by: str = ""
    reason: str = ""
    lifted_cordon_id: str = ""


class OperatorAction(StrEnum):
    """What a person may order.

    DRAIN: leave running jobs at a step boundary, then stay out. HOLD: no new roster takes the node; what runs there
    goes on until its job regroups; one that is out already is not treated, and does not come back. RELEASE: the end of
    DRAIN and HOLD, and of nothing else; the node comes back by probation, or goes on with its cures. EVICT: out of
    every job at once, over any budget. READMIT: back, on probation unless the node was only held; it ends a maintenance
    window early. REPAIR: out for repair; only READMIT brings it back. FORGET: drop a node that is not heard and that no
    job wants. STOP_JOB: end the job. RESIZE_JOB: at most ``size`` nodes from the next boundary on. RESET_BREAKER:
    evictions may happen again, by what stands then. MAINTENANCE: a node, or all nodes of ``rack``, leave their jobs at
    a boundary and come back by probation at ``until``; nothing that happens to them before is held against them.
    CANCEL_MAINTENANCE: what is planned for the node, or for ``rack``, does not begin.
    """

    DRAIN = "drain"
    HOLD = "hold"
    RELEASE = "release"
    EVICT = "evict"
    READMIT = "readmit"
    REPAIR = "repair"
    FORGET = "forget"
    STOP_JOB = "stop_job"
    RESIZE_JOB = "resize_job"
    RESET_BREAKER = "reset_breaker"
    MAINTENANCE = "maintenance"
    CANCEL_MAINTENANCE = "cancel_maintenance"


class OperatorCommand(EventBase, frozen=True, kw_only=True, tag=True):
    """An order. ``node``, ``rack`` or ``job`` names its subject; ``actor`` is who gave it, ``reason`` why (shown for
    ever). ``until``: wall seconds. ``starts_at`` the same, of a window that is planned ahead; None: it begins now.
    """

    action: OperatorAction
    actor: str
    reason: str = ""
    node: NodeId | None = None
    job: JobId | None = None
    node_limit: int | None = None
    rack: str | None = None
    until: float | None = None
    starts_at: float | None = None


class ProbeRequested(EventBase, frozen=True, kw_only=True, tag=True):
    """Somebody wants an all-reduce probe between ``nodes`` (two or more), over gloo or nccl."""

    nodes: tuple[NodeId, ...]
    backend: str = "gloo"
    actor: str
    reason: str = ""


Event = (
    ControllerStarted
    | Tick
    | AgentRegistered
    | HeartbeatChanged
    | ReportArrived
    | NodeDisconnected
    | NodeSeen
    | DatabaseAvailabilityChanged
    | RemediationFinished
    | SchedulerStateChanged
    | OperatorCommand
    | ProbeRequested
)
