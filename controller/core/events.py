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
    """First event after ``restore``, or after a take-over: all deadlines start anew, nobody is late for our absence."""


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

    ``entropy``: 64 hex digits from the shell's random source; becomes a job's secret when the report creates one.
    """

    node: NodeId
    incarnation: Incarnation
    number: int
    body: AnyReport
    entropy: str


class NodeDisconnected(EventBase, frozen=True, kw_only=True, tag=True):
    """The node's long poll ended without our doing. Not yet a loss: agents restart, networks blink."""

    node: NodeId
    incarnation: Incarnation


class NodeHeard(EventBase, frozen=True, kw_only=True, tag=True):
    """Any authenticated request of a node that was disconnected, suspect or lost."""

    node: NodeId
    incarnation: Incarnation


class OperatorAction(StrEnum):
    """What a person may order.

    DRAIN: leave running jobs at a step boundary, then stay out. HOLD: no new roster takes the node; what runs there
    goes on until its job regroups. EVICT: out of every job at once, over any budget. READMIT: back, on probation
    unless the node was only held. REPAIR: out for repair; only READMIT brings it back. STOP_JOB: end the job.
    RESIZE_JOB: at most ``size`` nodes from the next boundary on. RESET_BREAKER: evictions may happen again; verdicts
    of before are not acted on.
    """

    DRAIN = "drain"
    HOLD = "hold"
    EVICT = "evict"
    READMIT = "readmit"
    REPAIR = "repair"
    STOP_JOB = "stop_job"
    RESIZE_JOB = "resize_job"
    RESET_BREAKER = "reset_breaker"


class OperatorCommand(EventBase, frozen=True, kw_only=True, tag=True):
    """An order. ``node`` or ``job`` names its subject; ``actor`` is who gave it, ``reason`` why (shown for ever)."""

    kind: OperatorAction
    actor: str
    reason: str = ""
    node: NodeId | None = None
    job: JobId | None = None
    size: int | None = None


class ProbeRequested(EventBase, frozen=True, kw_only=True, tag=True):
    """Somebody wants an all-reduce probe between ``nodes`` (two or more), over gloo or nccl."""

    nodes: tuple[NodeId, ...]
    backend: str = "gloo"
    actor: str


Event = (
    ControllerStarted
    | Tick
    | AgentRegistered
    | HeartbeatChanged
    | ReportArrived
    | NodeDisconnected
    | NodeHeard
    | OperatorCommand
    | ProbeRequested
)
