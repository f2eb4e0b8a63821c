"""Define checkpoint slots in shared memory: the layout, over any buffer, without I/O.

A *segment* is one file that holds the slots of one rank::

    offset 0              segment header, one page
    PAGE + i * stride     slot i: header of two records, one page; chunk digests, manifest,
                          payload (64-byte aligned)
    the last page         the segment header again

A slot goes EMPTY -> FILLING -> COPIED -> SEALED. A slot counts as sealed only if a record of its header has a right
digest and says SEALED. Its chunk digests (xxh3-128 per CHUNK_BYTES of manifest and of payload) are valid only if they
match the header's digest of them, and its bytes only if they match the chunk digests. A writer killed during a fill
leaves FILLING, which nobody reads. One killed after copying but before hashing leaves COPIED, and the vault seals it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum

import msgspec
import xxhash

from everstep.errors import ConfigurationError, Conflict, DigestMismatch, OutOfSlotMemory, VersionMismatch
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
    and job. Raises DigestMismatch if no header fits, VersionMismatch for layout 1.
    """
    if len(buffer) < 2 * PAGE_BYTES:
        raise DigestMismatch(f"{len(buffer)} bytes are no segment")
    copies = [_unpack(bytes(buffer[at : at + HEADER_BYTES]), len(buffer)) for at in _header_offsets(len(buffer))]
    if (found := copies[0] or copies[1]) is not None:
        return found, copies[0] == copies[1]
    begin = bytes(buffer[: len(_FORMAT_1)])
    if begin == _FORMAT_1:
        raise VersionMismatch(
            f"its slots are in layout 1, and this release reads layout {LAYOUT_VERSION}: let the jobs that have slots "
            "here end under the release that wrote them, or remove the file and lose them"
        )
    fitting = [(_matching_slots(header, hint_at), header) for header in _candidate_headers(len(buffer), hint_at)]
    witnesses, made_out = max(fitting, key=lambda each: each[0], default=(0, None))
    if made_out is None or not witnesses:
        begins = f"it begins with {begin!r}, and no slot is in it"
        raise DigestMismatch(f"not a segment of layout {LAYOUT_VERSION}: {begins}")
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


# ---- finished step: how far the rank that writes the segment is, in the first page behind the header
#
# Written by the training thread as a step ends, without a copy: a mark that does not match its digest counts as none::
#
#   1024  u64  generation    1032  u64  step    1040  u32  rank    1044  u32  1: the loop has ended, else 0
#   1048  u64  xxh3-64 of the bytes before it

FINISHED_OFFSET = 1024
_FINISHED_BODY = struct.Struct("<QQII")


class FinishedStep(msgspec.Struct, frozen=True):
    """The last step that a rank has finished in a generation; the step it was restored from before the first.

    ``loop_ended``: the rank's loop has ended with this step, and the work after the loop runs.
    """

    generation: int
    step: int
    rank: int
    loop_ended: bool = False


def write_finished(buffer: memoryview, finished: FinishedStep) -> None:
    """Write the mark into a segment."""
    body = _FINISHED_BODY.pack(finished.generation, finished.step, finished.rank, finished.loop_ended)
    raw = body + xxhash.xxh3_64_digest(body)
    buffer[FINISHED_OFFSET : FINISHED_OFFSET + len(raw)] = raw


def read_finished(buffer: memoryview) -> FinishedStep | None:
    """Return the mark; None if there is none, or its writer died while it wrote."""
    body = bytes(buffer[FINISHED_OFFSET : FINISHED_OFFSET + _FINISHED_BODY.size])
    at = FINISHED_OFFSET + _FINISHED_BODY.size
    if xxhash.xxh3_64_digest(body) != bytes(buffer[at : at + 8]):
        return None
    generation, step, rank, loop_ended = _FINISHED_BODY.unpack(body)
    return FinishedStep(generation, step, rank, bool(loop_ended)) if generation else None


# ---- slot header: two equal records, each with its own digest
#
# The first record counts if its digest is right, else the second. A writer writes both, the first one first, before any
# bytes that depend on them. A writer that dies in between leaves either the previous state, with all its bytes intact,
# or the next one. A record of zeros has no right digest: an empty slot must say that it is empty::
#
#     0  u32  state            4  u32  rank
#     8  u64  generation      16  u64  step           24  u64  sequence
#    32  u64  manifest_bytes  40  u64  payload_bytes
#    48  u16  slot            50  u16  slots          52  u32  zero
#    56  16s  xxh3-128 of the chunk digests           72  16s  nonce of the segment
#    88  zeros
#   112  u64  xxh3-64 of the bytes before it

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


# ---- slots: fill, seal, read and repair

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 8 << 20
SLOTS_PER_RANK = 5
"""Slots of one rank: the one being filled, the two sealed last, the committed one, and the next to be committed."""

_UINT64 = struct.Struct("<Q")
_REPAIR_FLAG_VALUE = 0xB5E9_6A3C_1D57_F208
"""A slot's flag during a repair; no flipped bit turns zero into it."""
_FENCE = threading.Lock()
"""Taking it orders this thread's stores before its later loads, as seen by other processes."""


def segment_name(kind: str, number: int) -> str:
    """Return the file name of a local rank's own slots (``own``), or of copies of another node's rank (``replica``)."""
    return f"{kind}-{number}"


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
    ``header_was_repaired`` tells of either. Raises DigestMismatch if the buffer is no segment, VersionMismatch for one
    of an older layout.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.segment, intact = read_header(buffer, self._clue)
        self.header_was_repaired = not intact
        self.slots = self.segment.slots
        self.slot_bytes = self.segment.slot_bytes
        # no method of this object, whose reference cycle would keep the memory until the next gc
        size = self.slot_bytes
        self._records = SlotRecords(buffer, self.segment, lambda said, held: _payload_offset(said, held) + held <= size)
        self._copied = 0
        known = [self._records.header(slot) for slot in range(self.slots)]
        self._sequence = max((header.sequence for header in known if header is not None), default=0)

    def _clue(self, base: int) -> tuple[bytes, int, int] | None:
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

    # --- headers ------------------------------------------------------------------------------------------------------

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

    # --- filling ------------------------------------------------------------------------------------------------------

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

    # --- reading ------------------------------------------------------------------------------------------------------

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

    # --- repair -------------------------------------------------------------------------------------------------------

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


# ---- choice of a slot to overwrite. Pure.


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
