"""Define frames on a node's Unix sockets. Each is a 4-byte big-endian length and one MessagePack document.

``agent.sock``: launchers and ranks connect, authenticated by peer credentials (same user, or root). The first frame is
``Hello``; the agent answers ``Welcome``, then sends directives of that job as they come.

* A launcher sends ``LauncherJoined`` and ``LauncherLeaving``. It receives ``NewGeneration``, ``KillRank``,
  ``StopJob``.
* A rank sends ``RankHeartbeat``, reports and ``WrongProduct``, and receives ``NewGeneration``, ``StopJob``,
  ``VersionNotice``. The end of its connection is the end of its process: the agent reports ``RankLost`` at once. With
  ``Welcome`` it gets memory for a mutex that tells of its death sooner (``everstep.host.robust_mutex``).

``vault.sock``: ranks and the agent's supervisor connect. Requests carry ``request``; the answer repeats it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from everstep.ids import GenerationNumber, JobId, NodeId, NonNegativeInt, Rank, ShortText, Version
from everstep.wire.v1.base import Message
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import (
    AuditsClean,
    AuditStatement,
    CollectiveFailed,
    FindingRaised,
    Holder,
    LauncherJoined,
    LauncherLeaving,
    PeerConnectionLost,
    RankFinished,
    RankStalled,
    Resumed,
    UserError,
    VersionSealed,
)
from everstep.wire.v1.vault_reports import ParityGroup


class _Exchange(Message, frozen=True, kw_only=True):
    """A request to the vault, or an answer, which repeats the request's number."""

    request: int


class _JobRequest(_Exchange, frozen=True, kw_only=True):
    """A request about one job."""

    job: JobId


# ---- messages between a node's supervisor and its vault alone, on ``vault.sock``


class ConfigureJob(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From the supervisor: the job's generation, its secret and the vaults of its nodes.

    Sent for every generation, before its ranks receive it. The secret has at least 16 characters. ``RequestFailed``
    with StaleGeneration if a newer generation was configured before.
    """

    generation: GenerationNumber
    secret: ShortText
    holders: tuple[Holder, ...]


class ForgetJob(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From the supervisor: the job is over; unlink its segments."""


class Protect(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From the supervisor of a parity node: make P or Q of a group's shards of ``version``. Answer: Protected.

    The members' vaults are read, so the version must stay in their slots meanwhile. ``keep``: versions whose parity
    this one must not overwrite. ``RequestFailed`` with NotFound if a member no longer holds its shard.
    """

    generation: GenerationNumber
    version: Version
    group: ParityGroup
    keep: tuple[Version, ...] = ()


class Protected(_Exchange, frozen=True, kw_only=True, tag=True):
    """P or Q of the group is sealed here, made of bytes that matched their ranks' digests. ``members_digest``: a digest
    of the shards' sealed digests. P and Q work together only if it is the same."""

    parity: Literal["P", "Q"]
    members_digest: str


class Spill(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From the supervisor of a node that holds shares of ``version``: write them to storage. Answer: Spilled.

    ``writers``: the asked nodes, each with the ranks whose shares it writes; the same for all, since one node writes
    each byte. Together they make an ordinary checkpoint in a folder under ``url``, a path or URL. The last one to
    finish makes it complete, and then removes all under ``url`` but the ``keep_last`` newest (0: none are removed), and
    but what generations up to that of ``earlier`` wrote beyond its step: an earlier run's work. The version must stay
    in the slots meanwhile: ``RequestFailed`` with NotFound if a share is gone. A repeated request continues where the
    last one ended.
    """

    generation: GenerationNumber
    version: Version
    url: ShortText
    writers: dict[NodeId, tuple[Rank, ...]]
    keep_last: Annotated[int, msgspec.Meta(ge=0)] = 0
    earlier: Version | None = None


class Spilled(_Exchange, frozen=True, kw_only=True, tag=True):
    """This node's part is on storage."""

    folder: str
    bytes: int
    complete: bool  # all other parts are, too
    removed: tuple[str, ...] = ()  # folders of older checkpoints that were removed
    remaining: tuple[str, ...] = ()  # all complete folders, if some are removed


class Statistics(_Exchange, frozen=True, kw_only=True, tag=True):
    """From the supervisor: request the vault's statistics. Answer: StatisticsAnswer."""


class StatisticsAnswer(_Exchange, frozen=True, kw_only=True, tag=True):
    """Counts since the vault started (``counters``), refusals since then by code, and current levels (``gauges``).

    Counters: replicated_slots, replicated_bytes (sent and acknowledged), received_slots, received_bytes (sealed here
    for others), reused_bytes (of those: already here, and not sent), received_manifests (one per plan),
    superseded_copies, served_bytes, fetched_bytes (for ranks, without their own reads), parity_slots, parity_bytes
    (made here), parity_recovered_bytes (rebuilt from parity), spilled_slots, spilled_bytes (on storage),
    scrubbed_slots, scrubbed_bytes, corrupt_slots, corrupt_transfers. Levels: segment_bytes, free_bytes, sealed_slots,
    peer_connections.
    """

    counters: dict[str, int]
    refused: dict[str, int]
    gauges: dict[str, int]


class VaultFinding(Message, frozen=True, kw_only=True, tag=True):
    """To the supervisor, unasked: a finding of the scrubber or of a transfer.

    A connection is the supervisor's once it has sent ConfigureJob, ForgetJob or Statistics; until then findings wait.
    ``PeerConnectionLost`` goes to it in the same way, but does not wait: it concerns the present moment.
    """

    finding: FindingRaised


MAX_FRAME_BYTES = 16 << 20


DEFAULT_AGENT_SOCKET = "/run/everstep/agent.sock"
"""Socket of a node's agent, unless a setting names another one."""


class ConnectionRole(StrEnum):
    LAUNCHER = "launcher"
    RANK = "rank"


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """The connecting process. ``local_rank`` is None for a launcher."""

    protocols: tuple[int, ...]
    role: ConnectionRole
    job: JobId
    pid: int
    local_rank: int | None = None


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The agent's answer: which node this is, and where its vault listens.

    ``controllers`` are the URLs of the fleet's controllers, and ``ca_file`` the PEM file of the authority that signed
    their certificates (empty: the system's), for a launcher that reads its own job.
    """

    protocol: int
    node: NodeId
    vault_socket: str
    rank_heartbeat_interval_s: float
    controllers: tuple[str, ...] = ()
    ca_file: str = ""


class RankHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A rank's sign of life from its signal thread, with its progress. After long silence: ``RankUnresponsive``.

    Attributes:
        snapshot_every: Steps between its snapshots; 0 if only versions to be committed are stored.
        started_step: The last step that the rank has begun in ``generation``; 0 before the first.
        until_step: The last step that ``Run.steps`` was asked for; 0 in a custom loop, and in one without end.
    """

    generation: GenerationNumber
    rank: Rank
    step: int
    step_s: float
    collectives: int = 0
    loss: float | None = None
    busy_s: float | None = None
    snapshot_every: Annotated[int, msgspec.Meta(ge=0)] = 1
    started_step: Annotated[int, msgspec.Meta(ge=0)] = 0
    until_step: NonNegativeInt = 0


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """An orderly end of the connection; not a loss."""

    detail: ShortText = ""


class LauncherLost(Message, frozen=True, kw_only=True, tag=True):
    """To ranks: their launcher is gone and will not replace them."""

    detail: ShortText = ""


class RankExited(Message, frozen=True, kw_only=True, tag=True):
    """From a launcher: how a rank's process ended, and whether another is ready to replace it. ``generation``: the
    newest that the launcher knew by then (0: none)."""

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    has_replacement: bool
    generation: GenerationNumber | None = None


MAX_OPERAND_BYTES = 512 << 10
FewElements = Annotated[int, msgspec.Meta(ge=1, le=64)]
OperandBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_OPERAND_BYTES)]


class WrongProduct(Message, frozen=True, kw_only=True, tag=True):
    """From a rank: a matrix product that it computed wrongly, for later diagnostics of its node.

    Attributes:
        work: The product, in words.
        dtype: Of the operands and of the product.
        rows: Rows of the left operand.
        inner: Columns of the left operand, and rows of the right one.
        columns: Columns of the right operand.
        left: The left operand's bytes, row by row.
        right: The right operand's bytes, row by row.
        allows_tf32: Training multiplies float32 in TF32.
    """

    work: ShortText
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    rows: FewElements
    inner: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    columns: FewElements
    left: OperandBytes
    right: OperandBytes
    allows_tf32: bool = False


ToAgent = (
    Hello
    | RankHeartbeat
    | Goodbye
    | RankExited
    | LauncherJoined
    | LauncherLeaving
    | CollectiveFailed
    | RankStalled
    | VersionSealed
    | AuditStatement
    | AuditsClean
    | Resumed
    | UserError
    | RankFinished
    | FindingRaised
    | WrongProduct
)
FromAgent = Welcome | NewGeneration | KillRank | StopJob | VersionNotice | LauncherLost


# --- vault --------------------------------------------------------------------------------------------------------


class OpenSegment(_JobRequest, frozen=True, kw_only=True, tag=True):
    """Make (or find) the segment of one rank's slots, large enough for ``slot_bytes`` each. Answer: SegmentOpened.

    Attributes:
        keep: If given, the segment has exactly ``slots`` slots, and after a reduction these versions are moved first,
            in this order. Otherwise a segment with more slots serves as well.
        numa_node: The NUMA node whose memory to use.
    """

    local_rank: int
    slot_bytes: int
    slots: int
    numa_node: int | None = None
    keep: tuple[Version, ...] | None = None


class SegmentOpened(_Exchange, frozen=True, kw_only=True, tag=True):
    """The location of a segment: a file in a shared-memory file system, laid out by ``everstep.layout.slots``."""

    path: str


class SegmentRequirement(Message, frozen=True, kw_only=True, array_like=True):
    """A segment that a node will be asked for.

    Attributes:
        replica: Whether it is for copies of another node's rank ``number``, else for the local rank ``number``'s own
            slots.
        pinned_slots: Slots besides ``slots`` for versions on their way to storage or parity.
    """

    replica: bool
    number: int
    slot_bytes: int
    slots: int
    pinned_slots: int = 0


class CheckCapacity(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From one rank of a node, when the job's layout is known: check for room for all of these. Nothing is made.

    Answer: RequestDone; or ``RequestFailed`` with OutOfSlotMemory, which the supervisor receives as a finding.

    Attributes:
        has_fallback: There is a choice that takes less. So a part of the free memory must be left to the training, and
            a lack is only answered, without a finding.
        reclaim_below_rank: Before a lack is reported, copies of ranks below this number that are not among ``needs``
            release their memory, all versions but ``keep``. 0: nothing is released.
    """

    needs: tuple[SegmentRequirement, ...]
    has_fallback: bool = False
    reclaim_below_rank: int = 0
    keep: tuple[Version, ...] = ()


class SlotSealed(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From a rank: slot ``slot`` of its segment is sealed. The vault replicates it and answers ``Replicated``.

    A node that is still busy with an older slot of this rank gets the newest next, or the newest that may be committed.
    The others fail with "superseded by VERSION". Refused (``RequestFailed``) with NotFound if the slot is not sealed as
    that version, and with StaleGeneration if ``generation`` is over.

    Attributes:
        replicate_ranges: Byte ranges (offset, length) of the slot's payload that no other rank holds and that go to
            ``replica_nodes``. Empty if equal copies elsewhere already make it safe. Otherwise the whole slot (manifest,
            payload, digests) is copied, so that each copy can be checked and served by itself.
        keep: Versions that the rank does not overwrite, and its copies must not either.
        commit_candidate: This version may be committed.
    """

    generation: GenerationNumber
    rank: Rank
    local_rank: int
    slot: int
    version: Version
    replicate_ranges: tuple[tuple[int, int], ...] = ()
    replica_nodes: tuple[NodeId, ...] = ()
    keep: tuple[Version, ...] = ()
    commit_candidate: bool = False


class Replicated(_Exchange, frozen=True, kw_only=True, tag=True):
    """Nodes that now hold a hashed copy of the sealed slot; ``failed`` maps a node to why it does not."""

    nodes: tuple[NodeId, ...]
    failed: dict[str, str] = {}


class Inventory(_JobRequest, frozen=True, kw_only=True, tag=True):
    """List the job's sealed slots, own and replica, here and in the vaults of ``nodes``. Answer: InventoryAnswer. A
    node that does not answer within ``timeout_s`` is left out."""

    nodes: tuple[NodeId, ...] = ()
    timeout_s: float = 1.0


class SlotInfo(Message, frozen=True, kw_only=True, array_like=True):
    """One sealed slot: its node, rank, version, file, and the digest of its manifest.

    ``parity_group``: the slot is gone, and vaults rebuild it from this group when it is fetched; ``node`` had it, and
    ``path`` and ``slot`` are meaningless.
    ``finished``: the last generation and step that the segment's rank has finished, as it noted itself; None if that
    is not known. The step may be older or newer than that of ``version``. ``finished_by`` is the rank.
    ``loop_ended``: the rank's loop has ended with that step.
    """

    node: NodeId
    rank: Rank
    version: Version
    path: str
    slot: int
    replica: bool
    manifest_digest: str
    parity_group: ParityGroup | None = None
    finished: Version | None = None
    finished_by: Rank = 0
    loop_ended: bool = False

    def is_on(self, node: str) -> bool:
        """Return whether its file is on that node."""
        return self.node == node and self.parity_group is None


class InventoryAnswer(_Exchange, frozen=True, kw_only=True, tag=True):
    """The sealed slots that were found. ``unchecked``: number of slots of the job that those vaults found when they
    started and have yet to hash. They are not among ``slots``; ask again."""

    slots: tuple[SlotInfo, ...]
    unchecked: int = 0


class Fetch(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From a rank: copy a slot's manifest, or ranges of a slot that is gone. The vault answers ``Fetched``.

    ``RequestFailed`` with NotRestorable if more is lost than the group can rebuild, and with ``malformed`` for ranges
    without a group: ranks read existing slots themselves (``OpenPeerConnection``).

    Attributes:
        ranges: (offset, length) in the slot's payload, written one after another from ``target_offset`` on. Empty: the
            manifest.
        target_path: A scratch file under the segment directory.
        parity_group: No vault holds the slot any more; rebuild it from this group, which contains it (``node`` is
            ignored).
    """

    node: NodeId
    rank: Rank
    version: Version
    ranges: tuple[tuple[int, int], ...]
    target_path: ShortText
    target_offset: int = 0
    parity_group: ParityGroup | None = None


class Fetched(_Exchange, frozen=True, kw_only=True, tag=True):
    bytes: int


class OpenPeerConnection(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From a rank: open a connection to read slots of ``node``'s vault. Answer: PeerConnectionOpened, with a
    descriptor."""

    node: NodeId


class PeerConnectionOpened(_Exchange, frozen=True, kw_only=True, tag=True):
    """The descriptor (SCM_RIGHTS) of an authenticated, unused connection between vaults accompanies this frame. The
    rank owns it from now on, for reads as in ``transfer``."""

    answer_timeout_s: float  # how long to wait for the answer to a request
    io_timeout_s: float  # how long to wait for the next byte after that


class PeerConnectionBroken(_JobRequest, frozen=True, kw_only=True, tag=True):
    """From a rank: such a connection broke without its doing. The vault checks whether the peer is there, and answers
    ``RequestDone``."""

    node: NodeId
    reason: ShortText


class RequestDone(_Exchange, frozen=True, kw_only=True, tag=True):
    """The request is done."""


class RequestFailed(_Exchange, frozen=True, kw_only=True, tag=True):
    """The request was refused; ``code`` of everstep.errors."""

    code: str
    message: ShortText


ToVault = (
    OpenSegment
    | CheckCapacity
    | SlotSealed
    | ConfigureJob
    | ForgetJob
    | Inventory
    | Fetch
    | OpenPeerConnection
    | PeerConnectionBroken
    | Protect
    | Spill
    | Statistics
)
FromVault = (
    SegmentOpened
    | Replicated
    | InventoryAnswer
    | Fetched
    | PeerConnectionOpened
    | Protected
    | Spilled
    | RequestDone
    | RequestFailed
    | VaultFinding
    | PeerConnectionLost
    | StatisticsAnswer
)
