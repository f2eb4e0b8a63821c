"""What a parity shard says of itself: which of P and Q it is, of which shards, and what each of those was sealed as.

It carries each member's manifest and chunk digests, so that a lost member can be made again and be checked against
what its rank sealed, while nobody else is asked.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import xxhash

from agent.vault.parity.stripes import MOST_MEMBERS, parity_bytes
from everstep.errors import UNREADABLE, MalformedMessage
from everstep.ids import NodeId, Rank, Version
from everstep.slots import CHUNK_BYTES, DIGEST_BYTES, chunk_count

Letter = Literal["P", "Q"]
LETTERS: tuple[Letter, Letter] = ("P", "Q")

Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was sealed as one slot. ``digests``: the manifest's, then one per chunk of the payload, joined."""

    payload_bytes: Length
    manifest: bytes
    digests: bytes

    def chunk_bytes(self, index: int) -> int:
        """Length of chunk ``index``; 0 behind the payload's end."""
        return max(0, min(CHUNK_BYTES, self.payload_bytes - index * CHUNK_BYTES))

    def digest(self, index: int) -> bytes:
        """Of chunk ``index``."""
        return self.digests[(index + 1) * DIGEST_BYTES : (index + 2) * DIGEST_BYTES]

    def check(self, whose: str) -> Facts:
        """Returns these facts. Raises MalformedMessage where the lengths do not fit together."""
        if len(self.digests) != (chunk_count(self.payload_bytes) + 1) * DIGEST_BYTES:
            raise MalformedMessage(
                f"{whose}: {len(self.digests)} bytes of digests for a payload of {self.payload_bytes} bytes"
            )
        return self


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard of a group, where it was when parity was made."""

    rank: Rank
    node: NodeId
    sealed: Facts


class ParityManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``members`` in the order of their coefficients."""

    format: Literal[1] = 1
    letter: Letter
    group: Rank
    version: Version
    members: Annotated[tuple[MemberFacts, ...], msgspec.Meta(min_length=1, max_length=MOST_MEMBERS)]

    @property
    def longest(self) -> int:
        """Payload bytes of the longest member."""
        return max(member.sealed.payload_bytes for member in self.members)

    @property
    def payload_bytes(self) -> int:
        """Of the parity itself."""
        return parity_bytes(self.longest)

    @property
    def members_digest(self) -> str:
        """The same for P and Q of the same shards."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self.members))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(ParityManifest)


def read_manifest(data: bytes, whose: str) -> ParityManifest:
    """A parity shard's manifest. Raises MalformedMessage where it is none, or its lengths do not fit together."""
    try:
        manifest = _decoder.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"{whose}: this is no manifest of parity: {error}") from error
    for member in manifest.members:
        member.sealed.check(whose)
    return manifest
