"""A writer may die between any two words that it writes; the next reader recovers by the rules of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import Conflict, DigestMismatch
from everstep.ids import Version
from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import SegmentView, format_segment
from tests.support.plugins.example_counts import examples

WORD = 8
OLD, NEW = Version(1, 1), Version(1, 2)
Write = tuple[int, bytes]


class RecordedBuffer:
    """A buffer that records each written word, in order."""

    def __init__(self, image: bytearray) -> None:
        self.image = image
        self.words: list[Write] = []

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, key: slice) -> memoryview:
        return memoryview(bytes(self.image[key]))

    def __setitem__(self, key: slice, data: bytes) -> None:
        for at in range(key.start, key.start + len(data), WORD):
            word = bytes(data[at - key.start : at - key.start + WORD])
            self.words.append((at, word))
            self.image[at : at + len(word)] = word


def empty(slots: int = 2) -> bytearray:
    image = bytearray(segment_bytes(slots, PAGE_BYTES))
    format_segment(memoryview(image), slots, PAGE_BYTES)
    return image


def view_of(image: bytearray | RecordedBuffer) -> SegmentView:
    return SegmentView(cast(memoryview, image) if isinstance(image, RecordedBuffer) else memoryview(image))


def fill(view: SegmentView, slot: int, version: Version, payload: bytes) -> None:
    view.begin(slot, 0, version, b"manifest", len(payload))
    view._buffer[payload_range(view, slot)] = payload  # a RecordedBuffer returns copies
    view.mark_copied(slot)
    view.seal(slot)


def payload_range(view: SegmentView, slot: int) -> slice:
    header = view.header(slot)
    assert header is not None
    start = PAGE_BYTES + slot * (PAGE_BYTES + view.slot_bytes) + PAGE_BYTES + 64
    return slice(start, start + header.payload_bytes)


def cuts(image: bytearray, work: Callable[[SegmentView], object]) -> Iterator[bytearray]:
    """Yield the image before the first word that ``work`` writes, and after each word."""
    written = RecordedBuffer(bytearray(image))
    work(view_of(written))
    now = bytearray(image)
    yield bytearray(now)
    for at, word in written.words:
        now[at : at + len(word)] = word
        yield bytearray(now)


def version_and_state(image: bytearray, slot: int) -> tuple[SlotState, Version | None]:
    look = view_of(image).read_records(slot)
    return look.state, None if look.header is None or look.state is SlotState.EMPTY else look.header.version


@pytest.mark.promise("torn-writes")
@given(old=st.binary(min_size=1, max_size=100), new=st.binary(min_size=1, max_size=100))
@settings(max_examples=examples(20))
def test_interrupted_fill_leaves_old_slot_or_filling_state(old: bytes, new: bytes) -> None:
    image = empty()
    fill(view_of(image), 0, OLD, old)
    fill(view_of(image), 1, OLD, b"a neighbour")
    seen: list[tuple[SlotState, Version | None]] = []
    for cut in cuts(image, lambda view: fill(view, 0, NEW, new)):
        view = view_of(cut)
        view.verify(1)
        state = version_and_state(cut, 0)
        if not seen or seen[-1] != state:
            seen.append(state)
        if state[0] is SlotState.COPIED:
            header = view.header(0)
            assert header is not None
            assert view.seal_copied(0, header, view.compute_digests(0, header))
        if state[0] in (SlotState.SEALED, SlotState.COPIED):
            view.verify(0)
            assert view.payload(0) == (old if state[1] == OLD else new)
    states = [(SlotState.FILLING, NEW), (SlotState.COPIED, NEW), (SlotState.SEALED, NEW)]
    assert seen == [(SlotState.SEALED, OLD), *states]


@pytest.mark.promise("torn-writes")
def test_inconsistent_records_are_repaired_to_the_read_state() -> None:
    image = empty()
    fill(view_of(image), 0, OLD, b"old")
    for cut in [*cuts(image, lambda view: fill(view, 0, NEW, b"new")), *cuts(image, lambda view: view.discard(0))]:
        view = view_of(cut)
        look = view.read_records(0)
        mended = view.repair_records(0, look)
        after = view.read_records(0)
        assert after.header == look.header
        assert mended == (look.state not in (SlotState.FILLING, SlotState.COPIED))
        assert after.is_consistent or not mended


def test_interrupted_repair_leaves_correct_or_detected_bytes() -> None:
    image = empty()
    fill(view_of(image), 0, OLD, b"0123456789abcdef")
    view = view_of(image)
    header = view.header(0)
    assert header is not None
    image[payload_range(view, 0).start + 9] ^= 1
    for cut in cuts(image, lambda view: view.repair(0, header, chunks={0: b"0123456789abcdef"}, manifest=b"manifest")):
        after = view_of(cut)
        assert after.header(0) == header
        try:
            after.verify(0)
        except DigestMismatch:
            continue
        assert bytes(after.payload(0)) == b"0123456789abcdef"
    after.verify(0)


def test_slot_is_fillable_after_interrupted_repair_is_settled() -> None:
    image = empty()
    fill(view_of(image), 0, OLD, b"old")
    header = view_of(image).header(0)
    assert header is not None
    _, begun, *_ = cuts(image, lambda view: view.repair(0, header, manifest=b"manifest"))
    view = view_of(begun)
    with pytest.raises(Conflict, match="being mended"):
        view.begin(0, 0, NEW, b"", 3)
    assert view.finish_repair(0)
    assert not view.finish_repair(0)
    fill(view, 0, NEW, b"new")
    view.verify(0)


class RacingBuffer(RecordedBuffer):
    """A buffer that calls ``other`` just before the access with number ``at``."""

    def __init__(self, image: bytearray, at: int, other: Callable[[], object]) -> None:
        super().__init__(image)
        self._left = at
        self._other = other

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._other()

    def __getitem__(self, key: slice) -> memoryview:
        self._tick()
        return super().__getitem__(key)

    def __setitem__(self, key: slice, data: bytes) -> None:
        self._tick()
        super().__setitem__(key, data)


def put_bytes(view: SegmentView) -> bool:
    return view.repair(0, header_of(OLD_IMAGE), chunks={0: b"OLD BYTES"})


def drop(view: SegmentView) -> bool:
    return view.discard_if_unchanged(0, header_of(OLD_IMAGE))


def put_record(view: SegmentView) -> bool:
    return view.repair_records(0, view_of(OLD_IMAGE).read_records(0))


def header_of(image: bytearray) -> SlotHeader:
    header = view_of(image).header(0)
    assert header is not None
    return header


def old_image() -> bytearray:
    """A sealed slot whose header has a damaged first record."""
    image = empty()
    fill(view_of(image), 0, OLD, b"old bytes")
    image[PAGE_BYTES + 40] ^= 1
    return image


OLD_IMAGE = old_image()
REPAIR_STEPS = (put_bytes, drop, put_record)
RepairStep = Callable[[SegmentView], bool]


def race(at: int, repair_step: RepairStep, *, repair_first: bool) -> tuple[bytearray, list[bool]]:
    """Run one of the two just before the ``at``-th access of the other; return the slot and which of them succeeded."""
    image = bytearray(OLD_IMAGE)

    def refill(view: SegmentView) -> bool:
        try:
            fill(view, 0, NEW, b"new bytes")
        except Conflict:
            return False
        return True

    first, second = (repair_step, refill) if repair_first else (refill, repair_step)
    done: list[bool] = []
    view = view_of(RacingBuffer(image, at, lambda: done.append(second(view_of(image)))))
    done.insert(0, first(view))
    return image, done


@pytest.mark.promise("torn-writes")
@pytest.mark.parametrize("repair_first", [True, False])
@pytest.mark.parametrize("repair_step", REPAIR_STEPS)
def test_concurrent_repair_never_corrupts_a_sealed_fill(repair_step: RepairStep, repair_first: bool) -> None:
    """A fill that reports a seal has sealed its own bytes, at whichever access the repair ran."""
    outcomes = set()
    for at in range(1, 60):
        image, done = race(at, repair_step, repair_first=repair_first)
        view = view_of(image)
        if len(done) == 2 and done[repair_first]:
            header = view.header(0)
            assert header is not None
            assert (header.state, header.version) == (SlotState.SEALED, NEW), at
            assert bytes(view.payload(0)) == b"new bytes"
            view.verify(0)
        outcomes.add(tuple(done))
    assert len(outcomes - {(True,)}) > 1  # at some access, each of them prevented the other


def copied_image() -> bytearray:
    """A slot whose writer died before it computed the digests."""
    image = empty()
    view = view_of(image)
    view.begin(0, 0, OLD, b"manifest", 9)[:] = b"old bytes"
    view.mark_copied(0)
    return image


def test_copied_slot_is_sealed_for_its_writer() -> None:
    image = copied_image()
    header = header_of(image)
    seen = []
    for cut in cuts(image, lambda view: view.seal_copied(0, header, view.compute_digests(0, header))):
        after = view_of(cut)
        seen.append(header_of(cut).state)
        if list(after.sealed_slots()):
            after.verify(0)
    assert list(dict.fromkeys(seen)) == [SlotState.COPIED, SlotState.SEALED]
    assert bytes(view_of(cut).payload(0)) == b"old bytes"


def test_writer_seals_over_an_earlier_seal_on_its_behalf() -> None:
    image = empty()
    view = view_of(image)
    view.begin(0, 0, NEW, b"manifest", 3)[:] = b"new"
    view.mark_copied(0)
    header = header_of(image)
    assert view_of(image).seal_copied(0, header, view.compute_digests(0, header))
    assert view.seal(0) == header_of(image)
    with pytest.raises(DigestMismatch, match="is not being filled"):
        view.mark_copied(0)


@pytest.mark.parametrize("repair_first", [True, False])
def test_seal_for_writer_never_corrupts_its_later_fill(repair_first: bool) -> None:
    """The writer was slow and not dead: it seals its copy, and fills the slot again at once."""
    outcomes = set()
    for at in range(1, 60):
        image = bytearray(copied_image())
        header = header_of(image)
        digests = view_of(image).compute_digests(0, header)

        def seal_for(view: SegmentView, header: SlotHeader = header, digests: list[bytes] = digests) -> bool:
            return view.seal_copied(0, header, digests)

        def continue_writing(view: SegmentView) -> bool:
            try:
                view.seal(0)
                fill(view, 0, NEW, b"new bytes")
            except (Conflict, DigestMismatch):
                return False
            return True

        first, second = (seal_for, continue_writing) if repair_first else (continue_writing, seal_for)
        done: list[bool] = []
        racing = view_of(RacingBuffer(image, at, lambda: done.append(second(view_of(image)))))  # noqa: B023 - called here
        done.insert(0, first(racing))
        view = view_of(image)
        if len(done) > repair_first and done[repair_first]:
            assert (header_of(image).state, header_of(image).version) == (SlotState.SEALED, NEW), at
        if list(view.sealed_slots()):
            view.verify(0)
        outcomes.add(tuple(done))
    assert len(outcomes - {(True,)}) > 1
