"""Define the requests of operators and their answers.

The OpenAPI document lists the routes. Reading needs a viewer's or an operator's token, changing an operator's. Times
are wall seconds of the controller.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, ShortText, TraceId, Version
from everstep.vocabulary import AuditKind, Finding, GenerationReason, JobState, NodeState, Verdict
from everstep.wire.v1.agent import UNKNOWN_HOST, Domain, Gpu, Host
from everstep.wire.v1.base import Message, OperatorRequest
from everstep.wire.v1.training import GenerationSpec, JobSpec, Member, SdcMode, SdcPreset


class ReasonOnlyRequest(OperatorRequest, frozen=True, kw_only=True):
    """A change without parameters; the event log shows the reason beside the operator's name."""


class Resize(OperatorRequest, frozen=True, kw_only=True):
    """A bound on a job's nodes, from its next boundary on."""

    size: Annotated[int, msgspec.Meta(ge=1)]


class ChangeResult(Message, frozen=True, kw_only=True):
    """The change is durable. ``trace`` finds all its consequences; ``sentence`` is the decision."""

    trace: TraceId
    sentence: ShortText = ""


class NodeSummary(Message, frozen=True, kw_only=True):
    """One line about a node.

    Attributes:
        reason: Why it is in its state.
        connected: Directives reach it at once.
        job: The job whose roster it is in.
        findings: Number of findings that are raised and not cleared.
        gpu_model: Model of its GPUs.
        labels: The site's own labels for it.
        hold_reason: A person's order that keeps it out, whatever its state.
        outbreaks: Kinds (and XIDs) of its findings for which it is not evicted, since many nodes show them at once. A
            node with any is not fit, whatever its state.
        is_faulty: It serves despite a fault that needs a person, so it is not fit, whatever its state.
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
    is_faulty: bool = False


class PlannedMaintenance(Message, frozen=True, kw_only=True):
    """Maintenance that will begin; ``sentence`` says by whose order, and why."""

    starts_at: float
    until: float
    sentence: str


class Drift(Message, frozen=True, kw_only=True):
    """A value in which a node differs from the majority of like nodes. It may be an upgrade in progress.

    Like nodes are machines of one model with GPUs of one model. No node is evicted for a difference.

    Attributes:
        value: ``kernel``, ``driver``, ``vbios``, ``inforom``, ``nic_firmware``, ``gpu_count``, ``gpu_memory``,
            ``ecc_mode``, ``mig_mode`` or ``persistence_mode``. Later releases may add others.
        actual: The node's own; several are separated by commas.
        usual: The majority's.
        usual_nodes: Number of like nodes with ``usual``.
        compared_nodes: Number of like nodes whose value is known, with this node.
        kind: What the like nodes are.
        is_offline: The value is from the last registration of a node that is not heard now.
        sentence: All of it in words.
    """

    node: NodeId
    value: str
    actual: str
    usual: str
    usual_nodes: int
    compared_nodes: int
    kind: str
    is_offline: bool = False
    sentence: str = ""


class DriftList(Message, frozen=True, kw_only=True):
    """Differences between like nodes, in the order of nodes; ``total`` and ``next`` as in NodeList."""

    drifts: tuple[Drift, ...]
    total: int = 0
    next: str = ""


class NodeDetail(Message, frozen=True, kw_only=True):
    """Everything known about a node.

    Attributes:
        verdicts: Its verdicts, newest first.
        registered_at: When its agent last registered.
        offence_score: Score of repeated faults, which decays over time.
        hold_reason: A person's order that keeps it out.
        external_cordon_by: Another system that keeps it out.
        maintenance_until: End of its maintenance window.
        planned_maintenance: Windows to come.
        eviction_deferred_by: What defers its decided eviction.
        drifts: Values in which it differs from the majority of like nodes.
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
    drifts: tuple[Drift, ...] = ()


class GpuStatus(Message, frozen=True, kw_only=True):
    """A GPU's newest gauges. None: the device does not offer the value, or nothing was received yet.

    Attributes:
        memory_bytes: Its whole memory.
        is_lost: NVML reports the GPU as gone.
        utilization: Share of the time that a kernel was running, 0 to 1.
        throttled_by: NVML's reasons for which the GPU is slower than it could be.
        ecc_corrected: Corrected memory errors since the driver was loaded; ``ecc_uncorrected`` likewise.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    is_lost: bool = False
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


class NodeGpus(Message, frozen=True, kw_only=True):
    """The GPUs of a node's registration with their newest gauges.

    An agent sends gauges that have changed every 10 to 20 s, and all of them at least once a minute. The controller
    keeps the newest in memory. ``received_at``: when they came, in wall seconds; None: none came since it leads.
    """

    node: NodeId
    received_at: float | None = None
    gpus: tuple[GpuStatus, ...] = ()


class NodeList(Message, frozen=True, kw_only=True):
    """Nodes in the order of their names.

    ``total`` counts all that match; ``next`` is the ``cursor`` of the next page (empty on the last one).
    """

    nodes: tuple[NodeSummary, ...]
    total: int = 0
    next: str = ""


class GenerationRecovery(Message, frozen=True, kw_only=True):
    """One generation after the first: from the decision to the first step of its last rank.

    Attributes:
        duration_s: Seconds of the recovery; None while a rank has not resumed.
        resumed_ranks: Number of ranks that reported their first step.
        phases_s: The slowest rank's seconds, by phase.
        finished_step: The last step that a surviving rank had finished before; None if it is not known.
        after_step: The boundary up to which ranks trained on after the decision; None if they stopped at once.
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
    finished_step: int | None = None
    after_step: int | None = None


class RankStatus(Message, frozen=True, kw_only=True):
    """A rank's newest progress. ``step`` is its last finished step. ``busy_s``: of ``step_s``, the seconds in which the
    rank did not wait for others; None if it is not measured. ``snapshot_every``: steps between its snapshots; 0 if only
    versions to be committed are stored."""

    rank: Rank
    node: NodeId
    step: int
    step_s: float = 0.0
    loss: float | None = None
    busy_s: float | None = None
    snapshot_every: int = 1


class JobSummary(Message, frozen=True, kw_only=True):
    """One line about a job.

    Attributes:
        step: The newest step that all ranks finished.
        until_step: The last one that they will make; 0 if it is not known.
        audited: The newest version that audits have verified.
        is_stopped: An operator ended it; its ``state`` is ``failed``.
        stall: What ranks without progress do, as in "rank 0 works alone at train.py:16; ranks 1-3 wait".
        stall_since: Since when; None without a stall.
    """

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
    until_step: int = 0
    audited: Version | None = None
    is_stopped: bool = False
    stall: str = ""
    stall_since: float | None = None


class JobAudits(Message, frozen=True, kw_only=True):
    """Audits of a job: what they may do, and what they do not cover.

    Attributes:
        off: Audits that are off for the rest of the job, and why.
        not_compared: Nodes whose results are not compared, and why.
        reports: Newest differences, if audits only report.
        withdrawn: Newest suspicions against nodes that were withdrawn.
        voting_off_reason: Why digests of replicas are not compared any more; empty while they are.
    """

    preset: SdcPreset = "off"
    mode: SdcMode = "enforce"
    off: dict[AuditKind, str] = {}
    not_compared: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    voting_off_reason: str = ""


class JobDetail(Message, frozen=True, kw_only=True):
    """Everything known about a job. ``recoveries`` are oldest first.

    Attributes:
        created_at: When the first launcher of this run joined.
        since: When the job entered its state.
        ineligible_nodes: Nodes whose launchers have joined but that may not be seated now, and why.
    """

    summary: JobSummary
    spec: JobSpec
    roster: tuple[Member, ...] = ()
    spares: tuple[NodeId, ...] = ()
    store: Address | None = None
    ranks: tuple[RankStatus, ...] = ()
    recoveries: tuple[GenerationRecovery, ...] = ()
    ineligible_nodes: dict[NodeId, str] = {}
    created_at: float = 0.0
    since: float = 0.0
    audits: JobAudits = JobAudits()


class ProgressSample(Message, frozen=True, kw_only=True):
    """A job's progress at one time. ``step`` is the newest that all ranks had finished."""

    at: float
    generation: GenerationNumber
    step: int
    world_size: int
    step_s: float = 0.0
    loss: float | None = None


class ProgressHistory(Message, frozen=True, kw_only=True):
    """A job's progress since this controller leads, oldest first, in a bounded number of samples. ``interval_s``:
    seconds between samples; it doubles, and every second sample is dropped, when they become too many."""

    job: JobId
    interval_s: float
    samples: tuple[ProgressSample, ...] = ()


class OutputLine(Message, frozen=True, kw_only=True):
    """A line that a rank printed, and when, in wall seconds of its node."""

    at: float
    text: str


class RankOutput(Message, frozen=True, kw_only=True):
    """What a rank printed last, oldest line first; its predecessors in the same place are included."""

    rank: Rank
    node: NodeId
    lines: tuple[OutputLine, ...] = ()


class JobOutput(Message, frozen=True, kw_only=True):
    """What the ranks of a job printed last, as far as the controller's machine keeps it.

    Attributes:
        ranks: In order; of many, those that printed last.
        kept_ranks: Number of ranks whose output this machine keeps.
        sentence: Where the output of other ranks is; empty if there are none.
        command: The command that prints it there.
    """

    job: JobId
    ranks: tuple[RankOutput, ...] = ()
    kept_ranks: int = 0
    sentence: str = ""
    command: str = ""


class CallerIdentity(Message, frozen=True, kw_only=True):
    """The sender as the controller knows it: its role, its name, and when its credential ends (None: never)."""

    role: str
    subject: str
    expires_at: float | None = None


class LoginOptions(Message, frozen=True, kw_only=True):
    """How people log in with accounts of an OpenID Connect provider. All fields are empty if they cannot.

    Attributes:
        issuer: URL of the provider.
        page: URL at which a browser begins a login on the web page; empty if there is none.
        command_client_id: Public client with which commands log in; empty if they cannot.
        scopes: Scopes to ask for.
    """

    issuer: str = ""
    page: str = ""
    command_client_id: str = ""
    scopes: tuple[str, ...] = ()


class LossForecast(Message, frozen=True, kw_only=True):
    """The job's loss if ``nodes`` were lost with their memory, all at once.

    Attributes:
        kind: One node, a pair of nodes, or everything in one rack, switch or power unit (``name``).
        restorable: The committed version stays complete, or parity has an older one (``fallback_version``).
        remaining_nodes: Size of the remaining roster; 0: the job would be paused, below its minimum.
        ranks: If not restorable, the ranks whose shares would be gone (the first 64).
    """

    kind: Literal["node", "pair", "rack", "switch", "power"]
    name: str
    nodes: tuple[NodeId, ...]
    restorable: bool
    remaining_nodes: int
    sentence: ShortText
    ranks: tuple[Rank, ...] = ()
    fallback_version: Version | None = None


class Restorability(Message, frozen=True, kw_only=True):
    """The version that the job would restore after a failure now, and the losses that it cannot survive.

    Attributes:
        version: The version committed last. A crash restores this one or a newer one. None: nothing is committed yet,
            and the job takes a complete version that it finds, or starts anew.
        ceiling: After corruption no newer version counts.
        missing_ranks: Ranks whose shares of ``version`` no reachable node holds now (the first 64).
        loss_forecasts: Those that would cost something come first.
    """

    job: JobId
    sentence: ShortText
    version: Version | None = None
    verified: bool = False
    ceiling: Version | None = None
    missing_ranks: tuple[Rank, ...] = ()
    loss_forecasts: tuple[LossForecast, ...] = ()


class JobList(Message, frozen=True, kw_only=True):
    """Jobs in the order of their names; ``total`` and ``next`` as in NodeList."""

    jobs: tuple[JobSummary, ...]
    total: int = 0
    next: str = ""


class GenerationList(Message, frozen=True, kw_only=True):
    """Rosters, oldest first; their ``secret`` is blanked. ``next`` is the ``cursor`` of the page of older ones."""

    generations: tuple[GenerationSpec, ...]
    next: str = ""


class Event(Message, frozen=True, kw_only=True):
    """One line of the event log: an event or decision in a sentence, with its facts in ``detail``."""

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
    """A gap in the event stream: events after ``after`` up to ``through`` are not in the event log, and never come.

    ``reason``: ``deleted`` by age or number; or ``unknown``: ``after`` is beyond the newest event, so the reader has
    seen another database.
    """

    after: int
    through: int
    reason: Literal["deleted", "unknown"]
    sentence: str


class EventList(Message, frozen=True, kw_only=True):
    """Events, oldest first. ``next_after`` is the next request's ``after``."""

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
    """A probe. ``ok`` is None while a node's answer is missing; ``answers`` has each node's answer."""

    probe: str
    nodes: tuple[NodeId, ...]
    started_at: float
    trace: TraceId = ""
    ok: bool | None = None
    answers: dict[str, str] = {}
    rows: tuple[ProbeRow, ...] = ()


class ProbeList(Message, frozen=True, kw_only=True):
    """Probes since the controller began to lead, newest first; ``next`` as in NodeList."""

    probes: tuple[ProbeStatus, ...]
    next: str = ""


class Outbreak(Message, frozen=True, kw_only=True):
    """A finding on so many nodes at once that none of them is evicted for it.

    Attributes:
        finding: Its kind, and XID: ``gpu.xid/79``.
        rule: Id of the rule that judges it.
        count: Number of nodes with the finding.
        nodes: The first of these, at most 32.
        since: When the first of them showed it, in wall seconds.
        sentence: Where it is, and the suspected cause.
        advice: What happens next, and what a person can do.
    """

    finding: str
    rule: str
    count: int
    nodes: tuple[NodeId, ...]
    since: float
    sentence: str
    advice: str


class Need(Message, frozen=True, kw_only=True):
    """A matter that no automatic action will settle, so it needs a person.

    Attributes:
        kind: ``database_outage``, ``breaker``, ``outbreak``, ``job_paused``, ``job_failed``, ``job_notice``,
            ``deferred_eviction``, ``critical_finding``, ``quarantine``, ``repair``, ``lost`` or ``dry_run``. Later
            releases may add others.
        severity: ``critical`` or ``warning``.
        subject: The node, the job or the finding; ``fleet`` for the whole fleet.
        since: Wall seconds.
        reason: Why it needs a person, as a sentence.
        advice: What to do, as a sentence.
        command: The command to begin with; placeholders are in capitals.
        node: The node; empty for none.
        job: The job; empty for none.
        gpu: Index of the GPU on the node, or its id if the node does not know it; empty for none.
        finding: Kind of the finding, and XID or part: ``gpu.xid/79``, ``network.port_down/mlx5_0``; empty for none.
    """

    kind: str
    severity: str
    subject: str
    since: float
    reason: str
    advice: str
    command: str = ""
    node: str = ""
    job: str = ""
    gpu: str = ""
    finding: str = ""


class FleetStatus(Message, frozen=True, kw_only=True):
    """The fleet on one screen.

    Attributes:
        epoch: Number of the controller's lives over this database.
        nodes: Number of nodes by state. Nodes that serve despite a finding of one of the ``outbreaks`` count as
            ``outbreak``, and those that serve despite a fault that needs a person as ``faulty``, whatever their state.
        jobs: The jobs that are not over.
        budget_left: Number of nodes that may be evicted now.
        breaker: Why automatic eviction is paused; empty if it is not.
        breaker_at: Since when it is paused.
        database_outage: Why the database cannot be written, empty if it can. Jobs still run and regroup; nothing else
            is decided.
        needs: What needs a person, the gravest first, at most 200. The fleet is well only if this is empty.
        need_count: Number of all of them.
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
    needs: tuple[Need, ...] = ()
    need_count: int = 0
