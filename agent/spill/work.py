"""Writing a version to storage: each rank's file, a record of it, and the checkpoint's ``.metadata`` last.

Readers of the checkpoint need ``.metadata``, so nothing is there for them until everything is. A writer that was
killed is followed by one that compares what it finds with what it would write, and goes on from the first byte that
is missing or wrong: nothing that lies there is believed unread. All bytes follow from the slots, so two writers at once
write the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import msgspec
import xxhash

from agent.spill.dcp_metadata import ObjectEntry, TensorEntry, encode_metadata
from agent.spill.extents import Division, FilePlan, FromSlot, Literal, divide, file_of, merge
from agent.spill.python_state import decode_state, require_format
from agent.spill.retention import FEWEST_LEFT, Stored, folder_of, superfluous, version_of
from agent.spill.slot import SpilledSlot
from agent.spill.target import Growing, Target
from everstep.errors import UNREADABLE, MalformedMessage
from everstep.ids import Version
from everstep.manifests import Manifest, decode_manifest
from everstep.range_digests import RangeHasher
from everstep.stored_digests import DIGEST_BYTES, DIGESTS, ArchiveDigest, StoredDigests, encode_digests

METADATA = ".metadata"
_RECORD_FORMAT = 2


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a finished file is: whose, of which division of the version, the digests of its archives one behind
    another, and its entries."""

    format: int
    rank: int
    division: bytes
    file: str
    length: int
    archives: tuple[ArchiveDigest, ...]
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]


def record_name(rank: int) -> str:
    """Where a rank's record stands; torch does not look into this folder."""
    return f".everstep/{rank}"


class Job:
    """One version to be written.

    Args:
        target: the folder of this version.
        manifests: of every rank whose slot of it is somewhere, as sealed; the same on all nodes that write.

    Raises NotRestorable where they do not make up the whole state, MalformedMessage where one cannot be read.
    """

    def __init__(self, target: Target, version: Version, manifests: Mapping[int, bytes]) -> None:
        self._target = target
        self._version = version
        self._manifests: dict[int, Manifest] = {rank: decode_manifest(manifests[rank]) for rank in sorted(manifests)}
        self._division: Division = divide(self._manifests)
        self._identity = _identity(version, manifests)

    def write(self, rank: int, slot: SpilledSlot) -> FileRecord:
        """Writes one rank's file and its record; what is there already is not written again.

        Raises DigestMismatch where the slot's bytes are not what was sealed, MalformedMessage where it is not the slot
        that the division was made for, OSError from the target.
        """
        if slot.manifest != self._manifests[rank]:
            raise MalformedMessage(f"rank {rank}'s slot has another manifest than the one that was divided")
        record = self.record(rank)
        if record is not None:
            return record
        blob = slot.blob()
        state = decode_state(blob)
        require_format(state)
        plan = file_of(rank, slot.manifest, self._division, state, len(blob), self._version)
        archives = _write(self._target.grow(plan.name), plan, slot)
        record = FileRecord(
            _RECORD_FORMAT, rank, self._identity, plan.name, plan.length, archives, plan.tensors, plan.objects
        )
        body = msgspec.msgpack.encode(record)
        self._target.put(record_name(rank), xxhash.xxh3_128_digest(body) + body)
        return record

    def record(self, rank: int) -> FileRecord | None:
        """A rank's record, where it is one of this division and its file has the length it says."""
        body = self._target.get(record_name(rank))
        if body is None or xxhash.xxh3_128_digest(body[DIGEST_BYTES:]) != body[:DIGEST_BYTES]:
            return None
        try:
            record = msgspec.msgpack.decode(body[DIGEST_BYTES:], type=FileRecord)
        except UNREADABLE:
            return None
        if (record.format, record.rank, record.division) != (_RECORD_FORMAT, rank, self._identity):
            return None
        return record if self._target.size(record.file) == record.length else None

    def complete(self) -> bool:
        """Writes the digests and then ``.metadata`` if every rank's file is there; whether it was."""
        records = [self.record(rank) for rank in self._manifests]
        found = [record for record in records if record is not None]
        if len(found) < len(records):
            return False
        tensors, objects = merge((record.tensors, record.objects) for record in found)
        metadata = encode_metadata(tensors, objects)
        files = {record.file: record.archives for record in found}
        digests = encode_digests(StoredDigests(xxhash.xxh3_128_digest(metadata), files))
        for name, body in ((DIGESTS, digests), (METADATA, metadata)):
            if self._target.get(name) != body:  # when .metadata was written first says which checkpoint is the newest
                self._target.put(name, body)
        return True


def prune(root: Target, keep: int, named: Version) -> tuple[list[Version], list[Version]]:
    """Removes what ``superfluous`` names of the checkpoints under ``root``, but never ``named``; what it removed, and
    the whole ones that are left."""
    stored = [
        Stored(version, root.written_at(f"{folder}/{METADATA}"))
        for folder in root.folders()
        if (version := version_of(folder)) is not None
    ]
    gone = superfluous(stored, max(keep, FEWEST_LEFT), [named])
    for version in gone:
        root.remove(f"{folder_of(version)}/{METADATA}")  # first: what is half gone is no checkpoint
        root.remove(folder_of(version))
    return gone, [one.version for one in stored if one.whole_at is not None and one.version not in gone]


def _identity(version: Version, manifests: Mapping[int, bytes]) -> bytes:
    """Names a version as divided among these ranks."""
    digest = xxhash.xxh3_128(f"{version.generation}:{version.step}".encode())
    for rank in sorted(manifests):
        digest.update(f";{rank}:".encode() + xxhash.xxh3_128_digest(manifests[rank]))
    return digest.digest()


def _bytes_of(plan: FilePlan, slot: SpilledSlot) -> Iterator[bytes | memoryview]:
    for piece in plan.pieces:
        if isinstance(piece, Literal):
            yield piece.data
            continue
        yield piece.archive.head
        crc = 0
        for data in slot.read(piece.ranges):
            crc = zlib.crc32(data, crc)
            yield data
        yield piece.archive.tail(crc)


def _write(file: Growing, plan: FilePlan, slot: SpilledSlot) -> tuple[ArchiveDigest, ...]:
    """Writes what is not there yet; returns the digests of all archives."""
    hasher = RangeHasher([_length(piece) for piece in plan.pieces])
    at, comparing = 0, True
    try:
        for data in _bytes_of(plan, slot):
            hasher.update(memoryview(data))
            if comparing and at + len(data) <= file.held and file.read(len(data)) == data:
                at += len(data)
                continue
            if comparing:
                comparing = False
                file.keep(at)
            file.append(data)
        if comparing:
            file.keep(at)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return tuple(_archives(plan, hasher.digests()))


def _archives(plan: FilePlan, digests: bytes) -> Iterator[ArchiveDigest]:
    at = 0
    for number, piece in enumerate(plan.pieces):
        yield ArchiveDigest(at, _length(piece), digests[number * DIGEST_BYTES :][:DIGEST_BYTES])
        at += _length(piece)


def _length(piece: Literal | FromSlot) -> int:
    return len(piece.data) if isinstance(piece, Literal) else piece.archive.length
