"""Define a slot's manifest: which boxes of which tensors its payload holds, and at which byte.

Ranks write and read it; vaults read it to write checkpoints to storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from everstep.errors import DECODE_ERRORS, ConfigurationError, MalformedMessage

# ---- boxes: axis-aligned parts of tensors, in the coordinates of the whole (global) tensor. Pure.

Extent = tuple[int, ...]
Range = tuple[int, int]
"""Offset and length in bytes."""


class Box(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Offset and size in each dimension. A scalar's box has no dimensions and volume 1."""

    offset: Extent
    size: Extent

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None if it is empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        size = tuple(
            min(a + n, b + m) - o
            for a, n, b, m, o in zip(self.offset, self.size, other.offset, other.size, low, strict=True)
        )
        return None if any(n <= 0 for n in size) else Box(low, size)

    def chunk(self, dim: int, index: int, count: int) -> Box:
        """Return part ``index`` of ``count`` along ``dim``."""
        start, length = chunk(self.size[dim], index, count)
        offset, size = list(self.offset), list(self.size)
        offset[dim] += start
        size[dim] = length
        return Box(tuple(offset), tuple(size))

    def subtract(self, other: Box) -> list[Box]:
        """Return the rest of this box without ``other``, which must be inside it, as disjoint boxes."""
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
    """Return (start, length) of part ``index`` of ``count``, cut like torch.chunk: the last may be shorter or empty."""
    full = -(-length // count)
    start = min(index * full, length)
    return start, min(full, length - start)


def full_box(shape: Extent) -> Box:
    """Return the box of a whole tensor of this shape."""
    return Box((0,) * len(shape), shape)


def uncovered(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return the parts of ``target`` that no box covers; empty if it is covered."""
    rest = [target] if target.volume else []
    for box in boxes:
        if not rest:
            break
        holes = [(part, part.intersect(box)) for part in rest]
        rest = [left for part, hole in holes for left in ([part] if hole is None else part.subtract(hole))]
    return rest


def byte_ranges(stored: Box, selected: Box, itemsize: int, offset: int) -> list[Range]:
    """Return the byte ranges of ``selected`` in ``stored``, a row-major box at ``offset`` that contains it. They are
    (offset, length) of contiguous runs, ascending; concatenated they are ``selected`` in row-major order."""
    if not selected.volume:
        return []
    split = run_dimension(stored, selected)
    strides = [math.prod(stored.size[dim + 1 :]) * itemsize for dim in range(len(stored.size))]
    length = math.prod(selected.size[split:]) * itemsize
    start = offset + sum((w - h) * s for w, h, s in zip(selected.offset, stored.offset, strides, strict=True))
    steps = [[i * stride for i in range(n)] for n, stride in zip(selected.size[:split], strides[:split], strict=True)]
    return [(start + sum(step), length) for step in itertools.product(*steps)]


def run_dimension(stored: Box, selected: Box) -> int:
    """Return the first dimension of a contiguous run: later ones are selected in full, earlier ones have one index
    each."""
    split = len(stored.size)
    while split and selected.size[split - 1] == stored.size[split - 1]:
        split -= 1
    split = max(0, split - 1)
    while split and selected.size[split - 1] == 1:
        split -= 1
    return split


LAYOUT_FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
"""About 500,000 tensors with long names. Each slot has a manifest, which is read as a whole and sent to readers."""
BLOB_LENGTH_BYTES = 8
"""Size of the little-endian length before the Python state."""
PIECE_DIGEST_BYTES = 8
"""Size of the digest of a stored box, and of the mark before all of them: 1 if they are there, 0 if not."""


class TensorPlacement(IntEnum):
    """Place where an optimizer had a tensor of its state.

    UNKNOWN: not recorded (on a CPU, by older releases, or no optimizer state). HOST: plain, on the host. DEVICE: plain,
    on its parameter's device. DTENSOR: on its parameter's mesh. FULL: plain and in full, beside a parameter of its
    shape that is a DTensor.
    """

    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    DTENSOR = 3
    FULL = 4


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the job, as every manifest lists it."""

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    per_rank: bool  # each rank has its own values, and ``shape`` begins with the number of ranks
    aliases: tuple[str, ...] = ()  # other names of a tied tensor, or of optimizer state that several parameters share
    groups: tuple[tuple[str, int], ...] = ()  # the optimizers that train it, by their keys, and its parameter groups
    ranks: tuple[int, ...] = ()  # the ranks that have the tensor, if not all do
    placement: TensorPlacement = TensorPlacement.UNKNOWN  # where it was, for optimizer state

    @property
    def owner_ranks(self) -> tuple[int, ...]:
        """The ranks that have a per-rank tensor."""
        return self.ranks or tuple(range(self.shape[0]))

    def source_rank(self, rank: int) -> int:
        """Return the rank whose values a rank of a later generation begins with: its own, or another to copy."""
        return rank if rank in self.owner_ranks else self.owner_ranks[rank % len(self.owner_ranks)]


class StoredBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of tensor ``catalog[tensor]`` in a slot, contiguous in row-major order from byte ``offset`` of the
    payload."""

    tensor: int
    box: Box
    offset: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The content of a slot's payload."""

    format: int
    rank: int
    world_size: int
    catalog: tuple[TensorInfo, ...]  # every tensor of the job, so that a missing one is noticed
    stored: tuple[StoredBox, ...]
    blob_offset: int  # of the Python state: its length in BLOB_LENGTH_BYTES bytes, then the state
    blob_capacity: int  # the most bytes of the Python state
    payload_bytes: int
    exclusive_bytes: int  # of the payload's first part, on too few nodes; enough ranks have the rest in their slots
    digests_offset: int = 0  # of the digests of the stored boxes, in their order, behind a mark; 0: no room for them

    @property
    def python_state_range(self) -> Range:
        """The room for the Python state and its length."""
        return self.blob_offset, BLOB_LENGTH_BYTES + self.blob_capacity

    @property
    def digests_range(self) -> Range:
        """The room for the digests of the stored boxes and their mark; empty if there is none."""
        return self.digests_offset, PIECE_DIGEST_BYTES * (1 + len(self.stored)) if self.digests_offset else 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest. Raises ConfigurationError if it exceeds MAX_MANIFEST_BYTES."""
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
    """Decode a manifest. Raises MalformedMessage for another format, or for indices out of bounds."""
    try:
        manifest = _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"a slot's manifest cannot be read: {error}") from error
    if manifest.format != LAYOUT_FORMAT:
        raise MalformedMessage(f"a slot's manifest has format {manifest.format}, this release reads {LAYOUT_FORMAT}")
    rooms = (manifest.python_state_range, manifest.digests_range)
    if not all(_stored_in_bounds(manifest, s) for s in manifest.stored) or not all(
        offset >= 0 and size >= 0 and offset + size <= manifest.payload_bytes for offset, size in rooms
    ):
        raise MalformedMessage("a slot's manifest points outside its payload or its tensors")
    return manifest


def _stored_in_bounds(manifest: Manifest, stored: StoredBox) -> bool:
    if not 0 <= stored.tensor < len(manifest.catalog):
        return False
    tensor, box = manifest.catalog[stored.tensor], stored.box
    end = stored.offset + box.volume * tensor.itemsize
    if not len(box.size) == len(tensor.shape) == len(box.offset) or stored.offset < 0 or end > manifest.payload_bytes:
        return False
    sides = zip(box.offset, box.size, tensor.shape, strict=True)
    return all(offset >= 0 and size > 0 and offset + size <= whole for offset, size, whole in sides)
