"""Stored records of the core: the fleet, nodes, jobs and versions.

A record changes only inside ``engine.handle``. Every change leaves the core as a ``Put...`` effect. All times are wall
seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Action, AuditKind, Finding, JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import UNKNOWN_HOST, UNKNOWN_MODES, Domain, Gpu, GpuModes, Host, NetworkAdapter
from everstep.wire.v1.training import GenerationSpec, JobSpec
from everstep.wire.v1.vault_reports import Protection

IN_SERVICE = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION)
"""States in which a node serves or is about to."""
QUARANTINE_STATES = (NodeState.QUARANTINED, NodeState.REPAIR)
"""States that a node leaves only through a probe."""


class MaintenanceWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A maintenance window of one node or of one rack."""

    until: float
    starts_at: float = 0.0
    """Planned start; 0.0 once the window has begun."""
    sentence: str
    """Sentence for people, with the operator who ordered the window."""
    node: NodeId = ""
    """The node in maintenance; empty for a rack's window."""
    rack: str = ""
    """The rack in maintenance; empty for a node's window."""
    readmitted_early: tuple[NodeId, ...] = ()
    """Nodes of the rack that an operator readmitted before the end."""


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic eviction, counted against the eviction budgets."""

    evicted_at: float
    node: NodeId
    rack: str = ""
    """The rack whose budget the eviction uses; empty for none."""
    jobs: tuple[JobId, ...] = ()
    """Jobs in which the node had a seat; the eviction uses their budgets."""


class UnfitNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts kept about a node that was forgotten while it was unfit to serve."""

    sentence: str
    """The reason why the node was out of service."""
    diagnostics: tuple[ProbeKind, ...] = ()
    """Diagnostics that the node must pass if it returns, as in ``ReadmissionPlan.required_diagnostics``."""
    required_passes: int = 1
    """Number of consecutive passes, as in ``ReadmissionPlan.required_passes``."""
    defective_gpus: tuple[str, ...] = ()
    """GPUs that computed wrongly, as in ``NodeRecord.defective_gpus``."""


class FleetRecord(msgspec.Struct, kw_only=True):
    """Stored state that belongs to no single node or job."""

    breaker_reason: str = ""
    """Reason for which the eviction breaker is latched; empty while evictions are allowed."""
    breaker_tripped_at: float = 0.0
    breaker_tripped_by: tuple[str, str] = ("", "")
    """The node whose eviction exceeded the budget, and the key of the finding behind the eviction."""
    recent_evictions: list[Eviction] = []
    """Evictions inside the budget's window, oldest first."""
    probe_count: int = 0
    """Number of probes ever requested; makes probe ids unique."""
    remediation_count: int = 0
    """Number of remediations ever requested; makes remediation ids unique."""
    remediation_times: list[float] = []
    """Times of automatic resets and reboots inside ``remediation.fleet_window_s``."""
    rank_restart_times: list[float] = []
    """Times of automatic rank restarts inside ``remediation.fleet_window_s``."""
    maintenance_windows: list[MaintenanceWindow] = []
    """Maintenance windows that are planned or under way."""
    unfit_nodes: dict[NodeId, UnfitNode] = {}
    """Forgotten nodes that must not come back as new ones, oldest first."""
    outbreaks: dict[str, float] = {}
    """Start of each standing outbreak, by signature (``core.health.outbreaks``)."""

    @property
    def breaker_since(self) -> float:
        """When the eviction breaker was latched; 0 while evictions are allowed."""
        return self.breaker_tripped_at if self.breaker_reason else 0.0


class HistoryKind(StrEnum):
    """Kind of an entry in a node's history."""

    FINDING = "finding"
    CLEARED = "cleared"
    VERDICT = "verdict"
    PROBE = "probe"
    ACTION = "action"
    """An order, a window or a remediation."""


class UndecidedReason(StrEnum):
    """Reason why a standing finding cannot be judged yet."""

    BOOT_GRACE = "boot_grace"
    """The node has just booted."""
    OUTBREAK = "outbreak"
    BLAME_ISOLATION = "blame_isolation"
    """Probes identify which of several suspects is at fault."""
    RESTART_CAP = "restart_cap"
    """The fleet has used up its automatic restarts of ranks."""
    DATABASE_OUTAGE = "database_outage"


class DiagnosticsStatus(StrEnum):
    """Progress of the diagnostics of a node on probation."""

    NOT_STARTED = "not_started"
    RUNNING = "running"
    """The probe ``NodeQuarantine.probe_id`` runs."""
    WAITING = "waiting"
    """The next diagnostic waits for a partner, for a blame isolation or for its next try."""
    PASSED = "passed"
    SKIPPED = "skipped"
    """No partner was available, or the policy requires no diagnostics."""


DIAGNOSTICS_DONE = (DiagnosticsStatus.PASSED, DiagnosticsStatus.SKIPPED)


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a node's history: a finding, verdict, probe or action."""

    at: float
    kind: HistoryKind
    sentence: str
    detail: dict[str, str] = {}
    """Further facts, such as the verdict's id."""


class ReadmissionPlan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Treatment of a node that is out of service, up to its readmission."""

    rule_id: str = ""
    """Id of the rule that took the node out."""
    ladder: tuple[Action, ...] = ()
    """Remediation actions, weakest first."""
    ladder_step: int = 0
    """Index in ``ladder`` of the action that is due."""
    required_diagnostics: tuple[ProbeKind, ...] = ()
    """Diagnostics to pass before readmission; empty means one all-reduce."""
    required_passes: int = 1
    """Number of consecutive passes of all diagnostics."""
    remaining_diagnostics: list[ProbeKind] = []
    """Diagnostics still to be passed, in order."""
    lacked_partner: bool = False
    """True if a diagnostic that needs a partner was skipped because no partner was available."""
    clear_s: float = 0.0
    """Seconds for which the causes must be clear before readmission."""
    pending_remediation_id: str = ""
    """Id of the requested action whose outcome is not reported yet."""
    remediation_deadline: float = 0.0
    """Time at which the pending action counts as failed."""
    settle_deadline: float = 0.0
    """Time by which the causes must clear after a confirmed action."""
    blocked_reason: str = ""
    """Latest reported reason why no action was requested."""
    offence_weight: float = 0.0
    """Weight added to the node's offence score for being out."""
    evicted_at: float = 0.0
    """Time of the eviction, or of the quarantine before the node served; 0.0 if the node is out for another reason."""
    cause_signatures: dict[str, str] = {}
    """Outbreak signature of every cause seen since ``evicted_at``, cleared causes included, by finding key."""
    rollback_window_s: float = 0.0
    """Seconds after ``evicted_at`` in which an outbreak among the causes rolls the eviction back."""


class NodeIdentity(msgspec.Struct, kw_only=True):
    """The machine and its agent, as registered."""

    incarnation: Incarnation
    vault: Address
    """Address of the node's vault."""
    domain: Domain = Domain()
    labels: dict[str, str] = {}
    """The site's own labels for the node."""
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    adapters: tuple[NetworkAdapter, ...] = ()
    gpu_modes: GpuModes = UNKNOWN_MODES
    agent_version: str = ""
    takes_nvml_pause: bool = False
    """True if the agent takes the directive ``PauseNvml``."""
    driver_version: str = ""
    boot_id: str = ""
    booted_at: float = 0.0
    """First sighting of the node after its last boot."""
    registered_at: float = 0.0


def node_kind(identity: NodeIdentity) -> str:
    """Return what a node computes with, in words: its GPUs and their driver, or its model; empty if unknown."""
    if identity.gpus:
        names = ", ".join(sorted({gpu.name for gpu in identity.gpus}))
        return f"{names} with driver {identity.driver_version or 'unknown'}"
    return f"{identity.host.vendor} {identity.host.product}".strip()


class NodeLiveness(msgspec.Struct, kw_only=True):
    """Whether the node's agent is heard, and how often it was lost."""

    reachable: bool = True
    """True while messages arrive within the deadlines: always in service, never while the node is lost."""
    lost_at: float = 0.0
    """Time at which the node was last declared unreachable."""
    loss_times: list[float] = []
    """Losses attributed to the node itself, inside ``liveness.flap_window_s``."""


class NodeHealth(msgspec.Struct, kw_only=True):
    """Standing findings on the node, and decisions about them that are still open."""

    agent_findings: dict[str, Finding] = {}
    """Findings reported by the agent, by key. Stored in rows of their own, not in the node's document."""
    controller_findings: dict[str, Finding] = {}
    """Findings of the controller itself, by key."""
    controller_findings_until: dict[str, float] = {}
    """Expiry of controller findings that clear by time only; each new sighting postpones the expiry."""
    undecided_findings: dict[str, UndecidedReason] = {}
    """Reasons why findings cannot be judged yet, by finding key."""
    accepted_findings: list[str] = []
    """Keys of findings that stood when an operator readmitted the node and have not become graver since."""
    finding_seen_at: dict[str, float] = {}
    """Last sighting of findings that wait for the end of an outbreak or whose eviction is deferred, by key."""
    deferred_eviction_key: str = ""
    """Key of the finding whose eviction is deferred; empty for none."""
    eviction_deferred_by: str = ""
    """Scope that defers the eviction (``core.health.eviction``)."""
    digest_tie_nodes: list[NodeId] = []
    """Other nodes of the last undecided digest vote."""
    digest_tie_at: float = 0.0
    defective_gpus: list[str] = []
    """UUIDs of GPUs that computed wrongly, or the node's name if it has no GPU. The node counts as repaired once none
    of them is left."""


class AuditStrike(msgspec.Struct, frozen=True, omit_defaults=True):
    """A wrong result of the node in an audit that alone does not convict it."""

    at: float
    job: JobId
    generation: GenerationNumber
    sentence: str
    """What was wrong, for the sentence of the strike that convicts."""
    audit: AuditKind | None = None
    """None in records of older controllers."""
    on_own_word: bool = False
    """True if no other rank has done the work again: the node contradicts itself."""


class NodeAudits(msgspec.Struct, kw_only=True):
    """Results of audits of training that speak against the node."""

    strikes: list[AuditStrike] = []
    """Strikes inside ``audits.strike_window_s``, oldest first."""


class NodeQuarantine(msgspec.Struct, kw_only=True):
    """Conditions under which a node that is out of service returns."""

    causes: list[str] = []
    """Keys of the findings that must clear before the node leaves quarantine."""
    cause_cleared_at: dict[str, float] = {}
    """Time at which each cause cleared, by finding key."""
    needs_operator: bool = False
    """True if only an operator can end the quarantine."""
    earliest_end: float = 0.0
    """Earliest time at which the node may leave quarantine."""
    required_action: Action = Action.NONE
    """Action that the causes ask for."""
    diagnostics: DiagnosticsStatus = DiagnosticsStatus.NOT_STARTED
    probe_id: str = ""
    """Id of the latest diagnostic; it runs while ``diagnostics`` is ``RUNNING``."""
    probe_failures: int = 0
    plan: ReadmissionPlan | None = None
    """Treatment of the node while it is out; None while it is in service."""


class NodeScheduling(msgspec.Struct, kw_only=True):
    """Orders of people and other systems about the node's work."""

    cordon_id: str = ""
    """Id of the remediation by which Everstep cordoned the node; empty for none."""
    cordon_failed: bool = False
    """True if the remediation ``cordon_id`` was reported as failed; the cordon may be in force all the same."""
    is_cordon_dry_run: bool = False
    """True if only the dry run received ``cordon_id``, so that no system was asked to keep other work away."""
    external_cordon_by: str = ""
    """Name of the person or program other than Everstep that cordoned the node; empty for none, as in service."""
    hold_reason: str = ""
    """Operator's order that keeps the node out of service; empty for none, as on every node in service."""
    maintenance_until: float = 0.0
    notice_reason: str = ""
    """Notice of the provider that keeps the node out of service (``core.notices``); empty for none."""


class NodeHistory(msgspec.Struct, kw_only=True):
    """Past decisions about the node that later decisions depend on."""

    verdict_count: int = 0
    """Number of verdicts ever given on the node; makes verdict ids unique."""
    current_verdict_id: str = ""
    """Id of the verdict that put the node into, or out of, service."""
    eviction_times: list[float] = []
    """Times of the node's evictions; repeat offenders wait longer."""
    offence_score: float = 0.0
    """Decaying score of offences, as of ``offence_score_at``."""
    offence_score_at: float = 0.0
    """Time for which ``offence_score`` was computed."""
    recent_offences: list[tuple[float, float]] = []
    """Offences of the last half-life, as (time, weight)."""
    counted_reports: dict[str, list[tuple[float, bool]]] = {}
    """Counted reports, by rule and finding key."""
    ladder_steps: dict[str, list[tuple[float, Action]]] = {}
    """Ladder steps taken, by rule."""
    remediation_times: list[float] = []
    """Times of the node's automatic resets and reboots."""
    dry_run_times: list[float] = []
    """Times of resets and reboots that were only logged."""
    rank_restart_times: list[float] = []
    """Times of automatic restarts of the node's ranks."""
    entries: list[HistoryEntry] = []
    """The newest entries of the node's history."""


class NodeRecord(msgspec.Struct, kw_only=True):
    """Stored state of a node."""

    node: NodeId
    state: NodeState = NodeState.HEALTHY
    """Current state; ``core.health.node_state`` lists the allowed transitions."""
    since: float = 0.0
    """Time at which the node entered ``state``."""
    sentence: str = ""
    """Reason for ``state``, as a sentence for people."""
    trace: TraceId = ""
    """Trace id of the event that led to ``state``."""
    identity: NodeIdentity
    liveness: NodeLiveness = msgspec.field(default_factory=NodeLiveness)
    health: NodeHealth = msgspec.field(default_factory=NodeHealth)
    audits: NodeAudits = msgspec.field(default_factory=NodeAudits)
    quarantine: NodeQuarantine = msgspec.field(default_factory=NodeQuarantine)
    scheduling: NodeScheduling = msgspec.field(default_factory=NodeScheduling)
    history: NodeHistory = msgspec.field(default_factory=NodeHistory)

    def all_findings(self) -> tuple[Finding, ...]:
        """Return all standing findings, of the agent and of the controller."""
        return (*self.health.agent_findings.values(), *self.health.controller_findings.values())

    def get_finding(self, key: str) -> Finding | None:
        """Return the finding with this key, from the agent or the controller."""
        return self.health.agent_findings.get(key) or self.health.controller_findings.get(key)


class LeavingLauncher(msgspec.Struct, kw_only=True):
    """A launcher that lets its ranks end before it ends."""

    cause: str
    """Signal that it received, or why else it ends."""
    until: float
    """Time at which its ranks have ended at the latest."""
    ranks_ended: bool = False


class LauncherRecord(msgspec.Struct, kw_only=True):
    """A node's offer to take part in a job."""

    node: NodeId
    incarnation: Incarnation
    store_address: Address
    """Address at which the node can host the job's store."""
    generation: GenerationNumber = 0
    """Generation of the launcher's ranks; 0 for none."""
    usable: bool = True
    """False after a failed rank replacement or a late entry of its ranks, until the launcher joins again."""
    has_rejoined: bool = True
    """False between a new life of the agent and the launcher's next join."""
    unusable_reason: str = ""
    """Reason why ``usable`` is false."""
    missing_local_ranks: list[int] = []
    """Local ranks that did not enter a generation and have not been replaced since."""
    late_generations: int = 0
    """Number of consecutive generations in which local ranks were missing."""
    leaving: LeavingLauncher | None = None
    """Set once the launcher has announced its end; it stays unusable."""

    def make_usable(self) -> None:
        """Forget why the launcher was not usable, unless it is about to end."""
        if self.leaving is not None:
            return
        self.usable, self.unusable_reason = True, ""
        self.missing_local_ranks, self.late_generations = [], 0


class ShareLocations(msgspec.Struct, frozen=True, omit_defaults=True):
    """Other nodes that hold the part of a version that one node's ranks stored."""

    full_copies: tuple[NodeId, ...] = ()
    """Nodes that each hold everything that only these ranks hold."""
    partial_copies: tuple[NodeId, ...] = ()
    """Nodes that each store a part of the remaining bytes again."""


class VersionLocations(msgspec.Struct, frozen=True):
    """Locations of the versions that were committed in one generation."""

    generation: GenerationNumber
    shares: dict[NodeId, ShareLocations]


class PendingSpill(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version that is being written to storage."""

    version: Version
    url: str
    """Folder on storage."""
    writers: dict[NodeId, tuple[Rank, ...]]
    """Ranks whose shares each node writes from its slots."""
    started_at: float
    """Time of the first order."""
    bytes: int = 0
    attempt: int = 0
    """Number of the current order; answers to other orders are void."""
    failures: int = 0
    """Number of answers that reported a failure."""
    last_error: str = ""
    trace: TraceId = ""
    """Trace id of the event that started the write."""


class StoredCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version that is complete on storage."""

    version: Version
    url: str
    """Folder on storage."""
    bytes: int
    started_at: float
    stored_at: float
    maybe_corrupt: bool = False
    """True if the version may contain corrupted state."""


class PendingProtection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version whose parity is being made."""

    protection: Protection
    """Groups of the version and the nodes that hold their parity."""
    started_at: float
    """Time of the first order."""
    copy_only_shares: dict[NodeId, ShareLocations] = {}
    """Locations of the shares that belong to no group, by node."""
    failures: int = 0
    """Number of answers that reported a failure."""
    trace: TraceId = ""
    """Trace id of the event that started the work."""


class ActiveProtection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version that parity protects."""

    protection: Protection
    """Groups of the version and the nodes that hold their parity."""
    protected_at: float
    copy_only_shares: dict[NodeId, ShareLocations] = {}
    """Locations of the shares that belong to no group, by node."""


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.FORMING: frozenset({JobState.RUNNING, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.FINISHED, JobState.FAILED}),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.FAILED}),
    JobState.FINISHED: frozenset({JobState.FORMING}),
    JobState.FAILED: frozenset({JobState.FORMING}),
}
"""States that may follow each state of a job; drawn in ``docs/concepts/job-states.md``. A job begins in ``FORMING``."""

ENDED_STATES = (JobState.FINISHED, JobState.FAILED)


class JobStatus(msgspec.Struct, kw_only=True):
    """State of a job, and the reason for it."""

    state: JobState = JobState.FORMING
    since: float = 0.0
    """Time at which the job entered ``state``."""
    sentence: str = ""
    """Reason for ``state``, as a sentence for people."""
    trace: TraceId = ""
    """Trace id of the event that led to ``state``."""
    paused_for: str = ""
    """Cause of the latest pause; the sentence of a paused job adds the eligible nodes."""
    is_stopped: bool = False
    """True for a job that an operator's order ended. Its state is ``FAILED``, and its launchers' exit status 1."""

    def enter(self, state: JobState, sentence: str, *, trace: TraceId, now: float, is_stopped: bool = False) -> None:
        """Enter ``state``, or stay in it for another reason; ``JOB_TRANSITIONS`` must allow it (AssertionError)."""
        assert state in JOB_TRANSITIONS[self.state], f"a job that is {self.state} cannot become {state}"
        if state is not self.state:
            self.state, self.since = state, now
        self.sentence, self.trace, self.is_stopped = sentence, trace, is_stopped


class JobMembership(msgspec.Struct, kw_only=True):
    """Nodes that offer themselves to a job, that it may not use, or that may still hold its data."""

    launchers: dict[NodeId, LauncherRecord] = {}
    """Launchers in the order in which they joined."""
    node_limit: int | None = None
    """Operator's limit on nodes below ``spec.max_nodes``; None for no limit."""
    excluded_nodes: dict[NodeId, str] = {}
    """Nodes excluded from this job, with the reason."""
    replaced_stragglers: dict[NodeId, str] = {}
    """Nodes that were replaced as stragglers, with the reason."""
    former_nodes: list[NodeId] = []
    """Nodes of earlier rosters whose vaults may still hold slots of the job."""
    preempted_at: float = 0.0
    """Time at which the job last gave a node to a job of higher priority."""
    abandoned_at: float = 0.0


class RunProgress(msgspec.Struct, kw_only=True):
    """Progress of one run of a job, from its first launcher to its end."""

    created_at: float
    """Time at which the first launcher of this run joined."""
    last_number: GenerationNumber = 0
    """Highest generation number given so far, in all runs."""
    opened_at: float = 0.0
    """Time at which the current generation was decided."""
    resumed_at: float | None = None
    """Time at which the last rank of the current generation finished a step; None until then."""
    finished_ranks: list[Rank] = []
    """Ranks of the running generation whose training function returned."""
    last_begun: int | None = None
    """Last step that the finished ranks began; None if unknown."""
    returned_collectives: dict[Rank, int] = {}
    """Number of collectives that each finished rank had entered, where known."""
    ended_step: int = 0
    """Last step of a job that has ended."""
    ended_loss: tuple[Rank, float] | None = None
    """Loss of the last step, of the lowest rank whose training function returned and that reports one."""


class JobFailures(msgspec.Struct, kw_only=True):
    """Failures of a job that limit its retries or blame a node after repetition."""

    user_retries: int = 0
    """Number of retries spent on errors of the training function."""
    user_errors: dict[str, NodeId] = {}
    """First node on which each error of the training function occurred, by error text."""
    rank_loss_times: dict[NodeId, list[float]] = {}
    """Rank losses per node inside ``regroups.failure_window_s``; ranks that were killed for a hang are none."""
    digest_tie_times: list[float] = []
    """Undecided differences between nodes within a tie's memory (``sdc.digest_mismatch``: a week)."""
    kept_culprit_times: list[float] = []
    """Differences inside ``regroups.failure_window_s`` whose culprit is known and could not be spared."""
    recomputed_steps: dict[int, GenerationNumber] = {}
    """Steps that the job went back to compute again without a culprit, with the generation that ended for it. Each is
    computed again once: a second time the data is the likely cause. The newest ``MAX_RECOMPUTED_STEPS``."""
    searched_steps: dict[int, GenerationNumber] = {}
    """As ``recomputed_steps``, for steps from which on ranks look for the first one whose results stand out."""
    hang_kills: dict[str, int] = {}
    """Number of hung ranks that were replaced, by the place at which they hung, or by rank where it is unknown."""
    longest_pause_s: float = 0.0
    """Longest time for which a rank stood still and went on by itself."""
    hung_collective_step: int | None = None
    """Last finished step of the last regroup because all ranks waited in collectives."""


MAX_AUDIT_NOTES = 8
"""Maximum number of reports, and of withdrawn suspicions, that a job's record keeps."""
MAX_KIND_PAIRS = 16
"""Maximum number of pairs of kinds that are named."""


class JobAuditNotes(msgspec.Struct, kw_only=True):
    """Notes on the audits of a job, for people: which are off, and which differences accused no node."""

    off: dict[AuditKind, str] = {}
    """Why each of them is off, as a sentence for people."""
    reports: list[str] = []
    """Newest differences of a job whose audits only report."""
    withdrawn: list[str] = []
    """Newest suspicions against nodes that were withdrawn."""
    not_compared: dict[str, str] = {}
    """Pairs of kinds of nodes whose results were not compared, each with a sentence for people. At most
    ``MAX_KIND_PAIRS``."""
    voting_off_reason: str = ""
    """Why digests of replicas are not compared for the rest of the job, as a sentence; empty while they are."""
    compared_nodes: list[NodeId] = []
    """Nodes whose ranks are to name the parameters that differ between them; empty if none are, or they have."""


MAX_RECOMPUTED_STEPS = 64
"""Maximum number of entries in ``JobFailures.recomputed_steps`` and ``searched_steps``."""


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version."""

    job: JobId
    version: Version
    committed_at: float
    """Time since which the version is durable."""
    verified_at: float | None = None
    """Time at which the digests of all replicas agreed; None if they were not compared."""
    audited_at: float | None = None
    """Time at which audits had checked all ranks' work once since the version and found no difference; None before."""
    bytes: int = 0
    rank_count: int = 0
    """Number of ranks that sealed the version."""


class JobCommits(msgspec.Struct, kw_only=True):
    """Versions in memory that a generation may restore."""

    restore_ceiling: Version | None = None
    """Newest version that may be restored after corruption; None once a later version is committed."""
    locations: VersionLocations | None = None
    earlier_locations: list[VersionLocations] = []
    """Locations from earlier generations, of the versions kept for audits."""
    audited: VersionRecord | None = None
    """Newest committed version that audits have verified. Ranks keep it, because the job goes back to it after an audit
    found wrong work."""
    audit_candidate: VersionRecord | None = None
    """Committed version that audits verify next. Ranks keep it, too."""

    def shares_of(self, generation: GenerationNumber) -> dict[NodeId, ShareLocations]:
        """Return the locations of the shares of versions from ``generation``, by node; {} if they are unknown."""
        known = [self.locations] if self.locations is not None else []
        found = (
            locations.shares for locations in (*known, *self.earlier_locations) if locations.generation == generation
        )
        return next(found, {})

    def counts_on(self, node: NodeId) -> bool:
        """Return whether the node's ranks stored a share of a version that the job may restore."""
        known = [self.locations] if self.locations is not None else []
        return any(node in locations.shares for locations in (*known, *self.earlier_locations))


MAX_RESTORE_URLS = 4
"""Number of checkpoints on storage that a generation receives; if the newest is damaged, the one before it serves."""


class JobSpills(msgspec.Struct, kw_only=True):
    """Versions of a job on storage."""

    pending: PendingSpill | None = None
    stored: list[StoredCheckpoint] = []
    """Versions on storage, ordered by the time of writing."""
    last_step: int = 0
    """Step of the newest version on storage."""
    last_orders: int = 0
    """Versions that were ordered after all ranks had returned."""
    folder: str = ""
    """Name of the job's folder under the URL of its plan; "" for the job's name."""
    earlier: Version | None = None
    """Last generation of earlier runs, and the step that this run resumed from; what they wrote beyond it stays."""
    failed_versions: int = 0
    """Number of versions that were ordered and never reached storage."""
    failures_in_row: int = 0
    error: str = ""
    not_before: float = 0.0
    """Earliest time of the next spill."""

    def restore_urls(self) -> list[str]:
        """Return the checkpoints to start from if memory has nothing: those not marked as corrupt, newest first."""
        clean = [checkpoint.url for checkpoint in reversed(self.stored) if not checkpoint.maybe_corrupt]
        return clean[:MAX_RESTORE_URLS]


class JobParity(msgspec.Struct, kw_only=True):
    """Versions of a job that parity protects."""

    active: ActiveProtection | None = None
    pending: PendingProtection | None = None
    summary: str = ""
    """Sentence on how the latest parity groups were formed."""
    failures_in_row: int = 0
    error: str = ""
    not_before: float = 0.0
    """Earliest time of the next protection."""


def min_seats(spec: JobSpec) -> int:
    """Return ``min_nodes`` rounded up to whole blocks."""
    return -(-spec.min_nodes // spec.block_nodes) * spec.block_nodes


def max_seats(spec: JobSpec) -> int:
    """Return ``max_nodes`` rounded down to whole blocks."""
    return spec.max_nodes // spec.block_nodes * spec.block_nodes


class JobRecord(msgspec.Struct, kw_only=True):
    """Stored state of a job."""

    job: JobId
    spec: JobSpec
    secret: str
    """Secret that the job's processes share."""
    status: JobStatus
    generation: GenerationSpec | None = None
    """Current generation; None while the job forms. In a running job its number is ``progress.last_number``."""
    outgoing_generation: GenerationSpec | None = None
    """Running generation while a boundary to ``generation`` is announced and not reached: its number is lower, and
    ``generation.after_step`` names the boundary."""
    progress: RunProgress
    membership: JobMembership = msgspec.field(default_factory=JobMembership)
    failures: JobFailures = msgspec.field(default_factory=JobFailures)
    audits: JobAuditNotes = msgspec.field(default_factory=JobAuditNotes)
    commits: JobCommits = msgspec.field(default_factory=JobCommits)
    spills: JobSpills = msgspec.field(default_factory=JobSpills)
    parity: JobParity = msgspec.field(default_factory=JobParity)

    @property
    def is_running(self) -> bool:
        return self.status.state is JobState.RUNNING

    @property
    def is_ended(self) -> bool:
        return self.status.state in ENDED_STATES

    @property
    def running_generation(self) -> GenerationSpec | None:
        """Generation whose ranks compute: the outgoing one before a boundary, else the current one."""
        return self.outgoing_generation or self.generation

    @property
    def seats(self) -> tuple[NodeId, ...]:
        """Nodes of the current roster in rank order."""
        return self.generation.seats if self.generation is not None else ()

    @property
    def all_seats(self) -> tuple[NodeId, ...]:
        """Nodes of the current and of the outgoing roster; nodes of both are repeated."""
        return (*self.seats, *(self.outgoing_generation.seats if self.outgoing_generation is not None else ()))

    @property
    def min_seats(self) -> int:
        """Size of the smallest roster with which the job runs."""
        return min_seats(self.spec)

    @property
    def max_seats(self) -> int:
        """Size of the largest roster allowed now: whole blocks, and never less than the minimum."""
        most, limit, block = max_seats(self.spec), self.membership.node_limit, self.spec.block_nodes
        return most if limit is None else max(self.min_seats, min(limit // block * block, most))

    def pinned_versions(self) -> tuple[Version, ...]:
        """Return the versions that ranks must keep: being read, needed by parity, or to be verified by audits."""
        kept = (self.spills.pending, self.commits.audited, self.commits.audit_candidate)
        held = {record.version for record in kept if record is not None}
        protections = (self.parity.active, self.parity.pending)
        held |= {state.protection.version for state in protections if state is not None}
        return tuple(sorted(held))

    def has_seat(self, node: NodeId) -> bool:
        """Return whether the node is in the roster of the current generation."""
        return self.generation is not None and node in self.generation.seated_nodes

    def is_seated(self, node: NodeId) -> bool:
        """Return whether the node is in the current or the outgoing roster."""
        return self.has_seat(node) or (
            self.outgoing_generation is not None and node in self.outgoing_generation.seated_nodes
        )


MAX_HISTORY_ENTRIES = 48
"""Maximum number of history entries per node; older entries remain in the event log."""
