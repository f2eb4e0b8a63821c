"""Define the header of a segment: number and size of its slots, their owner, and how far that rank is.

The header is written once, in two copies: in the file's first page and in its last. A copy counts if its digest is
right and it matches the file's length. If neither does, the header is derived from the length and the slots' records::

    0    8s   magic
    8    u32  layout           12  u32  slots
    16   u64  slot_bytes
    24   u32  kind             28  u32  number (local rank, rank, or group)
    32   16s  nonce            48  64s  job
    112  16s  xxh3-128 of the bytes before it
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from everstep.errors import DigestMismatch
from everstep.native import DIGEST_BYTES

PAGE_BYTES = 4096
MAGIC = b"EVRSTEP\x02"
LAYOUT_VERSION = 2
MAX_SLOTS = 64
NONCE_BYTES = 16
KINDS = ("own", "replica", "parity")
"""Kinds of segments, in the order of their numbers in the header."""

_HEADER_BODY = struct.Struct("<8sIIQII16s64s")
HEADER_BYTES = _HEADER_BODY.size + DIGEST_BYTES

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


def segment_name(kind: str, number: int) -> str:
    """Return the file name of a local rank's own slots (``own``), or of copies of another node's rank (``replica``)."""
    return f"{kind}-{number}"


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
    and job. Raises DigestMismatch if no header fits.
    """
    if len(buffer) < 2 * PAGE_BYTES:
        raise DigestMismatch(f"{len(buffer)} bytes are no segment")
    copies = [_unpack(bytes(buffer[at : at + HEADER_BYTES]), len(buffer)) for at in _header_offsets(len(buffer))]
    if (found := copies[0] or copies[1]) is not None:
        return found, copies[0] == copies[1]
    fitting = [(_matching_slots(header, hint_at), header) for header in _candidate_headers(len(buffer), hint_at)]
    witnesses, made_out = max(fitting, key=lambda each: each[0], default=(0, None))
    if made_out is None or not witnesses:
        begins = f"it begins with {bytes(buffer[:12])!r}, and no slot is in it"
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


def _candidate_headers(length: int, hint_at: Callable[[int], SegmentHint | None]) -> Iterator[SegmentHeader]:
    """Yield all segments of ``length`` bytes that some slot's record describes, one per nonce."""
    for slots in range(1, MAX_SLOTS + 1):
        stride, rest = divmod(length - 2 * PAGE_BYTES, slots)
        if rest or stride % PAGE_BYTES or stride <= PAGE_BYTES:
            continue
        bare = SegmentHeader(slots, stride - PAGE_BYTES, b"")
        hints = (hint_at(bare.slot_offset(slot)) for slot in range(slots))
        for nonce in {hint[0] for hint in hints if hint is not None}:
            yield msgspec.structs.replace(bare, nonce=nonce)


def _matching_slots(header: SegmentHeader, hint_at: Callable[[int], SegmentHint | None]) -> int:
    """Return the number of slots whose records agree with this header on nonce, position and count."""
    return sum(hint_at(header.slot_offset(slot)) == (header.nonce, slot, header.slots) for slot in range(header.slots))


# How far the rank that writes the segment is: a mark in the first page, behind the header.
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
