"""Define a job's specification, its generations, and the reports of its ranks and launchers."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

import msgspec

from everstep.ids import (
    Address,
    GenerationNumber,
    Incarnation,
    JobId,
    LongText,
    NodeId,
    NonNegativeInt,
    Rank,
    SafeInt,
    ShortText,
    TraceId,
    Version,
)
from everstep.vocabulary import AuditKind, AuditRole, Finding, GenerationReason, RankActivity
from everstep.wire.v1.base import Message, Report, Request
from everstep.wire.v1.vault_reports import Protection, VersionProtected, VersionSpilled

SdcPreset = Literal["off", "light", "standard", "paranoid"]
"""How thoroughly the ranks of a job audit each other's work."""
SdcMode = Literal["report", "enforce"]
"""What follows from a difference. ``report``: a finding and an event. ``enforce``: also strikes, evictions, and steps
that are computed again."""


class SpillPlan(Request, frozen=True, kw_only=True):
    """The versions of a job that also go to storage: committed ones at least ``every_steps`` steps apart.

    Attributes:
        url: An absolute path or a URL, without credentials; the job gets its own folder under it.
        keep_last: Number of versions to keep there, the newest (0: all).
    """

    every_steps: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    keep_last: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 2


class JobSpec(Request, frozen=True, kw_only=True):
    """A launcher's request for a job. All launchers of a job must request the same.

    Attributes:
        min_nodes: Fewest nodes of the roster.
        max_nodes: Most nodes of the roster; further launchers are spares.
        nproc_per_node: Ranks on each node of a roster.
        join_wait_s: The first generation forms when ``max_nodes`` have joined, or when ``min_nodes`` have and this time
            has passed.
        replicas: Number of failure domains that hold each byte of a version.
        digest_interval: Steps between parameter digests (0: none).
        sdc: How thoroughly the ranks audit each other's work (`everstep_trainer.sdc.presets`).
        sdc_mode: What follows from a difference that audits find.
        hang_threshold_s: Seconds without progress and without signs of work after which a rank counts as hung (None:
            by its step time, at least a minute).
        work_limit_s: Seconds without progress after which a rank counts as hung although it works.
        max_user_retries: How often a training function that raised is called again.
        block_nodes: Nodes that form one tensor x pipeline block. A roster is a whole number of blocks, whose nodes have
            consecutive seats; the bounds are rounded inwards to whole blocks.
        block_within: The failure domain that the nodes of a block share.
        priority: The job with the higher number gets a contested node.
        parity_group_size: Members of a parity group (0: no parity). Besides the copies, a clean version is kept by
            groups of at most this many nodes, with two more for P and Q, which survive the loss of any two.
        restarts_script: Ranks only start a script anew in each generation. It continues from its own checkpoint, so
            Everstep does not know what a loss costs.
    """

    job: JobId
    min_nodes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] = 1
    max_nodes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] = 1
    nproc_per_node: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    join_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    digest_interval: NonNegativeInt = 1
    sdc: SdcPreset = "off"
    sdc_mode: SdcMode = "enforce"
    hang_threshold_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    work_limit_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    max_user_retries: NonNegativeInt = 0
    block_nodes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    block_within: Literal["", "rack", "switch"] = ""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    spill: SpillPlan | None = None
    parity_group_size: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    restarts_script: bool = False

    @property
    def pinned_slots(self) -> int:
        """Slots that a rank needs besides the usual ones. One for the version on its way to storage; two for the
        version kept by parity, and the next while its parity is made; two for the version that audits have verified,
        and the one that they verify next."""
        return (self.spill is not None) + 2 * (self.parity_group_size > 0) + 2 * self.keeps_audited_version

    @property
    def keeps_audited_version(self) -> bool:
        """Whether the ranks keep the newest version that audits have verified, to go back to it."""
        return self.sdc in ("standard", "paranoid") and self.sdc_mode == "enforce"


class Member(Message, frozen=True, kw_only=True, gc=False):
    """One rank of a roster: the process that holds ``local_rank`` on ``node``."""

    rank: Rank
    node: NodeId
    local_rank: Annotated[int, msgspec.Meta(ge=0)]


class Holder(Message, frozen=True, kw_only=True, gc=False):
    """A vault that may hold slots of the job: every roster node's, and those of nodes that left the roster.

    A vault outside the roster may not answer, and is asked only if the roster's lack something. ``rack``: as the node
    was registered; slots of another rack are farther away.
    """

    node: NodeId
    vault: Address
    rack: ShortText = ""


class RestoreRule(Message, frozen=True, kw_only=True):
    """The versions that a generation may start from; the ranks choose a complete one of them (docs/decisions/0003).

    The newest complete version ``v`` with ``floor <= v <= ceiling`` is taken. If there is none, two fallbacks follow in
    this order, never silently: the version of ``protection``, with shards rebuilt from parity, and the checkpoint at
    ``storage_url``.

    Attributes:
        floor: The newest version that the controller logged as committed: every rank keeps it, and an older one is
            never taken silently.
        ceiling: Set after corruption: the newest version known to be clean.
        from_scratch: Start anew (no version was ever committed).
        pinned: Versions that the ranks must keep, whatever else they keep.
        storage_url: A path or URL, from which a start from scratch begins, too (empty: none).
        older_storage_urls: Earlier checkpoints, newest first, in case that one is damaged.
    """

    floor: Version | None = None
    ceiling: Version | None = None
    from_scratch: bool = False
    pinned: tuple[Version, ...] = ()
    protection: Protection | None = None
    storage_url: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    older_storage_urls: tuple[Annotated[str, msgspec.Meta(max_length=2048)], ...] = ()


class GenerationSpec(Message, frozen=True, kw_only=True, dict=True):
    """A job's membership: the unit of truth.

    Attributes:
        seats: Its nodes, with ``spec.nproc_per_node`` consecutive ranks each; ``roster`` lists the ranks.
        store: Address of the rendezvous store; its keys go under the generation's number.
        store_node: The node whose launcher hosts the store.
        replica_nodes: For each node, those whose vaults copy the state that its ranks alone hold.
        secret: Authenticates vault transfers of this job (hex).
        after_step: Leave the running generation in order when this step is finished (a boundary), instead of at once.
        audits_off: Audits that the ranks leave out, because the program and no hardware makes them differ.
    """

    job: JobId
    number: GenerationNumber
    reason: GenerationReason
    sentence: ShortText
    trace: TraceId
    seats: tuple[NodeId, ...]
    store: Address
    store_node: NodeId
    restore: RestoreRule
    holders: tuple[Holder, ...]
    replica_nodes: dict[str, tuple[str, ...]]
    secret: str
    spec: JobSpec
    issued_at: float
    after_step: int | None = None
    audits_off: tuple[AuditKind, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.seats) * self.spec.nproc_per_node

    @cached_property
    def seated_nodes(self) -> frozenset[str]:
        """The nodes as a set, for look-ups."""
        return frozenset(self.seats)

    @cached_property
    def racks(self) -> dict[str, str]:
        """The rack of each holder that has one."""
        return {holder.node: holder.rack for holder in self.holders if holder.rack}

    def is_same_rack(self, node: str, other: str) -> bool:
        """Return whether both nodes are known to be in one rack."""
        rack = self.racks.get(node)
        return rack is not None and rack == self.racks.get(other)

    @cached_property
    def seat_index(self) -> dict[str, int]:
        """The place of each node among the seats."""
        return {node: place for place, node in enumerate(self.seats)}

    @cached_property
    def roster(self) -> tuple[Member, ...]:
        """Every rank, in order. Slow for ten thousand: ask for one node or one rank if possible."""
        return tuple(member for node in self.seats for member in self.members_on(node))

    def members_on(self, node: str | None) -> tuple[Member, ...]:
        """Return the ranks of a node; none if it has no seat."""
        if node is None:
            return ()
        return tuple(Member(rank=rank, node=node, local_rank=at) for at, rank in enumerate(self.ranks_on(node)))

    def node_of(self, rank: int) -> str:
        """Return the node of a rank. Raises IndexError if there is no such rank."""
        return self.seats[rank // self.spec.nproc_per_node]

    def ranks_on(self, node: str) -> range:
        """Return the global ranks on ``node``; none if it has no seat."""
        place, nproc = self.seat_index.get(node), self.spec.nproc_per_node
        return range(0) if place is None else range(place * nproc, (place + 1) * nproc)

    def has_rank_on(self, node: str, rank: int) -> bool:
        """Return whether there is such a rank, and it is on ``node``."""
        return rank < self.world_size and self.node_of(rank) == node

    def member_at(self, node: str, local_rank: int) -> Member | None:
        """Return the member at ``local_rank`` on ``node``, or None."""
        return next((member for member in self.members_on(node) if member.local_rank == local_rank), None)


# --- reports: from ranks and launchers, through the agent, to the controller --------------------------------------


class StoredVersion(Message, frozen=True, kw_only=True):
    """A whole checkpoint of an earlier run on storage."""

    version: Version
    url: Annotated[str, msgspec.Meta(max_length=2048)]
    written_at: float


class EarlierRun(Message, frozen=True, kw_only=True):
    """What a launcher found on storage before the job began.

    Attributes:
        folder: Name of the job's folder under the URL of its spill plan.
        versions: The newest checkpoints there, newest first.
        generation: The highest generation of any version there; this run counts on from it.
        fresh: The job starts anew, in a folder that is empty.
    """

    folder: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    versions: tuple[StoredVersion, ...] = ()
    generation: GenerationNumber = 0
    fresh: bool = False


class LauncherJoined(Report, frozen=True, kw_only=True, tag=True):
    """A launcher offers its node to the job. Sent again after every reconnect of launcher or agent.

    Attributes:
        generation: The one its ranks are in (0: none), so that a controller that lost track can catch up.
        earlier: What earlier runs left on storage; None without a spill plan.
    """

    spec: JobSpec
    launcher: Incarnation
    store: Address
    generation: GenerationNumber = 0
    earlier: EarlierRun | None = None


class LauncherLeft(Report, frozen=True, kw_only=True, tag=True):
    """A launcher is gone: ``orderly`` if it said goodbye, else its socket closed."""

    launcher: Incarnation
    orderly: bool
    detail: ShortText = ""


class LauncherLeaving(Report, frozen=True, kw_only=True, tag=True):
    """A launcher received a signal to end, and lets its ranks end first; ``LauncherLeft`` follows.

    Attributes:
        cause: The signal, or why else the launcher ends.
        grace_s: Seconds that its ranks have to end by themselves.
        ranks_ended: Sent a second time, once none of its ranks runs.
        is_notice: A scheduler announced an end, and nothing ends yet.
    """

    launcher: Incarnation
    cause: ShortText = ""
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    ranks_ended: bool = False
    is_notice: bool = False


class RankLost(Report, frozen=True, kw_only=True, tag=True):
    """A rank's process is gone. ``has_replacement``: the launcher has a process ready for its place, or can
    fork one. ``out_of_memory``: how much memory there was, if the kernel killed the process for want of it."""

    generation: GenerationNumber
    rank: Rank
    local_rank: SafeInt
    detail: ShortText
    exit_code: SafeInt | None = None
    signal: SafeInt | None = None
    has_replacement: bool = True
    out_of_memory: ShortText = ""


class CollectiveFailed(Report, frozen=True, kw_only=True, tag=True):
    """A rank's collective raised. Some rank is lost, but the reporter does not know which: a witness, not a judge."""

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    detail: ShortText


class RankStalled(Report, frozen=True, kw_only=True, tag=True):
    """A rank made no progress for ``stalled_s``. Sent again when its activity changes, and at each doubling.

    Attributes:
        step: The last finished step.
        collectives: Number of collectives entered in this generation. The others wait for the rank with the smallest
            (step, collectives), or for one that does not report at all.
        threshold_s: Seconds of standing still after which this rank counts as hung, by its own step time.
        stacks: Every Python thread's stack.
        begun: The last step that the rank has begun in this generation; 0 before the first.
        activity: What the rank does; None if it cannot tell. MOVING ends the stall, and ``activity_s`` is then the
            longest time for which it stood still.
        activity_s: Seconds for which that has lasted.
        doing: The same in words that follow the rank's name, such as "computes".
        place: The innermost line of the training script, such as "train.py:16".
        place_s: Seconds for which the main thread has been at the same instruction.
        operation: The collective in which it waits, such as "all_reduce".
        section: Name of the declared section (``run.alone``) that the rank is in.
        limit_s: The section's own limit, in place of the job's ``work_limit_s``.
        waits_for_all: The collective is one of all ranks for certain.
        transfers: Data of the collective move.
        may_wait: The rank may wait for a GPU, and so for a collective, although it computes.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    collectives: SafeInt
    stalled_s: float
    threshold_s: float
    stacks: LongText = ""
    begun: SafeInt = 0
    activity: RankActivity | None = None
    activity_s: float = 0.0
    doing: ShortText = ""
    place: ShortText = ""
    place_s: float = 0.0
    operation: ShortText = ""
    section: ShortText = ""
    limit_s: float | None = None
    waits_for_all: bool = False
    transfers: bool = False
    may_wait: bool = False


class RankUnresponsive(Report, frozen=True, kw_only=True, tag=True):
    """The agent's own observation: a rank whose signal thread stopped ticking.

    Attributes:
        process_state: The kernel's letter for the process.
        activity: STOPPED or STILL: the rank is to be replaced. WORKING: a long call holds Python's lock, or the process
            has no processor. MOVING: it ticks again. None, as from older agents: it is to be replaced.
        doing: What the process does, in words that follow its name.
    """

    generation: GenerationNumber
    rank: Rank
    local_rank: SafeInt
    unresponsive_s: float
    process_state: ShortText = ""
    activity: RankActivity | None = None
    doing: ShortText = ""


class VersionSealed(Report, frozen=True, kw_only=True, tag=True):
    """A rank's share of a version is sealed in the node's vault, or has been copied to the nodes that need it.

    Sent for versions that may be committed and for those with ``digests``; others are found in the vaults when needed.

    Attributes:
        durable: As many failure domains hold every byte of this share as the job asks for, including other ranks' equal
            copies.
        commit_candidate: The rank keeps the version until a later one is committed.
        full_copies: Nodes whose vaults have acknowledged the copy.
        digests: Weighted digest of the parameters, in hex, of each replica group (ranks that must be equal).
        partial_copies: Nodes that each store again a part of the share that is not copied to ``full_copies``.
        kind: The reporter's processor, driver and libraries, with ``digests``; empty if unknown. Digests of ranks of
            different kinds may differ without a fault.
        differing_parameters: Names of parameters that differ between ranks, and how many more do; empty if they were
            not compared (``VersionNotice.compared_ranks``), or are equal.
    """

    generation: GenerationNumber
    rank: Rank
    version: Version
    bytes: NonNegativeInt
    durable: bool
    commit_candidate: bool = False
    full_copies: tuple[NodeId, ...] = ()
    digests: dict[ShortText, ShortText] = {}
    partial_copies: tuple[NodeId, ...] = ()
    kind: Annotated[str, msgspec.Meta(max_length=256)] = ""
    differing_parameters: ShortText = ""


class AuditStatement(Report, frozen=True, kw_only=True, tag=True):
    """What one rank computed for an audit that found a difference. Each rank states only its own results.

    Attributes:
        step: The step whose work was checked.
        audit: Kind of the audit.
        unit: The part of the work, such as ``layers.3 backward, micro-batch 0``.
        owner: The rank whose work is checked.
        role: The reporter's part.
        original: For the owner, the digest of what training used, in hex; empty for others.
        digest: The digest of what the reporter computed when it did the work again, in hex; empty if the work cannot be
            done again, as for bytes in memory.
        expects_arbiter: An arbiter does the work again, so its statement follows.
        wrong_results: For an owner without a peer, how many results of its own stand out or are wrong. 2: those of two
            runs with different samples. 0: some rank's results stand out, and it is not known whose.
        difference: The bits that differ, in words; empty if the reporter has not seen both results.
        kind: The reporter's processor, driver and libraries; empty if unknown. Ranks of different kinds may round
            differently, so their bits are not compared.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    audit: AuditKind
    unit: ShortText
    owner: Rank
    role: AuditRole
    original: Annotated[str, msgspec.Meta(max_length=64)] = ""
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    expects_arbiter: bool = False
    wrong_results: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    difference: ShortText = ""
    kind: Annotated[str, msgspec.Meta(max_length=256)] = ""


class AuditsClean(Report, frozen=True, kw_only=True, tag=True):
    """All audited parts of a rank's work were checked once in the steps after ``step``, and no check failed.

    A fault that was there at ``step`` would have been found since, so versions up to it count as verified once all
    ranks say so.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt


class Resumed(Report, frozen=True, kw_only=True, tag=True):
    """A rank finished its first step in a generation, which ends the recovery from a failure.

    Attributes:
        restored: The version it started from (None: from scratch).
        phases_s: Seconds of each phase, in sequence: start (of a process without a standby), abort, teardown, wait,
            rendezvous, build (the training function up to ``run.track``), restore, plan (of snapshots) and first_step.
            compile is the time of torch.compile in the first step, and is not counted in first_step.
        finished_step: The last step that this process had finished before the generation; None for a new process.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    restored: Version | None
    phases_s: dict[ShortText, float]
    finished_step: SafeInt | None = None


class UserError(Report, frozen=True, kw_only=True, tag=True):
    """The training function raised an exception of its own.

    Attributes:
        step: The last finished step.
        started_step: The last step that the rank began in this generation, 0 before the first; None if unknown.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    error: ShortText
    traceback: LongText
    started_step: SafeInt | None = None


class RankFinished(Report, frozen=True, kw_only=True, tag=True):
    """A rank's training function returned.

    Attributes:
        step: The last finished step.
        started_step: The last step that the rank began, which a ``break`` leaves unfinished; None if unknown.
        collectives: Number of collectives entered in this generation; None if unknown.
        loss: The loss that the rank reported last; None if it reported none.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    started_step: SafeInt | None = None
    collectives: SafeInt | None = None
    loss: float | None = None


class PeerConnectionLost(Report, frozen=True, kw_only=True, tag=True):
    """The node's vault lost its connection to the vault on ``peer``, and a new one is refused there. A hint that
    ``peer`` may be gone: it accuses no node, and at most shortens a wait. At most one per second and peer."""

    peer: NodeId
    detail: ShortText = ""


class FindingRaised(Message, frozen=True, kw_only=True, tag=True):
    """The agent found something about its node; ``job`` if it concerns one."""

    finding: Finding
    job: JobId | None = None


class FindingCleared(Message, frozen=True, kw_only=True, tag=True):
    """A finding's clearing rule holds."""

    key: ShortText
    trace: TraceId = ""


class ProbeFinished(Message, frozen=True, kw_only=True, tag=True):
    """One side's result of a probe.

    Attributes:
        rows: Bytes, latency in seconds (median), bus bandwidth in bytes/s.
        wrong_result: The work was done and its result is wrong, which is grounds for a verdict; a probe that could not
            be done is not.
        started: This side was able to begin, so a later failure says something about the nodes or the path between
            them. A failure without it says nothing, and neither does one of an agent that does not know the field.
    """

    probe: ShortText
    ok: bool
    detail: ShortText = ""
    rows: tuple[tuple[SafeInt, float, float], ...] = ()
    wrong_result: bool = False
    started: bool = False


AnyReport = (
    LauncherJoined
    | LauncherLeft
    | LauncherLeaving
    | RankLost
    | CollectiveFailed
    | RankStalled
    | RankUnresponsive
    | VersionSealed
    | AuditStatement
    | AuditsClean
    | Resumed
    | UserError
    | RankFinished
    | PeerConnectionLost
    | VersionSpilled
    | VersionProtected
    | FindingRaised
    | FindingCleared
    | ProbeFinished
)


class RankProgress(Message, frozen=True, kw_only=True, array_like=True, gc=False):
    """A rank's progress in a heartbeat.

    Attributes:
        job: Not checked against the pattern of names, which took three times as long as reading the whole heartbeat; an
            unknown job is ignored.
        step: The last finished step.
        step_s: Seconds per step (median of the last ones).
        busy_s: Of these, the seconds in which the rank did not wait for others (median), if measured. In lock step all
            ranks take equally long; this tells which of them the others wait for.
        started_step: The last step that the rank has begun in this generation; 0 before the first.
        until_step: The last step that its training function asked for; 0 if it is not known.
        snapshot_every: Steps between its snapshots; 0 if only versions to be committed are stored.
    """

    job: Annotated[str, msgspec.Meta(max_length=63)]
    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    step_s: float
    loss: float | None = None
    busy_s: float | None = None
    started_step: SafeInt = 0
    until_step: SafeInt = 0
    snapshot_every: SafeInt = 1
