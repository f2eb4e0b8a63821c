"""Boxes: axis-aligned parts of tensors, in the coordinates of the whole (global) tensor. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

Extent = tuple[int, ...]
Range = tuple[int, int]
"""Bytes: offset and length."""


class Box(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Offset and size in each dimension. A scalar's box has no dimensions and volume 1."""

    offset: Extent
    size: Extent

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where it is empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        size = tuple(
            min(a + n, b + m) - o
            for a, n, b, m, o in zip(self.offset, self.size, other.offset, other.size, low, strict=True)
        )
        return None if any(n <= 0 for n in size) else Box(low, size)

    def chunk(self, dim: int, index: int, count: int) -> Box:
        """Part ``index`` of ``count`` along ``dim``."""
        start, length = chunk(self.size[dim], index, count)
        offset, size = list(self.offset), list(self.size)
        offset[dim] += start
        size[dim] = length
        return Box(tuple(offset), tuple(size))

    def without(self, hole: Box) -> list[Box]:
        """What is left of this box when ``hole``, which must lie inside it, is cut out: disjoint boxes."""
        rest: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for dim in range(len(size)):
            before = hole.offset[dim] - offset[dim]
            after = offset[dim] + size[dim] - hole.offset[dim] - hole.size[dim]
            if before:
                rest.append(Box(tuple(offset), (*size[:dim], before, *size[dim + 1 :])))
            if after:
                start = hole.offset[dim] + hole.size[dim]
                rest.append(Box((*offset[:dim], start, *offset[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :])))
            offset[dim], size[dim] = hole.offset[dim], hole.size[dim]
        return rest


def chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(start, length) of part ``index`` of ``count``, as torch.chunk cuts: the last ones may be shorter, or empty."""
    full = -(-length // count)
    start = min(index * full, length)
    return start, min(full, length - start)


def whole(shape: Extent) -> Box:
    """The box of a tensor of this shape in full."""
    return Box((0,) * len(shape), shape)


def uncovered(wanted: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of ``wanted`` that no box covers; empty when it is covered."""
    rest = [wanted] if wanted.volume else []
    for box in boxes:
        if not rest:
            break
        rest = [part for old in rest for part in _cut(old, box)]
    return rest


def _cut(part: Box, box: Box) -> list[Box]:
    hole = part.intersect(box)
    return [part] if hole is None else part.without(hole)


def byte_ranges(held: Box, wanted: Box, itemsize: int, at: int) -> list[Range]:
    """Where ``wanted`` lies when ``held``, which contains it, is stored in row-major order from byte ``at`` on.

    (offset, length) of each contiguous run, ascending; one after another they are ``wanted`` in row-major order.
    """
    if not wanted.volume:
        return []
    split = run_dimension(held, wanted)
    strides = _byte_strides(held.size, itemsize)
    length = math.prod(wanted.size[split:]) * itemsize
    start = at + sum((w - h) * s for w, h, s in zip(wanted.offset, held.offset, strides, strict=True))
    steps = [[i * stride for i in range(n)] for n, stride in zip(wanted.size[:split], strides[:split], strict=True)]
    return [(start + sum(step), length) for step in itertools.product(*steps)]


def run_dimension(held: Box, wanted: Box) -> int:
    """The first dimension of a contiguous run: all behind it are wanted in full, and before it there is one each."""
    split = len(held.size)
    while split and wanted.size[split - 1] == held.size[split - 1]:
        split -= 1
    split = max(0, split - 1)
    while split and wanted.size[split - 1] == 1:
        split -= 1
    return split


def _byte_strides(size: Sequence[int], itemsize: int) -> list[int]:
    strides, stride = [], itemsize
    for n in reversed(size):
        strides.append(stride)
        stride *= n
    return strides[::-1]
