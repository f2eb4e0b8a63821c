"""Events of the fleet: frozen and tagged, so that a journal can store and replay them.

The shell sets ``trace`` on an event when the event arises; a report or finding with a trace of its own keeps that one.
``ReportArrived.entropy`` is the only source of randomness.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.ids import Incarnation, JobId, NodeId, TraceId
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import Register
from everstep.wire.v1.training import AnyReport, RankProgress


class EventBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base of all events."""

    trace: TraceId = ""
    """Trace id of the event and of everything that follows from it."""


class ControllerStarted(EventBase, frozen=True, kw_only=True, tag=True):
    """The first event after ``restore_state`` or a takeover. All deadlines restart, so that no node is late."""

    epoch: int = 0
    """Number of this controller's term over its database; larger than all earlier ones."""


class Tick(EventBase, frozen=True, kw_only=True, tag=True):
    """The time that ``next_deadline`` returned has come."""

    lag_s: float = 0.0
    """Lag of the shell in seconds: the delay of the Tick or the age of the oldest unread request. A lagging observer
    lengthens every deadline by its lag before it suspects nodes."""


class AgentRegistered(EventBase, frozen=True, kw_only=True, tag=True):
    """An agent began a new life, or registered again in the same one."""

    register: Register


class HeartbeatChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """A heartbeat with news. A heartbeat without news goes to ``engine.apply_heartbeat`` instead."""

    node: NodeId
    incarnation: Incarnation
    findings: tuple[Finding, ...] | None = None
    ranks: tuple[RankProgress, ...] = ()


class ReportArrived(EventBase, frozen=True, kw_only=True, tag=True):
    """One report of a node. The shell drops reports whose number it has already accepted."""

    node: NodeId
    incarnation: Incarnation
    number: int
    body: AnyReport
    entropy: str
    """64 hex digits from the shell's random source; they become the secret of a job that the report creates."""


class NodeDisconnected(EventBase, frozen=True, kw_only=True, tag=True):
    """The node's session ended by itself. This is not yet a loss: agents restart, and networks fail briefly."""

    node: NodeId
    incarnation: Incarnation


class NodeSeen(EventBase, frozen=True, kw_only=True, tag=True):
    """An authenticated message of a node that was unseen since the start, disconnected, suspect or lost."""

    node: NodeId
    incarnation: Incarnation
    """Incarnation for which the node spoke."""
    others: tuple[tuple[NodeId, Incarnation], ...] = ()
    """Further nodes heard at the same moment, with their incarnations."""


class DatabaseAvailabilityChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """The database became unavailable, or available again with everything written that was decided meanwhile.

    During an outage the core decides nothing that must survive this controller: no eviction, no commit, no new job.
    Running jobs regroup under numbers that no other controller can give (``core.jobs.generations``).
    """

    is_unavailable: bool
    """True at the start of an outage, false at its end."""
    reason: str = ""
    unsent_jobs: tuple[JobId, ...] = ()
    """Jobs whose newest generation was decided in the failed transaction. They get another generation."""


class RemediationFinished(EventBase, frozen=True, kw_only=True, tag=True):
    """A remediation that ``effects.RequestRemediation`` requested has ended."""

    remediation_id: str
    node: NodeId
    succeeded: bool
    """True if the action was carried out and read back."""
    detail: str = ""
    """Reason why the action was given up."""
    dry_run: bool = False
    """True if nothing was done; the action then counts as done."""


class SchedulerStateChanged(EventBase, frozen=True, kw_only=True, tag=True):
    """The scheduler's view of a node has changed."""

    node: NodeId
    cordoned_by: str = ""
    """Person or program other than Everstep that has cordoned the node; empty for none."""
    reason: str = ""
    lifted_cordon_id: str = ""
    """Id of Everstep's own cordon, if nothing keeps the node out there any more."""


class OperatorAction(StrEnum):
    """Orders that an operator may give."""

    DRAIN = "drain"
    """Leave running jobs at a step boundary, then stay out."""
    HOLD = "hold"
    """Keep the node out of new rosters. Its jobs continue until they regroup. A node that is already out is not treated
    and does not come back."""
    RELEASE = "release"
    """End DRAIN and HOLD, and nothing else. The node comes back through probation, or its treatment continues."""
    EVICT = "evict"
    """Leave every job at once, beyond any budget."""
    READMIT = "readmit"
    """Come back, through probation unless the node was only held. Ends a maintenance window early."""
    REPAIR = "repair"
    """Go to repair; only READMIT brings the node back."""
    FORGET = "forget"
    """Drop an unreachable node that no job needs."""
    STOP_JOB = "stop_job"
    RESIZE_JOB = "resize_job"
    """Use at most ``node_limit`` nodes from the next boundary on."""
    RESET_BREAKER = "reset_breaker"
    """Allow evictions again, based on the findings that then stand."""
    MAINTENANCE = "maintenance"
    """Make a node, or all nodes of ``rack``, leave their jobs at a boundary and come back through probation at
    ``until``. Nothing that happens to them before counts against them."""
    CANCEL_MAINTENANCE = "cancel_maintenance"
    """Cancel the windows planned for the node or ``rack``."""


class OperatorCommand(EventBase, frozen=True, kw_only=True, tag=True):
    """An operator's order. ``node``, ``rack`` or ``job`` names its subject."""

    action: OperatorAction
    actor: str
    reason: str = ""
    """The person's reason; kept in the event log."""
    node: NodeId | None = None
    job: JobId | None = None
    node_limit: int | None = None
    """Limit on nodes for RESIZE_JOB."""
    rack: str | None = None
    until: float | None = None
    """End of a maintenance window, in wall seconds."""
    starts_at: float | None = None
    """Start of a planned maintenance window, in wall seconds; None means now."""


class ProbeRequested(EventBase, frozen=True, kw_only=True, tag=True):
    """An operator's request for an all-reduce probe."""

    nodes: tuple[NodeId, ...]
    """Two or more nodes."""
    backend: str = "gloo"
    """``gloo`` or ``nccl``."""
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
