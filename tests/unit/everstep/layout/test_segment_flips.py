"""Any flipped bit of a segment is detected: no wrong byte is read, and only refusals are raised."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from everstep.errors import DigestMismatch
from everstep.ids import Version
from everstep.layout.segment_header import HEADER_BYTES, PAGE_BYTES, segment_bytes
from everstep.layout.slot_header import RECORD_BYTES, RECORD_OFFSETS
from everstep.layout.slots import SegmentView, format_segment

SLOTS = 2
MANIFEST = b"what is where in it"
PAYLOADS = (bytes(range(256)) * 9, b"a short one")
STRIDE = 2 * PAGE_BYTES
LENGTH = segment_bytes(SLOTS, PAGE_BYTES)


def image() -> bytearray:
    made = bytearray(LENGTH)
    format_segment(memoryview(made), SLOTS, PAGE_BYTES, nonce=b"n" * 16, job="job", number=3)
    view = SegmentView(memoryview(made))
    for slot, payload in enumerate(PAYLOADS):
        view.begin(slot, slot, Version(1, slot + 1), MANIFEST, len(payload))[:] = payload
        view.seal(slot)
    return made


GOOD = image()
SEGMENT_HEADERS = [*range(HEADER_BYTES), *range(LENGTH - PAGE_BYTES, LENGTH - PAGE_BYTES + HEADER_BYTES)]


def record(slot: int, number: int) -> range:
    start = PAGE_BYTES + slot * STRIDE + RECORD_OFFSETS[number]
    return range(start, start + RECORD_BYTES)


def contents(slot: int) -> Iterator[int]:
    """Return the places of digests, manifest and payload; a payload begins at the next multiple of 64."""
    start = PAGE_BYTES + slot * STRIDE + PAGE_BYTES
    yield from range(start, start + 32 + len(MANIFEST))
    yield from range(start + 64, start + 64 + len(PAYLOADS[slot]))


RECORDS = [at for slot in range(SLOTS) for number in (0, 1) for at in record(slot, number)]


def flipped(*bits: int) -> SegmentView:
    """The segment with these bits of it flipped."""
    spoilt = bytearray(GOOD)
    for bit in bits:
        spoilt[bit // 8] ^= 1 << bit % 8
    return SegmentView(memoryview(spoilt))


def read(view: SegmentView, slot: int) -> bool:
    """Return True if the slot is read and right, and False if it is refused."""
    try:
        view.verify(slot)
        manifest, payload = view.manifest(slot), bytes(view.payload(slot))
    except DigestMismatch:
        return False
    header = view.header(slot)
    assert header is not None
    assert (manifest, payload, header.version, header.rank) == (MANIFEST, PAYLOADS[slot], Version(1, slot + 1), slot)
    return True


def bits(places: list[int]) -> Iterator[int]:
    return (at * 8 + bit for at in places for bit in range(8))


@pytest.mark.promise("bit-flips")
def test_header_bit_flip_is_detected_and_loses_no_slot() -> None:
    for bit in bits(SEGMENT_HEADERS + RECORDS):
        view = flipped(bit)
        assert [read(view, slot) for slot in range(SLOTS)] == [True, True], bit
        assert view.header_was_repaired == (bit // 8 in SEGMENT_HEADERS), bit
        assert any(not view.read_records(slot).is_consistent for slot in range(SLOTS)) == (bit // 8 in RECORDS), bit


@pytest.mark.promise("bit-flips")
def test_content_bit_flip_is_detected_and_loses_only_its_slot() -> None:
    for slot in range(SLOTS):
        for bit in bits(list(contents(slot))):
            view = flipped(bit)
            assert [read(view, each) for each in range(SLOTS)] == [each != slot for each in range(SLOTS)], bit


def test_double_flip_in_slot_header_is_detected() -> None:
    for first, second in zip(bits(list(record(0, 0))), bits(list(record(0, 1))), strict=True):
        view = flipped(first, second)
        assert [read(view, slot) for slot in range(SLOTS)] == [False, True]
        assert view.read_records(0).invalid == (0, 1)


@pytest.mark.parametrize("shift", [0, 1, 77])
def test_segment_header_is_rebuilt_from_its_slots(shift: int) -> None:
    half = list(bits(SEGMENT_HEADERS[:HEADER_BYTES]))
    for first, second in zip(half, itertools.islice(itertools.cycle(half), shift, None), strict=False):
        view = flipped(first, second + 8 * (LENGTH - PAGE_BYTES))
        assert view.header_was_repaired
        assert (view.slots, view.slot_bytes) == (SLOTS, PAGE_BYTES)
        assert [read(view, slot) for slot in range(SLOTS)] == [True, True]


def test_fill_continues_despite_header_bit_flip() -> None:
    for bit in bits([*record(0, 0), *record(0, 1)]):
        view = SegmentView(memoryview(bytearray(GOOD)))
        payload = view.begin(0, 7, Version(2, 9), b"m", 100)
        view._buffer[bit // 8] ^= 1 << bit % 8
        payload[:] = b"y" * 100
        view.seal(0)
        view.verify(0)
        assert view.read_records(0).is_consistent
        assert view.header(0).version == Version(2, 9)  # type: ignore[union-attr]
