"""What the core knows and stores: records that come back after a restart.

A record changes only inside ``fleet.handle`` and comes out as a ``Put...`` effect whenever it did.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Action, Finding, JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import UNKNOWN_HOST, Domain, Gpu, Host
from everstep.wire.v1.training import GenerationSpec, JobSpec
from everstep.wire.v1.vault_orders import Protection
from everstep_controller.core.policy import LadderHistory, ReportHistory


class MaintenanceWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Maintenance until ``until`` (wall seconds) of a node, or of a rack's nodes but those in ``without``, which were
    readmitted early; ``sentence`` says by whose order. ``starts_at``: when it begins, 0.0 once it has."""

    until: float
    starts_at: float = 0.0
    sentence: str
    node: NodeId = ""
    rack: str = ""
    readmitted_early: tuple[NodeId, ...] = ()


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic eviction, and whose budgets it uses: of ``rack`` (empty: none), of ``jobs`` with a seat there."""

    at: float
    node: NodeId
    rack: str = ""
    jobs: tuple[JobId, ...] = ()


class UnfitNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a node that was forgotten while it was not fit to serve: why, what it had to pass on its way back
    (as in ``Course``), and which of its GPUs computed wrongly (as ``NodeRecord.condemned``)."""

    sentence: str
    diagnostics: tuple[ProbeKind, ...] = ()
    required_passes: int = 1
    defective_gpus: tuple[str, ...] = ()


class FleetRecord(msgspec.Struct, kw_only=True):
    """What belongs to no single node or job.

    ``breaker``: the sentence of a latched eviction breaker, empty while evictions are allowed; ``latched_by``: the node
    whose eviction was one too many, and the key of the finding it was for. ``evicted``: the
    evictions inside the budget's window, oldest first. ``probes`` counts probes ever asked for, so that ids are new;
    ``remedies`` the same. ``remedied``: wall seconds of automatic resets and reboots inside their window,
    ``restarted`` of restarts of ranks. ``maintenance``: windows that are not over, planned ones too. ``unfit``: by name
    what was forgotten of nodes that must not come back as if nothing had been, oldest first. ``outbreaks``: since when
    each outbreak (``outbreaks``) stands, in wall seconds.
    """

    breaker_reason: str = ""
    breaker_tripped_at: float = 0.0
    breaker_tripped_by: tuple[str, str] = ("", "")
    recent_evictions: list[Eviction] = []
    probe_count: int = 0
    remediation_count: int = 0
    remediation_times: list[float] = []
    rank_restart_times: list[float] = []
    maintenance_windows: list[MaintenanceWindow] = []
    unfit_nodes: dict[NodeId, UnfitNode] = {}
    outbreaks: dict[str, float] = {}


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a node's case book: a finding, verdict, probe or action, and when."""

    at: float
    kind: str
    sentence: str
    detail: dict[str, str] = {}


class ReadmissionPlan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a node that is out is treated.

    ``rule``: id of the rule that took it out. ``ladder`` and ``rung``: its cures, and which is due. ``checks``: what it
    must pass on its way back (empty: an all-reduce), ``passes`` times in a row; ``left``: what is still to be passed,
    ``alone``: it had no partner for what takes one. ``clear_s``: for how long its causes must be clear. ``remedy``: id
    of the action that was asked for and not reported, ``remedy_due``: when it is given up. ``settles_at``: when the
    causes must have cleared after a confirmed one. ``hindered``: why no action was asked for, as it was last said.
    ``offence``: what was held against it for being out. ``evicted_at``: when it was evicted, or found ill before it
    served, 0.0 where it is out otherwise; ``signs``: of what signature (``outbreaks``)
    each cause is that was known since then, cleared ones too; ``reserve_s``: for how long after it one of them may turn
    out to be an outbreak's.
    """

    rule_id: str = ""
    ladder: tuple[Action, ...] = ()
    ladder_step: int = 0
    required_diagnostics: tuple[ProbeKind, ...] = ()
    required_passes: int = 1
    remaining_diagnostics: list[ProbeKind] = []
    lacked_partner: bool = False
    clear_s: float = 0.0
    pending_remediation_id: str = ""
    remediation_deadline: float = 0.0
    settle_deadline: float = 0.0
    blocked_reason: str = ""
    offence_weight: float = 0.0
    evicted_at: float = 0.0
    cause_signatures: dict[str, str] = {}
    rollback_window_s: float = 0.0


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node as stored.

    ``since`` and ``sentence``: when and why it came into ``state``. ``reachable``: it was heard within its deadlines;
    ``lost_at``: when it last ceased to be; ``lost``: times of losses that were its own, inside ``node_flap_window_s``.
    ``findings`` by key are the agent's picture, ``own`` the controller's; ``own_until``: when those of them that nobody
    clears are over, unless they are seen again. ``causes``: keys of findings that must
    clear before a quarantined node may come back; ``needs_operator``: they never do by themselves. ``returns_at``:
    not before this may it leave quarantine. ``evictions``: times of this node's evictions; repeat offenders wait
    longer. ``verdicts`` counts verdicts ever given, for their ids; ``stands_by``: the one by which it is out, or back.
    ``probe``: the one it must pass. ``against``: with whom it was in an undecided digest vote, at ``against_at``.
    ``condemned``: UUIDs of GPUs (or its name, without any) that computed wrongly; when none of them is left, the node
    is repaired.
    ``vouched``: keys of findings that stood when an operator readmitted it, and did not get worse.
    ``shown_at``: when findings that wait for the end of an outbreak, or whose eviction is held, were shown last.
    ``overruled``: key of the finding whose eviction is held, ``held_by`` what holds it (a scope of ``eviction``).

    ``booted_at``: when it was first seen after its last boot. ``reports`` of a finding are counted under its rule and
    key, ``steps`` of ladders under the rule. ``undecided``: keys of findings that are looked at again, and what for.
    ``cleared``: since when a cause has been clear. ``course``: its treatment while it is out. ``offences``: its score
    as of ``offended_at``, ``offended`` those of the last half-life, each with when it was and what it weighs.
    ``remedied``: times of its automatic resets and reboots, ``dry_runs`` of those that were only written to the log,
    ``restarted`` of restarts of its ranks. ``cordoned``: id of the remedy by which Everstep took it out of service with
    the scheduler, or ``remedies.PERHAPS``; ``foreign``: who else has. ``hold``: a person's order that keeps it out.
    ``maintenance_until``: the end of its maintenance window, 0.0 outside one. ``notes``: its case book.
    """

    node: NodeId
    incarnation: Incarnation
    vault: Address
    domain: Domain = Domain()
    labels: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    agent_version: str = ""
    driver_version: str = ""
    boot_id: str = ""
    registered_at: float = 0.0
    state: NodeState = NodeState.HEALTHY
    since: float = 0.0
    sentence: str = ""
    trace: TraceId = ""
    required_action: Action = Action.NONE
    reachable: bool = True
    lost_at: float = 0.0
    loss_times: list[float] = []
    agent_findings: dict[str, Finding] = {}
    controller_findings: dict[str, Finding] = {}
    controller_findings_until: dict[str, float] = {}
    quarantine_causes: list[str] = []
    needs_operator: bool = False
    quarantined_until: float = 0.0
    eviction_times: list[float] = []
    verdict_count: int = 0
    current_verdict_id: str = ""
    probe_status: str = ""
    probe_failures: int = 0
    digest_tie_nodes: list[NodeId] = []
    digest_tie_at: float = 0.0
    defective_gpus: list[str] = []
    accepted_findings: list[str] = []
    finding_seen_at: dict[str, float] = {}
    deferred_eviction_key: str = ""
    eviction_deferred_by: str = ""
    booted_at: float = 0.0
    report_history: dict[str, ReportHistory] = {}
    ladder_history: dict[str, LadderHistory] = {}
    undecided_findings: dict[str, str] = {}
    cause_cleared_at: dict[str, float] = {}
    readmission_plan: ReadmissionPlan | None = None
    offence_score: float = 0.0
    offence_score_at: float = 0.0
    offended: list[tuple[float, float]] = []
    remediation_times: list[float] = []
    dry_runs: list[float] = []
    rank_restart_times: list[float] = []
    cordon_id: str = ""
    external_cordon_by: str = ""
    hold_reason: str = ""
    maintenance_until: float = 0.0
    history: list[HistoryEntry] = []

    def all_findings(self) -> tuple[Finding, ...]:
        """What stands: as its agent tells, and as the controller found itself."""
        return (*self.agent_findings.values(), *self.controller_findings.values())

    def get_finding(self, key: str) -> Finding | None:
        """The one of that key, whoever found it."""
        return self.agent_findings.get(key) or self.controller_findings.get(key)


class LauncherRecord(msgspec.Struct, kw_only=True):
    """A node's offer to a job.

    ``able``: false once it could not replace a rank, or its ranks did not enter a generation in time, until it joins
    again; ``why_not`` says which. ``missing``: local ranks that did not enter, until another process has their place;
    ``late``: in how many of its generations in a row there were such.
    ``confirmed``: false from its agent's new life until it joins again.
    """

    node: NodeId
    incarnation: Incarnation
    store_address: Address
    generation: GenerationNumber = 0
    usable: bool = True
    has_rejoined: bool = True
    unusable_reason: str = ""
    missing_local_ranks: list[int] = []
    late_generations: int = 0


class ShareLocations(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where else the part of a version is that a node's ranks stored.

    ``copies``: nodes that each hold all of what these ranks alone hold. ``alike``: nodes that store the rest again,
    each of them a part of it.
    """

    full_copies: tuple[NodeId, ...] = ()
    partial_copies: tuple[NodeId, ...] = ()


class VersionLocations(msgspec.Struct, frozen=True):
    """Which nodes hold the versions that were committed in ``generation``: a share for each node of its roster."""

    generation: GenerationNumber
    shares: dict[NodeId, ShareLocations]


class PendingSpill(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version on its way to storage: under ``url``, from the slots of ``writers``, each of which writes the shares of
    these ranks. ``attempt``: number of the order; an answer to another one is void.
    ``failures``: answers that said that it could not be done now, with the last one's ``trouble``."""

    version: Version
    url: str
    writers: dict[NodeId, tuple[Rank, ...]]
    started_at: float
    bytes: int = 0
    attempt: int = 0
    failures: int = 0
    last_error: str = ""
    trace: TraceId = ""


class StoredCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version that is whole on storage, in the folder at ``url``. ``suspect``: it may be corrupt."""

    version: Version
    url: str
    bytes: int
    started_at: float
    stored_at: float
    maybe_corrupt: bool = False


class PendingProtection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version whose parity is being made. ``on_copies``: where else the shares are that no group takes. ``failures``
    as in ``Spilling``."""

    protection: Protection
    started_at: float
    copy_only_shares: dict[NodeId, ShareLocations] = {}
    failures: int = 0
    trace: TraceId = ""


class ActiveProtection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version that is kept by parity since ``at``."""

    protection: Protection
    protected_at: float
    copy_only_shares: dict[NodeId, ShareLocations] = {}


class JobRecord(msgspec.Struct, kw_only=True):
    """A job as stored.

    ``paused_for``: what paused it last. ``generation`` is the current one (None while forming). ``opened_at``: when it
    was decided; ``resumed_at``: when its last rank had stepped, None until then. ``launchers`` in order of joining.
    ``size``: an operator's bound on nodes below ``spec.max_nodes``. ``ceiling``: after corruption nothing newer may be
    restored, until a version is committed after it. ``losses``: per node, wall seconds of rank losses inside the flap
    window; ``leaving``: the running generation while a boundary to ``generation`` is announced and not reached.
    ``excluded``: nodes that this job does without, and why. ``former``: nodes of earlier rosters whose vaults may still
    hold slots. ``raised``: what the training function raised, and on which node first. ``ties``: times of unsettled
    votes. ``finished``: ranks of the running generation whose training function returned. ``slow``: nodes that were
    replaced as stragglers, and why. ``homes`` of the newest committed version. ``gave_at``: when it last gave a node to
    a job of higher priority. ``deserted_at``: when the last of its launchers was gone.
    ``ended_step``: the last step of a job that is over.
    ``last_begun``: the last step that the finished ranks began, None where it is not known.

    ``spilling``: the version on its way to storage. ``stored``: those that are there, by when they were written;
    ``spilled_step`` of the last one. ``spills_lost``: versions that were ordered and never got there;
    ``spill_failures`` of them in a row, the last for ``spill_trouble``, and none is ordered before
    ``spill_not_before``.

    ``shielded``: the version that is kept by parity; ``protecting``: the next one. ``parity_sentence``: how groups were
    formed last. ``protect_failures``, ``protect_trouble`` and ``protect_not_before`` as those of spills.
    """

    job: JobId
    spec: JobSpec
    secret: str
    created_at: float
    state: JobState = JobState.FORMING
    since: float = 0.0
    sentence: str = ""
    paused_for: str = ""
    trace: TraceId = ""
    launchers: dict[NodeId, LauncherRecord] = {}
    last_generation_number: GenerationNumber = 0
    generation: GenerationSpec | None = None
    outgoing_generation: GenerationSpec | None = None
    generation_opened_at: float = 0.0
    generation_resumed_at: float | None = None
    node_limit: int | None = None
    restore_ceiling: Version | None = None
    user_retries: int = 0
    user_errors: dict[str, NodeId] = {}
    rank_loss_times: dict[NodeId, list[float]] = {}
    excluded_nodes: dict[NodeId, str] = {}
    former_nodes: list[NodeId] = []
    digest_tie_times: list[float] = []
    finished_ranks: list[Rank] = []
    last_begun: int | None = None
    replaced_stragglers: dict[NodeId, str] = {}
    version_locations: VersionLocations | None = None
    preempted_at: float = 0.0
    abandoned_at: float = 0.0
    ended_step: int = 0
    pending_spill: PendingSpill | None = None
    stored_checkpoints: list[StoredCheckpoint] = []
    last_spilled_step: int = 0
    spills_lost: int = 0
    spill_failures: int = 0
    spill_error: str = ""
    spill_not_before: float = 0.0
    active_protection: ActiveProtection | None = None
    pending_protection: PendingProtection | None = None
    parity_summary: str = ""
    protection_failures: int = 0
    protection_error: str = ""
    protection_not_before: float = 0.0


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version: durable from ``committed_at``, and, where digests agreed, clean (``verified_at``)."""

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    rank_count: int = 0


# ---- casebook
# What is remembered of a node beside the audit log: enough for whoever has to mend it.

MAX_HISTORY_ENTRIES = 48
"""Entries kept of a node; older ones are in the audit log."""


def append_history(
    record: NodeRecord, at: float, kind: str, sentence: str, detail: dict[str, str] | None = None
) -> None:
    """One more entry. The caller says that the record has changed."""
    note = HistoryEntry(at=at, kind=kind, sentence=sentence, detail=detail or {})
    record.history = [*record.history[1 - MAX_HISTORY_ENTRIES :], note]
