"""Which bytes are where: boxes of tensors, a rank's layout, and the manifest that goes into each slot. Pure.

A *box* is an axis-aligned part of a tensor in the coordinates of the whole (global) tensor. A rank's *layout* says
which box of each tensor it holds live; its *manifest* says which boxes its slot holds, and at which byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec
import xxhash

from everstep.errors import MalformedMessage

Extent = tuple[int, ...]

ALIGN = 64
"""Pieces begin at multiples of this in a payload: a cache line, and enough for any dtype's view."""
LAYOUT_FORMAT = 1
BLOB_PREFIX = 8


class Box(msgspec.Struct, frozen=True, order=True, array_like=True):
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
        """Part ``index`` of ``count`` along ``dim``, as torch.chunk cuts: the last ones may be shorter, or empty."""
        full = -(-self.size[dim] // count)
        start = min(index * full, self.size[dim])
        offset, size = list(self.offset), list(self.size)
        offset[dim] += start
        size[dim] = min(full, self.size[dim] - start)
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


class Sharing(StrEnum):
    """How the ranks that hold the same box stand to each other.

    EQUAL: bit for bit the same, so any of them will do. FIRST: the lowest rank's is the truth (buffers that DDP
    broadcasts from rank 0). OWN: each rank has its own values; the tensor is then stored with the rank as an extra
    leading dimension.
    """

    EQUAL = "equal"
    FIRST = "first"
    OWN = "own"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a rank's layout: the box this rank holds. ``dtype`` as torch names it, without ``torch.``.

    For Sharing.OWN ``shape`` and ``box`` have the leading rank dimension already. ``digest`` says whether the tensor
    takes part in the digest that replicas compare.
    """

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    box: Box
    sharing: Sharing = Sharing.EQUAL
    digest: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds live, in the order of its tracked state."""

    parts: tuple[Part, ...]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the job, as every manifest lists it."""

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    own: bool


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A box in a slot: of tensor ``catalog[tensor]``, contiguous in row-major order from byte ``at`` of the payload."""

    tensor: int
    box: Box
    at: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What a slot's payload holds.

    ``catalog`` lists every tensor of the job, not only those stored here, so that a missing one is missed. The Python
    state lies at ``blob_at``: its length in BLOB_PREFIX bytes, then up to ``blob_capacity`` bytes. The first
    ``exclusive`` bytes of the payload lie on too few nodes and must be copied to others; the rest is in the slots of
    enough ranks as it is.
    """

    format: int
    rank: int
    world: int
    catalog: tuple[Tensor, ...]
    stored: tuple[Stored, ...]
    blob_at: int
    blob_capacity: int
    payload_bytes: int
    exclusive: int


_encoder = msgspec.msgpack.Encoder()
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_layout_decoder = msgspec.msgpack.Decoder(Layout)


def encode(value: Manifest | Layout) -> bytes:
    return _encoder.encode(value)


def content_digest(data: bytes) -> str:
    """xxh3-128 in hex: the name of a layout or manifest by its content."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_manifest(data: bytes) -> Manifest:
    """Raises MalformedMessage for anything but a manifest of this format whose indices hold."""
    try:
        manifest = _manifest_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a slot's manifest cannot be read: {error}") from error
    if manifest.format != LAYOUT_FORMAT:
        raise MalformedMessage(f"a slot's manifest has format {manifest.format}, this release reads {LAYOUT_FORMAT}")
    if not all(_stored_in_bounds(manifest, s) for s in manifest.stored):
        raise MalformedMessage("a slot's manifest points outside its payload or its tensors")
    return manifest


def _stored_in_bounds(manifest: Manifest, stored: Stored) -> bool:
    if not 0 <= stored.tensor < len(manifest.catalog):
        return False
    tensor = manifest.catalog[stored.tensor]
    end = stored.at + stored.box.volume * tensor.itemsize
    inside = all(
        o >= 0 and n > 0 and o + n <= full
        for o, n, full in zip(stored.box.offset, stored.box.size, tensor.shape, strict=False)
    )
    dims = len(stored.box.size) == len(tensor.shape) == len(stored.box.offset)
    return dims and inside and stored.at >= 0 and end <= manifest.payload_bytes


def decode_layout(data: bytes) -> Layout:
    """Raises MalformedMessage."""
    try:
        return _layout_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a rank's layout cannot be read: {error}") from error
