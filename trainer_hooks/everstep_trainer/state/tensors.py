"""Whether tracked tensors are still those that were found, in the same memory and shape: asked at every step.

The training thread pays for the answer, so it goes through ``map`` over methods written in C, one list for each
question, and shapes are asked of all tensors in one call: 0.1 us for optimizer state and 0.25 us for a parameter, as
long as the caches have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain, starmap
from operator import attrgetter, getitem, is_
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.errors import NotRestorable
from everstep.layout.manifests import Box, Extent, TensorInfo, TensorPlacement, chunk, full_box
from everstep_trainer.state.blob import as_bytes, dtype_name, refuse_overlap, require_own_memory
from everstep_trainer.state.layout import Layout, Sharing, TensorPart

# ---- placement
# Placements on a mesh as boxes. Pure, and the only place that knows what torch's placements mean.
#
# FSDP2 over tensor parallelism cuts what tensor parallelism left it, so the mesh dimension on the left cuts after the
# one
# on its right; torch writes that as ``_StridedShard``. Applied in the order in which the cuts were made each rank has
# one
# box. Where a ``_StridedShard`` cannot be read so, a rank has a part of each of ``split_factor`` pieces.

IndexRun = tuple[int, int]
"""(start, length) along one dimension."""


def local_boxes(
    shape: Extent, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[Extent, Box]]:
    """What the rank at ``coordinate`` holds of a tensor of this global shape.

    Each box with the offset at which it begins in the local tensor; a box without volume where the rank holds nothing.
    Raises TypeError for placements other than Shard, _StridedShard and Replicate.
    """
    unknown = [p for p in placements if not isinstance(p, Shard | _StridedShard | Replicate)]
    if unknown:
        raise TypeError(f"is placed as {unknown[0]}; only Shard and Replicate have a box to store")
    dims = [_runs(n, _cuts(dim, mesh_shape, coordinate, placements)) for dim, n in enumerate(shape)]
    found = []
    for runs in itertools.product(*(_with_local_offsets(runs) for runs in dims)):
        box = Box(tuple(start for _, (start, _) in runs), tuple(length for _, (_, length) in runs))
        found.append((tuple(at for at, _ in runs), box))
    return found


class _Cut:
    """One mesh dimension's cut of a tensor's dimension: part ``index`` of ``count``, of each of ``pieces`` pieces."""

    def __init__(self, index: int, count: int, pieces: int) -> None:
        self.index = index
        self.count = count
        self.pieces = pieces


def _cuts(
    dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[_Cut]:
    """The cuts of tensor dimension ``dim`` in the order in which they are to be made."""
    ordered: list[_Cut] = []
    here = [
        _Cut(index, count, int(p.split_factor) if isinstance(p, _StridedShard) else 1)
        for p, index, count in zip(placements, coordinate, mesh_shape, strict=True)
        if isinstance(p, Shard | _StridedShard) and p.dim == dim
    ]
    for cut in reversed(here):
        after = _made_before(cut, ordered)
        if after is None:  # not all pieces are ranks' parts: as torch has it, from left to right
            return here
        ordered.insert(after, cut)
    return [_Cut(cut.index, cut.count, 1) for cut in ordered]


def _made_before(cut: _Cut, ordered: list[_Cut]) -> int | None:
    """How many of the cuts to the right of ``cut`` make up its pieces; None where no number of them does."""
    pieces = 1
    for position in range(len(ordered) + 1):
        if pieces == cut.pieces:
            return position
        if position < len(ordered):
            pieces *= ordered[position].count
    return None


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
    """What lies from ``start`` on, ``length`` long, in the runs taken one after another."""
    found, passed = [], 0
    for at, n in runs:
        low, high = max(start, passed), min(start + length, passed + n)
        if low < high:
            found.append((at + low - passed, high - low))
        passed += n
    return found


def _with_local_offsets(runs: Sequence[IndexRun]) -> list[tuple[int, IndexRun]]:
    offsets = itertools.accumulate((n for _, n in runs[:-1]), initial=0)
    return list(zip(offsets, runs, strict=True))


# ---- live
# One live tensor: what part of the whole it is, and whether it is still where and what it was.

UNCOUNTED = -1
ALWAYS_COMPARED_BYTES = 1 << 20
"""Buffers up to this size are compared at every step, at some 10 GB/s."""


class TrackedTensor(msgspec.Struct, frozen=True):
    """One tensor, and the part of it that this rank holds; where that is several boxes, there is one of these each.

    ``shape`` is global, ``box`` this rank's part; ``local`` is a view of the live memory with the box's size.
    ``is_parameter``: it takes part in the digest that replicas compare. ``container[key]`` is the tensor itself, and
    was ``original`` when the state was looked for."""

    name: str
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    sharing: Sharing
    is_parameter: bool
    container: Mapping[Any, Any]
    key: Any
    location: TensorPlacement = TensorPlacement.UNKNOWN
    original: torch.Tensor | None = None

    @property
    def is_volatile(self) -> bool:
        """Whether forward passes may change it, so that it must be copied before the next one."""
        return self.sharing is not Sharing.EQUAL

    def current(self) -> torch.Tensor:
        """The live memory of a buffer at this moment; a module may put another tensor into its place."""
        tensor, known = self.container[self.key], self.local
        if self.original is not None and tensor is self.original and _has_same_memory(tensor, known):
            return known
        ((local, _),) = local_parts(self.name, tensor)
        return local

    def to_part(
        self, rank: int, world: int, aliases: tuple[str, ...] = (), groups: tuple[tuple[str, int], ...] = ()
    ) -> TensorPart:
        """How the tensor stands in this rank's layout."""
        shape, box = self.shape, self.box
        if self.sharing is Sharing.PER_RANK:
            shape, box = (world, *shape), Box((rank, *box.offset), (1, *box.size))
        dtype = self.local.dtype
        kind = (dtype_name(dtype), dtype.itemsize)
        return TensorPart(self.name, *kind, shape, box, self.sharing, self.is_parameter, aliases, groups, self.location)


def _has_same_memory(tensor: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether a plain tensor has the memory, shape and strides of ``known``."""
    same_memory = tensor.data_ptr() == known.data_ptr()
    return same_memory and tensor.size() == known.size() and tensor.stride() == known.stride()


class BufferRecord(msgspec.Struct):
    """A buffer as it was, to see whether training changes it: most are constants, some are running statistics."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    def is_unchanged(self, current: torch.Tensor) -> bool:
        """Whether ``current`` is the same buffer with the same bytes.

        torch counts writes to a tensor, but batch normalization's kernels write past the count, and DDP writes what is
        there already. So the bytes are compared: always where they are few, else when a write was counted.
        """
        if current is not self.buffer:
            return False
        writes = write_count(current)
        if current.device.type != "cpu":  # a comparison would wait for the GPU: small buffers count as changing there
            return writes == self.version != UNCOUNTED and current.nbytes > ALWAYS_COMPARED_BYTES
        if writes != self.version or writes == UNCOUNTED or current.nbytes <= ALWAYS_COMPARED_BYTES:
            if not has_same_values(current, self.value):
                return False
            self.version = writes
        return True


def record_buffer(buffer: torch.Tensor) -> BufferRecord:
    """The buffer as it is now."""
    return BufferRecord(buffer, write_count(buffer), buffer.detach().clone())


def write_count(tensor: torch.Tensor) -> int:
    """torch's count of them; UNCOUNTED of a tensor that was made in inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values are the same, or the bytes are, as those of NaN and of dtypes that torch does not compare."""
    try:
        if torch.equal(one, other):
            return True
    except NotImplementedError:
        pass
    return one.shape == other.shape and one.dtype == other.dtype and as_bytes(one) == as_bytes(other)


def refuse_duplicate_names(tensors: Iterable[TrackedTensor]) -> None:
    """Raises ValueError where two tensors of this rank have one name and different values: the one would come back as
    the other. Two stages of a pipeline may each have the same constant."""
    first: dict[str, TrackedTensor] = {}
    for tensor in tensors:
        other = first.setdefault(tensor.name, tensor)
        if other.container[other.key] is not tensor.container[tensor.key] and not has_same_values(
            tensor.local, other.local
        ):
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
        return [(tensor.detach(), full_box(tuple(tensor.shape)))]
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
    require_own_memory(
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
        return local_boxes(shape, mesh.shape, coordinate, placements)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None


# ---- exclude
# Tensors that a user does not want stored, by patterns on their full names: of frozen parts, of caches that refill.

MAX_SUGGESTIONS = 5
MIN_SIMILARITY = 0.4
"""difflib's measure from which on a name is worth showing."""


class Exclusions:
    """Patterns as of fnmatch: ``model.teacher.*``, ``optimizer.model.head.*``.

    A pattern may be of optimizer state, which is there after the first step only: so ``require_used`` is asked again.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._unused = dict.fromkeys(patterns)
        self._patterns = tuple(self._unused)

    def excludes(self, name: str) -> bool:
        """Whether the tensor of this name is left out."""
        for pattern in self._patterns:
            if fnmatchcase(name, pattern):
                self._unused.pop(pattern, None)
                return True
        return False

    def require_used(self, names: Collection[str], incomplete_optimizers: Collection[str]) -> None:
        """Raises ValueError, with the names that are near, for a pattern that left nothing out and will not.

        ``incomplete_optimizers``: keys of optimizers of which not all state is there.
        """
        for pattern in self._unused:
            literal = pattern.partition("*")[0].partition("?")[0].partition("[")[0]
            if not any(f"{key}.".startswith(literal) or literal.startswith(f"{key}.") for key in incomplete_optimizers):
                near = (
                    get_close_matches(pattern, names, MAX_SUGGESTIONS, MIN_SIMILARITY)
                    or sorted(names)[:MAX_SUGGESTIONS]
                )
                raise ValueError(
                    f"exclude={pattern!r} matches none of {len(names)} tracked tensors; near it are {', '.join(near)}"
                )

    def require_whole(self, name: str, keys: Collection[str]) -> None:
        """Raises ValueError where a part of a parameter's optimizer state is left out: an optimizer that finds some of
        it after a restore takes the rest for there."""
        out = [key for key in keys if self._patterns and self.excludes(f"{name}.{key}")]
        if out and len(out) < len(keys):
            raise ValueError(
                f"exclude leaves {', '.join(out)} of {name} out, and not the rest: exclude '{name}.*', or nothing of it"
            )


try:
    _Guards: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _Guards = None

_data_ptr, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_local_of = attrgetter("_local_tensor")
_form = attrgetter("dtype", "device", "shape")


class StateFingerprint:
    """Filled while tensors are looked for; then asked whether a search would find the same."""

    def __init__(self) -> None:
        self._containers: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._members: list[Any] = []
        self._walked: list[Iterable[Any]] = []
        self._places: list[Mapping[Any, Any]] = []
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

    # --- what was found

    def add_module(self, module: torch.nn.Module) -> None:
        """Which children it has, and how many parameters and buffers; ``add_tensor`` and ``add_volatile`` say which."""
        for inside in (module._parameters, module._buffers, module._modules):
            self._size_of(inside)
        self._size_of(module._non_persistent_buffers_set)
        for key, child in module._modules.items():
            self._entry(module._modules, key, child)
        for inside in (module._parameters, module._buffers):
            for key in (key for key, tensor in inside.items() if tensor is None):
                self._entry(inside, key, None)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its parameters in their groups, and which of them have state."""
        self._attributes += [(optimizer, name, getattr(optimizer, name)) for name in ("state", "param_groups")]
        self._walk(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._entry(group, "params", group["params"])
            self._walk(group["params"])
        self._walk(optimizer.state)
        shared = not all(isinstance(key, torch.Tensor) for key in optimizer.state)
        self._walk(_OfParameters(optimizer.state) if shared else optimizer.state.values())

    def add_state(self, state: Mapping[str, Any]) -> None:
        """A parameter's state in an optimizer: what is no tensor in it may change, but not become one."""
        self._size_of(state)
        self._scalars += [(state, key) for key, value in state.items() if not isinstance(value, torch.Tensor)]

    def add_tensor(
        self, container: Mapping[Any, Any], key: Any, tensor: torch.Tensor, *, check_shape: bool = True
    ) -> None:
        """One whose memory is copied from as it was found.

        ``check_shape``: it is also seen to be given another shape at the same address, as ``p.data = p.data[:n]`` does.
        That is asked of what users prune, and costs as much as all else; of optimizer state it need not be.
        """
        memory = tensor
        if isinstance(tensor, DTensor):
            memory = tensor._local_tensor
            self._sharded.append(tensor)
            self._locals.append(memory)
        self._entry(container, key, tensor)
        self._memories.append(memory)
        self._addresses.append(memory.data_ptr())
        if check_shape:
            self._shaped.append(memory)
            self._sizes.append(memory.size())
            self._strides.append(memory.stride())

    def add_volatile(self, container: Mapping[Any, Any], key: Any, tensor: torch.Tensor) -> None:
        """One that is asked for anew each time; another of the same form may stand in its place."""
        self._moving.append((container, key))
        self._forms.append(_form(tensor))

    def _size_of(self, container: Collection[Any]) -> None:
        self._containers.append(container)
        self._lengths.append(len(container))

    def _walk(self, container: Collection[Any]) -> None:
        """The same members in the same order."""
        self._size_of(container)
        self._walked.append(container)
        self._members += container

    def _entry(self, place: Mapping[Any, Any], key: Any, value: object) -> None:
        self._places.append(place)
        self._keys.append(key)
        self._values.append(value)

    # --- what is so now

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was found."""
        return (
            list(map(len, self._containers)) == self._lengths
            and all(getattr(owner, name) is value for owner, name, value in self._attributes)
            and all(map(is_, chain.from_iterable(self._walked), self._members))
            and self._entries_stand()
            and self._memory_stands()
            and self._forms_stand()
            and all(_is_scalar(place, key) for place, key in self._scalars)
        )

    def _entries_stand(self) -> bool:
        try:
            return all(map(is_, map(getitem, self._places, self._keys), self._values))
        except KeyError:
            return False

    def _forms_stand(self) -> bool:
        try:
            return list(map(_form, starmap(getitem, self._moving))) == self._forms
        except (KeyError, AttributeError):  # gone, or no tensor any more
            return False

    def _memory_stands(self) -> bool:
        return (
            all(map(is_, map(_local_of, self._sharded), self._locals))
            and list(map(_data_ptr, self._memories)) == self._addresses
            and self._shaped_as_found()
        )

    def _shaped_as_found(self) -> bool:
        if (
            self._are_shapes_unchanged is None
        ):  # now, where later calls will come from: the answer depends on autocast, say
            # each once: to the guards a tensor that comes twice, as a tied one does, is not what they were made of
            once = {id(tensor): at for at, tensor in enumerate(self._shaped)}.values()
            self._are_shapes_unchanged = _shape_check(
                [self._shaped[at] for at in once], [self._sizes[at] for at in once], [self._strides[at] for at in once]
            )
        return self._are_shapes_unchanged()


class _OfParameters(Collection[Any]):
    """The values in an optimizer's state but those of no parameter, which are Python state and may change."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state)

    def __iter__(self) -> Iterator[Any]:
        return (value for key, value in self._state.items() if isinstance(key, torch.Tensor))

    def __contains__(self, value: object) -> bool:
        return any(value is one for one in self)


def _shape_check(
    tensors: list[torch.Tensor], sizes: list[torch.Size], strides: list[tuple[int, ...]]
) -> Callable[[], bool]:
    """Whether tensors have these sizes and strides, each time it is called.

    By the check that torch.compile guards its graphs with, a quarter of the time of asking each one: it also looks at
    dtype, device and whether a gradient is wanted. It is no public part of torch; where it is another, each is asked.
    """
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


def _is_scalar(place: Mapping[Any, Any], key: Any) -> bool:
    return key in place and not isinstance(place[key], torch.Tensor)


# ---- changes
# What of a rank's tracked tensors is not what it was, in words for whoever changed it.

MAX_SHOWN = 5
"""Names of each kind."""


def describe_layout_change(before: Layout, after: Layout) -> str:
    """Tensors that are new, gone, or of another type, shape or part, by name; empty where it is none of these."""
    old, new = _by_name(before), _by_name(after)
    other = [name for name in new if name in old and old[name] != new[name]]
    kinds = {
        "new": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "changed": [f"{name} ({_describe_parts(old[name])}, now {_describe_parts(new[name])})" for name in other],
    }
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _by_name(layout: Layout) -> dict[str, list[TensorPart]]:
    found: dict[str, list[TensorPart]] = {}
    for part in layout.parts:
        found.setdefault(part.name, []).append(part)
    return found


def _describe_parts(parts: list[TensorPart]) -> str:
    """Of the first part; of several the number."""
    first = parts[0]
    more = f" in {len(parts)} parts" if len(parts) > 1 else ""
    held = "" if first.box.size == first.shape else f", of it {list(first.box.size)} at {list(first.box.offset)}"
    return f"{first.dtype} {list(first.shape)} {first.sharing}{held}{more}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def refuse_other_model(live: list[TrackedTensor], index_of: dict[str, int], catalog: tuple[TensorInfo, ...]) -> None:
    """Raises NotRestorable, with names, where a live tensor was not stored or is another one than was stored.

    ``index_of``: a name's place in ``catalog``.
    """
    missing = list(dict.fromkeys(t.name for t in live if t.name not in index_of))
    if missing:
        raise NotRestorable(
            f"the tracked state is not what was stored: {len(missing)} tensors are new ({', '.join(missing[:3])}), "
            f"{_not_here(live, index_of)}; restore with the objects that were tracked"
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
    """Raises NotRestorable where one of ``optimizers`` trained a parameter that it does not train now.

    ``groups``: as Tensor.groups, by the names of live parameters. Of an optimizer without state nothing else is missed.
    """
    for tensor in live if optimizers else ():
        now = {top for top, _ in groups.get(tensor.name, ())}
        for top, index in catalog[index_of[tensor.name]].groups:
            if top in optimizers and top not in now:
                raise NotRestorable(
                    f"{top} trained {tensor.name}, in its parameter group {index}, when the version was stored, and "
                    "does not now, so that the options of that group would be lost. What is added in the midst of "
                    "training has to be there before run.track: give an optimizer all parameters from the start, and "
                    "let requires_grad_ say which are trained"
                )


def _not_here(live: list[TrackedTensor], stored: Iterable[str]) -> str:
    """Names that are of no tensor here; of a pipeline's other stages some always are."""
    gone = sorted(set(stored) - {tensor.name for tensor in live})
    return f"{len(gone)} that were stored are not here ({', '.join(gone[:3])})" if gone else "none is gone"
