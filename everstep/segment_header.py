"""What a segment says of itself as a whole: how many slots, of how many bytes each, and whose.

Written once, twice over: in the file's first page and in its last. A copy is believed by its digest and where it
agrees with the file's length; where neither is, the length and the slots' own records say what it must have been::

      0  8s   magic
      8  u32  layout           12  u32  slots
     16  u64  slot_bytes
     24  u32  kind             28  u32  number (local rank, rank, or group)
     32  16s  nonce            48  64s  job
    112  16s  xxh3-128 of what is before it
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from everstep.errors import DigestMismatch, VersionMismatch

PAGE = 4096
MAGIC = b"EVRSTEP\x02"
LAYOUT = 2
MOST_SLOTS = 64
NONCE_BYTES = 16
KINDS = ("own", "replica", "parity")
"""Of segments, in the order of their numbers in the header."""

_BODY = struct.Struct("<8sIIQII16s64s")
_DIGEST_BYTES = 16
HEADER_BYTES = _BODY.size + _DIGEST_BYTES
_FORMAT_1 = b"EVRSTEP\x01\x01\x00\x00\x00"

Clue = tuple[bytes, int, int]
"""What a slot's record says of its segment: nonce, its own number, and how many slots there are."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """``slot_bytes``: of each slot, behind its header page. ``nonce``: which file this is, whatever its path."""

    slots: int
    slot_bytes: int
    nonce: bytes
    kind: str = "own"
    number: int = 0
    job: str = ""

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return segment_bytes(self.slots, self.slot_bytes)

    def base(self, slot: int) -> int:
        """Where a slot's header page begins."""
        return PAGE + slot * (PAGE + self.slot_bytes)


def segment_bytes(slots: int, slot_bytes: int) -> int:
    """Size of a segment file."""
    return PAGE + slots * (PAGE + slot_bytes) + PAGE


def write_header(buffer: memoryview, header: SegmentHeader) -> None:
    """Writes both copies of the header of a segment that fills ``buffer``."""
    raw = _pack(header)
    for at in _places(len(buffer)):
        buffer[at : at + HEADER_BYTES] = raw


def is_intact(buffer: memoryview, header: SegmentHeader) -> bool:
    """Whether both copies say this."""
    raw = _pack(header)
    return all(bytes(buffer[at : at + HEADER_BYTES]) == raw for at in _places(len(buffer)))


def read_header(buffer: memoryview, clue_at: Callable[[int], Clue | None]) -> tuple[SegmentHeader, bool]:
    """The header, and whether both copies are intact.

    ``clue_at``: what a slot's record that can be believed and begins at an offset says of its segment. A header that is
    made out from those does not know its kind, number and job. Raises DigestMismatch where nothing fits, and
    VersionMismatch for a segment of layout 1.
    """
    if len(buffer) < 2 * PAGE:
        raise DigestMismatch(f"{len(buffer)} bytes are no segment")
    copies = [_unpack(bytes(buffer[at : at + HEADER_BYTES]), len(buffer)) for at in _places(len(buffer))]
    found = next((copy for copy in copies if copy is not None), None)
    if found is not None:
        return found, copies[0] == copies[1]
    begin = bytes(buffer[: len(_FORMAT_1)])
    if begin == _FORMAT_1:
        raise VersionMismatch(
            f"its slots are in layout 1, and this release reads layout {LAYOUT}: let the jobs that have slots here end "
            "under the release that wrote them, or remove the file and lose them"
        )
    fitting = [(_witnesses(header, clue_at), header) for header in _fitting(len(buffer), clue_at)]
    witnesses, made_out = max(fitting, key=lambda each: each[0], default=(0, None))
    if made_out is None or not witnesses:
        raise DigestMismatch(f"not a segment of layout {LAYOUT}: it begins with {begin!r}, and no slot is in it")
    return made_out, False


def _places(length: int) -> tuple[int, int]:
    return 0, length - PAGE


def _pack(header: SegmentHeader) -> bytes:
    kind = KINDS.index(header.kind)
    body = _BODY.pack(
        MAGIC, LAYOUT, header.slots, header.slot_bytes, kind, header.number, header.nonce, header.job.encode()
    )
    return body + xxhash.xxh3_128_digest(body)


def _unpack(raw: bytes, length: int) -> SegmentHeader | None:
    body, digest = raw[: _BODY.size], raw[_BODY.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    magic, layout, slots, slot_bytes, kind, number, nonce, job = _BODY.unpack(body)
    if (magic, layout) != (MAGIC, LAYOUT) or kind >= len(KINDS) or segment_bytes(slots, slot_bytes) != length:
        return None
    return SegmentHeader(slots, slot_bytes, nonce, KINDS[kind], number, job.rstrip(b"\0").decode())


def _fitting(length: int, clue_at: Callable[[int], Clue | None]) -> Iterator[SegmentHeader]:
    """All segments of ``length`` bytes of which some slot speaks, each nonce by itself."""
    for slots in range(1, MOST_SLOTS + 1):
        stride, rest = divmod(length - 2 * PAGE, slots)
        if rest or stride % PAGE or stride <= PAGE:
            continue
        bare = SegmentHeader(slots, stride - PAGE, b"")
        clues = (clue_at(bare.base(slot)) for slot in range(slots))
        for nonce in {clue[0] for clue in clues if clue is not None}:
            yield msgspec.structs.replace(bare, nonce=nonce)


def _witnesses(header: SegmentHeader, clue_at: Callable[[int], Clue | None]) -> int:
    """Slots whose records say that they are just there, in a segment of so many."""
    return sum(clue_at(header.base(slot)) == (header.nonce, slot, header.slots) for slot in range(header.slots))
