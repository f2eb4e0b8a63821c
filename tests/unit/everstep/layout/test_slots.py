"""The slot layout over plain memory."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigurationError, DigestMismatch, OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.layout.slot_header import RECORD_OFFSETS, SlotHeader, SlotState
from everstep.layout.slots import CHUNK_BYTES, SegmentView, chunk_digests, format_segment, slot_bytes_for, slot_to_fill


def segment(slot_bytes: int = 64 * PAGE_BYTES, slots: int = 4) -> SegmentView:
    buffer = memoryview(bytearray(segment_bytes(slots, slot_bytes)))
    format_segment(buffer, slots, slot_bytes)
    return SegmentView(buffer)


def filled(view: SegmentView, slot: int, version: Version, payload: bytes, manifest: bytes = b"manifest") -> None:
    view.begin(slot, 3, version, manifest, len(payload))[:] = payload
    view.seal(slot)


def sealed_header(step: int) -> SlotHeader:
    return SlotHeader(SlotState.SEALED, 0, Version(1, step), 0, 0)


@given(manifest=st.binary(max_size=300), payload=st.binary(max_size=5000))
def test_sealed_slot_is_read_back(manifest: bytes, payload: bytes) -> None:
    view = segment(slot_bytes_for(len(manifest), len(payload)))
    filled(view, 2, Version(4, 5), payload, manifest)
    ((slot, header),) = view.sealed_slots()
    assert (slot, header.state, header.rank, header.version) == (2, SlotState.SEALED, 3, Version(4, 5))
    assert (header.manifest_bytes, header.payload_bytes) == (len(manifest), len(payload))
    view.verify(2)
    assert view.manifest(2) == manifest
    assert view.payload(2) == payload


def test_record_with_unknown_state_or_other_slot_is_damaged() -> None:
    view = segment(slots=2)
    for state, slot in ((SlotState.DAMAGED, 0), (SlotState.SEALED, 1)):
        record = view._records._pack(slot, SlotHeader(state, 0, Version(1, 1), 0, 0))
        for place in RECORD_OFFSETS:
            view._buffer[PAGE_BYTES + place : PAGE_BYTES + place + len(record)] = record
        assert view.read_records(0).state is SlotState.DAMAGED


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 99])
def test_flipped_bit_is_found_only_in_its_chunk(at: int) -> None:
    view = segment(slot_bytes_for(8, 2 * CHUNK_BYTES + 100), slots=1)
    filled(view, 0, Version(1, 1), bytes(2 * CHUNK_BYTES + 100))
    view.payload(0)[at] ^= 4
    bad = at // CHUNK_BYTES
    with pytest.raises(DigestMismatch, match=f"chunk {bad} of slot 0"):
        view.verify(0)
    for chunk in {0, 1, 2} - {bad}:
        view.verify_chunks(0, chunk * CHUNK_BYTES, 100)


def test_range_outside_payload_is_refused() -> None:
    view = segment()
    filled(view, 0, Version(1, 1), b"x" * 100)
    for start, length in ((90, 11), (-1, 5), (101, 0), (0, -1), (CHUNK_BYTES, 1)):
        with pytest.raises(IndexError, match="not within a payload of 100 bytes"):
            view.verify_chunks(0, start, length)


def test_incremental_digests_equal_final_digests() -> None:
    ours, theirs = segment(slots=1), segment(slots=1)
    payload = b"y" * 1000
    ours.begin(0, 3, Version(1, 1), b"m", 1000)[:] = payload
    ours.seal(0, [xxhash.xxh3_128_digest(b"m"), *chunk_digests(memoryview(payload))])
    filled(theirs, 0, Version(1, 1), payload, b"m")
    assert ours.digests(0) == theirs.digests(0)
    ours.verify(0)


def test_wrong_digest_count_does_not_seal() -> None:
    view = segment()
    view.begin(0, 3, Version(1, 1), b"m", 1000)
    with pytest.raises(DigestMismatch, match="1 digests do not seal"):
        view.seal(0, [bytes(16)])
    with pytest.raises(DigestMismatch, match="never begun"):
        view.seal(1)


def test_small_slot_error_names_required_size() -> None:
    with pytest.raises(OutOfSlotMemory, match=r"need \d+ bytes, the slot has 4096"):
        segment(PAGE_BYTES).begin(0, 0, Version(1, 1), b"", PAGE_BYTES)
    with pytest.raises(OutOfSlotMemory, match="need 40960 bytes with their headers, the segment has 100"):
        format_segment(memoryview(bytearray(100)), 4, PAGE_BYTES)


def test_slot_size_must_be_whole_pages() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 4096"):
        format_segment(memoryview(bytearray(segment_bytes(1, 5000))), 1, 5000)


def test_bytes_without_segment_header_are_refused() -> None:
    for data in (b"", bytes(PAGE_BYTES), b"EVRSTEP\x02" + bytes(PAGE_BYTES), bytes(8 * PAGE_BYTES)):
        with pytest.raises(DigestMismatch, match=r"no segment|not a segment"):
            SegmentView(memoryview(data))


def test_unsealed_slot_is_filled_before_sealed_ones() -> None:
    filling = SlotHeader(SlotState.FILLING, 0, Version(9, 9), 0, 0)
    assert slot_to_fill([sealed_header(1), filling, None], set()) == 1
    assert slot_to_fill([sealed_header(1), None, filling], set()) == 1


def test_oldest_unneeded_slot_is_filled_next() -> None:
    headers: list[SlotHeader | None] = [sealed_header(3), sealed_header(1), sealed_header(2), sealed_header(4)]
    assert slot_to_fill(headers, set()) == 1
    assert slot_to_fill(headers, {Version(1, 1), Version(1, 2)}) == 0
    with pytest.raises(OutOfSlotMemory, match="still needed"):
        slot_to_fill(headers, {Version(1, step) for step in range(1, 5)})


def test_slot_header_damaged_after_parsing_is_detected() -> None:
    buffer = memoryview(bytearray(segment_bytes(4, 64 * PAGE_BYTES)))
    format_segment(buffer, 4, 64 * PAGE_BYTES)
    view = SegmentView(buffer)
    filled(view, 1, Version(1, 5), b"payload")
    assert view.header(1) is not None
    for place in RECORD_OFFSETS:
        header = view.header(1)
        assert header is not None
        assert header.version == Version(1, 5), "the other record still says so"
        buffer[view.segment.slot_offset(1) + place + 16] ^= 1
    assert view.header(1) is None
    for place in RECORD_OFFSETS:
        buffer[view.segment.slot_offset(1) + place + 16] ^= 1
    assert view.header(1) == header
