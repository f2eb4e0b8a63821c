"""What a segment says of itself as a whole: how many slots, of how many bytes each.

A file is made exactly as long as its slots need, so a header is believed only where it agrees with the length. Where
it does not, what is left of it, the length and the slots' own headers say what it must have been.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec

from everstep.errors import DigestMismatch

PAGE = 4096
MAGIC = b"EVRSTEP\x01"
LAYOUT = 1
MOST_SLOTS = 64

_SEGMENT = struct.Struct("<8sIIQ")


class Geometry(msgspec.Struct, frozen=True):
    """Slots of a segment, and bytes of each behind its header page."""

    slots: int
    slot_bytes: int

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return segment_bytes(self.slots, self.slot_bytes)

    def base(self, slot: int) -> int:
        """Where a slot's header begins."""
        return PAGE + slot * (PAGE + self.slot_bytes)


def segment_bytes(slots: int, slot_bytes: int) -> int:
    """Size of a segment file."""
    return PAGE + slots * (PAGE + slot_bytes)


def write_geometry(buffer: memoryview, geometry: Geometry) -> None:
    """Writes the header of a segment that fills ``buffer``."""
    _SEGMENT.pack_into(buffer, 0, MAGIC, LAYOUT, geometry.slots, geometry.slot_bytes)


def is_intact(buffer: memoryview, geometry: Geometry) -> bool:
    """Whether the header says this geometry."""
    return bytes(buffer[: _SEGMENT.size]) == _SEGMENT.pack(MAGIC, LAYOUT, geometry.slots, geometry.slot_bytes)


def read_geometry(buffer: memoryview, good_slot: Callable[[int], bool]) -> tuple[Geometry, bool]:
    """The geometry, and whether the header says it itself; else it is the one that fits the length and the slots.

    ``good_slot`` tells whether a slot's header that can be believed begins at an offset. Raises DigestMismatch where
    nothing fits.
    """
    if len(buffer) < PAGE:
        raise DigestMismatch(f"{len(buffer)} bytes are no segment")
    magic, layout, slots, slot_bytes = _SEGMENT.unpack_from(buffer, 0)
    said = Geometry(slots, slot_bytes)
    if (magic, layout) == (MAGIC, LAYOUT) and 1 <= slots <= MOST_SLOTS and said.length == len(buffer):
        return said, True
    fitting = [(_agreement(g, said), _good(g, good_slot), g) for g in _fitting(len(buffer))]
    agreement, good, found = max(fitting, key=lambda each: each[:2], default=(0, 0, said))
    if not agreement and not good:
        raise DigestMismatch(f"not a segment of layout {LAYOUT}: magic {magic!r}, layout {layout}, and no slot in it")
    return found, False


def _fitting(length: int) -> Iterator[Geometry]:
    """All geometries of segments of ``length`` bytes."""
    for slots in range(1, MOST_SLOTS + 1):
        stride, rest = divmod(length - PAGE, slots)
        if not rest and stride % PAGE == 0 and stride > PAGE:
            yield Geometry(slots, stride - PAGE)


def _agreement(geometry: Geometry, said: Geometry) -> int:
    return (geometry.slots == said.slots) + (geometry.slot_bytes == said.slot_bytes)


def _good(geometry: Geometry, good_slot: Callable[[int], bool]) -> int:
    return sum(good_slot(geometry.base(slot)) for slot in range(geometry.slots))
