"""Checkpoint slots in shared memory: the layout, over any buffer, without I/O.

A *segment* is one file that holds the slots of one rank::

    offset 0              segment header, one page: magic, layout version, number of slots, bytes of each
    PAGE + i * stride     slot i: header (one page), chunk digests, manifest, payload (64-byte aligned)

A slot goes EMPTY -> FILLING -> SEALED. It is believed only when its header's digest is right and its state is
SEALED; its bytes only when they hash to the chunk digests (xxh3-128 per CHUNK_BYTES of manifest and of payload).
A writer killed in the middle of a fill leaves FILLING behind, which nobody reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

import msgspec
import xxhash

from everstep.errors import ConfigurationError, DigestMismatch, OutOfSlotMemory
from everstep.ids import Version
from everstep.segment_header import PAGE as PAGE
from everstep.segment_header import Geometry, read_geometry, segment_bytes, write_geometry

ALIGN = 64
CHUNK_BYTES = 8 << 20
DIGEST_BYTES = 16
SLOTS = 5
"""Of one rank: the one being filled, the two sealed last, the committed one, and the one to be committed next."""

_SLOT = struct.Struct("<IIQQQQ")
_SLOT_DIGEST = struct.Struct("<Q")


def segment_name(kind: str, number: int) -> str:
    """The file of a local rank's own slots (``own``), or of the copies of another node's rank (``replica``)."""
    return f"{kind}-{number}"


class SlotState(IntEnum):
    EMPTY = 0
    FILLING = 1
    SEALED = 2


class SlotHeader(msgspec.Struct, frozen=True):
    """What a slot says of itself: whose shard, of which version, how many bytes of manifest and payload."""

    state: SlotState
    rank: int
    version: Version
    manifest_bytes: int
    payload_bytes: int


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def chunk_count(n: int) -> int:
    """Chunks that ``n`` bytes are hashed in."""
    return -(-n // CHUNK_BYTES)


def slot_bytes_for(manifest_bytes: int, payload_bytes: int) -> int:
    """Bytes a slot needs behind its header for a manifest and a payload of these sizes."""
    return _aligned(_payload_offset(manifest_bytes, payload_bytes) + payload_bytes, PAGE)


def _digest_table_bytes(payload_bytes: int) -> int:
    return (chunk_count(payload_bytes) + 1) * DIGEST_BYTES


def _payload_offset(manifest_bytes: int, payload_bytes: int) -> int:
    return _aligned(_digest_table_bytes(payload_bytes) + manifest_bytes, ALIGN)


def chunk_digests(data: memoryview) -> Iterator[bytes]:
    """xxh3-128 of each CHUNK_BYTES of ``data``."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES])


def format_segment(buffer: memoryview, slots: int, slot_bytes: int) -> None:
    """Writes an empty segment's headers over ``buffer``. Raises OutOfSlotMemory where it is too small."""
    need = segment_bytes(slots, slot_bytes)
    if len(buffer) < need:
        raise OutOfSlotMemory(
            f"{slots} slots of {slot_bytes} bytes need {need} bytes with their headers, the segment has {len(buffer)}"
        )
    if slot_bytes % PAGE:
        raise ConfigurationError(f"slot_bytes must be a multiple of {PAGE}, not {slot_bytes}")
    geometry = Geometry(slots, slot_bytes)
    write_geometry(buffer, geometry)
    for index in range(slots):
        _SLOT.pack_into(buffer, geometry.base(index), SlotState.EMPTY, 0, 0, 0, 0, 0)


class SegmentView:
    """A segment's slots over a writable (or, for readers, read-only) buffer.

    A header that was damaged is made out from the rest; ``mended_header`` says so.
    Raises DigestMismatch where the buffer is no segment of this layout.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.geometry, intact = read_geometry(buffer, self._good_slot)
        self.mended_header = not intact
        self.slots = self.geometry.slots
        self.slot_bytes = self.geometry.slot_bytes

    def _good_slot(self, base: int) -> bool:
        raw = bytes(self._buffer[base : base + _SLOT.size])
        (digest,) = _SLOT_DIGEST.unpack_from(self._buffer, base + _SLOT.size)
        return bool(digest == xxhash.xxh3_64_intdigest(raw))

    def _base(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return self.geometry.base(slot)

    def header(self, slot: int) -> SlotHeader | None:
        """The slot's header, or None where its digest is wrong (a torn write) or it is empty."""
        base = self._base(slot)
        raw = bytes(self._buffer[base : base + _SLOT.size])
        state, rank, generation, step, manifest_bytes, payload_bytes = _SLOT.unpack(raw)
        (digest,) = _SLOT_DIGEST.unpack_from(self._buffer, base + _SLOT.size)
        if state not in (SlotState.FILLING, SlotState.SEALED) or digest != xxhash.xxh3_64_intdigest(raw):
            return None
        if _payload_offset(manifest_bytes, payload_bytes) + payload_bytes > self.slot_bytes:
            return None
        return SlotHeader(SlotState(state), rank, Version(generation, step), manifest_bytes, payload_bytes)

    def _write_header(self, slot: int, header: SlotHeader) -> None:
        base = self._base(slot)
        version = header.version
        raw = _SLOT.pack(
            header.state, header.rank, version.generation, version.step, header.manifest_bytes, header.payload_bytes
        )
        self._buffer[base : base + _SLOT.size] = raw
        _SLOT_DIGEST.pack_into(self._buffer, base + _SLOT.size, xxhash.xxh3_64_intdigest(raw))

    def begin(self, slot: int, rank: int, version: Version, manifest: bytes, payload_bytes: int) -> memoryview:
        """Marks the slot FILLING, writes the manifest, and returns the payload to fill.

        Raises OutOfSlotMemory where manifest and payload do not fit.
        """
        need = _payload_offset(len(manifest), payload_bytes) + payload_bytes
        if need > self.slot_bytes:
            raise OutOfSlotMemory(
                f"a manifest of {len(manifest)} and a payload of {payload_bytes} bytes need {need} bytes, "
                f"the slot has {self.slot_bytes}"
            )
        self._write_header(slot, SlotHeader(SlotState.FILLING, rank, version, len(manifest), payload_bytes))
        start = self._base(slot) + PAGE + _digest_table_bytes(payload_bytes)
        self._buffer[start : start + len(manifest)] = manifest
        return self.payload(slot)

    def seal(self, slot: int, digests: Sequence[bytes] | None = None) -> SlotHeader:
        """Writes the digests and marks the slot SEALED. The last step of a fill.

        ``digests`` (the manifest's, then one per payload chunk) is for a caller who hashed these very bytes as they
        came in; without it, everything is hashed here. Raises DigestMismatch where the slot was never begun, or the
        number of digests is not that of its bytes.
        """
        header = self.header(slot)
        if header is None:
            raise DigestMismatch(f"slot {slot} was never begun")
        if digests is None:
            manifest = self._buffer[self._manifest_range(slot, header)]
            digests = list(self._all_digests(manifest, self._payload_of(slot, header)))
        if len(digests) != chunk_count(header.payload_bytes) + 1:
            raise DigestMismatch(f"{len(digests)} digests do not seal a payload of {header.payload_bytes} bytes")
        table = self._base(slot) + PAGE
        for index, digest in enumerate(digests):
            at = table + index * DIGEST_BYTES
            self._buffer[at : at + DIGEST_BYTES] = digest
        sealed = msgspec.structs.replace(header, state=SlotState.SEALED)
        self._write_header(slot, sealed)
        return sealed

    def discard(self, slot: int) -> None:
        """Marks the slot EMPTY."""
        _SLOT.pack_into(self._buffer, self._base(slot), SlotState.EMPTY, 0, 0, 0, 0, 0)

    @staticmethod
    def _all_digests(manifest: memoryview, payload: memoryview) -> Iterator[bytes]:
        yield xxhash.xxh3_128_digest(manifest)
        yield from chunk_digests(payload)

    def _manifest_range(self, slot: int, header: SlotHeader) -> slice:
        start = self._base(slot) + PAGE + _digest_table_bytes(header.payload_bytes)
        return slice(start, start + header.manifest_bytes)

    def _require(self, slot: int) -> SlotHeader:
        header = self.header(slot)
        if header is None:
            raise DigestMismatch(f"slot {slot} is empty or its header is torn")
        return header

    def payload(self, slot: int) -> memoryview:
        """The payload's bytes, unchecked."""
        return self._payload_of(slot, self._require(slot))

    def _payload_of(self, slot: int, header: SlotHeader) -> memoryview:
        start = self._base(slot) + PAGE + _payload_offset(header.manifest_bytes, header.payload_bytes)
        return self._buffer[start : start + header.payload_bytes]

    def digests(self, slot: int) -> list[bytes]:
        """The sealed digests: the manifest's, then one per payload chunk."""
        return self._digests_of(slot, self._require(slot))

    def _digests_of(self, slot: int, header: SlotHeader) -> list[bytes]:
        table = self._base(slot) + PAGE
        count = chunk_count(header.payload_bytes) + 1
        return [bytes(self._buffer[table + i * DIGEST_BYTES : table + (i + 1) * DIGEST_BYTES]) for i in range(count)]

    def manifest(self, slot: int) -> bytes:
        """The manifest, checked. Raises DigestMismatch."""
        header = self._require(slot)
        manifest = bytes(self._buffer[self._manifest_range(slot, header)])
        if xxhash.xxh3_128_digest(manifest) != self._digests_of(slot, header)[0]:
            raise DigestMismatch(f"the manifest of slot {slot} (version {header.version}) is not what was sealed")
        return manifest

    def check_chunks(self, slot: int, start: int = 0, length: int | None = None) -> None:
        """Hashes the chunks that hold payload bytes [start, start + length).

        Raises DigestMismatch, and IndexError where the range is not within the payload. The header is read once, so
        that a slot which is filled anew meanwhile is a mismatch and nothing worse.
        """
        header = self._require(slot)
        payload, sealed = self._payload_of(slot, header), self._digests_of(slot, header)
        end = len(payload) if length is None else start + length
        if not 0 <= start <= end <= len(payload):
            raise IndexError(f"bytes {start} to {end} are not within a payload of {len(payload)} bytes")
        for index in range(start // CHUNK_BYTES, chunk_count(end)):
            chunk = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            if xxhash.xxh3_128_digest(chunk) != sealed[index + 1]:
                raise DigestMismatch(f"chunk {index} of slot {slot} is not what was sealed")

    def check(self, slot: int) -> None:
        """Hashes everything. Raises DigestMismatch."""
        self.manifest(slot)
        self.check_chunks(slot)

    def sealed(self) -> Iterator[tuple[int, SlotHeader]]:
        """The slots that say SEALED, with their headers."""
        for slot in range(self.slots):
            header = self.header(slot)
            if header is not None and header.state is SlotState.SEALED:
                yield slot, header


def slot_to_fill(headers: list[SlotHeader | None], keep: set[Version]) -> int:
    """Which slot to fill next: an empty or unfinished one, else the oldest that is not to be kept.

    ``keep`` are versions that somebody may still need. Raises OutOfSlotMemory where every slot holds one of those.
    """
    free = [i for i, h in enumerate(headers) if h is None or h.state is not SlotState.SEALED]
    if free:
        return free[0]
    old = [(h.version, i) for i, h in enumerate(headers) if h is not None and h.version not in keep]
    if not old:
        raise OutOfSlotMemory(f"all {len(headers)} slots hold versions that are still needed: {sorted(keep)}")
    return min(old)[1]
