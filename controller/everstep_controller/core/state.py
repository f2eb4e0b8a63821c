"""Everything the core knows: the records, and live parts that are learned anew after a restart.

What is kept per rank and changes every step (progress, seals, acknowledgements) is live: losing it costs at most one
version's commit, and heartbeats bring it back.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.ids import GenerationNumber, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Finding, GenerationReason, ProbeKind
from everstep.wire.v1.training import RankProgress
from everstep_controller.core.policy import BlameIsolationMethod, CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord

Ignored = Literal[
    "remediation_finished.unknown",
    "collective_failed.not_a_member",
    "collective_failed.stale",
    "disconnected.stale",
    "finding_cleared.unknown",
    "node_seen.stale",
    "launcher_joined.stale",
    "launcher_left.stale",
    "scheduler_state.unchanged",
    "peer_connection_lost.not_a_member",
    "probe_finished.unknown",
    "rank_finished.not_a_member",
    "rank_finished.stale",
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
"""Why an event was dropped by rule; the controller's metrics show every one of these from the start."""


class HeartbeatState(msgspec.Struct):
    """What beats alone change of a node; rules read it through ``Turn.pulse``.

    ``heard_at``: its last word; 0.0 before the first that this controller hears. ``beats``: clean ones on probation.
    ``longest_s``: its longest pause between two words, of lately.
    """

    last_seen_at: float = 0.0
    clean_beats: int = 0
    longest_pause_s: float = 0.0


class ObserverState(msgspec.Struct):
    """How well this controller listens: ``last_at`` somebody was heard; ``since`` then it was not deaf for long. No
    node's silence began before."""

    last_received_at: float = 0.0
    receiving_since: float = 0.0


class FindingBurst(msgspec.Struct):
    """How many findings of a kind came without a pause, and when the last one did."""

    count: int = 0
    last_at: float = 0.0


class NodeRuntime(msgspec.Struct):
    """What is known of a node only while this controller lives.

    ``picture``: it has told its findings in full since we began. ``gone_at``: its connection closed then and nothing
    was heard since. ``watched``: its silence deadline is queued. ``rejoin_due``: until when its launchers may join
    again. ``jobs``: those that ever had a launcher on it; ``open``: those of them that are not over, without those that
    go on with other launchers. ``accusers``: nodes whose vaults lost its vault, and when;
    void once it is heard after that. ``bursts``: by kind and severity of findings.
    """

    heartbeats: HeartbeatState = msgspec.field(default_factory=HeartbeatState)
    has_full_findings: bool = False
    disconnected_at: float | None = None
    has_silence_deadline: bool = False
    launcher_rejoin_due: float | None = None
    jobs: dict[JobId, None] = {}
    open: dict[JobId, None] = {}
    peer_loss_reports: dict[NodeId, float] = {}
    finding_bursts: dict[str, FindingBurst] = {}


class PendingRegroup(msgspec.Struct, frozen=True):
    """A regrouping that waits until ``due`` for more witnesses: after a failed collective, or after a stall; or, with a
    ``reason``, for members that a controller which has just begun has not heard yet."""

    is_stall: bool
    since: float
    due: float
    trace: TraceId
    sentence: str
    reason: GenerationReason | None = None


class VersionSeals(msgspec.Struct):
    """What ranks said of one version: who has sealed it, whose share is kept, whose is safe too, digests by group and
    rank.

    ``copies`` and ``alike`` as in ``Share``, by node.
    """

    sealed_ranks: set[Rank] = set()
    kept_ranks: set[Rank] = set()
    safe_ranks: set[Rank] = set()
    full_copies: dict[NodeId, dict[NodeId, None]] = {}
    partial_copies: dict[NodeId, dict[NodeId, None]] = {}
    bytes_by_rank: dict[Rank, int] = {}
    digests: dict[str, dict[Rank, str]] = {}


class JobProgress(msgspec.Struct):
    """What beats alone change of a job; rules read it through ``Turn.stride``, ``Turn.progress`` and ``Turn.entered``.

    ``progress`` by rank of the running generation, ``newest_step`` the furthest of it, seen at ``newest_at``.
    ``entered``: ranks seen in the current generation.
    """

    by_rank: dict[Rank, RankProgress] = {}
    furthest_step: int | None = None
    furthest_step_at: float = 0.0
    entered_ranks: set[Rank] = set()

    def record_step(self, step: int, now: float) -> None:
        """A rank has finished ``step``."""
        if self.furthest_step is None or step > self.furthest_step:
            self.furthest_step, self.furthest_step_at = step, now


class JobRuntime(msgspec.Struct):
    """What is known of a job only while this controller lives.

    ``resumed``: ranks that have stepped in the current generation; ``slowest``: the one that took longest, with its
    phases. ``witnesses``: ranks whose collective failed. ``stalls``: (step, collectives) by
    rank. ``ballots`` by version, all newer than ``settled``. ``candidate``: the step announced for the next commit
    (None: the first that every rank keeps), looked at again at ``candidate_due`` (0.0: not awaited). ``blind``: times
    of regroupings that named nobody. ``committed_at``: when ``committed`` was. ``slow``: for each node of which a rank
    was slow lately, numbers of the windows in which one was; ``window`` is the newest, looked at again at
    ``window_due`` (0.0: not awaited). ``inherited``: its generation had not resumed when this controller began;
    ``first_steps`` are the first two that each rank was then seen at. ``gather_due``: until when others
    that come back are waited for before the job grows (0.0: nobody came yet). ``offered_at``: since when a node that
    became able waits for the next Tick's look at the job (None: none does). ``untold``: number of a generation that
    is not written, so that nobody may hear of it before the database is back (0: none). ``spill_due``: when vaults are
    asked again for what has not come to storage, ``spill_done`` the nodes that have written; ``protect_due`` the same
    for parity, and ``protect_made`` by home, and there by group, as what the members were sealed of which P or Q was
    made. ``replaced``: by node and local rank, when another process took the place. ``missed``:
    homes of copies, and how many versions in a row could not be committed because one did not arrive there;
    ``passed_over``: those that get none until then. ``nodes``: those whose ``NodeLive.jobs`` has the job. ``owns``:
    the nodes that ``FleetState.owners`` gives to the job.
    """

    progress: JobProgress = msgspec.field(default_factory=JobProgress)
    resumed_ranks: set[Rank] = set()
    slowest_resume: tuple[float, Rank, dict[str, float]] | None = None
    failed_collective_ranks: set[Rank] = set()
    stalled_ranks: dict[Rank, tuple[int, int]] = {}
    pending_regroup: PendingRegroup | None = None
    version_seals: dict[Version, VersionSeals] = {}
    committed_version: Version | None = None
    committed_at: float = 0.0
    verified_version: Version | None = None
    settled_version: Version | None = None
    slow_windows: dict[NodeId, list[int]] = {}
    straggler_window: int = 0
    straggler_window_due: float = 0.0
    candidate_step: int | None = None
    candidate_due: float = 0.0
    boundary_fallback_at: float = 0.0
    resume_due: float = 0.0
    growth_due: float = 0.0
    node_offered_at: float | None = None
    unannounced_generation: GenerationNumber = 0
    spill_due: float = 0.0
    spilled_nodes: set[NodeId] = set()
    protection_due: float = 0.0
    made_parity: dict[NodeId, dict[Rank, str]] = {}
    missed_copies: dict[NodeId, int] = {}
    skipped_replica_nodes: dict[NodeId, float] = {}
    resume_attempts: int = 0
    inherited_unresumed: bool = False
    first_seen_steps: dict[Rank, tuple[int, ...]] = {}
    unattributed_regroup_times: list[float] = []
    rank_replaced_at: dict[NodeId, dict[int, float]] = {}
    nodes: dict[NodeId, None] = {}
    owns: frozenset[NodeId] = frozenset()


class Probe(msgspec.Struct):
    """A probe under way: who takes part, who is to be judged by it (None: somebody only wants to know).

    ``passed`` and ``failed``, with the words of it: who has answered. ``case``: the second pass that it belongs to.
    """

    nodes: tuple[NodeId, ...]
    tested_node: NodeId | None
    due: float
    trace: TraceId
    passed: set[NodeId] = set()
    failed: dict[NodeId, str] = {}
    kind: ProbeKind = ProbeKind.ALL_REDUCE
    case_id: str = ""


class BlameCase(msgspec.Struct, kw_only=True):
    """A second pass under way: whose fault is it?

    ``findings``: of each suspect, what it is suspected of. ``what``: the same in a sentence. ``tries``: probes begun of
    each suspect. ``unable``: partners that could not run it. ``failed``, ``passed``, ``unknown``: how it ended for
    each, with the words of it. ``due``: when those without an end count as unknown. ``job``: whose ranks' digests
    differed, empty for pairs.
    """

    kind: BlameIsolationMethod
    suspects: tuple[NodeId, ...]
    findings: dict[NodeId, Finding]
    summary: str
    due: float
    trace: TraceId
    job: str = ""
    tries: dict[NodeId, int] = {}
    incapable_partners: dict[NodeId, None] = {}
    failed: dict[NodeId, str] = {}
    passed: dict[NodeId, str] = {}
    inconclusive: dict[NodeId, str] = {}


class SilenceCount(msgspec.Struct):
    """Of nodes with something in common: how many are ``expected`` (reachable), and how many of these ``silent``."""

    expected: int = 0
    silent: int = 0


class CorrelatedSilence(msgspec.Struct):
    """So many are silent at once that the network or this controller is suspected: ``since`` when, ``most`` at once."""

    since: float
    max_silent: int = 0
    announced: bool = False


class FleetState(msgspec.Struct, kw_only=True):
    """Everything the core knows.

    ``deadlines``: a heap of (due, order, kind, subject); an entry is a hint to look, never a decision. ``silent``:
    reachable nodes over their first deadline or with a closed connection. ``tallies`` count both by what nodes have in
    common, ``crossed`` names those of them that are silent at once, in an ``episode``; ``calm_since``: when the last
    one ended. ``unmet``: reachable nodes that this controller has not heard; until ``reunion_at`` they are waited for,
    which moves on while they come, up to ``reunion_by``.
    ``held``: nodes whose eviction is held, by what holds it; ``short``: jobs that can spare no node: until when that is
    taken as known, and why. ``slack_s``: the observer's own lag. ``cases``: second passes under way.
    ``lost_lately``: nodes that were lost by themselves, and when (``flapping``); at first those whose loss counts.
    ``partnerless_until``: until then no node is free to be a partner in a probe. ``sightings``: where and when each
    kind of finding (and XID) was seen lately; ``outbreaks``: those of them taken for no node's own, and which
    nodes are in them: true for those that wait for their end, since they show it still. (States of an older form have a
    list under its name.)
    ``epoch``: which life of a controller over its database this is. ``store_away``: why the database cannot be written
    now, empty while it can; ``store_away_at``: since when.
    ``owners``: the running job whose roster, or the one it is leaving, has the node.
    ``ignored`` counts what was dropped by rule (stale reports and the like), by reason.
    """

    policy: CorePolicy
    fleet: FleetRecord = msgspec.field(default_factory=FleetRecord)
    nodes: dict[NodeId, NodeRecord] = {}
    jobs: dict[JobId, JobRecord] = {}
    node_runtime: dict[NodeId, NodeRuntime] = {}
    job_runtime: dict[JobId, JobRuntime] = {}
    probes: dict[str, Probe] = {}
    blame_cases: dict[str, BlameCase] = {}
    no_partner_until: float = 0.0
    recent_losses: dict[NodeId, float] = {}
    sightings: dict[str, dict[NodeId, float]] = {}
    outbreaks: dict[str, dict[NodeId, bool]] = msgspec.field(default_factory=dict, name="outbreak_nodes")
    deadlines: list[tuple[float, int, str, str]] = []
    queued_deadlines: set[tuple[float, str, str]] = set()
    deadline_sequence: int = 0
    reachable: set[NodeId] = set()
    silent: set[NodeId] = set()
    silence_counts: dict[str, SilenceCount] = {}
    silent_groups: set[str] = set()
    correlated_silence: CorrelatedSilence | None = None
    correlated_silence_ended_at: float = 0.0
    unseen: set[NodeId] = set()
    rejoin_window_ends_at: float = 0.0
    rejoin_window_latest_at: float = 0.0
    deferred_evictions: dict[str, dict[NodeId, None]] = {}
    node_shortages: dict[JobId, tuple[float, str]] = {}
    observer: ObserverState = msgspec.field(default_factory=ObserverState)
    observer_lag_s: float = 0.0
    observer_lag_at: float = 0.0
    epoch: int = 0
    database_outage: str = ""
    database_outage_since: float = 0.0
    owners: dict[NodeId, JobId] = {}
    ignored_counts: dict[str, int] = {}
