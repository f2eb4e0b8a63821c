"""Fill, seal, read and repair checkpoint slots in shared memory, over any buffer, without I/O.

A *segment* is one file that holds the slots of one rank::

    offset 0              segment header, one page
    PAGE + i * stride     slot i: header of two records, one page; chunk digests, manifest,
                          payload (64-byte aligned)
    the last page         the segment header again

A slot goes EMPTY -> FILLING -> COPIED -> SEALED. A slot counts as sealed only if a record of its header has a right
digest and says SEALED. Its chunk digests (xxh3-128 per CHUNK_BYTES of manifest and of payload) are valid only if they
match the header's digest of them, and its bytes only if they match the chunk digests. A writer killed during a fill
leaves FILLING, which no reader accepts. One killed after copying but before hashing leaves COPIED; the vault seals it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import xxhash

from everstep.errors import ConfigurationError, Conflict, DigestMismatch, OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segment_header import (
    NONCE_BYTES,
    PAGE_BYTES,
    FinishedStep,
    SegmentHeader,
    SegmentHint,
    read_finished,
    read_header,
    segment_bytes,
    write_finished,
    write_header,
)
from everstep.layout.slot_header import (
    RECORD_BYTES,
    RECORD_OFFSETS,
    SlotHeader,
    SlotRecordPair,
    SlotRecords,
    SlotState,
    parse_segment_hint,
)
from everstep.native import DIGEST_BYTES

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 8 << 20
SLOTS_PER_RANK = 5
"""Slots of one rank: the one being filled, the two sealed last, the committed one, and the next to be committed."""

REPAIR_FLAG_OFFSET = 1024
"""Offset in the slot's header page of a word that marks the slot as being repaired; see ``SegmentView.repair``."""
_UINT64 = struct.Struct("<Q")
_REPAIR_FLAG_VALUE = 0xB5E9_6A3C_1D57_F208
"""A slot's flag during a repair; no flipped bit turns zero into it."""
_FENCE = threading.Lock()
"""Taking it orders this thread's stores before its later loads, as seen by other processes."""


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def chunk_count(n: int) -> int:
    """Return the number of chunks in which ``n`` bytes are hashed."""
    return -(-n // CHUNK_BYTES)


def slot_bytes_for(manifest_bytes: int, payload_bytes: int) -> int:
    """Return the size of a slot, without its header, for a manifest and a payload of these sizes."""
    return _aligned(_payload_offset(manifest_bytes, payload_bytes) + payload_bytes, PAGE_BYTES)


def _table_bytes(payload_bytes: int) -> int:
    return (chunk_count(payload_bytes) + 1) * DIGEST_BYTES


def _payload_offset(manifest_bytes: int, payload_bytes: int) -> int:
    return _aligned(_table_bytes(payload_bytes) + manifest_bytes, ALIGNMENT_BYTES)


def chunk_digests(data: memoryview) -> Iterator[bytes]:
    """Yield the xxh3-128 of each CHUNK_BYTES of ``data``."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES])


def format_segment(
    buffer: memoryview,
    slots: int,
    slot_bytes: int,
    *,
    nonce: bytes = bytes(NONCE_BYTES),
    kind: str = "own",
    number: int = 0,
    job: str = "",
) -> None:
    """Write the headers of an empty segment that fills ``buffer``. ``nonce`` should differ from all other segments'.
    Raises OutOfSlotMemory if the buffer is too small, ConfigurationError if it or a slot has another wrong size."""
    need = segment_bytes(slots, slot_bytes)
    if len(buffer) < need:
        raise OutOfSlotMemory(
            f"{slots} slots of {slot_bytes} bytes need {need} bytes with their headers, the segment has {len(buffer)}"
        )
    if slot_bytes % PAGE_BYTES or len(buffer) != need:
        raise ConfigurationError(
            f"slot_bytes must be a multiple of {PAGE_BYTES}, not {slot_bytes}; the segment is {need} bytes, "
            f"not {len(buffer)}"
        )
    header = SegmentHeader(slots, slot_bytes, nonce, kind, number, job)
    write_header(buffer, header)
    records = SlotRecords(buffer, header, lambda _manifest, _payload: True)
    for slot in range(slots):
        records.write(slot, _EMPTY)


_EMPTY = SlotHeader(SlotState.EMPTY, 0, Version(0, 0), 0, 0)


class SegmentView:
    """A segment's slots over a writable (or, for readers, read-only) buffer.

    A segment header with one damaged copy is read from the other; if both are damaged, it is derived from the slots.
    ``header_was_repaired`` tells of either. Raises DigestMismatch if the buffer is no segment.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.segment, intact = read_header(buffer, self._segment_hint)
        self.header_was_repaired = not intact
        self.slots = self.segment.slots
        self.slot_bytes = self.segment.slot_bytes
        # no method of this object, whose reference cycle would keep the memory until the next gc
        size = self.slot_bytes
        self._records = SlotRecords(buffer, self.segment, lambda said, held: _payload_offset(said, held) + held <= size)
        self._copied = 0
        known = [self._records.header(slot) for slot in range(self.slots)]
        self._sequence = max((header.sequence for header in known if header is not None), default=0)

    def _segment_hint(self, base: int) -> SegmentHint | None:
        found = (parse_segment_hint(bytes(self._buffer[base + at : base + at + RECORD_BYTES])) for at in RECORD_OFFSETS)
        return next((each for each in found if each is not None), None)

    def _base(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return self.segment.slot_offset(slot)

    def mark_finished(self, finished: FinishedStep) -> None:
        """Note how far the rank is that writes this segment."""
        write_finished(self._buffer, finished)

    def finished(self) -> FinishedStep | None:
        """Return how far the rank is that wrote this segment; None if it is not known."""
        return read_finished(self._buffer)

    def header(self, slot: int) -> SlotHeader | None:
        """Return the slot's header; None if it is empty, or both its records are damaged."""
        self._base(slot)  # raises IndexError
        header = self._records.header(slot)
        return None if header is None or header.state is SlotState.EMPTY else header

    def headers(self) -> list[SlotHeader | None]:
        """Return the headers of all slots, in order."""
        return [self.header(slot) for slot in range(self.slots)]

    def read_records(self, slot: int) -> SlotRecordPair:
        """Return both records of the slot's header, which tell a damaged slot from an empty one."""
        return self._records.read_pair(slot)

    def repair_records(self, slot: int, seen: SlotRecordPair) -> bool:
        """Restore one record from the other. Return False if the slot has changed since it was seen, or is being
        filled."""
        with self._repairing(slot):
            return self._records.repair(slot, seen)

    def sealed_slots(self) -> Iterator[tuple[int, SlotHeader]]:
        """Yield the sealed slots with their headers."""
        return self._in_states(SlotState.SEALED)

    def complete_slots(self) -> Iterator[tuple[int, SlotHeader]]:
        """Yield the sealed and the copied slots with their headers."""
        return self._in_states(SlotState.SEALED, SlotState.COPIED)

    def _in_states(self, *states: SlotState) -> Iterator[tuple[int, SlotHeader]]:
        for slot in range(self.slots):
            header = self.header(slot)
            if header is not None and header.state in states:
                yield slot, header

    def _require(self, slot: int) -> SlotHeader:
        header = self.header(slot)
        if header is None:
            raise DigestMismatch(f"slot {slot} is empty or its header is damaged")
        return header

    def begin(self, slot: int, rank: int, version: Version, manifest: bytes, payload_bytes: int) -> memoryview:
        """Reserve the slot and write the manifest; return the payload to fill."""
        _, payload = self.reserve(slot, rank, version, len(manifest), payload_bytes)
        start = self._base(slot) + PAGE_BYTES + _table_bytes(payload_bytes)
        self._buffer[start : start + len(manifest)] = manifest
        return payload

    def reserve(
        self, slot: int, rank: int, version: Version, manifest_bytes: int, payload_bytes: int
    ) -> tuple[memoryview, memoryview]:
        """Mark the slot FILLING; return the manifest and the payload to fill. Raises OutOfSlotMemory if the two do not
        fit, Conflict if the slot is being repaired."""
        offset = _payload_offset(manifest_bytes, payload_bytes)
        if offset + payload_bytes > self.slot_bytes:
            raise OutOfSlotMemory(
                f"a manifest of {manifest_bytes} and a payload of {payload_bytes} bytes need {offset + payload_bytes} "
                f"bytes, the slot has {self.slot_bytes}"
            )
        base = self._base(slot)
        self._sequence += 1
        header = SlotHeader(SlotState.FILLING, rank, version, manifest_bytes, payload_bytes, self._sequence)
        self._records.write(slot, header)
        with _FENCE:
            pass
        if self._is_being_repaired(slot):
            raise Conflict(f"slot {slot} is being mended; it can be filled in a moment")
        payload = self._buffer[base + PAGE_BYTES + offset : base + PAGE_BYTES + offset + payload_bytes]
        return self._buffer[self._manifest_range(slot, header)], payload

    def mark_copied(self, slot: int) -> None:
        """Mark a slot that is being filled COPIED: all its bytes are there, and any process may seal it. Raises
        DigestMismatch: the slot is not being filled."""
        header = self.header(slot)
        if header is None or header.state is not SlotState.FILLING:
            raise DigestMismatch(f"slot {slot} is not being filled")
        self._copied = header.sequence
        self._records.write(slot, msgspec.structs.replace(header, state=SlotState.COPIED))

    def seal(self, slot: int, digests: Sequence[bytes] | None = None) -> SlotHeader:
        """Write the digests and mark the slot SEALED, the last step of a fill, unless ``seal_copied`` was faster.

        ``digests`` (the manifest's, then one per payload chunk) is for a caller who hashed these bytes while copying;
        without it, everything is hashed here. Raises DigestMismatch if the slot was never begun, or their number is
        wrong.
        """
        header = self.header(slot)
        if header is not None and header.state is SlotState.SEALED and header.sequence == self._copied:
            return header
        if header is None or header.state is SlotState.SEALED:
            raise DigestMismatch(f"slot {slot} was never begun")
        if digests is None:
            digests = self.compute_digests(slot, header)
        if len(digests) != chunk_count(header.payload_bytes) + 1:
            raise DigestMismatch(f"{len(digests)} digests do not seal a payload of {header.payload_bytes} bytes")
        return self._seal(slot, header, b"".join(digests))

    def seal_copied(self, slot: int, header: SlotHeader, digests: Sequence[bytes]) -> bool:
        """Seal a slot that another process copied and left. Return False if its header is no longer ``header``."""
        with self._repairing(slot):
            if header.state is not SlotState.COPIED or self.header(slot) != header:
                return False
            self._seal(slot, header, b"".join(digests))
            return True

    def compute_digests(self, slot: int, header: SlotHeader) -> list[bytes]:
        """Return digests of the present bytes: the manifest's, then one per payload chunk."""
        manifest = self._buffer[self._manifest_range(slot, header)]
        return [xxhash.xxh3_128_digest(manifest), *chunk_digests(self._payload_of(slot, header))]

    def _seal(self, slot: int, header: SlotHeader, table: bytes) -> SlotHeader:
        start = self._base(slot) + PAGE_BYTES
        self._buffer[start : start + len(table)] = table
        sealed = msgspec.structs.replace(header, state=SlotState.SEALED, table_digest=xxhash.xxh3_128_digest(table))
        self._records.write(slot, sealed)
        return sealed

    def discard(self, slot: int) -> None:
        """Mark the slot EMPTY. For the slot's own writer; others use ``discard_if_unchanged``."""
        self._records.write(slot, msgspec.structs.replace(_EMPTY, sequence=self._sequence))

    def _manifest_range(self, slot: int, header: SlotHeader) -> slice:
        start = self._base(slot) + PAGE_BYTES + _table_bytes(header.payload_bytes)
        return slice(start, start + header.manifest_bytes)

    def payload(self, slot: int) -> memoryview:
        """Return the payload's bytes, unchecked."""
        return self._payload_of(slot, self._require(slot))

    def _payload_of(self, slot: int, header: SlotHeader) -> memoryview:
        start = self._base(slot) + PAGE_BYTES + _payload_offset(header.manifest_bytes, header.payload_bytes)
        return self._buffer[start : start + header.payload_bytes]

    def digests(self, slot: int) -> list[bytes]:
        """Return the sealed digests, checked: the manifest's, then one per payload chunk. Raises DigestMismatch."""
        table = self._table(slot, self._require(slot))
        return [table[at : at + DIGEST_BYTES] for at in range(0, len(table), DIGEST_BYTES)]

    def _table(self, slot: int, header: SlotHeader) -> bytes:
        start = self._base(slot) + PAGE_BYTES
        table = bytes(self._buffer[start : start + _table_bytes(header.payload_bytes)])
        if xxhash.xxh3_128_digest(table) != header.table_digest:
            raise DigestMismatch(f"the chunk digests of slot {slot} (version {header.version}) are not what was sealed")
        return table

    def manifest_view(self, slot: int) -> memoryview:
        """Return the manifest's bytes, unchecked."""
        return self._buffer[self._manifest_range(slot, self._require(slot))]

    def manifest(self, slot: int) -> bytes:
        """Return the manifest, checked. Raises DigestMismatch."""
        header = self._require(slot)
        manifest = bytes(self._buffer[self._manifest_range(slot, header)])
        if xxhash.xxh3_128_digest(manifest) != self._table(slot, header)[:DIGEST_BYTES]:
            raise DigestMismatch(f"the manifest of slot {slot} (version {header.version}) is not what was sealed")
        return manifest

    def verify_chunks(self, slot: int, start: int = 0, length: int | None = None) -> None:
        """Hash the chunks that hold payload bytes [start, start + length) and compare them with the sealed digests.

        The header is read once, so that a slot refilled meanwhile is only a mismatch. Raises DigestMismatch if a chunk
        is not as sealed, IndexError for a range outside the payload.
        """
        header = self._require(slot)
        payload, table = self._payload_of(slot, header), self._table(slot, header)
        end = len(payload) if length is None else start + length
        if not 0 <= start <= end <= len(payload):
            raise IndexError(f"bytes {start} to {end} are not within a payload of {len(payload)} bytes")
        for index in range(start // CHUNK_BYTES, chunk_count(end)):
            sealed = table[(index + 1) * DIGEST_BYTES : (index + 2) * DIGEST_BYTES]
            if xxhash.xxh3_128_digest(payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]) != sealed:
                raise DigestMismatch(f"chunk {index} of slot {slot} is not what was sealed")

    def verify(self, slot: int) -> None:
        """Check the manifest and the whole payload. Raises DigestMismatch."""
        self.manifest(slot)
        self.verify_chunks(slot)

    def _is_being_repaired(self, slot: int) -> bool:
        at = self._base(slot) + REPAIR_FLAG_OFFSET
        return int.from_bytes(self._buffer[at : at + _UINT64.size], "little") == _REPAIR_FLAG_VALUE

    def _flag(self, slot: int, value: int) -> None:
        at = self._base(slot) + REPAIR_FLAG_OFFSET
        self._buffer[at : at + _UINT64.size] = _UINT64.pack(value)

    @contextmanager
    def _repairing(self, slot: int) -> Iterator[None]:
        """Keep the slot's own writer from beginning a fill inside the block; a fill that has begun shows in the header.

        The writer writes FILLING and then looks at the flag; a repairer sets the flag and then looks at the header. So
        one of them sees the other, and no repairer ever writes into a fill. For one repairer at a time.
        """
        self._flag(slot, _REPAIR_FLAG_VALUE)
        try:
            with _FENCE:
                pass
            yield
        finally:
            self._flag(slot, 0)

    def discard_if_unchanged(self, slot: int, header: SlotHeader | None) -> bool:
        """Mark the slot EMPTY if its header is still ``header`` (None: damaged); return whether it was."""
        with self._repairing(slot):
            if self._records.header(slot) != header:
                return False
            self.discard(slot)
            return True

    def rebuild_table(self, slot: int, header: SlotHeader) -> bytes | None:
        """Return the chunk digests computed again from intact bytes; None if the bytes are not intact."""
        table = b"".join(self.compute_digests(slot, header))
        return table if xxhash.xxh3_128_digest(table) == header.table_digest else None

    def repair(
        self,
        slot: int,
        header: SlotHeader,
        *,
        chunks: Mapping[int, bytes] = {},
        manifest: bytes | None = None,
        table: bytes | None = None,
    ) -> bool:
        """Write bytes into a slot that is not being filled. Return False if its header is no longer ``header``."""
        with self._repairing(slot):
            if self.header(slot) != header:
                return False
            base = self._base(slot) + PAGE_BYTES
            payload = base + _payload_offset(header.manifest_bytes, header.payload_bytes)
            pieces = [(base, table), (base + _table_bytes(header.payload_bytes), manifest)]
            for at, piece in [*pieces, *((payload + i * CHUNK_BYTES, chunk) for i, chunk in chunks.items())]:
                if piece is not None:
                    self._buffer[at : at + len(piece)] = piece
            return True

    def finish_repair(self, slot: int) -> bool:
        """End a repair whose process died. Return False if there is none."""
        if not self._is_being_repaired(slot):
            return False
        self._flag(slot, 0)
        return True


def slot_to_fill(headers: list[SlotHeader | None], keep: set[Version]) -> int:
    """Return the slot to fill next: an empty or unfinished one, else the oldest one that need not be kept. ``keep``:
    versions that may still be needed. Raises OutOfSlotMemory if every slot holds one of them."""
    free = [i for i, h in enumerate(headers) if h is None or h.state is not SlotState.SEALED]
    if free:
        return free[0]
    old = [(h.version, i) for i, h in enumerate(headers) if h is not None and h.version not in keep]
    if not old:
        raise OutOfSlotMemory(f"all {len(headers)} slots hold versions that are still needed: {sorted(keep)}")
    return min(old)[1]
