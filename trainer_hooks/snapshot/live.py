"""One live tensor: what part of the whole it is, and whether it is still where and what it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from everstep.manifests import Lies
from trainer_hooks.snapshot.blob import as_bytes, dtype_name
from trainer_hooks.snapshot.layout import Box, Extent, Part, Sharing, whole
from trainer_hooks.snapshot.placement import boxes_of
from trainer_hooks.snapshot.refusals import refuse_overlap, require_bytes_of_its_own

UNCOUNTED = -1
ALWAYS_COMPARED_BYTES = 1 << 20
"""Buffers up to this size are compared at every step, at some 10 GB/s."""


class TrackedTensor(msgspec.Struct, frozen=True):
    """One tensor, and the part of it that this rank holds; where that is several boxes, there is one of these each.

    ``shape`` is global, ``box`` this rank's part; ``local`` is a view of the live memory with the box's size.
    ``parameter``: it takes part in the digest that replicas compare. ``place[key]`` is the tensor itself, and was
    ``found`` when the state was looked for.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    sharing: Sharing
    parameter: bool
    place: Mapping[Any, Any]
    key: Any
    lies: Lies = Lies.UNTOLD
    found: torch.Tensor | None = None

    @property
    def volatile(self) -> bool:
        """Whether forward passes may change it, so that it must be copied before the next one."""
        return self.sharing is not Sharing.EQUAL

    def now(self) -> torch.Tensor:
        """The live memory of a buffer at this moment; a module may put another tensor into its place."""
        tensor, known = self.place[self.key], self.local
        if self.found is not None and tensor is self.found and _lies_as(tensor, known):
            return known
        ((local, _),) = local_parts(self.name, tensor)
        return local

    def part(
        self, rank: int, world: int, aliases: tuple[str, ...] = (), groups: tuple[tuple[str, int], ...] = ()
    ) -> Part:
        """How the tensor stands in this rank's layout."""
        shape, box = self.shape, self.box
        if self.sharing is Sharing.OWN:
            shape, box = (world, *shape), Box((rank, *box.offset), (1, *box.size))
        dtype = self.local.dtype
        kind = (dtype_name(dtype), dtype.itemsize)
        return Part(self.name, *kind, shape, box, self.sharing, self.parameter, aliases, groups, self.lies)


def _lies_as(tensor: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether a plain tensor has the memory, shape and strides of ``known``."""
    same_memory = tensor.data_ptr() == known.data_ptr()
    return same_memory and tensor.size() == known.size() and tensor.stride() == known.stride()


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
        writes = writes_to(now)
        if now.device.type != "cpu":  # a comparison would wait for the GPU: small buffers count as changing there
            return writes == self.version != UNCOUNTED and now.nbytes > ALWAYS_COMPARED_BYTES
        if writes != self.version or writes == UNCOUNTED or now.nbytes <= ALWAYS_COMPARED_BYTES:
            if not same(now, self.value):
                return False
            self.version = writes
        return True


def still(buffer: torch.Tensor) -> Still:
    """The buffer as it is now."""
    return Still(buffer, writes_to(buffer), buffer.detach().clone())


def writes_to(tensor: torch.Tensor) -> int:
    """torch's count of them; UNCOUNTED of a tensor that was made in inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values are the same, or the bytes are, as those of NaN and of dtypes that torch does not compare."""
    try:
        if torch.equal(one, other):
            return True
    except NotImplementedError:
        pass
    return one.shape == other.shape and one.dtype == other.dtype and as_bytes(one) == as_bytes(other)


def refuse_namesakes(tensors: Iterable[TrackedTensor]) -> None:
    """Raises ValueError where two tensors of this rank have one name and different values: the one would come back as
    the other. Two stages of a pipeline may each have the same constant."""
    first: dict[str, TrackedTensor] = {}
    for tensor in tensors:
        other = first.setdefault(tensor.name, tensor)
        if other.place[other.key] is not tensor.place[tensor.key] and not same(tensor.local, other.local):
            raise ValueError(
                f"{tensor.name} is the name of two tensors of this rank that differ, of shapes {list(other.shape)} and "
                f"{list(tensor.shape)}: one would be restored into both. Things in a list have the names of one model, "
                "as stages of a pipeline do; track others under names of their own, run.track(first=..., second=...)"
            )


def local_parts(name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Box]]:
    """The live local memory of a tensor and its box in the whole; several where this rank's part is not one box.

    Raises TypeError for placements with no box, for a mesh of a generation in which this process was another rank, and
    for a tensor that is not dense, or made of others.
    """
    require_dense(name, tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    if not isinstance(tensor, DTensor):
        return [(tensor.detach(), whole(tuple(tensor.shape)))]
    boxes = _boxes_on_mesh(name, tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor.detach()
    volume = sum(box.volume for _, box in boxes)
    if not volume and not local.numel() and local.ndim == tensor.ndim:  # torch writes nothing in several shapes
        return [(local, Box((0,) * local.ndim, tuple(local.shape)))]
    if local.numel() != volume or (len(boxes) == 1 and tuple(local.shape) != boxes[0][1].size):
        raise TypeError(
            f"{name} holds a local part of shape {tuple(local.shape)} where its mesh says {[b.size for _, b in boxes]}"
        )
    return [(_narrowed(local, at, box), box) for at, box in boxes] if len(boxes) > 1 else [(local, boxes[0][1])]


def require_dense(name: str, local: torch.Tensor) -> None:
    """Raises TypeError for what of a module or an optimizer cannot be stored."""
    require_bytes_of_its_own(
        name, local, "only plain dense tensors are stored; leave it out by run.track(exclude=...), or hold it in such"
    )
    refuse_overlap(name, local)


def _narrowed(local: torch.Tensor, at: Extent, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(at, box.size, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def _boxes_on_mesh(
    name: str, shape: Extent, mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[Extent, Box]]:
    """Asks the mesh each time: torch counts those of two generations as equal where they are of the same ranks, while
    this process may be another one of them."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [((0,), Box((), (0,)))]
    if int(mesh.mesh[tuple(coordinate)]) != dist.get_rank():
        raise TypeError(
            f"{name} lies on a mesh of rank {int(mesh.mesh[tuple(coordinate)])}, and this process is rank "
            f"{dist.get_rank()} now: make meshes inside the training function, anew in each generation"
        )
    try:
        return boxes_of(shape, mesh.shape, coordinate, placements)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None
