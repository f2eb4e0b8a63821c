"""When a segment serves on, and else what the one in its place is like, and takes over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent.vault.memory import taken_bytes
from everstep.errors import DigestMismatch
from everstep.ids import Version
from everstep.segment_header import PAGE, segment_bytes
from everstep.slots import SLOTS, SegmentView, SlotHeader

Carried = list[tuple[int, int, SlotHeader]]
"""Slots of the old segment, each with the one that it becomes."""


def serves(old: SegmentView, path: Path, slot_bytes: int, slots: int, exact: bool) -> bool:
    """Whether the segment of that file is what is wanted. ``exact``: more slots are too many."""
    if old.slot_bytes < slot_bytes or old.slots < slots or (exact and old.slots > slots) or not path.exists():
        return False
    return taken_bytes(path) >= old.segment.length  # else memory was given back for a successor that could not be made


def sizes(old: SegmentView | None, slot_bytes: int, slots: int, exact: bool) -> tuple[int, int]:
    """Bytes of a slot, and how many, of the one in its place: what was in a slot fits into one."""
    before = (0, 0) if old is None else (old.slot_bytes, old.slots)
    return -(-max(slot_bytes, before[0]) // PAGE) * PAGE, slots if exact else max(slots, before[1])


def freed_bytes(old: SegmentView, path: Path, slots: int, keep: Sequence[Version] | None) -> int:
    """What is given back of a segment before one of ``slots`` slots takes its place: where memory is short, what does
    not go along need not count beside it."""
    if not _short(old, slots, keep):
        return 0
    stay = slots if slots < old.slots else len(carried(old, slots, keep))
    return max(0, taken_bytes(path) - segment_bytes(old.slots, old.slot_bytes) + (old.slots - stay) * old.slot_bytes)


def carried(old: SegmentView, slots: int, keep: Sequence[Version] | None) -> Carried:
    """What a segment of ``slots`` slots takes over: all that is sealed, each in its place. Where there are fewer places
    than before, as much as goes of ``keep`` in its order, and then of the newest; where there are as few, ``keep``."""
    sealed = list(old.sealed())
    if not _short(old, slots, keep):
        return [(slot, slot, header) for slot, header in sealed]
    order = {version: place for place, version in enumerate(keep or ())}
    if slots == old.slots:
        return [(slot, slot, header) for slot, header in sealed if header.version in order]
    sealed.sort(key=lambda each: each[1].version, reverse=True)
    sealed.sort(key=lambda each: order.get(each[1].version, len(order)))
    return [(slot, place, header) for place, (slot, header) in enumerate(sealed[:slots])]


def _short(old: SegmentView, slots: int, keep: Sequence[Version] | None) -> bool:
    """Whether there are to be just so many slots because there is no memory for more."""
    return slots < old.slots or (slots == old.slots < SLOTS and keep is not None)


def carry_over(old: SegmentView, new: SegmentView, slots: Carried) -> None:
    """Copies what hashes right."""
    for slot, place, header in slots:
        try:
            old.check(slot)
            payload = new.begin(place, header.rank, header.version, old.manifest(slot), header.payload_bytes)
            payload[:] = old.payload(slot)
            if old.header(slot) == header:
                new.seal(place, old.digests(slot))
            else:
                new.discard(place)
        except (DigestMismatch, ValueError):
            new.discard(place)  # it was bad, or its rank began to fill it anew
