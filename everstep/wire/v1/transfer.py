"""Define frames between vaults: a 4-byte big-endian length and one MessagePack document, as on Unix sockets.

docs/reference/protocol.md describes the mutual proof that begins a connection, and which answer follows each request.
Any request may be answered with ``TransferRefused``.

Bulk bytes follow a frame raw, in pieces of at most CHUNK_BYTES. One status byte after each piece says whether the slot
still matched its header after the piece had been read: a slot that its rank refilled meanwhile is not corruption. After
a piece of ``Data`` it also says whether the next piece hashes right (or was not to be hashed), or else that
``TransferRefused`` follows instead.

A ``Put`` whose slot needs bytes goes on with ``ManifestPart`` and ``Part``, on this connection or on others of the same
client, and ends with ``PutDone``. Repeated after its connection broke, it continues where that ended. It belongs to a
generation and is refused when that is over. Reads do not: sealed bytes with the right hash are valid for a rank that
was suspended, too, and the version identifies them.

The challenge keeps strangers out; the bytes are neither encrypted nor signed individually. Against an attacker on the
path between two nodes, run the vaults on a separate network or inside a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Annotated

import msgspec

from everstep.errors import BY_CODE, EverstepError
from everstep.ids import GenerationNumber, JobId, NodeId, Rank, ShortText, Version
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.native import DIGEST_BYTES
from everstep.wire.v1.base import Message
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.vault_reports import ParityGroup

MAX_GREETING_BYTES = 4096
"""Longest frame from a peer that has not authenticated itself."""

MAX_TRANSFER_FRAME_BYTES = 16 << 20
"""Longest frame of an authenticated peer; a slot's digests must fit in one."""

MIN_SEND_BYTES_PER_S = 4 << 20
"""A slower sender looks dead to its peer, which then ends the transfer."""

MAX_RANGES = 1 << 18
"""Most byte ranges in one ``Get``."""

NONCE_BYTES = 32

PIECE_VALID = b"\x00"
PIECE_STALE = b"\x01"

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
TransferId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


ManifestBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_MANIFEST_BYTES)]


class Greeting(Message, frozen=True, kw_only=True, tag=True):
    """The client's first message: the job, its own node, and the node it means to reach. ``read_only``: nothing may be
    copied here over this connection."""

    protocols: tuple[int, ...]
    job: JobId
    node: NodeId
    peer: NodeId
    nonce: Nonce
    read_only: bool = False


class Challenge(Message, frozen=True, kw_only=True, tag=True):
    protocol: int
    nonce: Nonce


class Proof(Message, frozen=True, kw_only=True, tag=True):
    """``make_proof`` of one side's role."""

    mac: Mac


class Put(Message, frozen=True, kw_only=True, tag=True):
    """A request to copy a sealed slot here.

    Attributes:
        slot_bytes: Slot size of the sender's segment, so that the copy's segment need not grow later.
        slots: Number of slots of the sender's segment.
        digests: The xxh3-128 of the manifest and of each payload chunk, concatenated.
        keep: Versions of this rank whose copies this one must not overwrite.
    """

    generation: GenerationNumber
    rank: Rank
    version: Version
    slot_bytes: Count
    slots: Annotated[int, msgspec.Meta(ge=1, le=64)]
    payload_bytes: Count
    manifest_bytes: ManifestBytes
    digests: bytes
    keep: Annotated[tuple[Version, ...], msgspec.Meta(max_length=16)] = ()


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """A slot is reserved; parts carry ``transfer``.

    Attributes:
        needs_manifest: It must be sent, since no slot here has it.
        present_chunks: A bit for each payload chunk, lowest first, that need not be sent: it arrived before the
            connection broke, or another version has the same bytes (frozen layers, embeddings whose rows saw no token).
            Missing bits are 0.
    """

    transfer: TransferId
    needs_manifest: bool = False
    present_chunks: Annotated[bytes, msgspec.Meta(max_length=MAX_TRANSFER_FRAME_BYTES // 128)] = b""


class Part(Message, frozen=True, kw_only=True, tag=True):
    """``chunks`` payload chunks from ``first_chunk`` on follow, a status byte after each."""

    transfer: TransferId
    first_chunk: Count
    chunks: Annotated[int, msgspec.Meta(ge=1)]


class ManifestPart(Message, frozen=True, kw_only=True, tag=True):
    """The manifest follows, in pieces of CHUNK_BYTES with a status byte after each."""

    transfer: TransferId


class PartDone(Message, frozen=True, kw_only=True, tag=True):
    """Every chunk of the part, or the manifest, has the right hash."""


class PutDone(Message, frozen=True, kw_only=True, tag=True):
    """All parts are done: seal the slot."""

    transfer: TransferId


class Ack(Message, frozen=True, kw_only=True, tag=True):
    """The slot is sealed here."""


class Get(Message, frozen=True, kw_only=True, tag=True):
    """Request byte ranges (offset, length) of a sealed slot's payload; without ranges, its manifest.

    Attributes:
        parity: Read the parity of the group with the number ``rank`` instead of a rank's slot.
        skip_hash: A range that is one whole chunk may be sent unchecked, since the requester hashes it and receives the
            sealed digest. If it is wrong, the requester asks again without this flag, to learn whether it is wrong at
            its source.
    """

    rank: Rank
    version: Version
    ranges: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_RANGES)]
    parity: bool = False
    skip_hash: bool = False


class Data(Message, frozen=True, kw_only=True, tag=True):
    """``bytes`` of bulk follow: the ranges one after another, cut into pieces of CHUNK_BYTES."""

    bytes: Count


class DataEnd(Message, frozen=True, kw_only=True, tag=True):
    """After the bulk: the xxh3-128 of each range (or of the manifest), concatenated."""

    digests: bytes


class DigestsRequest(Message, frozen=True, kw_only=True, tag=True):
    """Request the sealed digests of that rank's version (``parity``: of the group with that number). ``group``: the
    request serves to make parity of that group, which the shard is a member of."""

    rank: Rank
    version: Version
    parity: bool = False
    group: ParityGroup | None = None


class Digests(Message, frozen=True, kw_only=True, tag=True):
    """The xxh3-128 of the manifest and of each payload chunk, concatenated. ``Get`` fetches the manifest."""

    payload_bytes: Count
    digests: bytes


class InventoryRequest(Message, frozen=True, kw_only=True, tag=True):
    """Request the list of the job's sealed slots."""


class InventoryList(Message, frozen=True, kw_only=True, tag=True):
    """The sealed slots. ``unchecked``: number of further ones that this vault has yet to hash."""

    slots: tuple[SlotInfo, ...]
    unchecked: int = 0


class TransferRefused(Message, frozen=True, kw_only=True, tag=True):
    """The request was refused; ``code`` of everstep.errors."""

    code: str
    message: ShortText


Opening = Greeting | Proof
OpeningAnswer = Challenge | Proof | TransferRefused
TransferRequest = Put | ManifestPart | Part | PutDone | Get | DigestsRequest | InventoryRequest
TransferAnswer = Ready | PartDone | Ack | Data | DataEnd | Digests | InventoryList | TransferRefused


def make_proof(secret: bytes, role: str, greeting: Greeting, challenge: Challenge) -> bytes:
    """Return the HMAC-SHA256 under the job's secret over both nodes, the job and both nonces.

    ``role`` ("client" or "server") is part of it, so that one side's proof cannot be replayed as the other's.
    """
    names = ("everstep/1/vault", role, greeting.job, greeting.node, greeting.peer, challenge.protocol)
    text = msgspec.msgpack.encode((*names, greeting.nonce, challenge.nonce))
    return hmac.new(secret, text, hashlib.sha256).digest()


def is_valid_proof(mac: bytes, secret: bytes, role: str, greeting: Greeting, challenge: Challenge) -> bool:
    """Return whether ``mac`` is that role's proof. Takes the same time for every wrong one."""
    return hmac.compare_digest(mac, make_proof(secret, role, greeting, challenge))


def split_digests(joined: bytes) -> list[bytes]:
    """Split concatenated digests."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def chunk_bitmap(chunks: Iterable[int]) -> bytes:
    """Return a set of chunks as a bitmap, as in ``Ready.present_chunks``."""
    number = 0
    for chunk in chunks:
        number |= 1 << chunk
    return number.to_bytes(-(-number.bit_length() // 8), "little")


def missing_chunks(count: int, bits: bytes) -> list[int]:
    """Return which of ``count`` chunks are not in such a bitmap."""
    number = int.from_bytes(bits, "little")
    return [chunk for chunk in range(count) if not number >> chunk & 1]


def refused_from_error(error: EverstepError) -> TransferRefused:
    """Return the refusal for an error."""
    return TransferRefused(code=error.code, message=str(error)[:4096])


def error_from_refused(refused: TransferRefused, peer: str) -> EverstepError:
    """Return the error of a peer's refusal; the message names the peer."""
    kind = BY_CODE.get(refused.code, EverstepError)
    return kind(f"{peer}: {refused.message}")
