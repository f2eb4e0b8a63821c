"""Describe sealed shards and read them chunk by chunk from any node, hashed before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash

from everstep.errors import DECODE_ERRORS, DigestMismatch, EverstepError, MalformedMessage
from everstep.ids import NodeId, Rank, Version
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.native import DIGEST_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import DataEnd, Digests, DigestsRequest, Get
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.reading import ByteRange, SealedSlotReader, SlotFinder
from everstep_agent.vault.memory.segments import SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerPool, fetch_manifest, request_bulk

# Length of parity. Apart from the arithmetic, so that a vault loads numpy only when it makes or reads parity.

STRIPE_BYTES = 256 << 10
"""Part of the parity format: a byte's place in its stripe determines its field element and bit."""

MAX_MEMBERS = 255  # g has order 255; a 256th member would repeat the first coefficient


def parity_bytes(longest: int) -> int:
    """Return the bytes of P, and of Q, for members of at most ``longest`` bytes: a whole number of stripes."""
    return -(-longest // STRIPE_BYTES) * STRIPE_BYTES


# Parity manifest: a parity shard's letter and its members, each with its sealed manifest and chunk digests, so that a
# lost member can be recovered and checked without asking another node.

ParityLetter = Literal["P", "Q"]
PARITY_LETTERS: tuple[ParityLetter, ParityLetter] = ("P", "Q")

PayloadLength = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a sealed shard. ``digests`` joins the manifest's digest and one per payload chunk."""

    payload_bytes: PayloadLength
    manifest: bytes
    digests: bytes

    def chunk_bytes(self, index: int) -> int:
        """Return the length of chunk ``index``; 0 behind the payload's end."""
        return max(0, min(CHUNK_BYTES, self.payload_bytes - index * CHUNK_BYTES))

    def digest(self, index: int) -> bytes:
        return self.digests[(index + 1) * DIGEST_BYTES : (index + 2) * DIGEST_BYTES]

    def check(self, description: str) -> ShardInfo:
        """Return this description. Raises MalformedMessage if its lengths do not fit together."""
        if len(self.digests) != (chunk_count(self.payload_bytes) + 1) * DIGEST_BYTES:
            raise MalformedMessage(
                f"{description}: {len(self.digests)} bytes of digests for a payload of {self.payload_bytes} bytes"
            )
        return self


class ParityMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard of a group and its node when the parity was made."""

    rank: Rank
    node: NodeId
    info: ShardInfo

    def location(self, job: str, version: Version) -> ShardLocation:
        return ShardLocation(job, self.node, self.rank, version)


class ParityManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parity shard's manifest. ``members`` are in the order of their coefficients."""

    format: Literal[1] = 1
    letter: ParityLetter
    group: Rank
    version: Version
    members: Annotated[tuple[ParityMember, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of the parity itself."""
        return parity_bytes(max(member.info.payload_bytes for member in self.members))

    @property
    def members_digest(self) -> str:
        """A digest that is equal for P and Q of the same shards."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self.members))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(ParityManifest)


def decode_parity_manifest(data: bytes, description: str) -> ParityManifest:
    """Decode a parity shard's manifest. Raises MalformedMessage if it is none, or its lengths do not fit together."""
    try:
        manifest = _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"{description}: not a parity manifest: {error}") from error
    for member in manifest.members:
        member.info.check(description)
    return manifest


T = TypeVar("T")


class ShardLocation(msgspec.Struct, frozen=True):
    """A shard of a version on a node: rank ``rank_or_group``'s, or that group's parity."""

    job: str
    node: str
    rank_or_group: int
    version: Version
    is_parity: bool = False

    def __str__(self) -> str:
        whose = "the parity of group" if self.is_parity else "rank"
        return f"{whose} {self.rank_or_group}'s version {self.version} on {self.node}"


@dataclass(eq=False)
class ShardReader:
    """Read shards of this node and of others. Safe to use from any thread."""

    _settings: VaultSettings
    _slot_finder: SlotFinder
    _peers: PeerPool
    _finding_reporter: FindingReporter

    def read_info(
        self, location: ShardLocation, known_manifests: Mapping[bytes, bytes] = {}, group: ParityGroup | None = None
    ) -> ShardInfo:
        """Return the sealed description of a shard with a hashed manifest; its node is told of the parity ``group``."""
        if location.node == self._settings.node:
            reading = self._open(location)
            return _make_info(len(reading.payload), reading.manifest, b"".join(reading.digests), location)
        rank, version, parity = location.rank_or_group, location.version, location.is_parity

        def ask(channel: VaultChannel) -> tuple[Digests, bytes]:
            channel.send(DigestsRequest(rank=rank, version=version, parity=parity, group=group))
            channel.set_receive_timeout(self._settings.request_timeout_s)
            answer = channel.receive_answer(Digests)
            manifest = known_manifests.get(answer.digests[:DIGEST_BYTES])
            if manifest is None:
                manifest = fetch_manifest(channel, self._settings, rank, version, parity=parity)
            return answer, manifest

        answer, manifest = self._peers.call(location.job, location.node, ask)
        if xxhash.xxh3_128_digest(manifest) != answer.digests[:DIGEST_BYTES]:
            self._raise_corrupt(location, "its manifest has a wrong digest")
        return _make_info(answer.payload_bytes, manifest, answer.digests, location)

    def read_chunk(self, location: ShardLocation, info: ShardInfo, index: int, into: memoryview) -> None:
        """Fill ``into`` with chunk ``index`` of the shard sealed as ``info``; ``into`` is as long as the chunk."""
        piece = index * CHUNK_BYTES, len(into)
        if location.node == self._settings.node:
            reading = self._open(location, piece)
            (into[:],) = reading.views([piece])
            reading.require_unchanged()
        else:
            read = partial(self._read_remote, location=location, piece=piece, into=into)
            self._peers.call(location.job, location.node, read)
        if xxhash.xxh3_128_digest(into) != info.digest(index):
            self._raise_corrupt(location, f"chunk {index} differs from the sealed bytes")

    def _open(self, location: ShardLocation, *ranges: ByteRange) -> SealedSlotReader:
        rank, version, parity = location.rank_or_group, location.version, location.is_parity
        return self._slot_finder.open(location.job, rank, version, ranges, parity=parity)

    def _read_remote(self, channel: VaultChannel, location: ShardLocation, piece: ByteRange, into: memoryview) -> None:
        rank, version, parity = location.rank_or_group, location.version, location.is_parity
        length = request_bulk(channel, self._settings, Get(rank=rank, version=version, ranges=(piece,), parity=parity))
        if length != len(into):
            raise MalformedMessage(f"{location.node} announced {length} bytes instead of {len(into)}")
        channel.receive_into(into)
        channel.require_good_piece()
        channel.receive_answer(DataEnd)

    def _raise_corrupt(self, location: ShardLocation, detail: str) -> None:
        if location.node != self._settings.node:
            self._finding_reporter.report_corrupt_transfer(
                location.job, location.node, location.rank_or_group, location.version, detail
            )
        raise DigestMismatch(f"{location}: {detail}")


@dataclass(eq=False)
class ShardWorker:
    """Base of the workers that protect, recover and spill versions: they read shards of all nodes in parallel."""

    node: str
    store: SegmentStore
    job_table: JobTable
    shard_reader: ShardReader
    counters: VaultCounters
    streams: Executor

    def read_infos(
        self,
        locations: Sequence[ShardLocation],
        known_manifests: Mapping[bytes, bytes] = {},
        group: ParityGroup | None = None,
    ) -> list[ShardInfo | EverstepError]:
        """Return the sealed description of each shard, or the error; see ``ShardReader.read_info``."""
        read = self.shard_reader.read_info
        return run_parallel(self.streams, [partial(read, each, known_manifests, group) for each in locations])


def _make_info(payload_bytes: int, manifest: bytes, digests: bytes, location: ShardLocation) -> ShardInfo:
    return ShardInfo(payload_bytes=payload_bytes, manifest=manifest, digests=digests).check(str(location))


def run_parallel(executor: Executor, calls: Iterable[Callable[[], T]]) -> list[T | EverstepError]:
    """Run each call in a thread and wait for all; return results or errors."""
    futures = [executor.submit(work) for work in calls]
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


def require_all(outcomes: Iterable[T | EverstepError]) -> list[T]:
    """Return the results. Raises the first error."""
    results = []
    for outcome in outcomes:
        if isinstance(outcome, EverstepError):
            raise outcome
        results.append(outcome)
    return results
