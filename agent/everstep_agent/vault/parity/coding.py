"""Encode parity shards, and recover lost shards from the survivors and the parity.

A reader that wants ranges of a lost shard gets them in a scratch file. Every chunk they touch is recovered whole,
because only whole chunks can be hashed against the sealed digests; nothing is written before that.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import msgspec
import xxhash

from everstep.errors import ConfigurationError, DigestMismatch, EverstepError, MalformedMessage, NotFound, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES, chunk_count, slot_bytes_for, slot_to_fill
from everstep.native import DIGEST_BYTES
from everstep.wire.v1.local import Fetch, Protect
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_agent.vault.memory.reading import ByteRange
from everstep_agent.vault.memory.segments import SegmentKey
from everstep_agent.vault.memory.shared_memory import write_scratch
from everstep_agent.vault.parity.shards import (
    PARITY_LETTERS,
    ParityLetter,
    ParityManifest,
    ParityMember,
    ShardInfo,
    ShardLocation,
    ShardReader,
    ShardWorker,
    decode_parity_manifest,
    parity_bytes,
    require_all,
    run_parallel,
)

# Encoding: make a group's P or Q on its parity node from the members' chunks, read side by side.
#
# Each chunk is hashed against its rank's sealed digest before it is used. A member whose slot is refilled meanwhile
# ends the work, and the slot that was begun is discarded.

PARITY_SLOTS = 2  # parity slots per group: the protected version, and the next one while it is made


@dataclass(eq=False)
class ParityEncoder(ShardWorker):
    """Answer Protect requests. Runs in worker threads; ``streams`` reads the members side by side."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._group_locks: defaultdict[SegmentKey, threading.Lock] = defaultdict(threading.Lock)

    def encode_group(self, request: Protect) -> ParityManifest:
        """Make and seal the parity, unless that of these very shards exists already, and return its manifest."""
        self.job_table.require_current(request.job, request.generation)
        key = SegmentKey(request.job, "parity", request.group.group)
        manifest = self._build_manifest(request, key)
        with self._lock:
            group_lock = self._group_locks[key]
        with group_lock:
            self._write_parity(request, key, manifest)
        self.job_table.add_parity_group(request.job, request.version, request.group)
        return manifest

    def _build_manifest(self, request: Protect, key: SegmentKey) -> ParityManifest:
        group = request.group
        nodes = [*(node for _, node in group.members), *group.parity]
        if len(set(nodes)) != len(nodes):
            raise ConfigurationError(
                f"group {group.group} names a node twice ({', '.join(nodes)}): "
                "members and parity must be on different nodes, or one loss costs two shards"
            )
        if self.node not in group.parity:
            raise NotFound(f"{self.node} does not store the parity of group {group.group}")
        locations = [ShardLocation(request.job, node, rank, request.version) for rank, node in group.members]
        infos = require_all(self.read_infos(locations, self._known_manifests(key), group))
        return ParityManifest(
            letter=PARITY_LETTERS[group.parity.index(self.node)],
            group=group.group,
            version=request.version,
            members=tuple(
                ParityMember(rank=rank, node=node, info=info)
                for (rank, node), info in zip(group.members, infos, strict=True)
            ),
        )

    def _known_manifests(self, key: SegmentKey) -> dict[bytes, bytes]:
        """Return members' manifests by digest from earlier parity here; they change only with the plan."""
        known: dict[bytes, bytes] = {}
        segment = self.store.get(key)
        if segment is None:
            return known
        for slot, _ in segment.view.sealed_slots():
            try:
                earlier = decode_parity_manifest(segment.view.manifest(slot), str(segment.path))
            except (DigestMismatch, MalformedMessage):  # reported by the scrubber or reader of that slot
                continue
            known |= {member.info.digests[:DIGEST_BYTES]: member.info.manifest for member in earlier.members}
        return known

    def _write_parity(self, request: Protect, key: SegmentKey, manifest: ParityManifest) -> None:
        encoded = manifest.encode()
        if len(encoded) > MAX_MANIFEST_BYTES:
            raise ConfigurationError(
                f"the manifests and digests of the {len(manifest.members)} members of group {request.group.group} "
                f"take {len(encoded)} bytes, more than the {MAX_MANIFEST_BYTES} bytes of a manifest: use smaller groups"
            )
        segment = self.store.open(key, slot_bytes_for(len(encoded), manifest.payload_bytes), PARITY_SLOTS)
        self.job_table.require_configured(request.job, self.store.delete_job)
        view = segment.view
        if any(header.version == request.version and view.manifest(s) == encoded for s, header in segment.sealed()):
            return
        slot = slot_to_fill(view.headers(), set(request.keep))
        payload = view.begin(slot, request.group.group, request.version, encoded, manifest.payload_bytes)
        try:
            digests = [xxhash.xxh3_128_digest(encoded), *self._encode_chunks(request, manifest, payload)]
            self.job_table.require_current(request.job, request.generation)
            view.seal(slot, digests)
        except BaseException:
            view.discard(slot)
            raise
        self.counters.add("parity_slots")
        self.counters.add("parity_bytes", manifest.payload_bytes)

    def _encode_chunks(self, request: Protect, manifest: ParityManifest, payload: memoryview) -> list[bytes]:
        """Write the parity chunk by chunk and return the digest of each."""
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        members = manifest.members
        locations = [member.location(request.job, request.version) for member in members]
        buffers = _chunk_buffers(members)
        digests = []
        for index in range(chunk_count(manifest.payload_bytes)):
            chunks = [buffer[: m.info.chunk_bytes(index)] for m, buffer in zip(members, buffers, strict=True)]
            reads = [
                partial(self.shard_reader.read_chunk, location, member.info, index, chunk)
                for location, member, chunk in zip(locations, members, chunks, strict=True)
                if chunk
            ]
            require_all(run_parallel(self.streams, reads))
            into = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            galois.encode(chunks, **{manifest.letter.lower(): into})
            digests.append(xxhash.xxh3_128_digest(into))
        return digests

    def forget_job(self, job: str) -> None:
        """Drop the job's locks; running work finds no segment to be kept in."""
        with self._lock:
            for key in [k for k in self._group_locks if k.job == job]:
                del self._group_locks[key]


def _chunk_buffers(members: Sequence[ParityMember]) -> list[memoryview]:
    return [memoryview(bytearray(min(CHUNK_BYTES, member.info.payload_bytes))) for member in members]


# Recovery: chunks of a lost member, or of P or Q, made again from the rest of the group.
#
# Every chunk read or recovered is hashed against its sealed digest. A survivor that does not answer, or has other bytes
# than the parity was made of, counts as lost too, as long as the remaining parity suffices.


class ParitySource(msgspec.Struct, frozen=True):
    """A group's P or Q and the node that holds it."""

    location: ShardLocation
    info: ShardInfo
    manifest: ParityManifest


@dataclass(eq=False)
class ShardRecovery:
    """Recover one shard of a group, chunk by chunk. The wanted shard is a member by its number, or P or Q, sealed as
    ``info``. ``members`` are in the order of their coefficients; ``lost_reasons`` are by lost location."""

    _wanted: int | ParityLetter
    _location: ShardLocation
    info: ShardInfo
    _members: Sequence[ParityMember]
    _parities: dict[ParityLetter, ParitySource]
    _lost_reasons: dict[str, str]
    _shard_reader: ShardReader
    _streams: Executor

    def __post_init__(self) -> None:
        job, version = self._location.job, self._location.version
        self._lost = {self._wanted}
        self._shards: dict[int | ParityLetter, tuple[ShardLocation, ShardInfo]] = {
            number: (member.location(job, version), member.info) for number, member in enumerate(self._members)
        }
        self._shards |= {letter: (parity.location, parity.info) for letter, parity in self._parities.items()}
        self._buffers: dict[int | ParityLetter, memoryview] = dict(enumerate(_chunk_buffers(self._members)))
        size = min(CHUNK_BYTES, parity_bytes(max(m.info.payload_bytes for m in self._members)))
        self._buffers |= {letter: memoryview(bytearray(size)) for letter in PARITY_LETTERS}

    def recover_chunk(self, index: int) -> memoryview:
        """Return chunk ``index`` of the wanted shard, hashed. The next call overwrites it. Raises EverstepError."""
        while True:
            letters = self._choose_letters(index)
            failed = self._read_others(index, letters)
            if failed:
                self._mark_lost(failed)
                continue
            found = self._decode_chunk(index, letters)
            if xxhash.xxh3_128_digest(found) == self.info.digest(index):
                return found
            error = DigestMismatch(f"chunk {index} of {self._location}, recovered from parity, has a wrong digest")
            if len(letters) != 1:
                raise error
            self._mark_lost([(letters[0], error)])  # the other parity shard may be right

    def _decode_chunk(self, index: int, letters: Sequence[ParityLetter]) -> memoryview:
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        chunks = [self._chunk(number, index) for number in range(len(self._members))]
        lost = {number: chunks[number] for number in self._lost_in(index)}
        if lost:
            parity = {letter: self._chunk(letter, index) for letter in letters}
            present = [None if number in lost else chunk for number, chunk in enumerate(chunks)]
            galois.recover(present, parity.get("P"), parity.get("Q"), lost)
        if isinstance(self._wanted, int):
            return chunks[self._wanted]
        into = self._buffers[self._wanted][: self.info.chunk_bytes(index)]
        galois.encode(chunks, **{self._wanted.lower(): into})
        return into

    def _chunk(self, shard: int | ParityLetter, index: int) -> memoryview:
        return self._buffers[shard][: self._shards[shard][1].chunk_bytes(index)]

    def _lost_in(self, index: int) -> list[int]:
        """Return the lost members that had bytes in this chunk; the others are known to have had none."""
        return [n for n, m in enumerate(self._members) if n in self._lost and m.info.chunk_bytes(index)]

    def _choose_letters(self, index: int) -> list[ParityLetter]:
        """Choose as many of P and Q as members are lost."""
        letters = [letter for letter in PARITY_LETTERS if letter in self._parities.keys() - self._lost]
        lost = self._lost_in(index)
        if len(letters) < len(lost):
            others = sum(number != self._wanted for number in lost)
            without = 2 - len(letters) - (self._wanted in PARITY_LETTERS)
            raise NotRestorable(
                f"{self._location} cannot be recovered: {others} other members and {without} of P and Q are "
                f"lost too: {describe_lost(self._lost_reasons)}"
            )
        return letters[: len(lost)]

    def _read_others(self, index: int, letters: list[ParityLetter]) -> list[tuple[int | ParityLetter, EverstepError]]:
        """Read the chunk of the survivors and of the parity; return failed shards with their errors."""
        present = [n for n, m in enumerate(self._members) if n not in self._lost and m.info.chunk_bytes(index)]
        shards: list[int | ParityLetter] = [*present, *letters]
        read = self._shard_reader.read_chunk
        reads = [partial(read, *self._shards[shard], index, self._chunk(shard, index)) for shard in shards]
        outcomes = zip(shards, run_parallel(self._streams, reads), strict=True)
        return [(shard, error) for shard, error in outcomes if isinstance(error, EverstepError)]

    def _mark_lost(self, failed: Sequence[tuple[int | ParityLetter, EverstepError]]) -> None:
        for shard, error in failed:
            self._lost.add(shard)
            self._lost_reasons[str(self._shards[shard][0])] = str(error)


def describe_lost(lost_reasons: dict[str, str]) -> str:
    return "; ".join(f"{location} is unavailable ({reason})" for location, reason in lost_reasons.items())


class ParityDecoder(ShardWorker):
    """Recover shards. Runs in worker threads; ``streams`` reads the survivors side by side."""

    def fetch(self, request: Fetch) -> int:
        """Write a manifest, or ranges recovered by parity, into ``request.target_path``; return the number of bytes."""
        if request.parity_group is not None:
            recovery = self.recover_member(request.job, request.rank, request.version, request.parity_group)
            if request.ranges:
                return self._write_ranges(request, recovery)
            manifest, counter = recovery.info.manifest, "parity_recovered_bytes"
        elif request.ranges:
            raise MalformedMessage(
                f"a vault fetches ranges only by parity: read rank {request.rank}'s version {request.version} "
                f"over a connection to {request.node}"
            )
        else:
            location = ShardLocation(request.job, request.node, request.rank, request.version)
            manifest, counter = self.shard_reader.read_info(location).manifest, "fetched_bytes"
        return self._write(request, len(manifest), [(0, memoryview(manifest))], counter)

    def _write_ranges(self, request: Fetch, recovery: ShardRecovery) -> int:
        wanted = _pieces_by_chunk(request.ranges, recovery.info.payload_bytes)
        pieces = (
            (at, chunk[start : start + count])
            for index in sorted(wanted)
            for chunk in (recovery.recover_chunk(index),)
            for at, start, count in wanted[index]
        )
        return self._write(request, sum(count for _, count in request.ranges), pieces, "parity_recovered_bytes")

    def _write(self, request: Fetch, length: int, pieces: Iterable[tuple[int, memoryview]], counter: str) -> int:
        store = self.store
        write_scratch(store.directory, request.target_path, request.target_offset, length, store.budget, pieces)
        self.counters.add(counter, length)
        return length

    def recover_member(self, job: str, rank: int, version: Version, group: ParityGroup) -> ShardRecovery:
        """Return the recovery of a member's shard. Raises NotRestorable, DigestMismatch, MalformedMessage."""
        nodes = dict(zip(PARITY_LETTERS, group.parity, strict=True))
        parities, missing = self._find_parities(job, version, group.group, nodes)
        description = f"rank {rank}'s version {version}"
        if not parities:
            raise NotRestorable(f"{description} cannot be recovered: {describe_lost(missing)}")
        manifest = _require_same_members([parity.manifest for parity in parities.values()], description)
        parts = manifest.members, parities, missing, self.shard_reader, self.streams
        for number, member in enumerate(manifest.members):
            if member.rank == rank:
                return ShardRecovery(number, member.location(job, version), member.info, *parts)
        raise MalformedMessage(f"rank {rank} is not in group {group.group} of the parity of {version}")

    def recover_parity(
        self, location: ShardLocation, manifest: ParityManifest, info: ShardInfo, group: ParityGroup | None
    ) -> ShardRecovery:
        """Return the recovery of P or Q at ``location``, sealed as ``info``. ``group`` names the other one's node."""
        parities, missing = self._other_parity(location, manifest.letter, group)
        _require_same_members([manifest, *(parity.manifest for parity in parities.values())], str(location))
        parts = manifest.members, parities, missing, self.shard_reader, self.streams
        return ShardRecovery(manifest.letter, location, info, *parts)

    def rebuild_parity_manifest(self, location: ShardLocation, group: ParityGroup) -> bytes:
        """Return the manifest of the parity shard on ``location.node``, rebuilt from the other parity shard's."""
        mine = PARITY_LETTERS[group.parity.index(location.node)]
        parities, missing = self._other_parity(location, mine, group)
        for parity in parities.values():
            return msgspec.structs.replace(parity.manifest, letter=mine).encode()
        raise NotRestorable(f"the manifest of {location} cannot be rebuilt: {describe_lost(missing)}")

    def _other_parity(
        self, location: ShardLocation, mine: ParityLetter, group: ParityGroup | None
    ) -> tuple[dict[ParityLetter, ParitySource], dict[str, str]]:
        if group is None:
            return {}, {f"the other parity of group {location.rank_or_group}": "its node is unknown"}
        nodes = {letter: node for letter, node in zip(PARITY_LETTERS, group.parity, strict=True) if letter != mine}
        return self._find_parities(location.job, location.version, location.rank_or_group, nodes)

    def _find_parities(
        self, job: str, version: Version, group: int, nodes: Mapping[ParityLetter, str]
    ) -> tuple[dict[ParityLetter, ParitySource], dict[str, str]]:
        """Return the available parity shards, and reasons for missing ones. Raises MalformedMessage for a wrong one."""
        locations = {letter: ShardLocation(job, node, group, version, is_parity=True) for letter, node in nodes.items()}
        parities, missing = {}, {}
        for (letter, location), info in zip(locations.items(), self.read_infos([*locations.values()]), strict=True):
            if isinstance(info, EverstepError):
                missing[str(location)] = str(info)
                continue
            manifest = decode_parity_manifest(info.manifest, str(location))
            found = (manifest.letter, manifest.group, manifest.version, info.payload_bytes)
            if found != (letter, group, version, manifest.payload_bytes):
                raise MalformedMessage(
                    f"{location}: the manifest is that of {manifest.letter} of group {manifest.group} "
                    f"at {manifest.version}"
                )
            parities[letter] = ParitySource(location, info, manifest)
        return parities, missing


def _require_same_members(manifests: Sequence[ParityManifest], description: str) -> ParityManifest:
    """Return one of the manifests. Raises DigestMismatch if they cover different shards."""
    if len({manifest.members_digest for manifest in manifests}) > 1:
        raise DigestMismatch(f"P and Q of the group of {description} were made of different shards")
    return manifests[0]


def _pieces_by_chunk(ranges: Sequence[ByteRange], length: int) -> dict[int, list[tuple[int, int, int]]]:
    """Split joined ranges by chunk, into (offset in the joined bytes, offset in the chunk, length)."""
    found: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    at = 0
    for offset, count in ranges:
        if offset < 0 or count < 0 or offset + count > length:
            raise MalformedMessage(f"bytes {offset} to {offset + count} are outside a payload of {length} bytes")
        end = offset + count
        while offset < end:
            index, start = divmod(offset, CHUNK_BYTES)
            part = min(end - offset, CHUNK_BYTES - start)
            found[index].append((at, start, part))
            at, offset = at + part, offset + part
    return found
