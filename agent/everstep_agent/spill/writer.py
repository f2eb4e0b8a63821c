"""Write a version to storage: each rank's file, a record of it, and the checkpoint's ``.metadata`` last.

Readers need ``.metadata``, so they see nothing until everything is written. The successor of a killed writer continues
from the first byte that is missing or differs from its own. All bytes follow from the slots.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

import msgspec
import xxhash

from everstep.errors import DECODE_ERRORS, DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.digests import DIGESTS_FILE, ArchiveDigest, RangeHasher, StoredDigests, encode_digests
from everstep.layout.manifests import BLOB_LENGTH_BYTES, Manifest, Range, decode_manifest
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import CHUNK_BYTES, SegmentView
from everstep.layout.stored_checkpoints import METADATA_FILE, folder_name, parse_folder_name
from everstep.native import DIGEST_BYTES
from everstep_agent.spill.dcp_metadata import STATE_FORMAT, ObjectEntry, TensorEntry, decode_state, encode_metadata
from everstep_agent.spill.layout import Division, FilePlan, LiteralBytes, divide, merge_entries, plan_file
from everstep_agent.spill.target import SequentialFile, StorageTarget

# Read a sealed slot of this node from front to back. Its rank may refill it at any moment, so each chunk is copied
# first and the copy is hashed.


class SpillSlotReader:
    """One slot, mapped read-only. Raises NotFound, or DigestMismatch or MalformedMessage for its manifest."""

    def __init__(self, path: str, slot: int, rank: int, version: Version) -> None:
        self._description = f"rank {rank}'s {version} in slot {slot} of {path}"
        view = SegmentView(_map(path))
        header = view.header(slot)
        if header is None or (header.state, header.rank, header.version) != (SlotState.SEALED, rank, version):
            raise NotFound(f"{self._description} no longer exists")
        self.manifest: Manifest = decode_manifest(view.manifest(slot))
        self._digests = view.digests(slot)[1:]
        self._payload = view.payload(slot)
        if view.header(slot) != header:
            raise NotFound(f"{self._description} was refilled while it was read")
        if (self.manifest.rank, self.manifest.payload_bytes) != (rank, len(self._payload)):
            raise MalformedMessage(f"the manifest of {self._description} belongs to another slot")
        self._chunk: tuple[int, memoryview] = (-1, memoryview(b""))

    def read(self, ranges: tuple[Range, ...]) -> Iterator[memoryview]:
        """Yield the ranges' bytes in pieces of at most CHUNK_BYTES; each is valid until the next."""
        for start, length in ranges:
            at, end = start, start + length
            if start < 0 or end > len(self._payload):
                raise MalformedMessage(f"bytes {start} to {end} are not within {self._description}")
            while at < end:
                index = at // CHUNK_BYTES
                base = index * CHUNK_BYTES
                piece = self._checked(index)[at - base : end - base]
                yield piece
                at += len(piece)

    def read_python_state(self) -> bytes:
        at, capacity = self.manifest.blob_offset, self.manifest.blob_capacity
        length = int.from_bytes(b"".join(self.read(((at, BLOB_LENGTH_BYTES),))), "little")
        if length > capacity:
            raise MalformedMessage(f"the Python state of {self._description} claims {length} of {capacity} bytes")
        return b"".join(self.read(((at + BLOB_LENGTH_BYTES, length),)))

    def _checked(self, index: int) -> memoryview:
        if self._chunk[0] != index:
            copy = bytes(self._payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            if xxhash.xxh3_128_digest(copy) != self._digests[index]:
                raise DigestMismatch(f"chunk {index} of {self._description} differs from the sealed bytes")
            self._chunk = index, memoryview(copy)
        return self._chunk[1]


def _map(path: str) -> memoryview:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"the segment {path} no longer exists") from error
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except ValueError as error:
        raise DigestMismatch(f"{path} is empty and no segment") from error
    finally:
        os.close(descriptor)


# Retention: which stored checkpoints may be removed. Pure.

MIN_KEPT_CHECKPOINTS = 2
"""The newest, and the one before it: the vault may be lost with its report that the newest is complete."""


class SpilledCheckpoint(msgspec.Struct, frozen=True):
    """A stored checkpoint, and when its ``.metadata`` was written (unix seconds; None if it was not)."""

    version: Version
    completed_at: float | None


def select_removable(
    stored: list[SpilledCheckpoint], keep: int, protected: Collection[Version] = (), earlier: Version | None = None
) -> list[Version]:
    """Return the removable versions: all whole ones but the ``protected`` ones and the ``keep`` written last. The one
    written last is the newest: an earlier run may have come further. An incomplete one is removable if its step is not
    after the newest whole one's: no writer will complete it.

    Args:
        stored: What is there.
        keep: Number of whole versions to keep.
        protected: Versions to keep besides.
        earlier: The last generation of earlier runs, and the step that this run resumed from. What earlier runs wrote
            beyond that step stays.
    """
    if earlier is not None:
        beyond = [checkpoint.version for checkpoint in stored if checkpoint.version.generation <= earlier.generation]
        protected = {*protected, *(version for version in beyond if version.step > earlier.step)}
    complete = sorted((s.completed_at, s.version) for s in stored if s.completed_at is not None)
    if not complete:
        return []
    kept = {version for _, version in complete[-max(keep, 1) :]} | set(protected)
    newest = complete[-1][1]
    return sorted(
        s.version
        for s in stored
        if s.version not in kept and (s.completed_at is not None or s.version.step <= newest.step)
    )


_RECORD_FORMAT = 2


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record of a finished file: its rank, the digest of its division, the digests of its archives, and its entries."""

    format: int
    rank: int
    division_digest: bytes
    file: str
    length: int
    archives: tuple[ArchiveDigest, ...]
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]


def record_name(rank: int) -> str:
    """Return the name of a rank's record; torch does not look into this folder."""
    return f".everstep/{rank}"


class CheckpointWriter:
    """Write one version to ``target``. ``manifests``: of all ranks. Raises NotRestorable if they are not complete."""

    def __init__(self, target: StorageTarget, version: Version, manifests: Mapping[int, bytes]) -> None:
        self._target, self._version = target, version
        self._manifests: dict[int, Manifest] = {rank: decode_manifest(manifests[rank]) for rank in sorted(manifests)}
        self._division: Division = divide(self._manifests)
        digest = xxhash.xxh3_128(f"{version.generation}:{version.step}".encode())
        for rank in sorted(manifests):
            digest.update(f";{rank}:".encode() + xxhash.xxh3_128_digest(manifests[rank]))
        self._division_digest = digest.digest()

    def write(self, rank: int, slot: SpillSlotReader) -> FileRecord:
        """Write one rank's file and its record; existing parts are not written again. Raises EverstepError, OSError."""
        if slot.manifest != self._manifests[rank]:
            raise MalformedMessage(f"rank {rank}'s slot has another manifest than the order")
        record = self.read_record(rank)
        if record is not None:
            return record
        blob = slot.read_python_state()
        state = decode_state(blob)
        if (found := state.get("format")) != STATE_FORMAT:
            raise MalformedMessage(f"a slot's Python state has format {found!r}, this release reads {STATE_FORMAT}")
        plan = plan_file(rank, slot.manifest, self._division, state, len(blob), self._version)
        archives = _write(self._target.open_for_writing(plan.name), plan, slot)
        entries = tuple(plan.tensors), tuple(plan.objects)
        record = FileRecord(_RECORD_FORMAT, rank, self._division_digest, plan.name, plan.length, archives, *entries)
        body = msgspec.msgpack.encode(record)
        self._target.put(record_name(rank), xxhash.xxh3_128_digest(body) + body)
        return record

    def read_record(self, rank: int) -> FileRecord | None:
        """Return a rank's record if it is of this division and its file has the recorded length."""
        body = self._target.get(record_name(rank))
        if body is None or xxhash.xxh3_128_digest(body[DIGEST_BYTES:]) != body[:DIGEST_BYTES]:
            return None
        try:
            record = msgspec.msgpack.decode(body[DIGEST_BYTES:], type=FileRecord)
        except DECODE_ERRORS:
            return None
        if (record.format, record.rank, record.division_digest) != (_RECORD_FORMAT, rank, self._division_digest):
            return None
        return record if self._target.size(record.file) == record.length else None

    def complete(self) -> bool:
        """Write the digests and then ``.metadata`` if every rank's file is there; return whether it was."""
        found = [record for rank in self._manifests if (record := self.read_record(rank)) is not None]
        if len(found) < len(self._manifests):
            return False
        tensors, objects = merge_entries((record.tensors, record.objects) for record in found)
        metadata = encode_metadata(tensors, objects)
        files = {record.file: record.archives for record in found}
        digests = encode_digests(StoredDigests(xxhash.xxh3_128_digest(metadata), files))
        for name, body in ((DIGESTS_FILE, digests), (METADATA_FILE, metadata)):
            # the time of the first .metadata write determines which checkpoint is the newest
            if self._target.get(name) != body:
                self._target.put(name, body)
        return True


def prune(
    root: StorageTarget, keep: int, protected: Version, earlier: Version | None = None
) -> tuple[list[Version], list[Version]]:
    """Remove the checkpoints of ``select_removable``, but never ``protected``. Return removed and whole versions."""
    stored = [
        SpilledCheckpoint(version, root.written_at(f"{folder}/{METADATA_FILE}"))
        for folder in root.folders()
        if (version := parse_folder_name(folder)) is not None
    ]
    removed = select_removable(stored, max(keep, MIN_KEPT_CHECKPOINTS), [protected], earlier)
    for version in removed:
        root.remove(f"{folder_name(version)}/{METADATA_FILE}")  # first, so that a half-removed folder is no checkpoint
        root.remove(folder_name(version))
    return removed, [
        checkpoint.version
        for checkpoint in stored
        if checkpoint.completed_at is not None and checkpoint.version not in removed
    ]


def _file_bytes(plan: FilePlan, slot: SpillSlotReader) -> Iterator[bytes | memoryview]:
    for piece in plan.pieces:
        if isinstance(piece, LiteralBytes):
            yield piece.data
            continue
        yield piece.archive.head
        crc = 0
        for data in slot.read(piece.ranges):
            crc = zlib.crc32(data, crc)
            yield data
        yield piece.archive.tail(crc)


def _write(file: SequentialFile, plan: FilePlan, slot: SpillSlotReader) -> tuple[ArchiveDigest, ...]:
    """Write the missing bytes; return the digests of all archives."""
    lengths = [len(p.data) if isinstance(p, LiteralBytes) else p.archive.length for p in plan.pieces]
    hasher = RangeHasher(lengths)
    at, comparing = 0, True
    try:
        for data in _file_bytes(plan, slot):
            hasher.update(memoryview(data))
            if comparing and at + len(data) <= file.existing_bytes and file.read(len(data)) == data:
                at += len(data)
                continue
            if comparing:
                comparing = False
                file.truncate(at)
            file.append(data)
        if comparing:
            file.truncate(at)
        file.finish()
    except BaseException:
        file.close_unfinished()
        raise
    digests = hasher.digests()
    each = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
    return tuple(map(ArchiveDigest, accumulate(lengths, initial=0), lengths, each))
