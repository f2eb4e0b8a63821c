"""Encode parity shards, and recover lost shards from the survivors and the parity.

A reader that wants ranges of a lost shard gets them in a scratch file, as for an existing slot. Every chunk they touch
is recovered whole, because only whole chunks can be hashed against the sealed digests; nothing is written before that.
Slot repair takes recovered chunks, also of P and Q, without a scratch file.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
import xxhash

from everstep.errors import ConfigurationError, DigestMismatch, EverstepError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES, chunk_count, slot_bytes_for, slot_to_fill
from everstep.native import DIGEST_BYTES
from everstep.wire.v1.local import Fetch, Protect
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.reading import ByteRange
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import ScratchFile
from everstep_agent.vault.parity.shards import (
    PARITY_LETTERS,
    ParityLetter,
    ParityManifest,
    ParityMember,
    ShardInfo,
    ShardLocation,
    ShardReader,
    decode_parity_manifest,
    not_a_parity_node,
    parity_bytes,
    require_all,
    run_parallel,
)
from everstep_agent.vault.reporting import VaultCounters

# Encoding: make a group's P or Q on its parity node from the members' chunks, read side by side.
#
# Each chunk is hashed against its rank's sealed digest before it is used; parity chunks are hashed as they are made.
# Members are read like any other shard, so a member whose slot is refilled meanwhile ends the work, and the slot that
# was begun is discarded.

PARITY_SLOTS = 2
"""Parity slots per group: the protected version, and the next one while it is made."""


class ParityEncoder:
    """Answer Protect requests. Runs in worker threads; ``streams`` reads the members side by side."""

    def __init__(
        self,
        node: str,
        store: SegmentStore,
        job_table: JobTable,
        shard_reader: ShardReader,
        counters: VaultCounters,
        streams: Executor,
    ) -> None:
        self._node = node
        self._store = store
        self._job_table = job_table
        self._shard_reader = shard_reader
        self._counters = counters
        self._streams = streams
        self._lock = threading.Lock()
        self._group_locks: defaultdict[SegmentKey, threading.Lock] = defaultdict(threading.Lock)

    def encode_group(self, request: Protect) -> ParityManifest:
        """Make and seal the parity, and return its manifest. Parity of these very shards that exists already is kept.

        Raises:
            StaleGeneration: The request's generation is over.
            NotFound: This node is no parity node of the group, or a member does not hold its shard.
            Unavailable: A member's node does not answer.
            DigestMismatch: A member's bytes are not the sealed ones.
            OutOfSlotMemory: Memory for the parity is missing.
            ConfigurationError: The group cannot be encoded.
        """
        self._job_table.require_current(request.job, request.generation)
        manifest = self._build_manifest(request)
        key = SegmentKey(request.job, "parity", request.group.group)
        with self._lock:
            making = self._group_locks[key]
        with making:
            self._write_parity(request, key, manifest)
        self._job_table.add_parity_group(request.job, request.version, request.group)
        return manifest

    def _build_manifest(self, request: Protect) -> ParityManifest:
        group = request.group
        _check_members(request)
        if self._node not in group.parity:
            raise not_a_parity_node(self._node, group.group)
        places = [ShardLocation(request.job, node, rank, request.version) for rank, node in group.members]
        known = self._known_manifests(SegmentKey(request.job, "parity", group.group))
        asks = [partial(self._shard_reader.read_info, place, known, group) for place in places]
        found = require_all(run_parallel(self._streams, asks))
        return ParityManifest(
            letter=PARITY_LETTERS[group.parity.index(self._node)],
            group=group.group,
            version=request.version,
            members=tuple(
                ParityMember(rank=place.rank_or_group, node=place.node, info=info)
                for place, info in zip(places, found, strict=True)
            ),
        )

    def _known_manifests(self, key: SegmentKey) -> dict[bytes, bytes]:
        """Return members' manifests by digest from earlier parity here; they change only with the plan."""
        segment = self._store.get(key)
        known: dict[bytes, bytes] = {}
        if segment is None:
            return known
        for slot, _ in segment.view.sealed_slots():
            try:
                made = decode_parity_manifest(segment.view.manifest(slot), str(segment.path))
            except (DigestMismatch, MalformedMessage):  # reported by the scrubber or reader of that slot
                continue
            known |= {member.info.digests[:DIGEST_BYTES]: member.info.manifest for member in made.members}
        return known

    def _write_parity(self, request: Protect, key: SegmentKey, manifest: ParityManifest) -> None:
        said = manifest.encode()
        if len(said) > MAX_MANIFEST_BYTES:
            raise ConfigurationError(
                f"the manifests and digests of the {len(manifest.members)} members of group {request.group.group} take "
                f"{len(said)} bytes, and parity's own manifest {MAX_MANIFEST_BYTES} at most: make smaller groups"
            )
        segment = self._store.open(key, slot_bytes_for(len(said), manifest.payload_bytes), PARITY_SLOTS)
        self._job_table.require_configured(request.job, self._store.delete_job)
        if _holds(segment, request, said):
            return
        slot = slot_to_fill(segment.view.headers(), set(request.keep))
        payload = segment.view.begin(slot, request.group.group, request.version, said, manifest.payload_bytes)
        try:
            digests = [xxhash.xxh3_128_digest(said), *self._encode_chunks(request, manifest, payload)]
            self._job_table.require_current(request.job, request.generation)
            segment.view.seal(slot, digests)
        except BaseException:
            segment.view.discard(slot)
            raise
        self._counters.add("parity_slots")
        self._counters.add("parity_bytes", manifest.payload_bytes)

    def _encode_chunks(self, request: Protect, manifest: ParityManifest, payload: memoryview) -> list[bytes]:
        """Write the parity chunk by chunk and return the digest of each."""
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.info.payload_bytes))) for m in manifest.members]
        digests = []
        for index in range(chunk_count(manifest.payload_bytes)):
            chunks = self._read_members(request, manifest, index, buffers)
            into = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            galois.encode(chunks, **{manifest.letter.lower(): into})
            digests.append(xxhash.xxh3_128_digest(into))
        return digests

    def _read_members(
        self, request: Protect, manifest: ParityManifest, index: int, buffers: list[memoryview]
    ) -> list[memoryview]:
        chunks = [buffer[: m.info.chunk_bytes(index)] for m, buffer in zip(manifest.members, buffers, strict=True)]
        works = [
            partial(
                self._shard_reader.read_chunk,
                ShardLocation(request.job, m.node, m.rank, request.version),
                m.info,
                index,
                chunk,
            )
            for m, chunk in zip(manifest.members, chunks, strict=True)
            if chunk
        ]
        require_all(run_parallel(self._streams, works))
        return chunks

    def forget_job(self, job: str) -> None:
        """Drop the job's locks; running work finds no segment to be kept in."""
        with self._lock:
            for key in [k for k in self._group_locks if k.job == job]:
                del self._group_locks[key]


def _check_members(request: Protect) -> None:
    group = request.group
    nodes = [node for _, node in group.members]
    if len({*nodes, *group.parity}) != len(nodes) + 2:
        raise ConfigurationError(
            f"group {group.group} has a node twice ({', '.join([*nodes, *group.parity])}): "
            "members and parity must be on different nodes, or one loss costs two shards"
        )


def _holds(segment: SegmentFile, request: Protect, manifest: bytes) -> bool:
    return any(
        header.version == request.version and segment.view.manifest(slot) == manifest
        for slot, header in segment.sealed()
    )


# Recovery: chunks of a lost member, or of P or Q, made again from the rest of the group.
#
# Every chunk read or recovered is hashed against its sealed digest. A survivor that does not answer, or has other bytes
# than the parity was made of, counts as lost too, as long as the remaining parity suffices.


class ParitySource(msgspec.Struct, frozen=True):
    """A group's P or Q and the node that holds it."""

    location: ShardLocation
    info: ShardInfo
    manifest: ParityManifest


class RecoveryTarget(msgspec.Struct, frozen=True):
    """The shard to recover: a member by its number, or P or Q by its letter, with its sealed ``info``."""

    member_or_letter: int | ParityLetter
    location: ShardLocation
    info: ShardInfo


class ShardRecovery:
    """Recover one shard of a group, chunk by chunk, from the others.

    Args:
        members: The group's members, in the order of their coefficients.
        parities: The available P and Q, without the wanted one.
        lost_reasons: Per lost location, the reason.
    """

    def __init__(
        self,
        target: RecoveryTarget,
        members: Sequence[ParityMember],
        parities: dict[ParityLetter, ParitySource],
        lost_reasons: dict[str, str],
        shard_reader: ShardReader,
        streams: Executor,
    ) -> None:
        job, version = target.location.job, target.location.version
        self._target = target
        self._members = members
        self._locations = [ShardLocation(job, m.node, m.rank, version) for m in members]
        self._lost = {target.member_or_letter} if isinstance(target.member_or_letter, int) else set()
        self._parities = parities
        self._lost_reasons = lost_reasons
        self._shard_reader = shard_reader
        self._streams = streams
        self._buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.info.payload_bytes))) for m in members]
        size = min(CHUNK_BYTES, parity_bytes(max(m.info.payload_bytes for m in members)))
        self._parity_buffers: dict[ParityLetter, memoryview] = {
            letter: memoryview(bytearray(size)) for letter in PARITY_LETTERS
        }
        self._failed_letters: set[ParityLetter] = set()

    @property
    def info(self) -> ShardInfo:
        """The wanted shard's sealed description."""
        return self._target.info

    def recover_chunk(self, index: int) -> memoryview:
        """Return chunk ``index`` of the wanted shard, hashed. The next call overwrites it.

        Raises:
            NotRestorable: More shards are lost than the remaining parity can recover.
            DigestMismatch: The recovered chunk is not the sealed one.
        """
        while True:
            letters = self._choose_letters(index)
            failed = self._read_survivors(index, letters)
            if failed:
                self._mark_lost(failed)
                continue
            found = self._decode_chunk(index, letters)
            if xxhash.xxh3_128_digest(found) == self.info.digest(index):
                return found
            error = DigestMismatch(f"chunk {index} of {self._target.location}, made from it, is not its own")
            if len(letters) != 1:
                raise error
            # the chunk is wrong with this parity shard; the other one may be right
            self._mark_lost([(letters[0], error)])

    def _decode_chunk(self, index: int, letters: Sequence[ParityLetter]) -> memoryview:
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        chunks = [buffer[: m.info.chunk_bytes(index)] for m, buffer in zip(self._members, self._buffers, strict=True)]
        lost = {number: chunks[number] for number in self._lost_in(index)}
        if lost:
            parity = {letter: self._parity_chunk(letter, index) for letter in letters}
            left = [None if number in lost else chunk for number, chunk in enumerate(chunks)]
            galois.recover(left, parity.get("P"), parity.get("Q"), lost)
        which = self._target.member_or_letter
        if isinstance(which, int):
            return chunks[which]
        into = self._parity_buffers[which][: self.info.chunk_bytes(index)]
        galois.encode(chunks, into if which == "P" else None, into if which == "Q" else None)
        return into

    def _lost_in(self, index: int) -> list[int]:
        """Return the lost members that had bytes in this chunk; the others are known to have had none."""
        return [number for number in sorted(self._lost) if self._members[number].info.chunk_bytes(index)]

    def _parity_chunk(self, letter: ParityLetter, index: int) -> memoryview:
        return self._parity_buffers[letter][: self._parities[letter].info.chunk_bytes(index)]

    def _choose_letters(self, index: int) -> list[ParityLetter]:
        """Choose as many of P and Q as members are lost."""
        letters = [
            letter for letter in PARITY_LETTERS if letter in self._parities and letter not in self._failed_letters
        ]
        lost = self._lost_in(index)
        if len(letters) < len(lost):
            others = sum(number != self._target.member_or_letter for number in lost)
            without = 2 - len(letters) - (self._target.member_or_letter in PARITY_LETTERS)
            raise NotRestorable(
                f"{self._target.location} cannot be made again: {others} other members and {without} of P and "
                "Q are lost "
                f"too: {describe_lost(self._lost_reasons)}"
            )
        return letters[: len(lost)]

    def _read_survivors(
        self, index: int, letters: Sequence[ParityLetter]
    ) -> list[tuple[int | ParityLetter, EverstepError]]:
        """Read the chunk of the survivors and of the parity; return failed shards with their errors."""
        whole = [number for number in range(len(self._members)) if number not in self._lost]
        present = [number for number in whole if self._members[number].info.chunk_bytes(index)]
        works = [
            partial(
                self._shard_reader.read_chunk,
                self._locations[number],
                self._members[number].info,
                index,
                self._buffers[number][: self._members[number].info.chunk_bytes(index)],
            )
            for number in present
        ] + [
            partial(
                self._shard_reader.read_chunk,
                self._parities[letter].location,
                self._parities[letter].info,
                index,
                self._parity_chunk(letter, index),
            )
            for letter in letters
        ]
        outcomes = run_parallel(self._streams, works)
        return [
            (who, outcome)
            for who, outcome in zip([*present, *letters], outcomes, strict=True)
            if isinstance(outcome, EverstepError)
        ]

    def _mark_lost(self, failed: Sequence[tuple[int | ParityLetter, EverstepError]]) -> None:
        for who, error in failed:
            if isinstance(who, int):
                self._lost.add(who)
                self._lost_reasons[str(self._locations[who])] = str(error)
            else:
                self._failed_letters.add(who)
                self._lost_reasons[str(self._parities[who].location)] = str(error)


def describe_lost(lost_reasons: dict[str, str]) -> str:
    return "; ".join(f"{place} is not to be had ({why})" for place, why in lost_reasons.items())


class ScratchPiece(msgspec.Struct, frozen=True):
    """``length`` bytes at ``start`` of a chunk, to be written at ``scratch_offset`` of the scratch area."""

    start: int
    length: int
    scratch_offset: int


class ParityDecoder:
    """Recover shards. Runs in worker threads; ``streams`` reads the survivors side by side."""

    def __init__(
        self, store: SegmentStore, shard_reader: ShardReader, counters: VaultCounters, streams: Executor
    ) -> None:
        self._store = store
        self._shard_reader = shard_reader
        self._counters = counters
        self._streams = streams

    def fetch(self, request: Fetch) -> int:
        """Write ranges of ``request.rank``'s payload, or without ranges its manifest, into ``request.target_path``.

        Returns:
            The number of bytes written.

        Raises:
            NotRestorable: More shards are lost than the group can recover; the message lists them with reasons.
            DigestMismatch: The recovered bytes are not the sealed ones.
            MalformedMessage: A range lies outside the payload.
            PermissionDenied, OutOfSlotMemory: See ``ScratchFile``.
        """
        assert request.parity_group is not None
        recovery = self.recover_member(request.job, request.rank, request.version, request.parity_group)
        sealed = recovery.info
        length = sum(n for _, n in request.ranges) if request.ranges else len(sealed.manifest)
        wanted = pieces_by_chunk(request.ranges, sealed.payload_bytes)
        scratch = ScratchFile(
            self._store.directory, request.target_path, request.target_offset, length, self._store.budget
        )
        try:
            if not request.ranges:
                scratch.write([memoryview(sealed.manifest)], 0)
            for index, pieces in sorted(wanted.items()):
                chunk = recovery.recover_chunk(index)
                for piece in pieces:
                    scratch.write([chunk[piece.start : piece.start + piece.length]], piece.scratch_offset)
        finally:
            scratch.close()
        self._counters.add("parity_recovered_bytes", length)
        return length

    def recover_member(self, job: str, rank: int, version: Version, group: ParityGroup) -> ShardRecovery:
        """Return the recovery of a member's shard. Raises NotRestorable, DigestMismatch, MalformedMessage."""
        parities, gone = self._find_parities(
            job, version, group.group, dict(zip(PARITY_LETTERS, group.parity, strict=True))
        )
        what = f"rank {rank}'s version {version}"
        if not parities:
            raise NotRestorable(f"{what} cannot be made again: {describe_lost(gone)}")
        manifest = _require_same_members([parity.manifest for parity in parities.values()], what)
        for number, member in enumerate(manifest.members):
            if member.rank == rank:
                wanted = RecoveryTarget(number, ShardLocation(job, member.node, rank, version), member.info)
                return ShardRecovery(wanted, manifest.members, parities, gone, self._shard_reader, self._streams)
        raise MalformedMessage(f"rank {rank} is not in group {group.group}, of which there is parity of {version}")

    def recover_parity(
        self, location: ShardLocation, manifest: ParityManifest, info: ShardInfo, group: ParityGroup | None
    ) -> ShardRecovery:
        """Return the recovery of P or Q at ``location``, sealed as ``info``, from its members.

        Args:
            group: Names the node of the other parity shard, which is needed for lost members.

        Raises:
            DigestMismatch: The other parity shard covers other shards.
            MalformedMessage: The other parity shard's manifest is unreadable.
        """
        parities, gone = self._other_parity(location, manifest.letter, group)
        _require_same_members([manifest, *(parity.manifest for parity in parities.values())], str(location))
        wanted = RecoveryTarget(manifest.letter, location, info)
        return ShardRecovery(wanted, manifest.members, parities, gone, self._shard_reader, self._streams)

    def rebuild_parity_manifest(self, location: ShardLocation, group: ParityGroup) -> bytes:
        """Return the manifest of the parity shard kept on ``location.node``, rebuilt from the other one's.

        Raises:
            NotRestorable: The other parity shard is not available.
            MalformedMessage: Its manifest is unreadable.
        """
        mine = PARITY_LETTERS[group.parity.index(location.node)]
        parities, gone = self._other_parity(location, mine, group)
        for parity in parities.values():
            return msgspec.structs.replace(parity.manifest, letter=mine).encode()
        raise NotRestorable(f"the manifest of {location} cannot be made again: {describe_lost(gone)}")

    def _other_parity(
        self, location: ShardLocation, mine: ParityLetter, group: ParityGroup | None
    ) -> tuple[dict[ParityLetter, ParitySource], dict[str, str]]:
        if group is None:
            return {}, {f"the other parity of group {location.rank_or_group}": "nobody has said where it is"}
        parity_nodes = {
            letter: node for letter, node in zip(PARITY_LETTERS, group.parity, strict=True) if letter != mine
        }
        return self._find_parities(location.job, location.version, location.rank_or_group, parity_nodes)

    def _find_parities(
        self, job: str, version: Version, group: int, nodes: Mapping[ParityLetter, str]
    ) -> tuple[dict[ParityLetter, ParitySource], dict[str, str]]:
        """Return the available parity shards, and the reasons for missing ones.

        Raises MalformedMessage for a wrong one.
        """
        places = {letter: ShardLocation(job, node, group, version, is_parity=True) for letter, node in nodes.items()}
        found = run_parallel(self._streams, [partial(self._shard_reader.read_info, place) for place in places.values()])
        parities, gone = {}, {}
        for (letter, place), info in zip(places.items(), found, strict=True):
            if isinstance(info, EverstepError):
                gone[str(place)] = str(info)
            else:
                parities[letter] = ParitySource(place, info, decode_parity_manifest(info.manifest, str(place)))
                _check_parity(letter, parities[letter])
        return parities, gone


def _check_parity(letter: ParityLetter, parity: ParitySource) -> None:
    manifest, place = parity.manifest, parity.location
    said = (manifest.letter, manifest.group, manifest.version, parity.info.payload_bytes)
    if said != (letter, place.rank_or_group, place.version, manifest.payload_bytes):
        raise MalformedMessage(
            f"{place}: it says to be {manifest.letter} of group {manifest.group} at {manifest.version}"
        )


def _require_same_members(manifests: Sequence[ParityManifest], description: str) -> ParityManifest:
    """Return one of the manifests. Raises DigestMismatch if they cover different shards."""
    if len({manifest.members_digest for manifest in manifests}) > 1:
        raise DigestMismatch(f"P and Q of the group of {description} were made of different shards")
    return manifests[0]


def pieces_by_chunk(ranges: Sequence[ByteRange], length: int) -> dict[int, list[ScratchPiece]]:
    """Split the ranges by chunk and place each piece in the scratch area.

    Raises MalformedMessage for a range outside.
    """
    found: dict[int, list[ScratchPiece]] = {}
    at = 0
    for offset, count in ranges:
        if offset < 0 or count < 0 or offset + count > length:
            raise MalformedMessage(f"bytes {offset} to {offset + count} are outside a payload of {length} bytes")
        for index, start, part in _split_range(offset, count):
            found.setdefault(index, []).append(ScratchPiece(start, part, at))
            at += part
    return found


def _split_range(offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    while count:
        index, start = divmod(offset, CHUNK_BYTES)
        part = min(count, CHUNK_BYTES - start)
        yield index, start, part
        offset, count = offset + part, count - part
