"""What operators ask and are told.

docs/reference shows which route takes and answers what. Reading needs a viewer's or an operator's token, changing an
operator's. Times are wall seconds of the controller.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Finding, GenerationReason, JobState, NodeState, Verdict
from everstep.wire.v1.agent import UNKNOWN_HOST, Domain, Gpu, Host
from everstep.wire.v1.base import Message, OperatorRequest, ShortText
from everstep.wire.v1.training import GenerationSpec, JobSpec, Member


class ReasonOnlyRequest(OperatorRequest, frozen=True, kw_only=True):
    """Why an operator changes something; it stands in the audit log beside the operator's name."""


class Resize(OperatorRequest, frozen=True, kw_only=True):
    """A bound on a job's nodes, from its next boundary on."""

    size: Annotated[int, msgspec.Meta(ge=1)]


class ChangeResult(Message, frozen=True, kw_only=True):
    """The change is durable. ``trace`` finds everything that follows from it; ``sentence`` says what was decided."""

    trace: TraceId
    sentence: ShortText = ""


class NodeSummary(Message, frozen=True, kw_only=True):
    """One line about a node. ``reason`` says why it is in its state, ``job`` whose roster it is in.

    ``connected``: it can be told something at once. ``findings`` counts what is raised and not cleared. ``model``: of
    its GPUs; ``labels``: the site's own words for it. ``hold``: a person's order that keeps it out, whatever its state.
    ``driver``: its version. ``outbreaks``: kinds (and XIDs) of findings that stand on it and for which it is not
    evicted, since they stand on many nodes at once. A node with any is not fit, whatever its state.
    """

    node: NodeId
    state: NodeState
    since: float
    reason: str = ""
    connected: bool = False
    last_seen_at: float | None = None
    job: JobId | None = None
    gpus: int = 0
    findings: int = 0
    domain: Domain = Domain()
    gpu_model: str = ""
    labels: dict[str, str] = {}
    hold_reason: str = ""
    driver_version: str = ""
    outbreaks: tuple[str, ...] = ()


class PlannedMaintenance(Message, frozen=True, kw_only=True):
    """Maintenance that will begin; ``sentence`` says by whose order, and why."""

    starts_at: float
    until: float
    sentence: str


class NodeDetail(Message, frozen=True, kw_only=True):
    """Everything known about a node. ``verdicts`` are its newest first. ``registered_at``: when its agent last did.

    ``offences``: its score of repeated faults, which time halves. ``hold``: a person's order that keeps it out;
    ``cordoned_by``: who else keeps it out; ``maintenance_until``: the end of its window; ``planned``: those to come.
    ``held_by``: what holds an eviction that it is convicted to.
    """

    summary: NodeSummary
    incarnation: Incarnation
    agent_version: str = ""
    driver_version: str = ""
    boot_id: str = ""
    vault: str = ""
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    evictions: int = 0
    pending_directives: int = 0
    registered_at: float = 0.0
    offence_score: float = 0.0
    hold_reason: str = ""
    external_cordon_by: str = ""
    maintenance_until: float = 0.0
    planned_maintenance: tuple[PlannedMaintenance, ...] = ()
    eviction_deferred_by: str = ""


class NodeList(Message, frozen=True, kw_only=True):
    """In the order of their names. ``total`` counts all that match, ``next`` is the ``cursor`` of the page after (empty
    on the last one)."""

    nodes: tuple[NodeSummary, ...]
    total: int = 0
    next: str = ""


class GenerationRecovery(Message, frozen=True, kw_only=True):
    """One generation after the first: from the decision to the first step of its last rank.

    ``seconds`` is None while a rank has not resumed. ``phases_s`` is, by phase, the slowest rank's seconds.
    ``resumed`` counts ranks that reported their first step.
    """

    generation: GenerationNumber
    reason: GenerationReason
    sentence: str
    trace: TraceId
    decided_at: float
    duration_s: float | None = None
    restored: Version | None = None
    resumed_ranks: int = 0
    world_size: int = 0
    phases_s: dict[str, float] = {}


class RankStatus(Message, frozen=True, kw_only=True):
    """A rank's newest progress. ``step`` is its last finished step."""

    rank: Rank
    node: NodeId
    step: int
    step_s: float = 0.0
    loss: float | None = None


class JobSummary(Message, frozen=True, kw_only=True):
    """One line about a job. ``step`` is the newest that all ranks finished."""

    job: JobId
    state: JobState
    generation: GenerationNumber = 0
    world_size: int = 0
    nodes: int = 0
    spares: int = 0
    step: int = 0
    step_s: float = 0.0
    loss: float | None = None
    committed: Version | None = None
    verified: Version | None = None
    reason: str = ""


class JobDetail(Message, frozen=True, kw_only=True):
    """Everything known about a job. ``recoveries`` oldest first.

    ``unable``: nodes whose launchers have joined and that may not be seated now, and why.
    """

    summary: JobSummary
    spec: JobSpec
    roster: tuple[Member, ...] = ()
    spares: tuple[NodeId, ...] = ()
    store: Address | None = None
    ranks: tuple[RankStatus, ...] = ()
    recoveries: tuple[GenerationRecovery, ...] = ()
    ineligible_nodes: dict[NodeId, str] = {}


class Exposure(Message, frozen=True, kw_only=True):
    """What the job would lose if ``nodes`` were lost with their memory, all at once.

    ``kind``: one node, a pair of them, or everything in one rack, switch or power unit (``name``). ``whole``: the
    committed version stays complete, or parity has an older one (``falls_back``). Where not, ``ranks`` are those whose
    shares would be gone (the first 64). ``nodes_left``: the roster the job would go on with; 0: it would be paused,
    below its minimum.
    """

    kind: Literal["node", "pair", "rack", "switch", "power"]
    name: str
    nodes: tuple[NodeId, ...]
    restorable: bool
    nodes_left: int
    sentence: ShortText
    ranks: tuple[Rank, ...] = ()
    fallback_version: Version | None = None


class Restorability(Message, frozen=True, kw_only=True):
    """What the job goes back to if something fails now, and what it cannot afford to lose.

    ``version``: what was committed last. A crash restores this one or a newer one (None: nothing is committed yet, and
    it takes what is found whole, or starts anew). ``ceiling``: after corruption nothing newer counts. ``missing``:
    ranks whose shares of ``version`` nobody in reach holds now (the first 64). ``exposures``: those that would cost
    something come first.
    """

    job: JobId
    sentence: ShortText
    version: Version | None = None
    verified: bool = False
    ceiling: Version | None = None
    missing_ranks: tuple[Rank, ...] = ()
    exposures: tuple[Exposure, ...] = ()


class JobList(Message, frozen=True, kw_only=True):
    """In the order of their names; ``total`` and ``next`` as in NodeList."""

    jobs: tuple[JobSummary, ...]
    total: int = 0
    next: str = ""


class GenerationList(Message, frozen=True, kw_only=True):
    """Rosters, oldest first; their ``secret`` is blanked. ``next`` is the ``cursor`` of the page of older ones."""

    generations: tuple[GenerationSpec, ...]
    next: str = ""


class Event(Message, frozen=True, kw_only=True):
    """One line of the audit log: what happened or was decided, in a sentence, with its facts in ``detail``."""

    id: int
    at: float
    kind: str
    sentence: str
    node: str = ""
    job: str = ""
    generation: int | None = None
    trace: TraceId = ""
    detail: dict[str, str] = {}


class EventGap(Message, frozen=True, kw_only=True):
    """Of the event stream: what follows ``after`` up to ``through`` is not in the audit log, and never comes.

    ``reason``: ``deleted`` by age or number, or ``unknown``: ``after`` is beyond the newest event, so the reader has
    seen a database that this one is not.
    """

    after: int
    through: int
    reason: Literal["deleted", "unknown"]
    sentence: str


class EventList(Message, frozen=True, kw_only=True):
    """Oldest first. ``next_after`` is what to ask ``after`` next."""

    events: tuple[Event, ...]
    next_after: int


class StartProbe(OperatorRequest, frozen=True, kw_only=True):
    """Ask nodes to run an all-reduce among them: latency and bus bandwidth by size."""

    nodes: Annotated[tuple[NodeId, ...], msgspec.Meta(min_length=1, max_length=64)]
    backend: Literal["gloo", "nccl"] = "gloo"


class ProbeRow(Message, frozen=True, kw_only=True):
    """One size: bytes, seconds (median), bytes per second on the bus; the slowest node's figures."""

    bytes: int
    latency_s: float
    bandwidth_bytes_per_s: float


class ProbeStatus(Message, frozen=True, kw_only=True):
    """``ok`` is None while a node's answer is missing; ``answers`` says what each had to say."""

    probe: str
    nodes: tuple[NodeId, ...]
    started_at: float
    trace: TraceId = ""
    ok: bool | None = None
    answers: dict[str, str] = {}
    rows: tuple[ProbeRow, ...] = ()


class ProbeList(Message, frozen=True, kw_only=True):
    """Newest first; those since the controller began to lead. ``next`` is the ``cursor`` of the page after (empty on
    the last one)."""

    probes: tuple[ProbeStatus, ...]
    next: str = ""


class Outbreak(Message, frozen=True, kw_only=True):
    """A finding that stands on so many nodes at once that none of them is evicted for it.

    Attributes:
        finding: its kind, and XID: ``gpu.xid/79``.
        rule: id of the rule that judges it.
        count: how many nodes it stands on.
        nodes: the first of these, at most 32.
        since: when the first of them showed it, in wall seconds.
        sentence: where it stands, and what is suspected.
        advice: what happens next, and what a person can do.
    """

    finding: str
    rule: str
    count: int
    nodes: tuple[NodeId, ...]
    since: float
    sentence: str
    advice: str


class FleetStatus(Message, frozen=True, kw_only=True):
    """The fleet on one screen. ``nodes`` counts by state; ``jobs`` are the ones not over.

    Nodes that serve although a finding of one of the ``outbreaks`` stands on them are counted as ``outbreak``, whatever
    their state.

    ``budget_left`` is how many nodes may be evicted now, ``breaker`` why automatic eviction is paused ("" when it is
    not), since ``breaker_at``. ``epoch`` counts the controller's lives over this database. ``store_away`` says why the
    database cannot be written ("" when it can): jobs run and regroup, and nothing else is decided.
    """

    version: str
    epoch: int
    now: float
    started_at: float
    nodes: dict[str, int]
    jobs: tuple[JobSummary, ...] = ()
    connected_nodes: int = 0
    budget_left: int = 0
    breaker: str = ""
    newest_event: int = 0
    breaker_at: float = 0.0
    database_outage: str = ""
    outbreaks: tuple[Outbreak, ...] = ()
