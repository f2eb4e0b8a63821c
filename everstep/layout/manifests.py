"""A slot's manifest: which boxes of which tensors its payload holds, and at which byte.

Written by ranks; read by ranks, and by vaults that write checkpoints to storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from everstep.errors import DECODE_ERRORS, ConfigurationError, MalformedMessage

# ---- boxes
# Boxes: axis-aligned parts of tensors, in the coordinates of the whole (global) tensor. Pure.

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

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this box when ``hole``, which must lie inside it, is cut out: disjoint boxes."""
        rest: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for dim in range(len(size)):
            before = other.offset[dim] - offset[dim]
            after = offset[dim] + size[dim] - other.offset[dim] - other.size[dim]
            if before:
                rest.append(Box(tuple(offset), (*size[:dim], before, *size[dim + 1 :])))
            if after:
                start = other.offset[dim] + other.size[dim]
                rest.append(Box((*offset[:dim], start, *offset[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :])))
            offset[dim], size[dim] = other.offset[dim], other.size[dim]
        return rest


def chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(start, length) of part ``index`` of ``count``, as torch.chunk cuts: the last ones may be shorter, or empty."""
    full = -(-length // count)
    start = min(index * full, length)
    return start, min(full, length - start)


def full_box(shape: Extent) -> Box:
    """The box of a tensor of this shape in full."""
    return Box((0,) * len(shape), shape)


def uncovered(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of ``wanted`` that no box covers; empty when it is covered."""
    rest = [target] if target.volume else []
    for box in boxes:
        if not rest:
            break
        rest = [part for old in rest for part in _cut(old, box)]
    return rest


def _cut(part: Box, box: Box) -> list[Box]:
    hole = part.intersect(box)
    return [part] if hole is None else part.subtract(hole)


def byte_ranges(stored: Box, selected: Box, itemsize: int, offset: int) -> list[Range]:
    """Where ``wanted`` lies when ``held``, which contains it, is stored in row-major order from byte ``at`` on.

    (offset, length) of each contiguous run, ascending; one after another they are ``wanted`` in row-major order.
    """
    if not selected.volume:
        return []
    split = run_dimension(stored, selected)
    strides = _byte_strides(stored.size, itemsize)
    length = math.prod(selected.size[split:]) * itemsize
    start = offset + sum((w - h) * s for w, h, s in zip(selected.offset, stored.offset, strides, strict=True))
    steps = [[i * stride for i in range(n)] for n, stride in zip(selected.size[:split], strides[:split], strict=True)]
    return [(start + sum(step), length) for step in itertools.product(*steps)]


def run_dimension(stored: Box, selected: Box) -> int:
    """The first dimension of a contiguous run: all behind it are wanted in full, and before it there is one each."""
    split = len(stored.size)
    while split and selected.size[split - 1] == stored.size[split - 1]:
        split -= 1
    split = max(0, split - 1)
    while split and selected.size[split - 1] == 1:
        split -= 1
    return split


def _byte_strides(size: Sequence[int], itemsize: int) -> list[int]:
    strides, stride = [], itemsize
    for n in reversed(size):
        strides.append(stride)
        stride *= n
    return strides[::-1]


LAYOUT_FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
"""Some 500,000 tensors with long names. It stands in each slot, is read as a whole, and goes to whoever reads one."""
BLOB_LENGTH_BYTES = 8
"""Bytes of the little-endian length that stands before the Python state."""


class TensorPlacement(IntEnum):
    """Where an optimizer had a tensor of its state: as a plain tensor on the host or on its parameter's device, or
    spread over its parameter's mesh (a DTensor). WHOLE: plain, in full, beside a parameter of its shape that is a
    DTensor. UNTOLD: on a CPU, by releases before, and of what is no such state."""

    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    DTENSOR = 3
    FULL = 4


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the job, as every manifest lists it.

    ``own``: each rank has its own values, and ``shape`` begins with the number of ranks; ``ranks`` are those that have
    the tensor at all, where not all do. ``aliases`` are the other names of a tied one, of optimizer state that several
    parameters share among them. ``groups``: the optimizers that train it, by the key they are tracked under, each with
    the index of the parameter group. ``lies`` is of optimizer state.
    """

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    per_rank: bool
    aliases: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    ranks: tuple[int, ...] = ()
    placement: TensorPlacement = TensorPlacement.UNKNOWN

    @property
    def owner_ranks(self) -> tuple[int, ...]:
        """Of an own tensor, the ranks that have it."""
        return self.ranks or tuple(range(self.shape[0]))

    def source_rank(self, rank: int) -> int:
        """Which rank's values a rank of a later generation begins with: its own, or a copy of another's."""
        return rank if rank in self.owner_ranks else self.owner_ranks[rank % len(self.owner_ranks)]


class StoredBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box in a slot: of tensor ``catalog[tensor]``, contiguous in row-major order from byte ``at`` of the payload."""

    tensor: int
    box: Box
    offset: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What a slot's payload holds.

    ``catalog`` lists every tensor of the job, not only those stored here, so that a missing one is missed. The Python
    state lies at ``blob_at``: its length in BLOB_PREFIX bytes, then up to ``blob_capacity`` bytes. The first
    ``exclusive`` bytes of the payload lie on too few nodes and must be copied to others; the rest is in the slots of
    enough ranks as it is.
    """

    format: int
    rank: int
    world_size: int
    catalog: tuple[TensorInfo, ...]
    stored: tuple[StoredBox, ...]
    blob_offset: int
    blob_capacity: int
    payload_bytes: int
    exclusive_bytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ConfigurationError where it takes more than MOST_MANIFEST_BYTES."""
    data = _encoder.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        tensors, stored = len(manifest.catalog), len(manifest.stored)
        names = sum(len(tensor.name) for tensor in manifest.catalog)
        raise ConfigurationError(
            f"the names ({names} bytes) and shapes of {tensors} tensors and the places of {stored} in this rank's slot "
            f"take {len(data)} bytes, and a manifest {MAX_MANIFEST_BYTES} at most: track fewer tensors, or larger ones"
        )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Raises MalformedMessage for anything but a manifest of this format whose indices hold."""
    try:
        manifest = _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"a slot's manifest cannot be read: {error}") from error
    if manifest.format != LAYOUT_FORMAT:
        raise MalformedMessage(f"a slot's manifest has format {manifest.format}, this release reads {LAYOUT_FORMAT}")
    if not all(_stored_in_bounds(manifest, s) for s in manifest.stored):
        raise MalformedMessage("a slot's manifest points outside its payload or its tensors")
    return manifest


def _stored_in_bounds(manifest: Manifest, stored: StoredBox) -> bool:
    if not 0 <= stored.tensor < len(manifest.catalog):
        return False
    tensor = manifest.catalog[stored.tensor]
    end = stored.offset + stored.box.volume * tensor.itemsize
    inside = all(
        o >= 0 and n > 0 and o + n <= full
        for o, n, full in zip(stored.box.offset, stored.box.size, tensor.shape, strict=False)
    )
    dims = len(stored.box.size) == len(tensor.shape) == len(stored.box.offset)
    return dims and inside and stored.offset >= 0 and end <= manifest.payload_bytes
