"""What is said about a job: its specification, its generations, and what its ranks and launchers report."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

import msgspec

from everstep.ids import (
    Address,
    GenerationNumber,
    Incarnation,
    JobId,
    NodeId,
    NonNegativeInt,
    Rank,
    SafeInt,
    TraceId,
    Version,
)
from everstep.vocabulary import Finding, GenerationReason
from everstep.wire.v1.base import Message, Report, Request, ShortText
from everstep.wire.v1.vault_orders import Protection, VersionProtected, VersionSpilled

LongText = Annotated[str, msgspec.Meta(max_length=65536)]


class SpillPlan(Request, frozen=True, kw_only=True):
    """Which versions of a job also go to storage: the first committed one that is ``every`` steps or more after the
    last one that went there. ``to``: an absolute path or a URL, without credentials; the job gets a folder of its own
    under it. ``keep``: so many stay there, the ones written last (0: all).
    """

    every_steps: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    keep_last: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 2


class JobSpec(Request, frozen=True, kw_only=True):
    """What a launcher asks for. All launchers of a job must say the same.

    ``min_nodes`` and ``max_nodes`` bound the roster; launchers beyond ``max_nodes`` are spares. A roster always has
    ``nproc_per_node`` ranks on each of its nodes. The first generation is formed when ``max_nodes`` have joined,
    or ``min_nodes`` have and ``join_wait_s`` passed. ``replicas`` is how many failure domains hold each byte of a
    version. ``digest_interval`` is the number of steps between parameter digests (0: none). ``max_user_retries``
    is how often a training function that raised is entered again.

    ``block_nodes``: nodes that form one tensor x pipeline block. A roster is a whole number of blocks, whose nodes have
    consecutive seats; the bounds are rounded inwards to whole blocks. ``block_within``: the nodes of a block share
    this failure domain. ``priority``: of jobs that want the same node the one with the higher number gets it.

    ``parity``: members of a parity group (0: no parity). Besides the copies, a clean version is then kept by groups of
    at most so many nodes with two more for P and Q, which bear the loss of any two.
    """

    job: JobId
    min_nodes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] = 1
    max_nodes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)] = 1
    nproc_per_node: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    join_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    digest_interval: NonNegativeInt = 1
    hang_threshold_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_user_retries: NonNegativeInt = 0
    block_nodes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    block_within: Literal["", "rack", "switch"] = ""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    spill: SpillPlan | None = None
    parity_group_size: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0

    @property
    def pinned_slots(self) -> int:
        """Slots that a rank needs besides the usual ones: for the version on its way to storage; for the one that is
        kept by parity, and the next one while its parity is made."""
        return (self.spill is not None) + 2 * (self.parity_group_size > 0)


class Member(Message, frozen=True, kw_only=True, gc=False):
    """One rank of a roster. Whichever process holds ``local_rank`` on ``node`` is that rank."""

    rank: Rank
    node: NodeId
    local_rank: Annotated[int, msgspec.Meta(ge=0)]


class Holder(Message, frozen=True, kw_only=True, gc=False):
    """A vault that may hold slots of the job: every roster node's, and those of nodes that left the roster.

    One of the latter need not answer: it is asked only where the roster's lack something. ``rack``: as the node was
    registered; what another rack holds is farther away.
    """

    node: NodeId
    vault: Address
    rack: str = ""


class RestoreRule(Message, frozen=True, kw_only=True):
    """Which version a generation may start from; the ranks choose within it by what is whole (docs/decisions/0003).

    The newest whole version ``v`` with ``floor <= v <= ceiling`` is taken. ``floor`` is the newest version the
    controller logged as committed: every rank keeps it, and an older one is never taken in silence. ``ceiling`` is set
    after corruption: the newest version known to be clean. ``scratch`` starts anew (no version was ever committed).

    ``pinned``: versions that the ranks go on keeping, whatever else they keep. Where nothing that the rule admits is
    whole, two more are looked at, in this order, and never in silence: the version of ``protection``, with the shards
    that its parity gives; and the checkpoint at ``storage``, a path or URL, which is also what a start from scratch
    begins with (empty: none). ``storage_before``: those stored before it, newest first, for where it is damaged.
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

    ``seats`` are its nodes: on each of them compute ``spec.nproc_per_node`` consecutive ranks, which ``roster`` names.
    ``store`` is the rendezvous store to meet at, hosted by the launcher on ``store_node``; its keys go under
    the generation's number. ``replica_nodes`` maps a node to those whose vaults copy what its ranks alone hold.
    ``after_step``: leave the running generation in order when this step is finished (a boundary), instead of at once.
    ``secret`` (hex) authenticates vault transfers of this job.
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

    @property
    def world_size(self) -> int:
        return len(self.seats) * self.spec.nproc_per_node

    @cached_property
    def seated_nodes(self) -> frozenset[str]:
        """The nodes, to look one up in."""
        return frozenset(self.seats)

    @cached_property
    def racks(self) -> dict[str, str]:
        """The rack of each holder that has one."""
        return {holder.node: holder.rack for holder in self.holders if holder.rack}

    def is_same_rack(self, node: str, other: str) -> bool:
        """Whether both are in one rack, as far as is known."""
        rack = self.racks.get(node)
        return rack is not None and rack == self.racks.get(other)

    @cached_property
    def seat_index(self) -> dict[str, int]:
        """The place of each node among the seats."""
        return {node: place for place, node in enumerate(self.seats)}

    @cached_property
    def roster(self) -> tuple[Member, ...]:
        """Every rank, in order. Of ten thousand it takes a while: ask for one node's, or one rank, where that does."""
        return tuple(member for node in self.seats for member in self.members_on(node))

    def members_on(self, node: str | None) -> tuple[Member, ...]:
        """The ranks of a node, none where it has no seat."""
        if node is None:
            return ()
        return tuple(Member(rank=rank, node=node, local_rank=at) for at, rank in enumerate(self.ranks_on(node)))

    def node_of(self, rank: int) -> str:
        """Where a rank computes. Raises IndexError where there is no such rank."""
        return self.seats[rank // self.spec.nproc_per_node]

    def ranks_on(self, node: str) -> range:
        """The global ranks that compute on ``node``; none where it has no seat."""
        place, nproc = self.seat_index.get(node), self.spec.nproc_per_node
        return range(0) if place is None else range(place * nproc, (place + 1) * nproc)

    def has_rank_on(self, node: str, rank: int) -> bool:
        """Whether there is such a rank, and it computes on ``node``."""
        return rank < self.world_size and self.node_of(rank) == node

    def member_at(self, node: str, local_rank: int) -> Member | None:
        """The rank that ``local_rank`` on ``node`` plays, or None where it plays none."""
        return next((member for member in self.members_on(node) if member.local_rank == local_rank), None)


# --- reports: from ranks and launchers, through the agent, to the controller -------------------------------------


class LauncherJoined(Report, frozen=True, kw_only=True, tag=True):
    """A launcher offers its node to the job. Sent again after every reconnect of launcher or agent.

    ``generation`` is what its ranks are in (0: none), so that a controller that lost track can catch up.
    """

    spec: JobSpec
    launcher: Incarnation
    store: Address
    generation: GenerationNumber = 0


class LauncherLeft(Report, frozen=True, kw_only=True, tag=True):
    """A launcher is gone: ``orderly`` when it said goodbye, else its socket closed."""

    launcher: Incarnation
    orderly: bool
    detail: ShortText = ""


class RankLost(Report, frozen=True, kw_only=True, tag=True):
    """A rank's process is gone. ``replacement``: the launcher has a process ready, or can fork one, for its place."""

    generation: GenerationNumber
    rank: Rank
    local_rank: SafeInt
    detail: ShortText
    exit_code: SafeInt | None = None
    signal: SafeInt | None = None
    has_replacement: bool = True


class CollectiveFailed(Report, frozen=True, kw_only=True, tag=True):
    """A rank's collective raised. It says that somebody is lost, not who; a witness, not a judge."""

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    detail: ShortText


class RankStalled(Report, frozen=True, kw_only=True, tag=True):
    """A rank made no progress for ``stalled_s``, over its own threshold.

    ``step`` is the last finished step; ``collectives`` counts collectives entered in this generation: the rank with
    the smallest (step, collectives), or that does not report at all, is the one the others wait for. ``stacks``
    is every Python thread's stack. ``begun``: the last step that the rank has begun in this generation; 0 before the
    first.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    collectives: SafeInt
    stalled_s: float
    threshold_s: float
    stacks: LongText = ""
    begun: SafeInt = 0


class RankUnresponsive(Report, frozen=True, kw_only=True, tag=True):
    """The agent's own view: a rank whose signal thread stopped ticking (a stopped or starved process)."""

    generation: GenerationNumber
    rank: Rank
    local_rank: SafeInt
    unresponsive_s: float
    process_state: ShortText = ""


class VersionSealed(Report, frozen=True, kw_only=True, tag=True):
    """A rank's share of a version is sealed in the node's vault, or has been copied where it must be.

    Told of versions that may be committed (``kept``: the rank keeps it until a later one is) and of those with
    ``digests``; the others are found in the vaults when they are needed. ``replicas``: nodes whose vaults have
    acknowledged the copy. ``safe``: as many failure domains hold every byte of this share as the job asks for (other
    ranks' equal copies counted). ``alike``: nodes that store again, each a part of it, what of this share is not copied
    to ``replicas``. ``digests`` maps a replica group (ranks that must be equal) to the weighted digest of
    its parameters, in hex.
    """

    generation: GenerationNumber
    rank: Rank
    version: Version
    bytes: NonNegativeInt
    durable: bool
    commit_candidate: bool = False
    full_copies: tuple[NodeId, ...] = ()
    digests: dict[str, str] = {}
    partial_copies: tuple[NodeId, ...] = ()


class Resumed(Report, frozen=True, kw_only=True, tag=True):
    """A rank finished its first step in a generation; the acknowledgement that ends a failure's way.

    ``restored`` is the version it started from (None: from scratch). ``phases_s`` has the seconds of each phase, one
    after the other: start (of a process for which no standby was there), abort, teardown, wait, rendezvous, build (the
    training function up to ``run.track``), restore, plan (of snapshots) and first_step. compile is the part of the
    first step in which torch.compile compiled, and is not counted in first_step.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    restored: Version | None
    phases_s: dict[str, float]


class UserError(Report, frozen=True, kw_only=True, tag=True):
    """The training function raised an exception of its own."""

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    error: ShortText
    traceback: LongText


class RankFinished(Report, frozen=True, kw_only=True, tag=True):
    """A rank's training function returned.

    ``step``: the last finished step. ``begun``: the last step that the rank began, which a ``break`` leaves unfinished;
    None where it is not known.
    """

    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    started_step: SafeInt | None = None


class PeerConnectionLost(Report, frozen=True, kw_only=True, tag=True):
    """The node's vault lost its connection to the vault on ``peer``, and a new one is not taken there.

    A hint that ``peer`` may be gone: it accuses nobody and shortens a wait at most. At most one a second for each peer.
    """

    peer: NodeId
    detail: ShortText = ""


class FindingRaised(Message, frozen=True, kw_only=True, tag=True):
    """The agent found something about its node; ``job`` where it belongs to one."""

    finding: Finding
    job: JobId | None = None


class FindingCleared(Message, frozen=True, kw_only=True, tag=True):
    """A finding's clearing rule holds."""

    key: str
    trace: TraceId = ""


class ProbeFinished(Message, frozen=True, kw_only=True, tag=True):
    """One side's result of a probe. ``rows``: bytes, latency in seconds (median), bus bandwidth in bytes/s.

    ``wrong``: the work was done and its result is wrong, which convicts; a probe that could not be done does not.
    ``began``: this side had what it takes, and went to work or to meet the others, so that a failure after that says
    something of the nodes or the way between them. A failure without it says nothing of anybody, nor does one of an
    agent that does not know the field.
    """

    probe: str
    ok: bool
    detail: ShortText = ""
    rows: tuple[tuple[SafeInt, float, float], ...] = ()
    wrong_result: bool = False
    started: bool = False


AnyReport = (
    LauncherJoined
    | LauncherLeft
    | RankLost
    | CollectiveFailed
    | RankStalled
    | RankUnresponsive
    | VersionSealed
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
    """A rank's progress in a heartbeat: last finished step, and seconds that step took (median of late ones).

    ``busy_s``: of these, the seconds in which the rank did not wait for others (median of late steps), where it is
    measured. In lock step all ranks take equally long; this tells which of them the others wait for.

    ``begun``: the last step that the rank has begun in this generation; 0 before the first.

    ``job`` is not held against the pattern of names here: that took three times as long as reading the whole beat, and
    a job that nobody knows by that name is passed over.
    """

    job: Annotated[str, msgspec.Meta(max_length=63)]
    generation: GenerationNumber
    rank: Rank
    step: SafeInt
    step_s: float
    loss: float | None = None
    busy_s: float | None = None
    started_step: SafeInt = 0
