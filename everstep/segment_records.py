"""A slot's header: two records that say the same, each with a digest of its own.

::

      0  u32  state            4  u32  rank
      8  u64  generation      16  u64  step           24  u64  sequence
     32  u64  manifest_bytes  40  u64  payload_bytes
     48  u16  slot            50  u16  slots          52  u32  zero
     56  16s  xxh3-128 of the chunk digests           72  16s  nonce of the segment
     88  zeros
    112  u64  xxh3-64 of what is before it

The first record is believed where its digest is right, else the second. Whoever writes, writes both, the first one
first, before it touches anything that depends on them. So a writer that dies in the middle leaves either what was
before, while all its bytes are still there, or what comes after.
A record that is all zeros has no right digest: an empty slot says that it is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import msgspec
import xxhash

from everstep.ids import Version
from everstep.segment_header import SegmentHeader

RECORD_PLACES = (0, 2048)
"""In the slot's header page."""
MEND_FLAG_AT = 1024
"""In the slot's header page: a word that says that the slot is being mended, see ``SegmentView.mend``."""

_BODY = struct.Struct("<IIQQQQQHHI16s16s24x")
RECORD_BYTES = _BODY.size + 8
NO_DIGEST = bytes(16)


class SlotState(IntEnum):
    """COPIED is for bytes that are whole while their digests are missing. DAMAGED is never written: neither record
    can be believed."""

    EMPTY = 0
    FILLING = 1
    SEALED = 2
    COPIED = 3
    DAMAGED = 4


class SlotHeader(msgspec.Struct, frozen=True):
    """What a slot says of itself: whose shard, of which version, how many bytes of manifest and payload.

    ``sequence`` counts the segment's fills, so that two of the same version differ. ``table``: digest of the chunk
    digests, zeros before the slot is sealed.
    """

    state: SlotState
    rank: int
    version: Version
    manifest_bytes: int
    payload_bytes: int
    sequence: int = 0
    table: bytes = NO_DIGEST


class Look(msgspec.Struct, frozen=True):
    """Both records of a slot as they were. ``header``: what the slot is, None where neither can be believed.

    ``bad``: the records (0, 1) that cannot. ``agree`` is False too where a writer is, or died, between the two.
    """

    raw: tuple[bytes, bytes]
    header: SlotHeader | None
    bad: tuple[int, ...]
    agree: bool

    @property
    def state(self) -> SlotState:
        return SlotState.DAMAGED if self.header is None else self.header.state


def clue(raw: bytes) -> tuple[bytes, int, int] | None:
    """What a record says of its segment: nonce, slot, slots. None where it cannot be believed."""
    if not _is_whole(raw):
        return None
    fields = _BODY.unpack_from(raw)
    return fields[11], fields[7], fields[8]


class Records:
    """The records of all slots of a segment whose header is known.

    ``fits``: whether a slot has room for what a header says it holds.
    """

    def __init__(self, buffer: memoryview, segment: SegmentHeader, fits: Callable[[int, int], bool]) -> None:
        self._buffer = buffer
        self._nonce = segment.nonce
        self._slots = segment.slots
        self._bases = [segment.base(slot) for slot in range(segment.slots)]
        self._fits = fits
        self._seen: list[tuple[bytes, SlotHeader | None]] = [(b"", None)] * segment.slots

    def header(self, slot: int) -> SlotHeader | None:
        """What the slot is, EMPTY included; None where neither record can be believed. Raises IndexError."""
        raw = self._raw(slot, 0)
        seen, header = self._seen[slot]
        if raw != seen:  # most slots are as they were at the last look
            header = self._parse(slot, raw)
            self._seen[slot] = raw, header
        return header or self._parse(slot, self._raw(slot, 1))

    def look(self, slot: int) -> Look:
        """Both records, for whoever mends them."""
        raw = self._raw(slot, 0), self._raw(slot, 1)
        first, second = self._parse(slot, raw[0]), self._parse(slot, raw[1])
        bad = tuple(number for number, found in enumerate((first, second)) if found is None)
        return Look(raw, first or second, bad, first is not None and first == second)

    def write(self, slot: int, header: SlotHeader) -> None:
        """Writes both."""
        raw = self._pack(slot, header)
        for number in (0, 1):
            self._write(slot, number, raw)

    def mend(self, slot: int, look: Look) -> bool:
        """Writes the record that is bad, or was not written any more, from its twin.

        Only of slots that stand: one that is filled has a writer. False where the slot is no longer what was seen.
        """
        if look.header is None or look.header.state in _WRITTEN or look.raw != self.look(slot).raw:
            return False
        raw = self._pack(slot, look.header)
        for number in (0, 1):
            if look.raw[number] != raw:
                self._write(slot, number, raw)
        return True

    def _raw(self, slot: int, number: int) -> bytes:
        at = self._bases[slot] + RECORD_PLACES[number]
        return bytes(self._buffer[at : at + RECORD_BYTES])

    def _write(self, slot: int, number: int, raw: bytes) -> None:
        at = self._bases[slot] + RECORD_PLACES[number]
        self._buffer[at : at + RECORD_BYTES] = raw

    def _pack(self, slot: int, header: SlotHeader) -> bytes:
        version = header.version
        body = _BODY.pack(
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
            header.table,
            self._nonce,
        )
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    def _parse(self, slot: int, raw: bytes) -> SlotHeader | None:
        if not _is_whole(raw):
            return None
        state, rank, generation, step, sequence, manifest, payload, at, slots, _, table, nonce = _BODY.unpack_from(raw)
        if (at, slots, nonce) != (slot, self._slots, self._nonce) or state >= SlotState.DAMAGED:
            return None
        if not self._fits(manifest, payload):
            return None
        version = Version(generation, step)
        return SlotHeader(_STATES[state], rank, version, manifest, payload, sequence, table)


def _is_whole(raw: bytes) -> bool:
    return xxhash.xxh3_64_intdigest(raw[: _BODY.size]) == int.from_bytes(raw[_BODY.size :], "little")


_STATES = tuple(SlotState)
_WRITTEN = (SlotState.FILLING, SlotState.COPIED)
