"""Find the live tensors of tracked objects, and check at every step that they are unchanged in memory and shape.

The check takes time of the training thread: 0.1 us per tensor of optimizer state and 0.25 us per parameter. So it uses
``map`` over methods written in C, one list per question, and asks for the shapes of all tensors in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain, starmap
from operator import attrgetter, getitem, is_, mul
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.errors import NotRestorable
from everstep.layout.manifests import Box, Extent, TensorInfo, TensorPlacement, chunk, full_box
from everstep_trainer.state.layout import Layout, Sharing, TensorPart
from everstep_trainer.state.python_value_codec import as_bytes, dtype_name
from everstep_trainer.state.supported import require_dense

# ---- placements on a mesh as boxes; pure, and the only place that interprets torch's placements
#
# FSDP2 over tensor parallelism cuts the part that tensor parallelism left, so the mesh dimension on the left cuts after
# the one on its right; torch writes that as ``_StridedShard``. Applied in the order of the cuts, each rank has one box.
# If a ``_StridedShard`` cannot be read this way, a rank has a part of each of ``split_factor`` pieces.

IndexRun = tuple[int, int]  # (start, length) along one dimension


def local_boxes(
    shape: Extent, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[Extent, Box]]:
    """Return the boxes that the rank at ``coordinate`` holds of a tensor of this shape, each with its offset in the
    local tensor; one without volume if it holds nothing. Raises TypeError for an unknown placement."""
    unknown = [p for p in placements if not isinstance(p, Shard | _StridedShard | Replicate)]
    if unknown:
        raise TypeError(f"is placed as {unknown[0]}; only Shard and Replicate have a box to store")
    dims = [_runs(n, _cuts(dim, mesh_shape, coordinate, placements)) for dim, n in enumerate(shape)]
    offsets = [itertools.accumulate((n for _, n in runs[:-1]), initial=0) for runs in dims]
    found = []
    for runs in itertools.product(*(list(zip(at, runs, strict=True)) for at, runs in zip(offsets, dims, strict=True))):
        box = Box(tuple(start for _, (start, _) in runs), tuple(length for _, (_, length) in runs))
        found.append((tuple(at for at, _ in runs), box))
    return found


class _Cut(msgspec.Struct, frozen=True):
    """One mesh dimension's cut of a tensor's dimension: part ``index`` of ``count``, of each of ``pieces`` pieces."""

    index: int
    count: int
    pieces: int


def _cuts(dim: int, sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> list[_Cut]:
    """Return the cuts of tensor dimension ``dim`` in the order in which to make them."""
    ordered: list[_Cut] = []
    here = [
        _Cut(index, count, int(p.split_factor) if isinstance(p, _StridedShard) else 1)
        for p, index, count in zip(placements, coordinate, sizes, strict=True)
        if isinstance(p, Shard | _StridedShard) and p.dim == dim
    ]
    for cut in reversed(here):
        after = _made_before(cut, ordered)
        if after is None:  # pieces do not match other ranks' parts: cut from left to right, as torch does
            return here
        ordered.insert(after, cut)
    return [_Cut(cut.index, cut.count, 1) for cut in ordered]


def _made_before(cut: _Cut, ordered: list[_Cut]) -> int | None:
    """Return how many of the cuts to the right of ``cut`` make up its pieces; None if no number does."""
    pieces = itertools.accumulate((other.count for other in ordered), mul, initial=1)
    return next((position for position, made in enumerate(pieces) if made == cut.pieces), None)


def _runs(length: int, cuts: Sequence[_Cut]) -> list[IndexRun]:
    runs = [(0, length)]
    for cut in cuts:
        total = sum(n for _, n in runs)
        picked = []
        for piece in range(cut.pieces):
            start, size = chunk(total, piece, cut.pieces)
            at, n = chunk(size, cut.index, cut.count)
            picked += _between(runs, start + at, n)
        runs = picked
    joined: list[IndexRun] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + n
        else:
            joined.append((start, n))
    return joined or [(length, 0)]


def _between(runs: Sequence[IndexRun], start: int, length: int) -> list[IndexRun]:
    """Return the part of the concatenated runs that begins at ``start`` and is ``length`` long."""
    found, passed = [], 0
    for at, n in runs:
        low, high = max(start, passed), min(start + length, passed + n)
        if low < high:
            found.append((at + low - passed, high - low))
        passed += n
    return found


# ---- live tensors: their part of the whole, and whether they are unchanged

UNCOUNTED = -1
ALWAYS_COMPARED_BYTES = 1 << 20  # buffers up to this size are compared at every step, at about 10 GB/s


Holder = Mapping[Any, Any] | Sequence[Any]
"""What a tensor is found in, by a key."""


class TrackedTensor(msgspec.Struct, frozen=True):
    """One box of a tensor that this rank holds; a tensor with several boxes has one of these for each."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    local: torch.Tensor  # view of the live memory with the size of ``box``
    sharing: Sharing
    is_parameter: bool  # whether it takes part in the digest that replicas compare
    container: Holder  # ``container[key]`` is the tensor itself, or what ``local`` is a view of
    key: Any
    location: TensorPlacement
    original: torch.Tensor  # the tensor found in ``container`` when the state was searched
    is_replaced: bool = False  # an array of an ArraySource: its memory never changes
    is_moment: bool = False  # state of an optimizer, which changes only in its steps

    @property
    def is_volatile(self) -> bool:
        """True if forward passes may change it, so that it must be copied before the next one."""
        return self.sharing is not Sharing.EQUAL and not self.is_moment

    def current(self) -> torch.Tensor:
        """Return the live memory of a buffer now; a module may have replaced the tensor."""
        tensor, known = self.container[self.key], self.local
        same_memory = tensor is self.original and tensor.data_ptr() == known.data_ptr()
        if same_memory and tensor.size() == known.size() and tensor.stride() == known.stride():
            return known
        ((local, _),) = local_parts(self.name, tensor)
        return local

    def to_part(
        self, rank: int, world: int, aliases: tuple[str, ...], groups: tuple[tuple[str, int], ...]
    ) -> TensorPart:
        """Return the tensor's part in this rank's layout."""
        shape, box = self.shape, self.box
        if self.sharing is Sharing.PER_RANK:
            shape, box = (world, *shape), Box((rank, *box.offset), (1, *box.size))
        kind = (dtype_name(self.local.dtype), self.local.itemsize)
        return TensorPart(self.name, *kind, shape, box, self.sharing, self.is_parameter, aliases, groups, self.location)


class BufferRecord(msgspec.Struct):
    """A recorded buffer, to detect changes by training: most buffers are constants, some are running statistics."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    def is_unchanged(self, current: torch.Tensor) -> bool:
        """Return whether ``current`` is the same buffer with the same bytes. torch counts writes, but batch
        normalization's kernels do not: small buffers are always compared, larger ones if a write was counted."""
        if current is not self.buffer:
            return False
        writes = write_count(current)
        if current.device.type != "cpu":  # a comparison would wait for the GPU: small buffers there count as changing
            return writes == self.version != UNCOUNTED and current.nbytes > ALWAYS_COMPARED_BYTES
        if writes != self.version or writes == UNCOUNTED or current.nbytes <= ALWAYS_COMPARED_BYTES:
            if not has_same_values(current, self.value):
                return False
            self.version = writes
        return True


def record_buffer(buffer: torch.Tensor) -> BufferRecord:
    return BufferRecord(buffer, write_count(buffer), buffer.detach().clone())


def write_count(tensor: torch.Tensor) -> int:
    """Return torch's count of writes; UNCOUNTED for a tensor made in inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether values are equal, or else bytes, as for NaN and dtypes that torch cannot compare."""
    with suppress(NotImplementedError):
        if torch.equal(one, other):
            return True
    return one.shape == other.shape and one.dtype == other.dtype and as_bytes(one) == as_bytes(other)


def refuse_duplicate_names(tensors: Iterable[TrackedTensor]) -> None:
    """Raise ValueError if two tensors of this rank, such as stages' constants, have one name and different values."""
    first: dict[str, TrackedTensor] = {}
    for tensor in tensors:
        other = first.setdefault(tensor.name, tensor)
        same = other.container[other.key] is tensor.container[tensor.key]
        if not same and not has_same_values(tensor.local, other.local):
            raise ValueError(
                f"{tensor.name} is the name of two tensors of this rank that differ, of shapes {list(other.shape)} and "
                f"{list(tensor.shape)}: one would be restored into both. Things in a list have the names of one model, "
                "as stages of a pipeline do; track others under names of their own, run.track(first=..., second=...)"
            )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor: a DTensor's local tensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_parts(name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Box]]:
    """Return a tensor's live local memory and its box in the whole; several if this rank's part is not one box. Raises
    TypeError if a placement has no box, the mesh belongs to another generation, or the tensor is not dense."""
    require_dense(name, local_part(tensor))
    if not isinstance(tensor, DTensor):
        return [(tensor.detach(), full_box(tuple(tensor.shape)))]
    boxes = _boxes_of(name, tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor.detach()
    volume = sum(box.volume for _, box in boxes)
    # torch represents an empty part in several shapes
    if not volume and not local.numel() and local.ndim == tensor.ndim:
        return [(local, Box((0,) * local.ndim, tuple(local.shape)))]
    if local.numel() != volume or (len(boxes) == 1 and tuple(local.shape) != boxes[0][1].size):
        raise TypeError(
            f"{name} holds a local part of shape {tuple(local.shape)} where its mesh says {[b.size for _, b in boxes]}"
        )
    return [(_narrowed(local, at, box), box) for at, box in boxes] if len(boxes) > 1 else [(local, boxes[0][1])]


def _narrowed(local: torch.Tensor, at: Extent, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(at, box.size, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def _boxes_of(name: str, shape: Extent, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[tuple[Extent, Box]]:
    """Return the boxes, asking the mesh each time: meshes with the same ranks are equal to torch."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [((0,), Box((), (0,)))]
    if int(mesh.mesh[tuple(coordinate)]) != dist.get_rank():
        raise TypeError(
            f"{name} is on a mesh of rank {int(mesh.mesh[tuple(coordinate)])}, but this process is rank "
            f"{dist.get_rank()} now: make new meshes in each generation, inside the training function"
        )
    try:
        return local_boxes(shape, mesh.shape, coordinate, placements)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None


# ---- exclude: patterns of full names of tensors not to store, such as frozen parts and caches

MAX_SUGGESTIONS = 5
MIN_SIMILARITY = 0.4  # lowest difflib ratio of a name worth suggesting


class Exclusions:
    """fnmatch patterns of tensors to exclude, such as ``model.teacher.*`` or ``optimizer.model.head.*``."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._unused = dict.fromkeys(patterns)
        self._patterns = tuple(self._unused)

    def excludes(self, name: str) -> bool:
        for pattern in self._patterns:
            if fnmatchcase(name, pattern):
                self._unused.pop(pattern, None)
                return True
        return False

    def require_used(self, names: Collection[str], incomplete_optimizers: Collection[str]) -> None:
        """Raise ValueError, suggesting names, for a pattern without a match, now or in these optimizers."""
        for pattern in self._unused:
            literal = pattern.partition("*")[0].partition("?")[0].partition("[")[0]
            if not any(f"{key}.".startswith(literal) or literal.startswith(f"{key}.") for key in incomplete_optimizers):
                near = get_close_matches(pattern, names, MAX_SUGGESTIONS, MIN_SIMILARITY)
                near = near or sorted(names)[:MAX_SUGGESTIONS]
                raise ValueError(
                    f"exclude={pattern!r} matches none of {len(names)} tracked tensors; near it are {', '.join(near)}"
                )

    def require_whole(self, name: str, keys: Collection[str]) -> None:
        """Raise ValueError if only a part of a parameter's optimizer state is excluded; optimizers need all or none."""
        out = [key for key in keys if self._patterns and self.excludes(f"{name}.{key}")]
        if out and len(out) < len(keys):
            raise ValueError(
                f"exclude matches only {', '.join(out)} of the state of {name}: exclude '{name}.*', or nothing of it"
            )


try:
    _Guards: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _Guards = None

_data_ptr, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_local_of = attrgetter("_local_tensor")
_form = attrgetter("dtype", "device", "shape")


class StateFingerprint:
    """A record of the searched objects, filled during the search, that detects whether a new search would differ."""

    def __init__(self) -> None:
        self._containers: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._members: list[Any] = []
        self._walked: list[Iterable[Any]] = []
        self._places: list[Holder] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._attributes: list[tuple[object, str, object]] = []
        self._memories: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._shaped: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []
        self._are_shapes_unchanged: Callable[[], bool] | None = None
        self._sharded: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._moving: list[tuple[Mapping[Any, Any], Any]] = []
        self._forms: list[tuple[Any, ...]] = []
        self._scalars: list[tuple[Mapping[Any, Any], Any]] = []

    def add_module(self, module: torch.nn.Module) -> None:
        """Record a module's children and its number of parameters and buffers."""
        for inside in (module._parameters, module._buffers, module._modules):
            self._size_of(inside)
        self._size_of(module._non_persistent_buffers_set)
        for key, child in module._modules.items():
            self._entry(module._modules, key, child)
        for inside in (module._parameters, module._buffers):
            for key in (key for key, tensor in inside.items() if tensor is None):
                self._entry(inside, key, None)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer's parameters, their groups, and which of them have state."""
        self._attributes += [(optimizer, name, getattr(optimizer, name)) for name in ("state", "param_groups")]
        self._walk(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._entry(group, "params", group["params"])
            self._walk(group["params"])
        self._walk(optimizer.state)
        if all(isinstance(key, torch.Tensor) for key in optimizer.state):
            self._walk(optimizer.state.values())
            return
        for key, value in optimizer.state.items():  # values of other keys are Python state and may change
            if isinstance(key, torch.Tensor):
                self._entry(optimizer.state, key, value)

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Record a parameter's optimizer state: values that are no tensors may change, but not become tensors."""
        self._size_of(state)
        self._scalars += [(state, key) for key, value in state.items() if not isinstance(value, torch.Tensor)]

    def add_tensor(self, owner: Holder, key: Any, tensor: torch.Tensor, *, check_shape: bool = True) -> None:
        """Record a tensor whose memory is copied as found. ``check_shape``: detect another shape at the same address
        too, as pruning by ``p.data = p.data[:n]`` makes; it costs as much as all other checks together."""
        memory = tensor
        if isinstance(tensor, DTensor):
            memory = tensor._local_tensor
            self._sharded.append(tensor)
            self._locals.append(memory)
        self._entry(owner, key, tensor)
        self._memories.append(memory)
        self._addresses.append(memory.data_ptr())
        if check_shape:
            self._shaped.append(memory)
            self._sizes.append(memory.size())
            self._strides.append(memory.stride())

    def add_sharded(self, owner: Holder, key: Any) -> None:
        """Record a tensor that holds shards, and the number of tensors beside it."""
        self._size_of(owner)
        self.add_tensor(owner, key, owner[key])

    def add_states_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Record how many parameters have state, of an optimizer inside a sharded object."""
        self._size_of(optimizer.state)

    def add_volatile(self, container: Mapping[Any, Any], key: Any, tensor: torch.Tensor) -> None:
        """Record a tensor that is looked up each time; another of the same form may replace it."""
        self._moving.append((container, key))
        self._forms.append(_form(tensor))

    def _size_of(self, container: Collection[Any]) -> None:
        self._containers.append(container)
        self._lengths.append(len(container))

    def _walk(self, container: Collection[Any]) -> None:
        """Record the container's members and their order."""
        self._size_of(container)
        self._walked.append(container)
        self._members += container

    def _entry(self, container: Holder, key: Any, value: object) -> None:
        self._places.append(container)
        self._keys.append(key)
        self._values.append(value)

    def is_unchanged(self) -> bool:
        """Return whether everything is as recorded."""
        try:
            return (
                list(map(len, self._containers)) == self._lengths
                and all(getattr(owner, name) is value for owner, name, value in self._attributes)
                and all(map(is_, chain.from_iterable(self._walked), self._members))
                and all(map(is_, map(getitem, self._places, self._keys), self._values))
                and self._has_same_memory()
                and list(map(_form, starmap(getitem, self._moving))) == self._forms
                and not any(isinstance(of[key], torch.Tensor) for of, key in self._scalars)
            )
        except (KeyError, AttributeError):  # an entry is gone, or no longer a tensor
            return False

    def _has_same_memory(self) -> bool:
        if self._are_shapes_unchanged is None:  # made in the context of later calls: the guards depend on autocast
            # each tensor once: the guards do not match a tensor that occurs twice, as a tied one does
            once = {id(tensor): at for at, tensor in enumerate(self._shaped)}.values()
            self._are_shapes_unchanged = _shape_check(
                [self._shaped[at] for at in once], [self._sizes[at] for at in once], [self._strides[at] for at in once]
            )
        return (
            all(map(is_, map(_local_of, self._sharded), self._locals))
            and list(map(_data_ptr, self._memories)) == self._addresses
            and self._are_shapes_unchanged()
        )


def _shape_check(
    tensors: list[torch.Tensor], sizes: list[torch.Size], strides: list[tuple[int, ...]]
) -> Callable[[], bool]:
    """Return a check of sizes and strides; torch.compile's private guards take a quarter of the time of asking each."""
    try:
        guards = _Guards(
            *tensors,
            dynamic_dims_sizes=[list(size) for size in sizes],
            dynamic_dims_strides=[list(stride) for stride in strides],
        )
        guards.check(*tensors)
    except (TypeError, ValueError, RuntimeError, SystemError):
        return lambda: list(map(_size, tensors)) == sizes and list(map(_stride, tensors)) == strides
    return lambda: bool(guards.check(*tensors))


# ---- descriptions of changes to a rank's tracked tensors

MAX_SHOWN = 5  # most names shown of each kind


def describe_layout_change(before: Layout, after: Layout) -> str:
    """Return the names of tensors that are new, gone or changed in type, shape or part; empty if there are none."""
    old, new = _by_name(before), _by_name(after)
    other = [name for name in new if name in old and old[name] != new[name]]
    kinds = {
        "new": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "changed": [f"{name} ({_describe_parts(old[name])}, now {_describe_parts(new[name])})" for name in other],
    }
    return "; ".join(f"{kind}: {list_names(names, MAX_SHOWN)}" for kind, names in kinds.items() if names)


def _by_name(layout: Layout) -> dict[str, list[TensorPart]]:
    found: dict[str, list[TensorPart]] = {}
    for part in layout.parts:
        found.setdefault(part.name, []).append(part)
    return found


def _describe_parts(parts: list[TensorPart]) -> str:
    """Describe the first part, and the number of parts if there are several."""
    first = parts[0]
    more = f" in {len(parts)} parts" if len(parts) > 1 else ""
    held = "" if first.box.size == first.shape else f", of it {list(first.box.size)} at {list(first.box.offset)}"
    return f"{first.dtype} {list(first.shape)} {first.sharing}{held}{more}"


def list_names(names: Sequence[str], limit: int) -> str:
    """Return the first ``limit`` names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


ADD_BEFORE_TRACK = (
    "Add everything before run.track: give an optimizer all parameters from the start, and select the trained ones "
    "with requires_grad_"
)


def refuse_other_model(live: list[TrackedTensor], index_of: dict[str, int], catalog: tuple[TensorInfo, ...]) -> None:
    """Raise NotRestorable if a live tensor was not stored or differs; ``index_of``: index in ``catalog`` by name."""
    missing = list(dict.fromkeys(t.name for t in live if t.name not in index_of))
    if missing:
        gone = sorted(index_of.keys() - {tensor.name for tensor in live})  # some belong to a pipeline's other stages
        absent = f"{len(gone)} stored tensors are missing here ({', '.join(gone[:3])})" if gone else "none is missing"
        raise NotRestorable(
            f"the tracked state is not what was stored: {len(missing)} tensors are new ({', '.join(missing[:3])}), "
            f"{absent}; restore with the objects that were tracked"
        )
    for tensor in live:
        stored = catalog[index_of[tensor.name]]
        shape = stored.shape[1:] if stored.per_rank else stored.shape
        dtype = dtype_name(tensor.local.dtype)
        if (dtype, tensor.shape) != (stored.dtype, shape):
            raise NotRestorable(
                f"{tensor.name} is {dtype} {list(tensor.shape)} now, and was stored as {stored.dtype} {list(shape)}"
            )


def refuse_other_groups(
    live: Iterable[TrackedTensor],
    index_of: Mapping[str, int],
    catalog: tuple[TensorInfo, ...],
    groups: Mapping[str, Iterable[tuple[str, int]]],
    optimizers: Collection[str],
) -> None:
    """Raise NotRestorable if an optimizer trained a parameter (``groups``) that it does not train now."""
    for tensor in live if optimizers else ():
        now = {top for top, _ in groups.get(tensor.name, ())}
        for top, index in catalog[index_of[tensor.name]].groups:
            if top in optimizers and top not in now:
                raise NotRestorable(
                    f"{top} trained {tensor.name}, in its parameter group {index}, when the version was stored, and "
                    f"does not now, so that the options of that group would be lost. {ADD_BEFORE_TRACK}"
                )
