"""The state that a training run must not lose: tensors and small Python state of the tracked objects.

Tensors are named ``model.blocks.0.weight`` (the object's key, then its own name for the tensor) and
``optimizer.model.blocks.0.weight.exp_avg`` (the optimizer's key, the parameter's full name, the optimizer's key for the
state). A plain tensor is taken to be equal on all ranks; one that differs must be a DTensor, or a buffer that training
changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from everstep.errors import NotRestorable
from everstep.layout.manifests import Box, TensorInfo, TensorPlacement
from everstep_trainer.state import optimizer_state, python_state, supported
from everstep_trainer.state.arrays import ArrayPart, ArraySource
from everstep_trainer.state.generators import GeneratorState
from everstep_trainer.state.layout import Layout, Sharing
from everstep_trainer.state.optimizer_state import allocate_state, has_full_state, location_of
from everstep_trainer.state.python_state import MergedState, ParameterGroup, PythonState, StateName
from everstep_trainer.state.python_value_codec import MAX_BLOB_BYTES, Blob, dtype_of
from everstep_trainer.state.sharded_state import Shard, ShardedState
from everstep_trainer.state.supported import require_dense, unsupported_reason
from everstep_trainer.state.tensors import (
    BufferRecord,
    Exclusions,
    StateFingerprint,
    TrackedTensor,
    has_same_values,
    local_part,
    local_parts,
    record_buffer,
    refuse_duplicate_names,
    refuse_other_groups,
    refuse_other_model,
)
from everstep_trainer.state.tracked_objects import TrackedObjects, named_modules
from everstep_trainer.state.unstored_buffers import UnstoredBuffers

# ---- ties: one tensor under several names, tied in a module or shared by parameters in an optimizer
#
# Tensors tied in one layout may be separate in another. Word embeddings that a pipeline has in its first and its last
# stage, each with its own optimizer state, are one parameter on a single rank.

TiedPair = tuple[str, TrackedTensor, TrackedTensor]
"""A name that was stored separately, the live tensor it is tied to now, a tensor to read its stored values into."""
Aliases = Mapping[str, tuple[str, ...]]  # the other names of a tensor, by its first


def find_aliases(modules: Iterable[tuple[str, torch.nn.Module]], tensors: Iterable[TrackedTensor]) -> Aliases:
    """Return the other names of tied tensors, and of tensors in modules that occur in several places."""
    first = {_memory(t.container[t.key]): t.name for t in tensors}
    aliases: dict[str, tuple[str, ...]] = {}
    for top, root in modules:
        for prefix, module in named_modules(top, root, remove_duplicate=False):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = f"{prefix}.{key}"
                known = first.get(_memory(tensor)) if tensor is not None else None
                if known not in (None, name) and key not in module._non_persistent_buffers_set:
                    aliases[known] = (*aliases.get(known, ()), name)
    return aliases


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors."""
    local = local_part(tensor)
    dense = not is_lazy(local) and local.layout is torch.strided and local.numel()
    return (local.data_ptr(), local.size(), local.stride(), local.dtype) if dense else (id(tensor),)


def other_names(name: str, aliases: Aliases, optimizers: Iterable[str]) -> Iterator[str]:
    """Yield the other names of a tensor, and of optimizer state whose parameter has other names."""
    yield from aliases.get(name, ())
    for top in optimizers:
        if name.startswith(f"{top}."):
            parameter, _, key = name.removeprefix(f"{top}.").rpartition(".")
            yield from (f"{top}.{alias}.{key}" for alias in aliases.get(parameter, ()))


class StoredNames:
    """The names under which a version's tensors may be live; ``optimizers`` are the keys of tracked optimizers."""

    def __init__(self, catalog: tuple[TensorInfo, ...] = (), optimizers: Collection[str] = ()) -> None:
        self._optimizers = optimizers
        self._exact = {tensor.name: index for index, tensor in enumerate(catalog)}
        self._aliases = {tensor.name: tensor.aliases for tensor in catalog if tensor.aliases}
        self.index_of = dict(self._exact)
        for name, index in self._exact.items() if self._aliases else ():
            for other in other_names(name, self._aliases, optimizers):
                self.index_of.setdefault(other, index)
        self._all_names = {alias: (n, *others) for n, others in self._aliases.items() for alias in (n, *others)}

    def names_of(self, name: str) -> Iterator[str]:
        """Yield a stored tensor's own name, and its other names that no other tensor was stored under."""
        yield name
        if self._aliases:
            yield from (n for n in other_names(name, self._aliases, self._optimizers) if n not in self._exact)

    def all_names(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor that was stored under one of them."""
        return self._all_names.get(name, (name,))

    def separately_stored(self, live: Iterable[TrackedTensor], aliases: Aliases) -> list[TiedPair]:
        """Return the tensors that are tied now but were stored under several names: each name but the first."""
        return [
            (other, tensor, msgspec.structs.replace(tensor, local=torch.empty_like(tensor.local)))
            for tensor in (live if aliases else ())
            for other in other_names(tensor.name, aliases, self._optimizers)
            if other in self._exact and self._exact[other] != self.index_of[tensor.name]
        ]


_Named = tuple[str, Mapping[Any, Any], Any, torch.Tensor]
"""A tensor's full name, its container, its key there, and the tensor."""


class TrackedState:
    """The tracked objects of one training function, without the tensors whose names match ``exclude``. Keys may hold
    lists of modules or optimizers, such as pipeline stages. Raises TypeError for an object that cannot be stored,
    ValueError for a pattern that matches nothing or too long a history of an LBFGS."""

    def __init__(self, objects: Mapping[str, object], exclude: Iterable[str] = ()) -> None:
        self._exclude = Exclusions(exclude)
        tracked = TrackedObjects(objects)
        self._modules, self._optimizers, self._others = tracked.modules, tracked.optimizers, tracked.others
        self._sharded = {key: other for key, other in tracked.others.items() if isinstance(other, ShardedState)}
        self._arrays: list[tuple[str, ArraySource]] = tracked.arrays
        self._array_parts: list[Sequence[ArrayPart]] = []  # of each of them, when the state was searched
        self._broadcast = tuple(f"{name}." for name in tracked.broadcast_modules)
        self._fqns = self._names()
        self._identity = StateFingerprint()
        self._buffer_records: list[BufferRecord] = []
        self._scalars: list[tuple[str, torch.optim.Optimizer, str, dict[str, Any], str]] = []
        self._extra: list[tuple[str, torch.nn.Module]] = []
        self._packed: list[bytes] | None = None
        self._locations: dict[str, TensorPlacement] = {}
        self._tied: dict[str, dict[str, None]] = defaultdict(dict)  # optimizer state's names, by the tied tensor's
        self._rank_markers = python_state.rank_markers(self._others)
        self._stored = StoredNames()
        self._separately_stored: list[TiedPair] = []
        self._has_searched = False
        self._changing: set[str] = set()
        self.running_buffers: set[str] = set()  # non-persistent ones that training changes
        self._own_moments: frozenset[str] = frozenset()  # optimizer state that differs between ranks
        self._has_new_own_moments = False
        for top, optimizer in self._optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                first, *_ = next(self._trained(optimizer))
                if not self._exclude.excludes(f"{top}.{first}.old_dirs"):
                    supported.refuse_long_history(top, optimizer, MAX_BLOB_BYTES)
        self.record_buffers()
        if exclude:
            self.tensors()

    def record_buffers(self) -> None:
        """Record the buffers as unchanged; those that training changes from now on are detected."""
        self._unstored = UnstoredBuffers(self._included(self._buffers(stored=False)))
        self._settled = {name: record_buffer(b) for name, _, _, b in self._buffers() if not unsupported_reason(b)}

    def tensors(self) -> list[TrackedTensor]:
        """Return all current tensors, in equal order on every rank; tied ones once. Call it between an optimizer step
        and the next forward pass. Raises TypeError for tensors that cannot be stored."""
        for part in (part for _, module in self._modules for part in module.modules()):
            if isinstance(part, FSDPModule):
                part.reshard()
        self._find_running_buffers()
        self._has_new_own_moments = False
        self._fqns = self._names()
        self._has_searched = True
        self._tied.clear()
        self._identity, self._buffer_records, self._scalars, self._packed = StateFingerprint(), [], [], None
        self._extra = [
            (name, module)
            for _, name, module in self._all_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        for _, _, module in self._all_modules():
            self._identity.add_module(module)
        found: dict[Any, TrackedTensor] = {}
        for name, place, key, parameter in self._included(self._parameters()):
            self._add(found, name, place, key, parameter, Sharing.EQUAL, parameter=True)
        for name, place, key, buffer in self._included(self._buffers()):
            self._add(found, name, place, key, buffer, self._sharing_of(name, buffer), parameter=False)
        for name, place, key, moment in self._moments():
            sharing = Sharing.PER_RANK if name in self._own_moments else Sharing.EQUAL
            self._add(found, name, place, key, moment, sharing, parameter=False, location=self._locations[name])
        for name, shard in self._shards():
            self._add_shard(found, name, shard)
        self._array_parts = [source.array_parts() for _, source in self._arrays]
        for (top, _), array_parts in zip(self._arrays, self._array_parts, strict=True):
            for array_part in array_parts:
                self._add_array(found, f"{top}.{array_part.name}", array_part)
        to_come = [top for top, optimizer in self._optimizers if not has_full_state(optimizer)]
        to_come += [key for key, sharded in self._sharded.items() if not sharded.is_complete()]
        self._exclude.require_used([tensor.name for tensor in found.values()], to_come)
        for name, mark in self._rank_markers.items():
            self._add(found, name, self._rank_markers, name, mark, Sharing.PER_RANK, parameter=False)
        tensors = list(found.values())
        refuse_duplicate_names(tensors)
        return tensors

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's memory of parameters and optimizer state by name, as it is now, without a new search."""
        found = {
            name: local_part(tensor).detach()
            for name, _, _, tensor in self._included(self._parameters())
            if not unsupported_reason(tensor)
        }
        for top, optimizer in self._optimizers:
            for fqn, parameter, _ in self._trained(optimizer):
                for key, value in (optimizer.state.get(parameter) or {}).items():
                    name = f"{top}.{fqn}.{key}"
                    if isinstance(value, torch.Tensor) and not self._exclude.excludes(name):
                        found[name] = local_part(value).detach()
        return found

    def _included(self, tensors: Iterable[_Named]) -> Iterator[_Named]:
        return (each for each in tensors if not self._exclude.excludes(each[0]))

    def is_complete(self) -> bool:
        """Return whether every optimizer has state for every parameter it trains, as after a step or a restore."""
        full = all(has_full_state(optimizer) for _, optimizer in self._optimizers)
        return full and all(sharded.is_complete() for sharded in self._sharded.values())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers, including those inside sharded objects."""
        inside = (optimizer for sharded in self._sharded.values() for optimizer in sharded.optimizers)
        return [*(optimizer for _, optimizer in self._optimizers), *inside]

    @property
    def generators(self) -> dict[str, GeneratorState]:
        """The tracked random generators, by key."""
        return {key: tracked for key, tracked in self._others.items() if isinstance(tracked, GeneratorState)}

    @property
    def changes_in_place(self) -> bool:
        """False if all tensors are arrays, which are replaced instead."""
        return bool(self._modules or self._optimizers or self._sharded)

    def is_unchanged(self) -> bool:
        """Return whether the tensors are those that ``tensors`` found, in the same memory. Fast: called every step."""
        return (
            not self._find_running_buffers()
            and not self._has_new_own_moments
            and self._has_searched
            and self._identity.is_unchanged()
            and all(still.is_unchanged(still.buffer) for still in self._buffer_records)
            and all(source.array_parts() is of for (_, source), of in zip(self._arrays, self._array_parts, strict=True))
        )

    def store_per_rank(self, moments: frozenset[str]) -> None:
        """Store these tensors of optimizer state for each rank from the next search on. From any thread."""
        self._own_moments |= moments
        self._has_new_own_moments = True

    def _find_running_buffers(self) -> bool:
        """Return whether training has changed a non-persistent buffer that was not stored so far."""
        found = self._unstored.pop_changing()
        self.running_buffers |= found
        return bool(found)

    def _names(self) -> dict[int, str]:
        """Return parameters' full names by identity; a tied one has its first."""
        names: dict[int, str] = {}
        for name, _, _, parameter in self._parameters():
            names.setdefault(id(parameter), name)
        return names

    def _add(
        self,
        found: dict[Any, TrackedTensor],
        name: str,
        container: Mapping[Any, Any],
        key: Any,
        tensor: torch.Tensor,
        sharing: Sharing,
        *,
        parameter: bool,
        location: TensorPlacement | None = None,
    ) -> None:
        """Add a tensor's parts; ``location`` is set for optimizer state."""
        parts = local_parts(name, tensor)
        if sharing is Sharing.EQUAL or location is not None:
            self._identity.add_tensor(container, key, tensor, check_shape=location is None)
        else:
            self._identity.add_volatile(container, key, tensor)
        for local, box in parts:
            identity = (local.data_ptr(), local.size(), local.stride(), local.dtype) if local.numel() else id(tensor)
            first = found.get(identity)
            if first is None:
                kind, shape = location or TensorPlacement.UNKNOWN, tuple(tensor.shape)
                here = TrackedTensor(
                    name,
                    shape,
                    box,
                    local,
                    sharing,
                    parameter,
                    container,
                    key,
                    kind,
                    tensor,
                    is_moment=location is not None,
                )
                found[identity] = here
            elif location is not None and name != first.name:
                self._tied[first.name][name] = None

    def _add_shard(self, found: dict[Any, TrackedTensor], name: str, shard: Shard) -> None:
        require_dense(name, shard.local)
        self._identity.add_sharded(shard.container, shard.key)
        found["shard", name, shard.box] = TrackedTensor(
            name,
            shard.shape,
            shard.box,
            shard.local.detach(),
            Sharing.EQUAL,
            False,
            shard.container,
            shard.key,
            TensorPlacement.UNKNOWN,
            shard.container[shard.key],
        )

    def _add_array(self, found: dict[Any, TrackedTensor], name: str, part: ArrayPart) -> None:
        """Add an array's part; two arrays are never tied, even if they are one object at present."""
        if not self._exclude.excludes(name):
            found[name, part.box] = TrackedTensor(
                name,
                part.shape,
                part.box,
                part.local,
                Sharing.EQUAL,
                is_parameter=True,
                container={name: part.local},
                key=name,
                location=TensorPlacement.UNKNOWN,
                original=part.local,
                is_replaced=True,
            )

    def _sharing_of(self, name: str, buffer: torch.Tensor) -> Sharing:
        """Return how ranks share a buffer: one that training changes is rank 0's under DDP, else each rank's own."""
        if isinstance(buffer, DTensor):
            return Sharing.EQUAL
        supported.require_dense(name, buffer)
        settled = self._settled.get(name)
        if name not in self._changing and settled is not None and settled.is_unchanged(buffer):
            self._buffer_records.append(settled)
            return Sharing.EQUAL
        self._changing.add(name)
        return Sharing.FIRST_RANK if name.startswith(self._broadcast) else Sharing.PER_RANK

    def _parameters(self) -> Iterator[_Named]:
        for top, prefix, module in self._all_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    supported.refuse_fsdp1(top, parameter)
                    yield f"{prefix}.{key}", module._parameters, key, parameter

    def _buffers(self, *, stored: bool = True) -> Iterator[_Named]:
        for _, prefix, module in self._all_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}"
                is_stored = key not in module._non_persistent_buffers_set or name in self.running_buffers
                if buffer is not None and is_stored == stored:
                    yield name, module._buffers, key, buffer

    def _all_modules(self) -> Iterator[tuple[str, str, torch.nn.Module]]:
        for top, root in self._modules:
            for name, module in named_modules(top, root):
                yield top, name, module

    def _moments(self) -> Iterator[_Named]:
        for top, optimizer in self._optimizers:
            self._identity.add_optimizer(optimizer)
            for fqn, parameter, _ in self._trained(optimizer):
                state = optimizer.state.get(parameter)
                if state is None:
                    continue
                self._identity.add_state(state)
                self._exclude.require_whole(f"{top}.{fqn}", state)
                for key, value in state.items():
                    name = f"{top}.{fqn}.{key}"
                    if self._exclude.excludes(name):
                        continue
                    if not isinstance(value, torch.Tensor):
                        self._scalars.append((top, optimizer, fqn, state, key))
                        continue
                    if not isinstance(key, str):
                        raise TypeError(
                            f"{top} has a tensor of {fqn} under {key!r}, which is a {type(key).__qualname__}: "
                            "state is stored and found by names, so take a string for the key"
                        )
                    supported.refuse_own_shard(name, parameter, value)
                    self._locations[name] = location_of(parameter, value)
                    yield name, state, key, value

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        for key, sharded in self._sharded.items():
            for optimizer in sharded.optimizers:
                self._identity.add_states_of(optimizer)
            for shard in sharded.shards():
                name = f"{key}.{shard.name}"
                if not self._exclude.excludes(name):
                    yield name, shard

    def _trained(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield parameters with their names and groups; one in no tracked module is named by its position."""
        for _, index, group in self._all_groups():
            if any(group is own for own in optimizer.param_groups):
                for name, parameter in zip(self._names_in(group, index), group["params"], strict=True):
                    yield name, parameter, group

    def layout(self, tensors: list[TrackedTensor], rank: int, world: int) -> Layout:
        """Return this rank's layout, for the plan."""
        aliases, groups = {**find_aliases(self._modules, tensors)}, self._groups()
        for name, others in self._tied.items():
            aliases[name] = (*aliases.get(name, ()), *others)
        return Layout(tuple(t.to_part(rank, world, aliases.get(t.name, ()), groups.get(t.name, ())) for t in tensors))

    def _groups(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return which optimizers train a parameter, each with the index of its parameter group."""
        groups: dict[str, tuple[tuple[str, int], ...]] = {}
        for top, index, group in self._all_groups():
            for name in (self._fqns.get(id(parameter)) for parameter in group["params"]):
                if name is not None:
                    groups[name] = (*groups.get(name, ()), (top, index))
        return groups

    def restore_targets(self, catalog: tuple[TensorInfo, ...]) -> list[tuple[int, TrackedTensor]]:
        """Return the live tensors to fill, each with its index in ``catalog``. Creates missing optimizer state. Raises
        NotRestorable if a tensor was not stored, or differs from the stored one."""
        self._stored = StoredNames(catalog, [top for top, _ in self._optimizers])
        index_of = self._stored.index_of
        self._changing.update(tensor.name for tensor in catalog if tensor.per_rank)
        self.running_buffers = set()
        self.running_buffers = {name for name, *_ in self._buffers(stored=False) if name in index_of}
        self._changing |= self.running_buffers
        self._own_moments = frozenset(tensor.name for tensor in catalog if tensor.per_rank)
        self._unstored = UnstoredBuffers(self._included(self._buffers(stored=False)))
        self._create_moments(catalog)
        for key, sharded in self._sharded.items():
            here = ((t.name.removeprefix(f"{key}."), t) for t in catalog if t.name.startswith(f"{key}."))
            sharded.create_missing({name: dtype_of(tensor.dtype) for name, tensor in here})
        live = [t for t in self.tensors() if t.name in index_of or t.name not in self._rank_markers]
        refuse_other_model(live, index_of, catalog)
        refuse_other_groups(live, index_of, catalog, self._groups(), {top for top, _ in self._optimizers})
        self._separately_stored = self._stored.separately_stored(live, find_aliases(self._modules, live))
        live = list(self._with_fresh_arrays(live))
        return [
            *((index_of[t.name], t) for t in live),
            *((index_of[name], beside) for name, _, beside in self._separately_stored),
        ]

    def _with_fresh_arrays(self, live: Sequence[TrackedTensor]) -> Iterator[TrackedTensor]:
        """Yield the tensors, arrays with fresh memory: the object itself gets other arrays by ``adopt_arrays``."""
        fresh: dict[tuple[str, Box], torch.Tensor] = {}
        names = {tensor.name for tensor in live if tensor.is_replaced}
        for (top, source), parts in zip(self._arrays, self._array_parts, strict=True):
            mine = {part.name for part in parts if f"{top}.{part.name}" in names}
            fresh |= {(f"{top}.{part.name}", part.box): part.local for part in source.make_restore_parts(mine)}
        for tensor in live:
            is_fresh = tensor.is_replaced
            yield msgspec.structs.replace(tensor, local=fresh[tensor.name, tensor.box]) if is_fresh else tensor

    def adopt_arrays(self) -> None:
        """Make arrays of the memory that was filled."""
        for _, source in self._arrays:
            source.adopt_restored()

    def _create_moments(self, catalog: tuple[TensorInfo, ...]) -> None:
        wanted: dict[str, list[tuple[str, TensorInfo]]] = {}
        for tensor in catalog:
            for name in self._stored.names_of(tensor.name):
                if not self._exclude.excludes(name):
                    prefix, _, key = name.rpartition(".")
                    wanted.setdefault(prefix, []).append((key, tensor))
        tied = {tensor.name for tensor in catalog if tensor.aliases}
        live = chain(self._parameters(), self._buffers()) if tied else ()
        one = {name: tensor.detach() for name, _, _, tensor in live if name in tied}
        for top, optimizer in self._optimizers:
            for fqn, parameter, group in self._trained(optimizer):
                for key, tensor in wanted.get(f"{top}.{fqn}", ()):
                    state = optimizer.state[parameter]
                    if key not in state:
                        known = one.get(tensor.name)
                        shape = tensor.shape[1:] if tensor.per_rank else tensor.shape
                        here = msgspec.structs.replace(tensor, shape=shape)
                        made = allocate_state(optimizer, group, parameter, key, here) if known is None else known
                        state[key] = made
                    if tensor.aliases:
                        one.setdefault(tensor.name, state[key])

    def capture(self) -> Blob:
        """Capture all Python state. Raises TypeError with an unstorable value's path, or ConfigurationError."""
        if not self._has_searched:
            self.tensors()
        scalars: dict[str, dict[str, dict[str, Any]]] = {}
        for top, optimizer, fqn, state, key in self._scalars:
            scalars.setdefault(top, {}).setdefault(fqn, {})[key] = optimizer_state.to_store(optimizer, state[key])
        for top, shared in optimizer_state.shared_state(self._optimizers):
            scalars.setdefault(top, {})[optimizer_state.SHARED_KEY] = shared
        if self._packed is None:
            self._packed = [
                python_state.pack_names(self._names_in(group, index)) for _, index, group in self._all_groups()
            ]
        groups: dict[str, list[ParameterGroup]] = {}
        for packed, (top, _, group) in zip(self._packed, self._all_groups(), strict=True):
            groups.setdefault(top, []).append(ParameterGroup(packed, python_state.group_options(group)))
        extra = {name: module.get_extra_state() for name, module in self._extra}
        objects = {key: python_state.get_state_dict(tracked) for key, tracked in self._others.items()}
        return python_state.encode(PythonState(groups, scalars, extra, objects))

    def python_names(self) -> frozenset[StateName]:
        """Return all names that ``load_python`` needs."""
        if not self._has_searched:
            self.tensors()
        trained = ((top, fqn) for top, optimizer in self._optimizers for fqn, *_ in self._trained(optimizer))
        return frozenset((*trained, *(("", name) for name, _ in self._extra), *((key, "") for key in self._others)))

    def require_python(self, stored: MergedState) -> None:
        """Raise NotRestorable if ``load_python`` would miss something or would have to mix different states."""
        for name, state, other in self._separately_stored:
            if not has_same_values(state.local, other.local):
                raise NotRestorable(
                    f"{name} and {state.name} now share one tensor but were stored separately with different values: "
                    "untie them, or start from weights where they are equal"
                )
        self._separately_stored = []
        for top, index, group in self._all_groups():
            stored.options(top, index, self._stored_names(stored, top, self._names_in(group, index)))
        for top, optimizer in self._optimizers:
            if optimizer_state.has_joint_state(optimizer):
                optimizer_state.require_same_parameters(
                    top, stored.members(top), [name for name, *_ in self._trained(optimizer)]
                )
        stored.require(self.python_names())

    def load_python(self, stored: MergedState) -> None:
        """Load stored Python state into the objects. Raises NotRestorable if they differ from the stored ones."""
        members: dict[str, list[list[str]]] = defaultdict(list)
        for top, index, group in self._all_groups():
            names = self._stored_names(stored, top, self._names_in(group, index))
            python_state.load_options(group, stored.options(top, index, names))
            members[top].append(names)
        for top, optimizer in self._optimizers:
            for fqn, parameter, _ in self._trained(optimizer):
                (name,) = self._stored_names(stored, top, [fqn])
                if scalars := stored.scalars(top, name):
                    optimizer.state[parameter].update(optimizer_state.to_live(optimizer, parameter, scalars))
            optimizer_state.load_shared(optimizer, stored.scalars(top, optimizer_state.SHARED_KEY))
        stored.require(self.python_names())
        for name, module in self._extra:
            if name in stored.extra:
                module.set_extra_state(stored.extra[name])
        for key, tracked in self._others.items():
            top = next(
                (top for top, optimizer in self._optimizers if getattr(tracked, "optimizer", None) is optimizer), ""
            )
            alone = [key for key, _ in self._optimizers].count(top) == 1
            tracked.load_state_dict(stored.schedule(key, top, members[top]) if alone else stored.objects[key])
        self.adopt_arrays()

    def _all_groups(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield every parameter group, with its optimizer's key and its number among the groups under that key."""
        counts: dict[str, int] = {}
        for top, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                index = counts[top] = counts.get(top, -1) + 1
                yield top, index, group

    def _names_in(self, group: dict[str, Any], index: int) -> list[str]:
        return [self._fqns.get(id(p), f"group{index}.{i}") for i, p in enumerate(group["params"])]

    def _stored_names(self, stored: MergedState, top: str, names: list[str]) -> list[str]:
        return [next((n for n in self._stored.all_names(name) if stored.has_parameter(top, n)), name) for name in names]
