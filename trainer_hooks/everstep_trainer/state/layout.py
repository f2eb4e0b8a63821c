"""Describe which bytes are where: a rank's layout, and the manifest that goes into each slot. Pure.

A rank's *layout* says which box (everstep.layout.manifests) of each tensor it holds live. Its *manifest*
(everstep.layout.manifests) says which boxes its slot holds, and at which byte.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import xxhash

from everstep.errors import DECODE_ERRORS, MalformedMessage
from everstep.layout.manifests import (
    BLOB_LENGTH_BYTES,
    LAYOUT_FORMAT,
    Box,
    Extent,
    Manifest,
    StoredBox,
    TensorInfo,
    TensorPlacement,
    decode_manifest,
    full_box,
    uncovered,
)

__all__ = [
    "ALIGN",
    "BLOB_LENGTH_BYTES",
    "LAYOUT_FORMAT",
    "Box",
    "Extent",
    "Layout",
    "Manifest",
    "Sharing",
    "StoredBox",
    "TensorInfo",
    "TensorPart",
    "content_digest",
    "decode_layout",
    "decode_manifest",
    "encode",
    "full_box",
    "uncovered",
]

ALIGN = 64
"""Pieces begin at multiples of this in a payload: a cache line, and enough for any dtype's view."""


class Sharing(StrEnum):
    """Relation between the ranks that hold the same box.

    EQUAL: bit for bit the same on all, so any rank's will do. FIRST_RANK: the lowest rank's counts (buffers that DDP
    broadcasts from rank 0). PER_RANK: each rank has its own values; the tensor is stored with the rank as an extra
    leading dimension.
    """

    EQUAL = "equal"
    FIRST_RANK = "first"
    PER_RANK = "own"


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a rank's layout, with the box that this rank holds.

    ``dtype`` is torch's name without ``torch.``. With Sharing.PER_RANK, ``shape`` and ``box`` already include the
    leading rank dimension. ``is_digested``: the tensor takes part in the digest that replicas compare. ``aliases`` and
    ``groups`` are as in everstep.layout.manifests.TensorInfo, and ``location`` is its ``placement``.
    """

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    box: Box
    sharing: Sharing = Sharing.EQUAL
    is_digested: bool = False
    aliases: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    location: TensorPlacement = TensorPlacement.UNKNOWN

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The parts that one rank holds live, in the order of its tracked state."""

    parts: tuple[TensorPart, ...]


_encoder = msgspec.msgpack.Encoder()
_layout_decoder = msgspec.msgpack.Decoder(Layout)


def encode(value: Manifest | Layout) -> bytes:
    return _encoder.encode(value)


def content_digest(data: bytes) -> str:
    """Return the xxh3-128 in hex, which names a layout or manifest by its content."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_layout(data: bytes) -> Layout:
    """Decode a layout. Raises MalformedMessage."""
    try:
        return _layout_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"a rank's layout cannot be read: {error}") from error
