"""What is one tensor under several names: tied in a module, or shared by parameters in an optimizer.

What is tied in one layout may be apart in another: word embeddings that a pipeline has in its first stage and in its
last, each with optimizer state of its own, are one parameter on a single rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from everstep.errors import NotRestorable
from trainer_hooks.module_names import named_modules
from trainer_hooks.snapshot.layout import Tensor
from trainer_hooks.snapshot.live import TrackedTensor, same

Twin = tuple[str, TrackedTensor, TrackedTensor]
"""A name that was stored apart from that of a live tensor, which it is tied to now; this, and one to read into."""
Aliases = Mapping[str, tuple[str, ...]]
"""The other names of a tensor, by its first."""


def aliases_in(modules: Iterable[tuple[str, torch.nn.Module]], tensors: Iterable[TrackedTensor]) -> Aliases:
    """Those of tied tensors, and of those in modules that stand in several places."""
    first = {_memory(t.place[t.key]): t.name for t in tensors}
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
    """What two tensors have in common that are tied."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    dense = not is_lazy(local) and local.layout is torch.strided and local.numel()
    return (local.data_ptr(), local.size(), local.stride(), local.dtype) if dense else (id(tensor),)


def other_names(name: str, aliases: Aliases, optimizers: Iterable[str]) -> Iterator[str]:
    """Of a tensor, and of optimizer state where its parameter has them."""
    yield from aliases.get(name, ())
    for top in optimizers:
        if name.startswith(f"{top}."):
            parameter, _, key = name.removeprefix(f"{top}.").rpartition(".")
            yield from (f"{top}.{alias}.{key}" for alias in aliases.get(parameter, ()))


class StoredNames:
    """The names under which a version's tensors may be live.

    Args:
        catalog: of the version.
        optimizers: the keys under which they are tracked.
    """

    def __init__(self, catalog: tuple[Tensor, ...] = (), optimizers: Collection[str] = ()) -> None:
        self._optimizers = optimizers
        self._exact = {tensor.name: index for index, tensor in enumerate(catalog)}
        self._aliases = {tensor.name: tensor.aliases for tensor in catalog if tensor.aliases}
        self.index_of = dict(self._exact)
        for name, index in self._exact.items() if self._aliases else ():
            for other in other_names(name, self._aliases, optimizers):
                self.index_of.setdefault(other, index)
        self._alike = {one: (n, *others) for n, others in self._aliases.items() for one in (n, *others)}

    def of(self, name: str) -> Iterator[str]:
        """A stored tensor's names: its own, and those that no other was stored under."""
        yield name
        if self._aliases:
            yield from (n for n in other_names(name, self._aliases, self._optimizers) if n not in self._exact)

    def alike(self, name: str) -> tuple[str, ...]:
        """All names of what one of these was stored under."""
        return self._alike.get(name, (name,))

    def apart(self, live: Iterable[TrackedTensor], aliases: Aliases) -> list[Twin]:
        """What is tied now and was stored under several names: each but the first."""
        return [
            (other, tensor, msgspec.structs.replace(tensor, local=torch.empty_like(tensor.local)))
            for tensor in (live if aliases else ())
            for other in other_names(tensor.name, aliases, self._optimizers)
            if other in self._exact and self._exact[other] != self.index_of[tensor.name]
        ]


def require_alike(twins: Iterable[Twin]) -> None:
    """Raises NotRestorable where what is tied now was stored apart with other values."""
    for name, one, other in twins:
        if not same(one.local, other.local):
            raise NotRestorable(
                f"{name} and {one.name} are one tensor now, and were stored apart, with different "
                "values: keep them apart, or begin with weights in which they are alike"
            )
