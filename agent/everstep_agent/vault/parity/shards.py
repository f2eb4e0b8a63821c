"""Sealed shards, chunk by chunk, wherever they are: hashed against what they were sealed as before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, wait
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash

from everstep.errors import UNREADABLE, DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.ids import NodeId, Rank, Version
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.native import DIGEST_BYTES
from everstep.wire.framing import Channel
from everstep.wire.v1.transfer import Data, DataEnd, Digests, DigestsAsk, Get
from everstep.wire.v1.vault_orders import ParityGroup
from everstep_agent.vault.memory.reading import Library
from everstep_agent.vault.reporting import Findings
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import Peers, ask_manifest

# ---- stripes
# How long parity is. Apart from the arithmetic, so that a vault loads numpy only once it makes parity or reads it.

STRIPE_BYTES = 256 << 10
"""Part of the format of parity: where a byte lies in its stripe is which bit of which element it is."""

MOST_MEMBERS = 255
"""g has order 255; the 256th member's coefficient would be the first one's again."""


def parity_bytes(longest: int) -> int:
    """Bytes of P, and of Q, for members of at most ``longest`` bytes: a whole number of stripes."""
    return -(-longest // STRIPE_BYTES) * STRIPE_BYTES


# ---- manifest
# What a parity shard says of itself: which of P and Q it is, of which shards, and what each of those was sealed as.
#
# It carries each member's manifest and chunk digests, so that a lost member can be made again and be checked against
# what its rank sealed, while nobody else is asked.

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


T = TypeVar("T")


class Place(msgspec.Struct, frozen=True):
    """A shard of a version on a node: rank ``number``'s, or the parity of group ``number``."""

    job: str
    node: str
    number: int
    version: Version
    parity: bool = False

    def __str__(self) -> str:
        whose = "the parity of group" if self.parity else "rank"
        return f"{whose} {self.number}'s version {self.version} on {self.node}"


class Shards:
    """Reads shards of this node and of others. Safe to use from any thread."""

    def __init__(self, settings: VaultSettings, library: Library, peers: Peers, findings: Findings) -> None:
        self._settings = settings
        self._library = library
        self._peers = peers
        self._findings = findings

    def facts(self, place: Place, known: Mapping[bytes, bytes] = {}, group: ParityGroup | None = None) -> Facts:
        """What is sealed there, the manifest hashed. ``known``: manifests by their digests, which are not asked for.
        ``group``: parity is to be made of it, and the node is told by which group.

        Raises NotFound where the node holds no such shard or is not known, Unavailable, DigestMismatch,
        MalformedMessage.
        """
        if place.node == self._settings.node:
            reading = self._library.open(place.job, place.number, place.version, (), parity=place.parity)
            return _facts(len(reading.payload), reading.manifest, b"".join(reading.digests), place)

        def ask(channel: Channel) -> tuple[Digests, bytes]:
            channel.send(DigestsAsk(rank=place.number, version=place.version, parity=place.parity, group=group))
            channel.patience(self._settings.settle_timeout_s)
            said = channel.answer(Digests)
            manifest = known.get(said.digests[:DIGEST_BYTES])
            if manifest is None:
                manifest = ask_manifest(channel, self._settings, place.number, place.version, parity=place.parity)
            return said, manifest

        said, manifest = self._peers.call(place.job, place.node, ask)
        if xxhash.xxh3_128_digest(manifest) != said.digests[:DIGEST_BYTES]:
            self._corrupt(place, "its manifest did not hash right")
        return _facts(said.payload_bytes, manifest, said.digests, place)

    def chunk(self, place: Place, facts: Facts, index: int, into: memoryview) -> None:
        """Fills ``into``, as long as the chunk, with chunk ``index`` of the shard that was sealed as ``facts``.

        Raises NotFound where it is not there any more, Unavailable, and DigestMismatch for other bytes than those.
        """
        if place.node == self._settings.node:
            self._copy(place, index, into)
        else:
            self._peers.call(place.job, place.node, lambda channel: self._get(channel, place, index, into))
        if xxhash.xxh3_128_digest(into) != facts.digest(index):
            self._corrupt(place, f"chunk {index} is not what was sealed as that version")

    def _copy(self, place: Place, index: int, into: memoryview) -> None:
        at = index * CHUNK_BYTES
        reading = self._library.open(place.job, place.number, place.version, ((at, len(into)),), parity=place.parity)
        into[:] = reading.payload[at : at + len(into)]
        reading.require_still()

    def _get(self, channel: Channel, place: Place, index: int, into: memoryview) -> None:
        ranges = ((index * CHUNK_BYTES, len(into)),)
        channel.send(Get(rank=place.number, version=place.version, ranges=ranges, parity=place.parity))
        channel.patience(self._settings.settle_timeout_s)
        length = channel.answer(Data).bytes
        if length != len(into):
            raise MalformedMessage(f"{place.node} announced {length} bytes where {len(into)} were asked for")
        channel.patience(self._settings.io_timeout_s)
        channel.receive_into(into)
        moved_on = not channel.status()
        channel.answer(DataEnd)  # raises what the peer refuses for
        if moved_on:
            raise MalformedMessage(f"{place.node} said that the slot moved on, and then that it did not")

    def _corrupt(self, place: Place, detail: str) -> None:
        if place.node != self._settings.node:
            self._findings.transfer_corrupt(place.job, place.node, place.number, place.version, detail)
        raise DigestMismatch(f"{place}: {detail}")


def _facts(payload_bytes: int, manifest: bytes, digests: bytes, place: Place) -> Facts:
    return Facts(payload_bytes=payload_bytes, manifest=manifest, digests=digests).check(str(place))


def all_at_once(streams: Executor, works: Iterable[Callable[[], T]]) -> list[T | EverstepError]:
    """Runs each in a thread and waits for all of them: results, or why there is none."""
    futures = [streams.submit(work) for work in works]
    wait(futures)
    found: list[T | EverstepError] = []
    for future in futures:
        error = future.exception()
        if error is None:
            found.append(future.result())
        elif isinstance(error, EverstepError):
            found.append(error)
        else:
            raise error
    return found


def require(found: Iterable[T | EverstepError]) -> list[T]:
    """The results. Raises the first of the errors."""
    results = []
    for one in found:
        if isinstance(one, EverstepError):
            raise one
        results.append(one)
    return results


def not_a_home(node: str, group: int) -> NotFound:
    """The refusal of a vault that is asked for a parity which is another's."""
    return NotFound(f"{node} is no home of the parity of group {group}")
