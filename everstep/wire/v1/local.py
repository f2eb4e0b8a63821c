"""Frames on a node's unix sockets. Each is a 4-byte big-endian length and one MessagePack document.

``agent.sock``: launchers and ranks connect; peer credentials (same user, or root) are the authentication. The first
frame is ``Hello``; the agent answers ``Welcome``, then sends directives of that job as they come.

* a launcher sends ``LauncherJoined`` and receives ``NewGeneration``, ``KillRank``, ``StopJob``;
* a rank sends ``Tick`` and reports, and receives ``NewGeneration``, ``StopJob``, ``VersionNotice``. The end of its
  connection is the end of its process: the agent reports ``RankLost`` at once.

``vault.sock``: ranks and the agent's supervisor, whose own requests are in ``supervision``. Requests carry
``request``; the answer repeats it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from everstep.ids import GenerationNumber, JobId, NodeId, Rank, Version
from everstep.wire.v1.base import Message, ShortText
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import (
    CollectiveFailed,
    FindingRaised,
    Holder,
    LauncherJoined,
    PeerConnectionLost,
    RankFinished,
    RankStalled,
    Resumed,
    UserError,
    VersionSealed,
)
from everstep.wire.v1.vault_orders import ParityGroup

# ---- supervision
# What only a node's supervisor and its vault say to each other on ``vault.sock``; all else there is in ``local``.


class ConfigureJob(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor: the job's generation, the secret and the vaults of its nodes.

    Sent for every generation, before its ranks hear of it. The secret has at least 16 characters. ``Failed`` with
    StaleGeneration where a newer generation was said before.
    """

    request: int
    job: JobId
    generation: GenerationNumber
    secret: str
    holders: tuple[Holder, ...]


class ForgetJob(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor: the job is over; unlink its segments."""

    request: int
    job: JobId


class Protect(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor of a home of parity: make P or Q of a group's shards of ``version``. Answer: Protected.

    The members' vaults are read, so the version must stay in their slots meanwhile. ``keep``: versions whose parity
    must not be overwritten by this one. ``Failed`` with NotFound where a member does not hold its shard any more.
    """

    request: int
    job: JobId
    generation: GenerationNumber
    version: Version
    group: ParityGroup
    keep: tuple[Version, ...] = ()


class Protected(Message, frozen=True, kw_only=True, tag=True):
    """P or Q of the group is sealed here, made of bytes that hashed as their ranks had sealed them.

    ``members``: a digest of what those shards were sealed as. P and Q are of use together only where it is the same.
    """

    request: int
    parity: Literal["P", "Q"]
    members_digest: str


class Spill(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor of a node that holds shares of ``version``: write them to storage. Answer: Spilled.

    ``writers``: the nodes that are asked, each with the ranks whose shares it writes; the same for all of them, since
    each byte is written by one. Together they make an ordinary checkpoint in a folder under ``url``, a path or URL; the
    last one to finish makes it whole, and then all under ``url`` but the ``keep`` written last are removed (0: none).

    The version must stay in the slots meanwhile: ``Failed`` with NotFound where a share is not there any more. Asked
    again, a vault goes on where it ended.
    """

    request: int
    job: JobId
    generation: GenerationNumber
    version: Version
    url: ShortText
    writers: dict[NodeId, tuple[Rank, ...]]
    keep_last: Annotated[int, msgspec.Meta(ge=0)] = 0


class Spilled(Message, frozen=True, kw_only=True, tag=True):
    """This node's part is on storage. ``whole``: so is all the rest. ``removed``: folders of older checkpoints;
    ``left``: of all that are whole, where some are removed."""

    request: int
    folder: str
    bytes: int
    complete: bool
    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


class Statistics(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor: what has the vault done so far? Answer: StatisticsAnswer."""

    request: int


class StatisticsAnswer(Message, frozen=True, kw_only=True, tag=True):
    """Counts since the vault started (``counters``), requests refused since then by code, and what is there now.

    Counters: replicated_slots, replicated_bytes (sent and acknowledged), received_slots, received_bytes (sealed
    here for others), reused_bytes (of those: were here already, and not sent), received_manifests (one for each plan),
    superseded_copies, served_bytes, fetched_bytes (for ranks, but for what they read themselves), parity_slots,
    parity_bytes (made here), parity_recovered_bytes (made again from parity), spilled_slots, spilled_bytes (on
    storage), scrubbed_slots, scrubbed_bytes, corrupt_slots, corrupt_transfers. Levels: segment_bytes, free_bytes,
    sealed_slots, peer_connections.
    """

    request: int
    counters: dict[str, int]
    refused: dict[str, int]
    gauges: dict[str, int]


class VaultFinding(Message, frozen=True, kw_only=True, tag=True):
    """To the supervisor, unasked: something the scrubber or a transfer found.

    A connection is the supervisor's once it has sent Configure, Forget or Statistics; until then findings wait.
    ``PeerLost`` goes to it in the same way, but does not wait: it is about this moment.
    """

    finding: FindingRaised


MAX_FRAME_BYTES = 16 << 20


class ConnectionRole(StrEnum):
    LAUNCHER = "launcher"
    RANK = "rank"


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Who is at the other end. ``local_rank`` is None for a launcher."""

    protocols: tuple[int, ...]
    role: ConnectionRole
    job: JobId
    pid: int
    local_rank: int | None = None


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The agent's answer: which node this is, and where its vault listens."""

    protocol: int
    node: NodeId
    vault_socket: str
    rank_heartbeat_interval_s: float


class RankHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A rank's sign of life from its signal thread, with its progress. No tick for long: ``RankUnresponsive``.

    ``snapshot_every``: how many steps apart its snapshots are; 0 where only what is to be committed is stored.
    ``begun``: the last step that the rank has begun in ``generation``; 0 before the first.
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


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """An orderly end of the connection; not a loss."""

    detail: ShortText = ""


class LauncherLost(Message, frozen=True, kw_only=True, tag=True):
    """To ranks: their launcher is gone and will not replace them."""

    detail: ShortText = ""


class RankExited(Message, frozen=True, kw_only=True, tag=True):
    """From a launcher: how a rank's process ended, and whether another stands ready for its place.

    ``generation``: the newest one that the launcher had heard of by then (0: none).
    """

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    has_replacement: bool
    generation: GenerationNumber | None = None


ToAgent = (
    Hello
    | RankHeartbeat
    | Goodbye
    | RankExited
    | LauncherJoined
    | CollectiveFailed
    | RankStalled
    | VersionSealed
    | Resumed
    | UserError
    | RankFinished
    | FindingRaised
)
FromAgent = Welcome | NewGeneration | KillRank | StopJob | VersionNotice | LauncherLost


# --- vault -------------------------------------------------------------------------------------------------------


class OpenSegment(Message, frozen=True, kw_only=True, tag=True):
    """Make (or find) the segment of one rank's slots, large enough for ``slot_bytes`` each. Answer: Segment.

    ``keep``: where it is given, the segment has just so many slots, and where they are fewer than before these versions
    are taken along first, in this order; else one with more slots serves as well. ``numa_node``: the one whose memory
    it should be made of.
    """

    request: int
    job: JobId
    local_rank: int
    slot_bytes: int
    slots: int
    numa_node: int | None = None
    keep: tuple[Version, ...] | None = None


class SegmentOpened(Message, frozen=True, kw_only=True, tag=True):
    """Where a segment is: a file in a shared-memory file system, laid out by ``everstep.layout.slots``."""

    request: int
    path: str
    slot_bytes: int
    slots: int


class SegmentRequirement(Message, frozen=True, kw_only=True, array_like=True):
    """A segment that a node will be asked for: ``slots`` of ``slot_bytes``, and ``pinned`` slots more for versions on
    their way to storage or parity. ``replica``: for copies of what rank ``number`` of another node has; else the local
    rank ``number``'s own.
    """

    replica: bool
    number: int
    slot_bytes: int
    slots: int
    pinned_slots: int = 0


class CheckCapacity(Message, frozen=True, kw_only=True, tag=True):
    """From one rank of a node, when the job's layout is known: is there room for all of these? Nothing is made.

    Answer: Done; or ``Failed`` with OutOfSlotMemory, which the supervisor hears of as a finding. ``tentative``: there
    is a choice that takes less, so a part of the free memory must be left to the training, and a lack is only answered.

    ``below``: before that lack, copies of ranks below this number that are not among ``needs`` give their memory back,
    all versions but ``keep``. 0: nothing is given back.
    """

    request: int
    job: JobId
    needs: tuple[SegmentRequirement, ...]
    has_fallback: bool = False
    reclaim_below_rank: int = 0
    keep: tuple[Version, ...] = ()


class SlotSealed(Message, frozen=True, kw_only=True, tag=True):
    """From a rank: slot ``slot`` of its segment is sealed. The vault replicates it and answers ``Replicated``.

    ``replicate``: byte ranges (offset, length) within the slot's payload that no other rank holds and that go to
    ``to``; empty when equal copies elsewhere already make it safe. Where it is not empty, the whole slot (manifest,
    payload, digests) is copied, so that each copy can be checked and served by itself. ``keep``: versions that the
    rank itself does not overwrite, nor may its copies be. ``kept``: this one may be committed.

    A node that is still busy with an older slot of this rank is given the newest one next, or the newest that may be
    committed: what else waited is answered as failed with "superseded by VERSION". Refused (``Failed``) with NotFound
    where that slot is not sealed as that version, and StaleGeneration where ``generation`` is over.
    """

    request: int
    job: JobId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    slot: int
    version: Version
    replicate_ranges: tuple[tuple[int, int], ...] = ()
    replica_nodes: tuple[NodeId, ...] = ()
    keep: tuple[Version, ...] = ()
    commit_candidate: bool = False


class Replicated(Message, frozen=True, kw_only=True, tag=True):
    """Nodes that hold a hashed copy of the sealed slot now; ``failed`` maps a node to why it does not."""

    request: int
    nodes: tuple[NodeId, ...]
    failed: dict[str, str] = {}


class Inventory(Message, frozen=True, kw_only=True, tag=True):
    """Which sealed slots of the job are here, own and replica, and in the vaults of ``nodes``. Answer: InventoryAnswer.

    A node that does not answer within ``timeout_s`` is left out of the answer.
    """

    request: int
    job: JobId
    nodes: tuple[NodeId, ...] = ()
    timeout_s: float = 1.0


class SlotInfo(Message, frozen=True, kw_only=True, array_like=True):
    """One sealed slot: on which node, whose, which version, its file there, and the digest of its manifest.

    ``group``: it is nowhere any more, and vaults make it again from this group when it is fetched; ``node`` had it, and
    ``path`` and ``slot`` say nothing.
    """

    node: NodeId
    rank: Rank
    version: Version
    path: str
    slot: int
    replica: bool
    manifest_digest: str
    parity_group: ParityGroup | None = None

    def is_on(self, node: str) -> bool:
        """Whether its file is on that node."""
        return self.node == node and self.parity_group is None


class InventoryAnswer(Message, frozen=True, kw_only=True, tag=True):
    """``unchecked``: sealed slots of the job that those vaults found when they began and have yet to hash. They are not
    among ``slots``; ask again."""

    request: int
    slots: tuple[SlotInfo, ...]
    unchecked: int = 0


class Fetch(Message, frozen=True, kw_only=True, tag=True):
    """From a rank: copy a slot's manifest, or ranges of one that is nowhere any more. The vault answers ``Fetched``.

    ``ranges`` are (offset, length) in the slot's payload; they land one after another from ``into_offset`` on in the
    file ``into`` (a scratch file under the segment directory). Empty ranges: the manifest lands there.

    ``group``: nobody holds the slot any more; make it again from this group that it is a member of (``node`` says
    nothing then). ``Failed`` with NotRestorable where more is lost than the group bears, and with ``malformed`` for
    ranges without a group: a rank reads slots that are there itself (``Connect``).
    """

    request: int
    job: JobId
    node: NodeId
    rank: Rank
    version: Version
    ranges: tuple[tuple[int, int], ...]
    target_path: str
    target_offset: int = 0
    parity_group: ParityGroup | None = None


class Fetched(Message, frozen=True, kw_only=True, tag=True):
    request: int
    bytes: int


class OpenPeerConnection(Message, frozen=True, kw_only=True, tag=True):
    """From a rank: let me read slots of ``node``'s vault myself. The vault answers ``Connected``, with a descriptor."""

    request: int
    job: JobId
    node: NodeId


class PeerConnectionOpened(Message, frozen=True, kw_only=True, tag=True):
    """Beside this frame comes the descriptor (SCM_RIGHTS) of a connection between vaults, proved and unused.

    It is the rank's from now on, for reads as ``transfer`` has them. ``answer_timeout_s``: how long to wait for the
    answer to a request, ``io_timeout_s``: for the next byte after that.
    """

    request: int
    answer_timeout_s: float
    io_timeout_s: float


class PeerConnectionBroken(Message, frozen=True, kw_only=True, tag=True):
    """From a rank: such a connection ended without its doing. The vault looks whether the peer is there, and answers
    ``Done``."""

    request: int
    job: JobId
    node: NodeId
    reason: ShortText


class RequestDone(Message, frozen=True, kw_only=True, tag=True):
    request: int


class RequestFailed(Message, frozen=True, kw_only=True, tag=True):
    """The request was refused; ``code`` of everstep.errors."""

    request: int
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
