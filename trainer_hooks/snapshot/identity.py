"""Whether tracked tensors are still those that were found, in the same memory and shape: asked at every step.

The training thread pays for the answer, so it goes through ``map`` over methods written in C, one list for each
question, and shapes are asked of all tensors in one call: 0.1 us for optimizer state and 0.25 us for a parameter, as
long as the caches have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import chain, starmap
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

try:
    _Guards: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _Guards = None

_data_ptr, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_local_of = attrgetter("_local_tensor")
_form = attrgetter("dtype", "device", "shape")


class Identity:
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
        self._shapes_stand: Callable[[], bool] | None = None
        self._sharded: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._moving: list[tuple[Mapping[Any, Any], Any]] = []
        self._forms: list[tuple[Any, ...]] = []
        self._scalars: list[tuple[Mapping[Any, Any], Any]] = []

    # --- what was found

    def module(self, module: torch.nn.Module) -> None:
        """Which children it has, and how many parameters and buffers; ``tensor`` and ``moving`` say which."""
        for inside in (module._parameters, module._buffers, module._modules):
            self._size_of(inside)
        self._size_of(module._non_persistent_buffers_set)
        for key, child in module._modules.items():
            self._entry(module._modules, key, child)
        for inside in (module._parameters, module._buffers):
            for key in (key for key, tensor in inside.items() if tensor is None):
                self._entry(inside, key, None)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its parameters in their groups, and which of them have state."""
        self._attributes += [(optimizer, name, getattr(optimizer, name)) for name in ("state", "param_groups")]
        self._walk(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._entry(group, "params", group["params"])
            self._walk(group["params"])
        self._walk(optimizer.state)
        shared = not all(isinstance(key, torch.Tensor) for key in optimizer.state)
        self._walk(_OfParameters(optimizer.state) if shared else optimizer.state.values())

    def state(self, state: Mapping[str, Any]) -> None:
        """A parameter's state in an optimizer: what is no tensor in it may change, but not become one."""
        self._size_of(state)
        self._scalars += [(state, key) for key, value in state.items() if not isinstance(value, torch.Tensor)]

    def tensor(self, place: Mapping[Any, Any], key: Any, tensor: torch.Tensor, *, shaped: bool = True) -> None:
        """One whose memory is copied from as it was found.

        ``shaped``: it is also seen to be given another shape at the same address, as ``p.data = p.data[:n]`` does. That
        is asked of what users prune, and costs as much as all else; of optimizer state it need not be.
        """
        memory = tensor
        if isinstance(tensor, DTensor):
            memory = tensor._local_tensor
            self._sharded.append(tensor)
            self._locals.append(memory)
        self._entry(place, key, tensor)
        self._memories.append(memory)
        self._addresses.append(memory.data_ptr())
        if shaped:
            self._shaped.append(memory)
            self._sizes.append(memory.size())
            self._strides.append(memory.stride())

    def moving(self, place: Mapping[Any, Any], key: Any, tensor: torch.Tensor) -> None:
        """One that is asked for anew each time; another of the same form may stand in its place."""
        self._moving.append((place, key))
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

    def unchanged(self) -> bool:
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
        if self._shapes_stand is None:  # now, where later calls will come from: the answer depends on autocast, say
            # each once: to the guards a tensor that comes twice, as a tied one does, is not what they were made of
            once = {id(tensor): at for at, tensor in enumerate(self._shaped)}.values()
            self._shapes_stand = _shape_check(
                [self._shaped[at] for at in once], [self._sizes[at] for at in once], [self._strides[at] for at in once]
            )
        return self._shapes_stand()


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
