"""Which bytes are where: a rank's layout, and the manifest that goes into each slot. Pure.

A rank's *layout* says which box (everstep.layout.manifests) of each tensor it holds live; its *manifest*
(everstep.layout.manifests) says
which boxes its slot holds, and at which byte.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import xxhash

from everstep.errors import UNREADABLE, MalformedMessage
from everstep.layout.manifests import (
    BLOB_PREFIX,
    LAYOUT_FORMAT,
    Box,
    Extent,
    Lies,
    Manifest,
    Stored,
    Tensor,
    decode_manifest,
    uncovered,
    whole,
)

__all__ = [
    "ALIGN",
    "BLOB_PREFIX",
    "LAYOUT_FORMAT",
    "Box",
    "Extent",
    "Layout",
    "Manifest",
    "Part",
    "Sharing",
    "Stored",
    "Tensor",
    "content_digest",
    "decode_layout",
    "decode_manifest",
    "encode",
    "uncovered",
    "whole",
]

ALIGN = 64
"""Pieces begin at multiples of this in a payload: a cache line, and enough for any dtype's view."""


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
    takes part in the digest that replicas compare. ``aliases``, ``groups`` and ``lies`` are as in
    everstep.layout.manifests.Tensor.
    """

    name: str
    dtype: str
    itemsize: int
    shape: Extent
    box: Box
    sharing: Sharing = Sharing.EQUAL
    digest: bool = False
    aliases: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    lies: Lies = Lies.UNTOLD

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds live, in the order of its tracked state."""

    parts: tuple[Part, ...]


_encoder = msgspec.msgpack.Encoder()
_layout_decoder = msgspec.msgpack.Decoder(Layout)


def encode(value: Manifest | Layout) -> bytes:
    return _encoder.encode(value)


def content_digest(data: bytes) -> str:
    """xxh3-128 in hex: the name of a layout or manifest by its content."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_layout(data: bytes) -> Layout:
    """Raises MalformedMessage."""
    try:
        return _layout_decoder.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"a rank's layout cannot be read: {error}") from error
