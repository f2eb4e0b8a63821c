"""In-memory state of the core: stored records, and runtime state that is learned anew after a restart.

State that changes every step (progress, seals, acknowledgements) is runtime state. Its loss costs at most one
version's commit, and heartbeats bring it back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from everstep.ids import GenerationNumber, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import AuditKind, Finding, GenerationReason, ProbeKind, RankActivity
from everstep.wire.v1.training import AuditStatement, GenerationSpec, RankProgress
from everstep_controller.core.policy import BlameIsolationMethod, CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord
from everstep_controller.core.wording import format_duration


class ScopeKind(StrEnum):
    """Kind of a scope that limits or defers evictions. A scope is the kind alone, or ``kind:name``."""

    FLEET = "fleet"
    """The fleet's budget: its breaker is latched."""
    RACK = "rack"
    """The budget of a rack."""
    JOB = "job"
    """The budget of a job."""
    SHARED = "shared"
    """The fleet's budget, while other nodes show the finding with this signature."""
    NEEDED = "needed"
    """The minimum of a job."""
    DATABASE = "database"
    """A database outage."""

    def scope(self, name: str = "") -> str:
        """Return the scope of this kind, with this name if it has one."""
        return f"{self}:{name}" if name else str(self)

    @staticmethod
    def of(scope: str) -> ScopeKind:
        """Return the kind of a scope."""
        return ScopeKind(scope.partition(":")[0])


Ignored = Literal[
    "audit_statement.audit_is_off",
    "audit_statement.not_a_member",
    "audit_statement.stale",
    "audit_statement.surplus",
    "audit_statement.wrong_role",
    "audits_clean.not_a_member",
    "audits_clean.stale",
    "remediation_finished.unknown",
    "collective_failed.not_a_member",
    "collective_failed.stale",
    "disconnected.stale",
    "finding_cleared.unknown",
    "node_seen.stale",
    "launcher_joined.stale",
    "launcher_leaving.stale",
    "launcher_left.job_ended",
    "launcher_left.stale",
    "scheduler_state.unchanged",
    "peer_connection_lost.not_a_member",
    "probe_finished.unknown",
    "rank_finished.not_a_member",
    "rank_finished.stale",
    "rank_report.launcher_leaving",
    "rank_lost.not_a_member",
    "rank_lost.not_running",
    "rank_lost.stale",
    "rank_stalled.not_a_member",
    "rank_stalled.stale",
    "rank_unresponsive.stale",
    "report.unknown_job",
    "resumed.not_a_member",
    "resumed.stale",
    "user_error.not_a_member",
    "user_error.stale",
    "version_protected.stale",
    "version_sealed.not_a_member",
    "version_sealed.old_version",
    "version_sealed.stale",
    "version_spilled.wrong_folder",
    "version_spilled.stale",
    "version_spilled.not_a_member",
]
"""Reasons for which a rule drops an event. The controller's metrics export all of them from the start."""


class DeadlineKind(StrEnum):
    """Kind of a queued check. Its subject is the node, job, probe, case or scope to check, or ``fleet``."""

    SILENCE = "silence"
    """A node's silence: suspect the node, or declare it lost."""
    MAINTENANCE = "maintenance"
    """Planned maintenance windows that begin."""
    NODE = "node"
    """A node's grace after a disconnection, its quarantine, and witnesses that may count now."""
    NODE_TREATMENT = "node_treatment"
    """A node's treatment while it is out: remediation, diagnostics, and findings that expire or wait."""
    PROBE = "probe"
    """A probe without a result."""
    BLAME_CASE = "blame_case"
    """A blame case, or a suspect that waits for a partner."""
    JOB = "job"
    """Everything of a job that may be due."""
    CORRELATED_SILENCE = "correlated_silence"
    """The announcement of a correlated silence."""
    REJOIN_WINDOW = "rejoin_window"
    """The end of the wait for nodes that this controller has not heard yet."""
    DEFERRED_EVICTIONS = "deferred_evictions"
    """Evictions that one scope defers."""
    RETENTION = "retention"
    """Nodes and jobs to forget."""


FLEET = "fleet"
"""Subject of deadlines that concern no single node or job, and name of the scope that covers all nodes."""


class HeartbeatState(msgspec.Struct):
    """Facts about a node that heartbeats change. Rules read them through ``Transition.read_heartbeats``."""

    last_seen_at: float = 0.0
    """Time of the last message; 0.0 before the first message that this controller receives."""
    clean_heartbeats: int = 0
    """Number of clean heartbeats on probation."""
    longest_pause_s: float = 0.0
    """Longest recent pause between two messages, in seconds."""


class ObserverState(msgspec.Struct):
    """Ability of this controller to receive messages."""

    last_received_at: float = 0.0
    """Time of the last message from any node."""
    receiving_since: float = 0.0
    """Start of the current period without a long stall; no node's silence counts from before."""


class FindingBurst(msgspec.Struct):
    """A series of findings of one kind without a pause."""

    count: int = 0
    last_at: float = 0.0


class NodeRuntime(msgspec.Struct):
    """Runtime state of a node."""

    heartbeats: HeartbeatState = msgspec.field(default_factory=HeartbeatState)
    has_full_findings: bool = False
    """True once the agent has sent its complete findings to this controller."""
    disconnected_at: float | None = None
    """Time at which the connection closed, if no message arrived since."""
    has_silence_deadline: bool = False
    """True while a silence deadline is queued for the node."""
    launcher_rejoin_due: float | None = None
    """Time by which the node's launchers may rejoin; None if none is awaited."""
    jobs: dict[JobId, None] = {}
    """Jobs that ever had a launcher on the node."""
    open_jobs: dict[JobId, None] = {}
    """Unfinished jobs among ``jobs``, without those that continue with other launchers only."""
    peer_loss_reports: dict[NodeId, float] = {}
    """Nodes whose vaults lost this node's vault, with the time; void once the node is heard after that time."""
    finding_bursts: dict[str, FindingBurst] = {}
    """Bursts of findings, by kind and severity."""


class PendingRegroup(msgspec.Struct, frozen=True):
    """A regroup that waits for more witnesses, or for members that a new controller has not heard yet."""

    since: float
    due: float
    """End of the wait."""
    trace: TraceId
    """Trace id of the first report."""
    sentence: str
    reason: GenerationReason | None = None
    """Reason of a regroup that waits for unseen members; None if it waits for witnesses."""


class VersionSeals(msgspec.Struct):
    """Reports of ranks about one version."""

    sealed_ranks: set[Rank] = set()
    """Ranks that have sealed the version."""
    retaining_ranks: set[Rank] = set()
    """Ranks that keep their share until a later commit."""
    safe_ranks: set[Rank] = set()
    """Ranks whose share is durable in enough failure domains."""
    full_copies: dict[NodeId, dict[NodeId, None]] = {}
    """Full copies by node, as in ``ShareLocations``."""
    partial_copies: dict[NodeId, dict[NodeId, None]] = {}
    """Partial copies by node, as in ``ShareLocations``."""
    bytes_by_rank: dict[Rank, int] = {}
    """Size of each rank's share in bytes."""
    digests: dict[str, dict[Rank, str]] = {}
    """Digests by replica group and rank."""
    kinds: dict[Rank, str] = {}
    """What each rank computes with; empty if its report does not say."""


class JobProgress(msgspec.Struct):
    """Progress of a job as heartbeats report it. Rules read it through methods of ``Transition``."""

    by_rank: dict[Rank, RankProgress] = {}
    """Latest progress of each rank of the running generation."""
    furthest_step: int | None = None
    """Highest step that any rank has finished."""
    furthest_step_at: float = 0.0
    """Time at which ``furthest_step`` was reported."""
    entered_ranks: set[Rank] = set()
    """Ranks seen in the current generation."""

    def record_step(self, step: int, now: float) -> None:
        """Record that a rank has finished ``step``."""
        if self.furthest_step is None or step > self.furthest_step:
            self.furthest_step, self.furthest_step_at = step, now


class ResumeRuntime(msgspec.Struct):
    """Resumption of the current generation."""

    ranks: set[Rank] = set()
    """Ranks that have finished a step in the current generation."""
    slowest: tuple[float, Rank, dict[str, float]] | None = None
    """The resume that took longest: seconds, rank, and seconds by phase."""
    due: float = 0.0
    """Time by which all ranks must have resumed."""
    attempts: int = 0
    """Number of resume deadlines missed in a row."""
    is_inherited: bool = False
    """True if the generation had not resumed when this controller started."""
    first_seen_steps: dict[Rank, tuple[int, ...]] = {}
    """The first two steps at which each rank of an inherited generation was seen."""


class StalledRank(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank without progress last said of itself, or its agent of it. Fields are as in ``RankStalled``."""

    step: int
    collectives: int
    since: float
    """Time of its last progress."""
    threshold_s: float
    activity: RankActivity | None = None
    activity_since: float = 0.0
    doing: str = ""
    place: str = ""
    place_since: float = 0.0
    """Time since which its main thread has been at one instruction."""
    operation: str = ""
    section: str = ""
    limit_s: float | None = None
    waits_for_all: bool = False
    transfers: bool = False
    may_wait: bool = False
    stacks: str = ""
    """Its stacks, if it may be the rank that the others wait for, or is one of the first that wait."""

    @property
    def position(self) -> tuple[int, int]:
        """Step and number of collectives; the rank with the smallest is the one for which others wait."""
        return self.step, self.collectives


class StallNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence about ranks without progress."""

    key: str
    """A stall says each key once."""
    since: float
    text: str
    """The sentence, with ``{time}`` for the time since ``since``."""
    ranks: tuple[Rank, ...] = ()
    """The ranks that the sentence is about."""
    needs_person: bool = False
    """True if the stall may never end by itself, and nothing is done about it for long; ``core.needs`` lists it."""

    def sentence(self, now: float) -> str:
        return self.text.replace("{time}", format_duration(now - self.since))

    @property
    def lasting_sentence(self) -> str:
        """The sentence without the time."""
        return self.text.replace(" for {time}", "")


class RegroupRuntime(msgspec.Struct):
    """Reasons for, and deadlines of, the next regroup."""

    pending: PendingRegroup | None = None
    """A regroup that waits for more reports. The job runs, and a deadline is queued for its ``due``."""
    failed_collective_ranks: set[Rank] = set()
    """Ranks whose collective failed."""
    stalled_ranks: dict[Rank, StalledRank] = {}
    """Ranks that make no progress."""
    stall_check_due: float = 0.0
    """Time at which they are judged after the last report; 0.0 if they were."""
    said_of_stall: dict[str, None] = {}
    """Keys of the notices of the present stall."""
    stall_notice: StallNotice | None = None
    """The last of them."""
    unattributed_times: list[float] = []
    """Times of regroups that blamed no node."""
    rank_replaced_at: dict[NodeId, dict[int, float]] = {}
    """Time at which a new process replaced the rank, by node and local rank."""
    boundary_fallback_at: float = 0.0
    """Time at which an announced boundary is abandoned for an immediate regroup."""
    growth_due: float = 0.0
    """Time until which more returning nodes are awaited before the job grows; 0.0 before the first returns."""
    node_offered_at: float | None = None
    """Time since which a newly usable node waits for the next Tick, for which a deadline is queued; None if none."""
    unannounced_generation: GenerationNumber = 0
    """Number of a generation that is not stored yet and must not be announced; 0 if there is none."""

    def record_replaced_rank(self, node: NodeId, local_rank: int, now: float) -> None:
        """Record that another process takes the place of this rank's."""
        self.rank_replaced_at.setdefault(node, {})[local_rank] = now

    def drop_reports(self) -> None:
        """Drop the reports about a generation that is over."""
        self.pending, self.failed_collective_ranks = None, set()
        self.end_stall()

    def end_stall(self) -> None:
        """Forget the ranks without progress."""
        self.stalled_ranks, self.said_of_stall, self.stall_notice = {}, {}, None

    @property
    def waiting_rank(self) -> Rank | None:
        """A rank that waits for others although none is known to work; None if there is none."""
        if any(stalled.activity is RankActivity.WORKING for stalled in self.stalled_ranks.values()):
            return None
        return min(self.stalled_ranks, default=None)


class CommitRuntime(msgspec.Struct):
    """Versions of a job that are sealed, settled and committed."""

    seals: dict[Version, VersionSeals] = {}
    """Seals of versions newer than ``settled_version``."""
    committed_version: Version | None = None
    """Newest committed version: not above ``settled_version``, nor above ``JobCommits.restore_ceiling``."""
    committed_at: float = 0.0
    committed_bytes: int = 0
    verified_version: Version | None = None
    """Newest version whose digests agreed; not above ``settled_version``."""
    settled_version: Version | None = None
    """Newest version that needs no further seals."""
    candidate_step: int | None = None
    """Step announced for the next commit; None means the first step that every rank keeps."""
    candidate_due: float = 0.0
    """Time at which the candidate is checked again; 0.0 if none is awaited."""
    missed_copies: dict[NodeId, int] = {}
    """Number of consecutive versions that failed to commit for want of a copy there, by replica node."""
    skipped_replica_nodes: dict[NodeId, float] = {}
    """Replica nodes that receive no copies, with the time until which they are skipped."""


class AuditGroup(NamedTuple):
    """One audit of one step: all ranks did it, so those that found no difference are the control group."""

    generation: GenerationNumber
    step: int
    audit: AuditKind


class AuditKey(NamedTuple):
    """The work that an audit case is about."""

    generation: GenerationNumber
    owner: Rank
    step: int
    audit: AuditKind
    unit: str

    @property
    def group(self) -> AuditGroup:
        return AuditGroup(self.generation, self.step, self.audit)


class AuditCase(msgspec.Struct):
    """Statements about work whose results differ, until all are there."""

    key: AuditKey
    spec: GenerationSpec
    """Generation of the work. It may be over: its witnesses still count."""
    opened_at: float
    due: float
    """Time at which the case is judged by the statements that have arrived, with the other cases of its group."""
    trace: TraceId
    """Trace id of the first statement."""
    statements: dict[Rank, AuditStatement] = {}
    """First statement of each rank."""

    @property
    def is_about_parameters(self) -> bool:
        """Whether the wrong result may have reached the parameters; a wrong copy of a version has not."""
        return self.key.audit is not AuditKind.CHECKPOINT

    @property
    def first_bad_step(self) -> int:
        """First step whose version may hold the wrong result. State in memory may have changed before the version of
        the step before was copied."""
        return self.key.step - (self.key.audit is AuditKind.STATE)


class Accusation(msgspec.Struct, frozen=True):
    """A judgement of one case that speaks against a rank."""

    rank: Rank
    node: NodeId
    is_tie: bool = False
    """Whether the rank differs from another one, and either may be wrong."""


class JudgedGroup(msgspec.Struct, frozen=True):
    """The judged cases of a group, for statements that arrive late."""

    spec: GenerationSpec
    accusations: tuple[Accusation, ...]


class AuditRuntime(msgspec.Struct):
    """Audits of a job's work."""

    cases: dict[AuditKey, AuditCase] = {}
    """Open cases."""
    judged: dict[AuditKey, None] = {}
    """Newest judged cases; further statements about them change nothing."""
    reported_at: float = 0.0
    """Time of the last report that names no node."""
    judged_groups: dict[AuditGroup, JudgedGroup] = {}
    """Newest groups with a judged case."""
    clean_steps: dict[Rank, int] = {}
    """Step by rank of the running generation: all of its work since was checked once, without a difference."""
    counted_version: Version | None = None
    """The candidate of verification for which ``clean_ranks`` counts."""
    clean_ranks: set[Rank] = set()
    """Ranks whose work since that version was checked."""

    def restart_counts(self) -> None:
        """Forget what ranks of a generation that is over said of their work."""
        self.clean_steps, self.counted_version, self.clean_ranks = {}, None, set()


class StragglerRuntime(msgspec.Struct):
    """Windows in which the ranks' own times are compared."""

    slow_windows: dict[NodeId, list[int]] = {}
    """Windows in which a rank of the node was slow, by node."""
    window: int = 0
    window_due: float = 0.0
    """End of the current window; 0.0 if none is awaited."""


class VaultOrderRuntime(msgspec.Struct):
    """Answers to the pending spill and the pending protection."""

    spill_due: float = 0.0
    """Time at which the vaults are asked again for a pending spill."""
    spilled_nodes: set[NodeId] = set()
    """Nodes that have written their part of the pending spill."""
    parity_due: float = 0.0
    """Time at which the vaults are asked again for a pending protection."""
    made_parity: dict[NodeId, dict[Rank, str]] = {}
    """Digest of the members from which each parity node made P or Q, by node and group."""


class JobRuntime(msgspec.Struct):
    """Runtime state of a job."""

    progress: JobProgress = msgspec.field(default_factory=JobProgress)
    resume: ResumeRuntime = msgspec.field(default_factory=ResumeRuntime)
    regroup: RegroupRuntime = msgspec.field(default_factory=RegroupRuntime)
    commits: CommitRuntime = msgspec.field(default_factory=CommitRuntime)
    audits: AuditRuntime = msgspec.field(default_factory=AuditRuntime)
    stragglers: StragglerRuntime = msgspec.field(default_factory=StragglerRuntime)
    vault_orders: VaultOrderRuntime = msgspec.field(default_factory=VaultOrderRuntime)
    nodes: dict[NodeId, None] = {}
    """Nodes whose ``NodeRuntime.jobs`` contains the job."""
    owned_nodes: frozenset[NodeId] = frozenset()
    """Nodes that ``FleetState.job_by_node`` assigns to the job."""


class Probe(msgspec.Struct):
    """A running probe."""

    nodes: tuple[NodeId, ...]
    tested_node: NodeId | None
    """The node that the probe judges; None for a probe that an operator requested."""
    due: float
    trace: TraceId
    """Trace id of the event that started the probe."""
    passed: set[NodeId] = set()
    """Nodes that reported a pass."""
    failed: dict[NodeId, str] = {}
    """Nodes that reported a failure, with its description."""
    kind: ProbeKind = ProbeKind.ALL_REDUCE
    case_id: str = ""
    """Id of the blame case that started the probe; empty for none."""


class BlameCase(msgspec.Struct, kw_only=True):
    """A running blame isolation: probes that identify which of several suspects is at fault."""

    kind: BlameIsolationMethod
    suspects: tuple[NodeId, ...]
    findings: dict[NodeId, Finding]
    """Finding for which each node is suspected."""
    summary: str
    """The suspicion as a sentence."""
    due: float
    """Time at which suspects without a result count as inconclusive."""
    trace: TraceId
    """Trace id of the event that opened the case."""
    job: str = ""
    """Job whose digests differed; empty for pairs."""
    tries: dict[NodeId, int] = {}
    """Number of probes started per suspect."""
    incapable_partners: dict[NodeId, None] = {}
    """Partners that could not run the probe."""
    failed: dict[NodeId, str] = {}
    """Suspects that failed, with the description."""
    passed: dict[NodeId, str] = {}
    """Suspects that passed, with the description."""
    inconclusive: dict[NodeId, str] = {}
    """Suspects without a clear result, with the description."""


class SilenceCount(msgspec.Struct):
    """Number of silent nodes in a group of nodes that have something in common."""

    expected: int = 0
    """Reachable nodes in the group."""
    silent: int = 0


class CorrelatedSilence(msgspec.Struct):
    """A silence of so many nodes that the network, or this controller, is suspected."""

    since: float
    max_silent: int = 0
    """Highest number of nodes that were silent at once."""
    announced: bool = False
    """True once the silence is in the event log."""


class StatePart(msgspec.Struct):
    """Part of ``FleetState``. A journal stores its fields beside those of the other parts, by their encoded names."""


class FleetLiveness(StatePart):
    """Nodes that should report, and those that are silent."""

    reachable_nodes: set[NodeId] = set()
    """Nodes with ``liveness.reachable``; each has a queued silence deadline."""
    silent_nodes: set[NodeId] = set()
    """Reachable nodes beyond their first deadline, or with a closed connection. None of them is healthy."""
    silence_counts: dict[str, SilenceCount] = {}
    """Reachable and silent nodes of each group (rack, switch, driver version and so on)."""
    silent_groups: set[str] = set()
    """Groups in which too many nodes are silent at once; ``correlated_silence`` lasts while there is one."""
    correlated_silence: CorrelatedSilence | None = None
    correlated_silence_ended_at: float = 0.0
    recent_losses: dict[NodeId, float] = {}
    """Nodes with a loss of their own, and its time; after a restart only losses that still count."""


class RejoinWindow(StatePart):
    """The wait, after a start of this controller, for nodes that it has not heard yet."""

    unseen_nodes: set[NodeId] = set()
    """Reachable nodes from which this controller has received no message yet."""
    ends_at: float = msgspec.field(name="rejoin_window_ends_at", default=0.0)
    """Time until which unseen nodes are awaited; moves on while nodes come."""
    latest_end: float = msgspec.field(name="rejoin_window_latest_at", default=0.0)
    """Latest end of that wait."""


class ControllerLag(StatePart):
    """Lag of this controller behind the messages that it receives."""

    seconds: float = msgspec.field(name="observer_lag_s", default=0.0)
    """The latest measurement."""
    measured_at: float = msgspec.field(name="observer_lag_at", default=0.0)


class SharedFindings(StatePart):
    """Findings that several nodes show. A signature is the kind of a finding, and the XID."""

    sightings: dict[str, dict[NodeId, float]] = {}
    """Recent sightings of each signature, by node."""
    outbreaks: dict[str, dict[NodeId, bool]] = {}
    """Nodes of each outbreak; true for nodes that still show the finding and wait for the end."""


class DiagnosticsState(StatePart):
    """Running probes, and the blame isolations that started them."""

    probes: dict[str, Probe] = {}
    """Running probes, by id."""
    blame_cases: dict[str, BlameCase] = {}
    """Running blame isolations, by id."""
    no_partner_until: float = 0.0
    """Time until which no node is known to be free as a probe partner."""


class EvictionState(StatePart):
    """Evictions that must wait."""

    deferred: dict[str, dict[NodeId, None]] = msgspec.field(name="deferred_evictions", default_factory=dict)
    """Nodes whose eviction is deferred, by the scope that defers it; no scope is empty. Each scope has a queued
    deadline, except the fleet and the database, which end by events."""
    node_shortages: dict[JobId, tuple[float, str]] = {}
    """Jobs that can spare no node: the time until which this is taken as known, and the reason."""


class DatabaseState(StatePart):
    """Whether the database can be written."""

    outage: str = msgspec.field(name="database_outage", default="")
    """Reason why the database cannot be written now; empty while it can."""
    outage_since: float = msgspec.field(name="database_outage_since", default=0.0)


class DeadlineQueue(StatePart):
    """Queued checks."""

    heap: list[tuple[float, int, DeadlineKind, str]] = msgspec.field(name="deadlines", default_factory=list)
    """Heap of (due, sequence, kind, subject). An entry is a hint to check, never a decision."""
    entries: set[tuple[float, DeadlineKind, str]] = msgspec.field(name="queued_deadlines", default_factory=set)
    """Entries of ``heap`` as (due, kind, subject), to avoid duplicates."""
    sequence: int = msgspec.field(name="deadline_sequence", default=0)
    """Number of the last queued deadline; orders deadlines with equal times."""


class EventCounts(StatePart):
    """Counts for the metrics."""

    ignored: dict[str, int] = msgspec.field(name="ignored_counts", default_factory=dict)
    """Number of dropped events, by reason."""
    audits: dict[tuple[AuditKind, str], int] = msgspec.field(name="audit_counts", default_factory=dict)
    """Number of judged audit cases, by kind of audit and outcome (``core.judgement.audits``)."""


class FleetState(msgspec.Struct, kw_only=True):
    """Everything that the core knows."""

    policy: CorePolicy
    fleet: FleetRecord = msgspec.field(default_factory=FleetRecord)
    nodes: dict[NodeId, NodeRecord] = {}
    jobs: dict[JobId, JobRecord] = {}
    node_runtime: dict[NodeId, NodeRuntime] = {}
    """Runtime state of exactly the nodes in ``nodes``."""
    job_runtime: dict[JobId, JobRuntime] = {}
    """Runtime state of exactly the jobs in ``jobs``."""
    job_by_node: dict[NodeId, JobId] = {}
    """Running job whose roster, or outgoing roster, contains the node. No two running jobs share a node."""
    epoch: int = 0
    """Number of this controller's term over its database."""
    database: DatabaseState = msgspec.field(default_factory=DatabaseState)
    observer: ObserverState = msgspec.field(default_factory=ObserverState)
    controller_lag: ControllerLag = msgspec.field(default_factory=ControllerLag)
    liveness: FleetLiveness = msgspec.field(default_factory=FleetLiveness)
    rejoin_window: RejoinWindow = msgspec.field(default_factory=RejoinWindow)
    shared_findings: SharedFindings = msgspec.field(default_factory=SharedFindings)
    evictions: EvictionState = msgspec.field(default_factory=EvictionState)
    diagnostics: DiagnosticsState = msgspec.field(default_factory=DiagnosticsState)
    deadline_queue: DeadlineQueue = msgspec.field(default_factory=DeadlineQueue)
    counts: EventCounts = msgspec.field(default_factory=EventCounts)
