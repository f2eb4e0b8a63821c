"""Describe which box of each tensor a rank holds live: its layout. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import xxhash

from everstep.errors import DECODE_ERRORS, MalformedMessage
from everstep.layout.manifests import Box, Extent, TensorPlacement

ALIGN = 64  # pieces begin at multiples of this in a payload: a cache line, and enough for any dtype's view


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


class Sharing(StrEnum):
    """Relation between the ranks that hold the same box."""

    EQUAL = "equal"  # bit for bit the same on all, so any rank's will do
    FIRST_RANK = "first"  # the lowest rank's counts: buffers that DDP broadcasts from rank 0
    PER_RANK = "own"  # each rank has its own, stored with the rank as an extra leading dimension


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a rank's layout, with the box that this rank holds; see everstep.layout.manifests.TensorInfo."""

    name: str
    dtype: str  # torch's name without ``torch.``
    itemsize: int
    shape: Extent  # with Sharing.PER_RANK, it and ``box`` already include the leading rank dimension
    box: Box
    sharing: Sharing = Sharing.EQUAL
    is_digested: bool = False  # it takes part in the digest that replicas compare
    aliases: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    location: TensorPlacement = TensorPlacement.UNKNOWN

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The parts that one rank holds live, in the order of its tracked state."""

    parts: tuple[TensorPart, ...]


_layout_decoder = msgspec.msgpack.Decoder(Layout)


def encode(layout: Layout) -> bytes:
    return msgspec.msgpack.encode(layout)


def content_digest(data: bytes) -> str:
    """Return the xxh3-128 in hex, which names a layout or manifest by its content."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_layout(data: bytes) -> Layout:
    """Decode a layout. Raises MalformedMessage."""
    try:
        return _layout_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"a rank's layout cannot be read: {error}") from error
