"""A slot's manifest: which boxes of which tensors its payload holds, and at which byte.

Written by ranks; read by ranks, and by vaults that write checkpoints to storage.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from everstep.boxes import Box, Extent
from everstep.errors import UNREADABLE, ConfigurationError, MalformedMessage

LAYOUT_FORMAT = 1
MOST_MANIFEST_BYTES = 64 << 20
"""Some 500,000 tensors with long names. It stands in each slot, is read as a whole, and goes to whoever reads one."""
BLOB_PREFIX = 8
"""Bytes of the little-endian length that stands before the Python state."""


class Lies(IntEnum):
    """Where an optimizer had a tensor of its state: as a plain tensor on the host or on its parameter's device, or
    spread over its parameter's mesh (a DTensor). WHOLE: plain, in full, beside a parameter of its shape that is a
    DTensor. UNTOLD: on a CPU, by releases before, and of what is no such state."""

    UNTOLD = 0
    HOST = 1
    DEVICE = 2
    SPREAD = 3
    WHOLE = 4


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    own: bool
    aliases: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    ranks: tuple[int, ...] = ()
    lies: Lies = Lies.UNTOLD

    @property
    def rows(self) -> tuple[int, ...]:
        """Of an own tensor, the ranks that have it."""
        return self.ranks or tuple(range(self.shape[0]))

    def row_of(self, rank: int) -> int:
        """Which rank's values a rank of a later generation begins with: its own, or a copy of another's."""
        return rank if rank in self.rows else self.rows[rank % len(self.rows)]


class Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ConfigurationError where it takes more than MOST_MANIFEST_BYTES."""
    data = _encoder.encode(manifest)
    if len(data) > MOST_MANIFEST_BYTES:
        tensors, stored = len(manifest.catalog), len(manifest.stored)
        names = sum(len(tensor.name) for tensor in manifest.catalog)
        raise ConfigurationError(
            f"the names ({names} bytes) and shapes of {tensors} tensors and the places of {stored} in this rank's slot "
            f"take {len(data)} bytes, and a manifest {MOST_MANIFEST_BYTES} at most: track fewer tensors, or larger ones"
        )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Raises MalformedMessage for anything but a manifest of this format whose indices hold."""
    try:
        manifest = _decoder.decode(data)
    except UNREADABLE as error:
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
