"""What only a node's supervisor and its vault say to each other on ``vault.sock``; all else there is in ``local``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.ids import GenerationNumber, JobId, NodeId, Rank, Version
from everstep.wire.v1.base import Message, ShortText
from everstep.wire.v1.parity import ParityGroup
from everstep.wire.v1.training import FindingRaised, Holder


class Configure(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor: the job's generation, the secret and the vaults of its nodes.

    Sent for every generation, before its ranks hear of it. The secret has at least 16 characters. ``Failed`` with
    StaleGeneration where a newer generation was said before.
    """

    request: int
    job: JobId
    generation: GenerationNumber
    secret: str
    holders: tuple[Holder, ...]


class Forget(Message, frozen=True, kw_only=True, tag=True):
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
    members: str


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
    keep: Annotated[int, msgspec.Meta(ge=0)] = 0


class Spilled(Message, frozen=True, kw_only=True, tag=True):
    """This node's part is on storage. ``whole``: so is all the rest. ``removed``: folders of older checkpoints;
    ``left``: of all that are whole, where some are removed."""

    request: int
    folder: str
    bytes: int
    whole: bool
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Statistics(Message, frozen=True, kw_only=True, tag=True):
    """From the supervisor: what has the vault done so far? Answer: StatisticsAnswer."""

    request: int


class StatisticsAnswer(Message, frozen=True, kw_only=True, tag=True):
    """Counts since the vault started (``counters``), requests refused since then by code, and what is there now.

    Counters: replicated_slots, replicated_bytes (sent and acknowledged), received_slots, received_bytes (sealed
    here for others), reused_bytes (of those: were here already, and not sent), received_manifests (one for each plan),
    superseded, served_bytes, fetched_bytes (for ranks, but for what they read themselves), parity_slots, parity_bytes
    (made here), decoded_bytes (made again from parity), spilled_slots, spilled_bytes (on storage), scrubbed_slots,
    scrubbed_bytes, corrupt_slots, corrupt_transfers. Levels: segment_bytes, free_bytes, sealed_slots, peer_connections.
    """

    request: int
    counters: dict[str, int]
    refused: dict[str, int]
    levels: dict[str, int]


class VaultFinding(Message, frozen=True, kw_only=True, tag=True):
    """To the supervisor, unasked: something the scrubber or a transfer found.

    A connection is the supervisor's once it has sent Configure, Forget or Statistics; until then findings wait.
    ``PeerLost`` goes to it in the same way, but does not wait: it is about this moment.
    """

    finding: FindingRaised
