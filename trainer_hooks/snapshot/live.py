"""One live tensor: what part of the whole it is, and whether it is still where and what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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
    """The live local memory of a tensor and its box in the whole.

    Raises TypeError for placements with no box, and for a mesh of a generation in which this process was another rank.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), whole(tuple(tensor.shape))
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise TypeError(f"{name} is placed as {placement}; only Shard and Replicate have a box to store")
    box = _box_on_mesh(name, tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor.detach()
    if tuple(local.shape) != box.size:
        raise TypeError(f"{name} holds a local part of shape {tuple(local.shape)} where its mesh says {box.size}")
    return local, box


def _box_on_mesh(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """Asks the mesh each time: torch counts those of two generations as equal where they are of the same ranks, while
    this process may be another one of them."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box((), (0,))
    if int(mesh.mesh[tuple(coordinate)]) != dist.get_rank():
        raise TypeError(
            f"{name} lies on a mesh of rank {int(mesh.mesh[tuple(coordinate)])}, and this process is rank "
            f"{dist.get_rank()} now: make meshes inside the training function, anew in each generation"
        )
    box = whole(shape)
    for placement, index, count in zip(placements, coordinate, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            box = box.chunk(placement.dim, index, count)
    return box
