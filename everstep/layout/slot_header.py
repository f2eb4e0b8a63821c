"""Define the header of a slot: two equal records, each with its own digest.

The first record counts if its digest is right, else the second. A writer writes both, the first one first, before any
bytes that depend on them. A writer that dies in between leaves either the previous state, with all its bytes intact, or
the next one. A record of zeros has no right digest: an empty slot must say that it is empty::

     0  u32  state            4  u32  rank
     8  u64  generation      16  u64  step           24  u64  sequence
    32  u64  manifest_bytes  40  u64  payload_bytes
    48  u16  slot            50  u16  slots          52  u32  zero
    56  16s  xxh3-128 of the chunk digests           72  16s  nonce of the segment
    88  zeros
   112  u64  xxh3-64 of the bytes before it
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import msgspec
import xxhash

from everstep.ids import Version
from everstep.layout.segment_header import SegmentHeader, SegmentHint

RECORD_OFFSETS = (0, 2048)
"""Offsets of the two records in the slot's header page."""

_RECORD_BODY = struct.Struct("<IIQQQQQHHI16s16s24x")
RECORD_BYTES = _RECORD_BODY.size + 8
NO_DIGEST = bytes(16)


class SlotState(IntEnum):
    """The state of a slot. COPIED: all bytes are there, but not their digests. DAMAGED is never written: neither record
    is valid."""

    EMPTY = 0
    FILLING = 1
    SEALED = 2
    COPIED = 3
    DAMAGED = 4


class SlotHeader(msgspec.Struct, frozen=True):
    """The header of a slot."""

    state: SlotState
    rank: int  # the rank whose shard it holds
    version: Version
    manifest_bytes: int
    payload_bytes: int
    sequence: int = 0  # number of the fill in the segment, so that two fills with one version differ
    table_digest: bytes = NO_DIGEST  # digest of the chunk digests; zeros before the slot is sealed


class SlotRecordPair(msgspec.Struct, frozen=True):
    """Both records of a slot as read."""

    raw: tuple[bytes, bytes]
    header: SlotHeader | None  # the slot's header; None if neither is valid
    invalid: tuple[int, ...]  # the records (0, 1) that are not valid
    is_consistent: bool  # both are valid and equal; False also if a writer is, or died, between the two

    @property
    def state(self) -> SlotState:
        return SlotState.DAMAGED if self.header is None else self.header.state


def parse_segment_hint(raw: bytes) -> SegmentHint | None:
    """Return nonce, slot and number of slots from a record; None if it is not valid."""
    if not _is_whole(raw):
        return None
    fields = _RECORD_BODY.unpack_from(raw)
    return fields[11], fields[7], fields[8]


class SlotRecords:
    """The records of all slots of a segment whose header is known. ``fits``: returns whether a slot has room for a
    manifest and a payload of these sizes."""

    def __init__(self, buffer: memoryview, segment: SegmentHeader, fits: Callable[[int, int], bool]) -> None:
        self._buffer = buffer
        self._nonce, self._slots = segment.nonce, segment.slots
        self._bases = [segment.slot_offset(slot) for slot in range(segment.slots)]
        self._fits = fits
        self._seen: list[tuple[bytes, SlotHeader | None]] = [(b"", None)] * segment.slots

    def header(self, slot: int) -> SlotHeader | None:
        """Return the slot's header, EMPTY included; None if neither record is valid. Raises IndexError."""
        raw = self._raw(slot, 0)
        seen, header = self._seen[slot]
        if raw != seen:  # most slots are unchanged since the last call
            header = self._parse(slot, raw)
            self._seen[slot] = raw, header
        return header or self._parse(slot, self._raw(slot, 1))

    def read_pair(self, slot: int) -> SlotRecordPair:
        """Return both records, for repair."""
        raw = self._raw(slot, 0), self._raw(slot, 1)
        first, second = self._parse(slot, raw[0]), self._parse(slot, raw[1])
        bad = tuple(number for number, found in enumerate((first, second)) if found is None)
        return SlotRecordPair(raw, first or second, bad, first is not None and first == second)

    def write(self, slot: int, header: SlotHeader) -> None:
        """Write both records."""
        raw = self._pack(slot, header)
        for number in (0, 1):
            self._write(slot, number, raw)

    def repair(self, slot: int, seen: SlotRecordPair) -> bool:
        """Restore a record that is invalid or was not written any more from the other one. Only for slots that no
        writer is filling. Return False if the slot has changed since it was seen."""
        if seen.header is None or seen.header.state in _WRITTEN or seen.raw != self.read_pair(slot).raw:
            return False
        raw = self._pack(slot, seen.header)
        for number in (0, 1):
            if seen.raw[number] != raw:
                self._write(slot, number, raw)
        return True

    def _raw(self, slot: int, number: int) -> bytes:
        at = self._bases[slot] + RECORD_OFFSETS[number]
        return bytes(self._buffer[at : at + RECORD_BYTES])

    def _write(self, slot: int, number: int, raw: bytes) -> None:
        at = self._bases[slot] + RECORD_OFFSETS[number]
        self._buffer[at : at + RECORD_BYTES] = raw

    def _pack(self, slot: int, header: SlotHeader) -> bytes:
        version = header.version
        sizes = (header.manifest_bytes, header.payload_bytes)
        place = (slot, self._slots, 0)
        numbers = (header.state, header.rank, version.generation, version.step, header.sequence, *sizes, *place)
        body = _RECORD_BODY.pack(*numbers, header.table_digest, self._nonce)
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    def _parse(self, slot: int, raw: bytes) -> SlotHeader | None:
        if not _is_whole(raw):
            return None
        state, rank, generation, step, sequence, manifest, payload, at, slots, _, table, nonce = (
            _RECORD_BODY.unpack_from(raw)
        )
        if (at, slots, nonce) != (slot, self._slots, self._nonce) or state >= SlotState.DAMAGED:
            return None
        if not self._fits(manifest, payload):
            return None
        version = Version(generation, step)
        return SlotHeader(_STATES[state], rank, version, manifest, payload, sequence, table)


def _is_whole(raw: bytes) -> bool:
    return xxhash.xxh3_64_intdigest(raw[: _RECORD_BODY.size]) == int.from_bytes(raw[_RECORD_BODY.size :], "little")


_STATES = tuple(SlotState)
_WRITTEN = (SlotState.FILLING, SlotState.COPIED)
