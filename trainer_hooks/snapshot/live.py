"""One live tensor: what part of the whole it is, and whether it is still where and what it was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_hooks.snapshot.blob import dtype_name
from trainer_hooks.snapshot.layout import Box, Part, Sharing, whole

ALWAYS_COMPARED_BYTES = 1 << 20
"""Buffers up to this size are compared at every step, at some 10 GB/s."""


class TrackedTensor(msgspec.Struct, frozen=True):
    """One tensor, and the part of it that this rank holds.

    ``shape`` is global, ``box`` this rank's part; ``local`` is a view of the live memory with the box's size.
    ``parameter``: it takes part in the digest that replicas compare. ``place[key]`` is the tensor itself.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    sharing: Sharing
    parameter: bool
    place: Mapping[Any, Any]
    key: Any

    @property
    def volatile(self) -> bool:
        """Whether forward passes may change it, so that it must be copied before the next one."""
        return self.sharing is not Sharing.EQUAL

    def now(self) -> torch.Tensor:
        """The live memory at this moment; a module may put another tensor into its place."""
        return local_part(self.name, self.place[self.key])[0]

    def part(self, rank: int, world: int) -> Part:
        """How the tensor stands in this rank's layout."""
        shape, box = self.shape, self.box
        if self.sharing is Sharing.OWN:
            shape, box = (world, *shape), Box((rank, *box.offset), (1, *box.size))
        dtype = self.local.dtype
        return Part(self.name, dtype_name(dtype), dtype.itemsize, shape, box, self.sharing, self.parameter)


class Site(msgspec.Struct, frozen=True):
    """Where a tensor was found, to see cheaply whether it is still there: ``place[key] is tensor`` at ``address``."""

    place: Mapping[Any, Any]
    key: Any
    tensor: torch.Tensor
    memory: torch.Tensor
    address: int


class Still(msgspec.Struct):
    """A buffer as it was, to see whether training changes it: most are constants, some are running statistics."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    def holds(self, now: torch.Tensor) -> bool:
        """Whether ``now`` is the same buffer with the same bytes.

        torch counts writes to a tensor, but batch normalization's kernels write past the count, and DDP writes what is
        there already. So the bytes are compared: always where they are few, else when a write was counted.
        """
        if now is not self.buffer:
            return False
        if now.device.type != "cpu":  # a comparison would wait for the GPU: small buffers count as changing there
            return now._version == self.version and now.nbytes > ALWAYS_COMPARED_BYTES
        if now._version != self.version or now.nbytes <= ALWAYS_COMPARED_BYTES:
            if not torch.equal(now, self.value):
                return False
            self.version = now._version
        return True


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """The live local memory of a tensor and its box in the whole. Raises TypeError for placements with no box."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), whole(tuple(tensor.shape))
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise TypeError(f"{name} is placed as {placement}; only Shard and Replicate have a box to store")
    box = _box_on_mesh(tensor.shape, tensor.device_mesh, tuple(tensor.placements))
    local = tensor._local_tensor.detach()
    if tuple(local.shape) != box.size:
        raise TypeError(f"{name} holds a local part of shape {tuple(local.shape)} where its mesh says {box.size}")
    return local, box


@lru_cache(maxsize=1024)
def _box_on_mesh(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """torch computes this in a millisecond; a model has few shapes, and one mesh for a generation."""
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(size))
