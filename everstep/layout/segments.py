"""Encode the headers of segments and of their slots.

A slot's header is two equal records, each with its own digest::

      0  u32  state            4  u32  rank
      8  u64  generation      16  u64  step           24  u64  sequence
     32  u64  manifest_bytes  40  u64  payload_bytes
     48  u16  slot            50  u16  slots          52  u32  zero
     56  16s  xxh3-128 of the chunk digests           72  16s  nonce of the segment
     88  zeros
    112  u64  xxh3-64 of the bytes before it

The first record counts if its digest is right, else the second. A writer writes both, the first one first, before any
bytes that depend on them. A writer that dies in between leaves either the previous state, with all its bytes intact, or
the next one. A record of zeros has no right digest: an empty slot must say that it is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec
import xxhash

from everstep.errors import DigestMismatch, VersionMismatch
from everstep.ids import Version
from everstep.native import DIGEST_BYTES

# ---- segment header: number and size of the slots, and their owner
#
# Written once, in two copies: in the file's first page and in its last. A copy counts if its digest is right and it
# matches the file's length. If neither does, the header is derived from the length and the slots' own records::
#
#   0    8s   magic
#   8    u32  layout           12  u32  slots
#   16   u64  slot_bytes
#   24   u32  kind             28  u32  number (local rank, rank, or group)
#   32   16s  nonce            48  64s  job
#   112  16s  xxh3-128 of the bytes before it

PAGE_BYTES = 4096
MAGIC = b"EVRSTEP\x02"
LAYOUT_VERSION = 2
MAX_SLOTS = 64
NONCE_BYTES = 16
KINDS = ("own", "replica", "parity")
"""Kinds of segments, in the order of their numbers in the header."""

_HEADER_BODY = struct.Struct("<8sIIQII16s64s")
HEADER_BYTES = _HEADER_BODY.size + DIGEST_BYTES
_FORMAT_1 = b"EVRSTEP\x01\x01\x00\x00\x00"

SegmentHint = tuple[bytes, int, int]
"""A slot's record about its segment: nonce, number of the slot, number of slots."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """The header of a segment."""

    slots: int
    slot_bytes: int  # size of each slot, after its header page
    nonce: bytes  # identifies the file, whatever its path
    kind: str = "own"  # one of KINDS
    number: int = 0  # local rank, rank or group, by kind
    job: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return segment_bytes(self.slots, self.slot_bytes)

    def slot_offset(self, slot: int) -> int:
        """Return the offset of a slot's header page."""
        return PAGE_BYTES + slot * (PAGE_BYTES + self.slot_bytes)


def segment_bytes(slots: int, slot_bytes: int) -> int:
    """Return the size of a segment file."""
    return PAGE_BYTES + slots * (PAGE_BYTES + slot_bytes) + PAGE_BYTES


def write_header(buffer: memoryview, header: SegmentHeader) -> None:
    """Write both copies of the header of a segment that fills ``buffer``."""
    raw = _pack(header)
    for at in _header_offsets(len(buffer)):
        buffer[at : at + HEADER_BYTES] = raw


def is_intact(buffer: memoryview, header: SegmentHeader) -> bool:
    """Return whether both copies equal this header."""
    raw = _pack(header)
    return all(bytes(buffer[at : at + HEADER_BYTES]) == raw for at in _header_offsets(len(buffer)))


def read_header(buffer: memoryview, hint_at: Callable[[int], SegmentHint | None]) -> tuple[SegmentHeader, bool]:
    """Return the header, and whether both copies are intact.

    ``hint_at`` returns the hint in the valid slot record at an offset. A header derived from hints lacks kind, number
    and job.

    Raises:
        DigestMismatch: No header fits.
        VersionMismatch: The segment has layout 1.
    """
    if len(buffer) < 2 * PAGE_BYTES:
        raise DigestMismatch(f"{len(buffer)} bytes are no segment")
    copies = [_unpack(bytes(buffer[at : at + HEADER_BYTES]), len(buffer)) for at in _header_offsets(len(buffer))]
    found = next((copy for copy in copies if copy is not None), None)
    if found is not None:
        return found, copies[0] == copies[1]
    begin = bytes(buffer[: len(_FORMAT_1)])
    if begin == _FORMAT_1:
        raise VersionMismatch(
            f"its slots are in layout 1, and this release reads layout {LAYOUT_VERSION}: let the jobs that "
            "have slots here end "
            "under the release that wrote them, or remove the file and lose them"
        )
    fitting = [(_matching_slots(header, hint_at), header) for header in _candidate_headers(len(buffer), hint_at)]
    witnesses, made_out = max(fitting, key=lambda each: each[0], default=(0, None))
    if made_out is None or not witnesses:
        raise DigestMismatch(
            f"not a segment of layout {LAYOUT_VERSION}: it begins with {begin!r}, and no slot is in it"
        )
    return made_out, False


def _header_offsets(length: int) -> tuple[int, int]:
    return 0, length - PAGE_BYTES


def _pack(header: SegmentHeader) -> bytes:
    kind = KINDS.index(header.kind)
    body = _HEADER_BODY.pack(
        MAGIC, LAYOUT_VERSION, header.slots, header.slot_bytes, kind, header.number, header.nonce, header.job.encode()
    )
    return body + xxhash.xxh3_128_digest(body)


def _unpack(raw: bytes, length: int) -> SegmentHeader | None:
    body, digest = raw[: _HEADER_BODY.size], raw[_HEADER_BODY.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    magic, layout, slots, slot_bytes, kind, number, nonce, job = _HEADER_BODY.unpack(body)
    if (magic, layout) != (MAGIC, LAYOUT_VERSION) or kind >= len(KINDS) or segment_bytes(slots, slot_bytes) != length:
        return None
    return SegmentHeader(slots, slot_bytes, nonce, KINDS[kind], number, job.rstrip(b"\0").decode())


def _candidate_headers(length: int, clue_at: Callable[[int], SegmentHint | None]) -> Iterator[SegmentHeader]:
    """Yield all segments of ``length`` bytes that some slot's record describes, one per nonce."""
    for slots in range(1, MAX_SLOTS + 1):
        stride, rest = divmod(length - 2 * PAGE_BYTES, slots)
        if rest or stride % PAGE_BYTES or stride <= PAGE_BYTES:
            continue
        bare = SegmentHeader(slots, stride - PAGE_BYTES, b"")
        clues = (clue_at(bare.slot_offset(slot)) for slot in range(slots))
        for nonce in {clue[0] for clue in clues if clue is not None}:
            yield msgspec.structs.replace(bare, nonce=nonce)


def _matching_slots(header: SegmentHeader, clue_at: Callable[[int], SegmentHint | None]) -> int:
    """Return the number of slots whose records agree with this header on nonce, position and count."""
    return sum(clue_at(header.slot_offset(slot)) == (header.nonce, slot, header.slots) for slot in range(header.slots))


RECORD_OFFSETS = (0, 2048)
"""Offsets of the two records in the slot's header page."""
REPAIR_FLAG_OFFSET = 1024
"""Offset in the slot's header page of a word that marks the slot as being repaired; see ``SegmentView.repair``."""

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


def parse_segment_hint(raw: bytes) -> tuple[bytes, int, int] | None:
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
        self._nonce = segment.nonce
        self._slots = segment.slots
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
        body = _RECORD_BODY.pack(
            header.state,
            header.rank,
            version.generation,
            version.step,
            header.sequence,
            header.manifest_bytes,
            header.payload_bytes,
            slot,
            self._slots,
            0,
            header.table_digest,
            self._nonce,
        )
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
