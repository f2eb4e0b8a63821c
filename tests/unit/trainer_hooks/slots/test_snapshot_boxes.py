"""Box arithmetic and resharding, compared with arrays that are filled element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import MalformedMessage, NotRestorable
from everstep.layout.manifests import (
    LAYOUT_FORMAT,
    Box,
    Manifest,
    StoredBox,
    TensorInfo,
    byte_ranges,
    decode_manifest,
    encode_manifest,
    full_box,
    uncovered,
)
from everstep_trainer.slots.fetch import MAX_RUNS, NeededBox, box_to_fetch, plan_reads

Shape = tuple[int, ...]
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """A tensor cut into boxes along random dimensions, uneven and in any nesting."""
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.size[dim]))
        first = Box(box.offset, (*box.size[:dim], at, *box.size[dim + 1 :]))
        rest = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
        second = Box(rest, (*box.size[:dim], box.size[dim] - at, *box.size[dim + 1 :]))
        boxes += [b for b in (first, second) if b.volume]
    return boxes


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


@given(st.data(), shapes)
def test_box_is_partitioned_by_hole_and_remainder(data: st.DataObject, shape: Shape) -> None:
    box, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    hole = box.intersect(other)
    count = np.zeros(shape, int)
    for part in [box] if hole is None else [hole, *box.subtract(hole)]:
        count[cells(part)] += 1
    expected = np.zeros(shape, int)
    expected[cells(box)] = 1
    assert (count == expected).all()


@given(st.data(), shapes)
def test_uncovered_is_the_part_outside_all_boxes(data: st.DataObject, shape: Shape) -> None:
    wanted = data.draw(boxes_in(shape))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    left = np.zeros(shape, bool)
    for part in uncovered(wanted, boxes):
        assert not left[cells(part)].any()
        left[cells(part)] = True
    expected = np.zeros(shape, bool)
    expected[cells(wanted)] = True
    for box in boxes:
        expected[cells(box)] = False
    assert (left == expected).all()


@given(st.data(), shapes, st.sampled_from([1, 2, 4]))
def test_byte_ranges_in_order_form_the_wanted_box(data: st.DataObject, shape: Shape, itemsize: int) -> None:
    held = data.draw(boxes_in(shape))
    wanted = held.intersect(data.draw(boxes_in(shape))) or held
    array = np.arange(np.prod(shape, dtype=int), dtype=f"<u{itemsize}").reshape(shape)
    stored = b"\xff" * 24 + array[cells(held)].tobytes()
    ranges = byte_ranges(held, wanted, itemsize, 24)
    assert b"".join(stored[at : at + n] for at, n in ranges) == array[cells(wanted)].tobytes()
    assert ranges == sorted(ranges)


def manifest(tensors: list[TensorInfo], stored: list[StoredBox], rank: int = 0, world: int = 1) -> Manifest:
    size = max([s.offset + s.box.volume * tensors[s.tensor].itemsize for s in stored], default=0)
    return Manifest(LAYOUT_FORMAT, rank, world, tuple(tensors), tuple(stored), size, 0, size + 8, 0)


@given(st.data(), st.lists(shapes, min_size=1, max_size=3))
def test_any_layout_is_read_from_any_other_each_byte_once(data: st.DataObject, forms: list[Shape]) -> None:
    """Sources cut one way over two slots, with repeats; targets cut another way; compared with whole arrays."""
    tensors = [TensorInfo(f"t{i}", "int32", 4, shape, False) for i, shape in enumerate(forms)]
    arrays = [np.arange(np.prod(f, dtype=int), dtype="<i4").reshape(f) + 1000 * i for i, f in enumerate(forms)]
    slots: list[tuple[list[StoredBox], bytearray]] = [([], bytearray()), ([], bytearray())]
    wants: list[NeededBox] = []
    for i, shape in enumerate(forms):
        for box in data.draw(cuts(shape)):
            for stored, payload in data.draw(st.sampled_from([slots[:1], slots[1:], slots])):
                stored.append(StoredBox(i, box, len(payload)))
                payload += arrays[i][cells(box)].tobytes()
        wants += [NeededBox(i, box) for box in data.draw(cuts(shape))]
    reads = plan_reads(wants, [manifest(tensors, stored) for stored, _ in slots])
    filled = [np.zeros(f, int) for f in forms]
    for read in reads:
        target = wants[read.needed_index]
        assert read.box.intersect(target.box) == read.box
        ranges = byte_ranges(read.stored.box, read.box, 4, read.stored.offset)
        got = b"".join(bytes(slots[read.source_index][1][at : at + n]) for at, n in ranges)
        assert got == arrays[target.tensor_index][cells(read.box)].tobytes()
        filled[target.tensor_index][cells(read.box)] += 1
    assert all((f == 1).all() for f in filled)


def test_part_missing_from_all_slots_is_named() -> None:
    tensors = [TensorInfo("model.weight", "float32", 4, (4, 2), False)]
    half = manifest(tensors, [StoredBox(0, Box((0, 0), (2, 2)), 0)])
    with pytest.raises(NotRestorable, match=r"model\.weight: the part at \(2, 0\) of size \(2, 2\)"):
        plan_reads([NeededBox(0, full_box((4, 2)))], [half])


def test_fragmented_box_is_fetched_with_whole_rows() -> None:
    held = full_box((MAX_RUNS + 1, 8))
    assert box_to_fetch(held, Box((0, 0), (MAX_RUNS + 1, 4))) == held
    narrow = Box((0, 0), (MAX_RUNS + 1, 1))
    assert box_to_fetch(held, narrow) == narrow
    few = Box((1, 2), (3, 4))
    assert box_to_fetch(held, few) == few


@pytest.mark.parametrize(
    "stored",
    [
        StoredBox(1, Box((0,), (2,)), 0),
        StoredBox(0, Box((3,), (2,)), 0),
        StoredBox(0, Box((0,), (2,)), 64),
        StoredBox(0, Box((0, 0), (1, 1)), 0),
        StoredBox(0, Box((-1,), (2,)), 0),
    ],
)
def test_manifest_pointing_outside_is_refused(stored: StoredBox) -> None:
    tensors = (TensorInfo("t", "float32", 4, (4,), False),)
    bad = Manifest(LAYOUT_FORMAT, 0, 1, tensors, (stored,), 0, 0, 64, 0)
    with pytest.raises(MalformedMessage, match="outside"):
        decode_manifest(encode_manifest(bad))


@pytest.mark.parametrize("data", [b"", b"\x93\x01", b"\xff" * 40])
def test_invalid_manifest_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="cannot be read"):
        decode_manifest(data)
