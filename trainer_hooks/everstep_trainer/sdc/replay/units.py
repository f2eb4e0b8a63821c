"""Find the units of a model: the parts whose forward and backward passes are audited one at a time.

A unit is a module that training calls. Blocks become units first: submodules that ``fully_shard`` has sharded,
compiled modules, checkpoint wrappers, and the elements of containers whose class repeats, such as the layers of a
transformer. Beside the blocks, each largest module that holds none becomes a unit, such as the embedding and the head;
a model without blocks is one unit, with its loss if its ``forward`` returns it. No module is in two units. Code in the
``forward`` of a module that holds units belongs to none of them.

If no block of a model can be computed again by itself, the whole model is the unit. A tracked module without parameters
beside a trained model is taken for its loss, and is a unit, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.state.tracked_objects import as_list, strip_wrapper_names

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Unit:
    """A part of a model.

    Attributes:
        name: Its path, as if nothing were wrapped.
        module: The module that training calls.
        shards: The module of ``fully_shard`` that gathers the unit's parameters; None: they are whole.
        changing_buffers: Names of buffers that its forward pass has changed; None before the first one was seen.
        is_block: It is one of the repeated parts that make up most of a model.
        whole: The whole model, which takes the unit's place if no block can be replayed; None: it cannot be called.
    """

    name: str
    module: nn.Module
    shards: FSDPModule | None = None
    changing_buffers: set[str] | None = None
    is_block: bool = False
    whole: Unit | None = None

    @property
    def is_compiled_in_place(self) -> bool:
        """``module.compile()`` was called, so that its hooks are part of the compiled code."""
        return not isinstance(self.module, OptimizedModule) and self.module._compiled_call_impl is not None

    def statistics(self) -> Iterator[str]:
        """Yield the names of buffers that may change in other calls, if not in the first one: running statistics."""
        for path, module in self.module.named_modules():
            if isinstance(module, _NormBase):
                yield from (f"{path}.{key}".lstrip(".") for key, _ in module.named_buffers(recurse=False))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the unit's parameters whole. A collective if they are sharded."""
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if self.shards is None or not is_sharded:
            yield
            return
        self.shards.unshard()
        try:
            yield
        finally:
            self.shards.reshard()


class LeftOut(NamedTuple):
    """A module whose own work no unit covers, and why."""

    name: str
    module: nn.Module
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Units:
    """The units of a run's models, in the order of the modules, and the modules that none covers."""

    units: tuple[Unit, ...]
    left_out: tuple[LeftOut, ...]


def find_units(objects: Mapping[str, object]) -> Units:
    """Return the units of the tracked modules, the same on all ranks: of models with trained parameters and losses."""
    models = [
        (key, item) for key, tracked in objects.items() for item in as_list(tracked) if isinstance(item, nn.Module)
    ]
    trained = [(key, model) for key, model in models if any(p.requires_grad for p in model.parameters())]
    division = _UnitFinder()
    for key, model in trained:
        division.divide_model(key, model, is_only=len(trained) == 1)
    for key, model in models if trained else ():
        if next(model.parameters(), None) is None:
            division.divide_model(key, model, is_only=False)
    return Units(tuple(division.units), tuple(division.left_out))


class _UnitFinder:
    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.left_out: list[LeftOut] = []
        self._seen: set[int] = set()
        self._repeated: set[int] = set()
        self._key = ""

    def divide_model(self, key: str, model: nn.Module, *, is_only: bool) -> None:
        self._repeated = _repeated_elements(model)
        self._key = key
        before = len(self.units)
        self._divide("" if is_only else key, model, None)
        whole = _whole_unit(key, model)
        for unit in self.units[before:]:
            unit.whole = None if whole is None or unit.module is whole.module else whole

    def _divide(self, path: str, module: nn.Module, shards: FSDPModule | None) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        name = strip_wrapper_names(path).strip(".") or self._key
        if isinstance(module, DistributedDataParallel):
            self._divide(path, module.module, None)
            return
        if isinstance(module, FullyShardedDataParallel):
            self.left_out.append(LeftOut(name, module, "FullyShardedDataParallel: use fully_shard"))
            return
        is_block = self._is_block(module, shards)
        shards = module if isinstance(module, FSDPModule) else shards
        is_compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
        if is_compiled and (wrapper := _communicating_wrapper(module)):
            reason = f"compiled around {wrapper}: compile the model or its blocks inside"
            self.left_out.append(LeftOut(name, module, reason))
            return
        inner = [child for child in module.modules() if child is not module]
        is_whole = is_block or not any(self._is_block(child, shards) for child in inner)
        reason = _describe_collectives(module)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            can_be_called = not reason and not any(isinstance(child, FSDPModule) for child in inner)
            if is_whole and can_be_called and not any(_describe_collectives(child) for child in inner):
                self._add(name, module, shards, is_block=is_block)
                return
            if reason or is_compiled:
                self.left_out.append(LeftOut(name, module, reason or "compiled, with collectives inside"))
            if is_compiled:
                self._seen.update(id(child) for child in inner)
                return
        for key, child in module.named_children():
            self._divide(f"{path}.{key}", child, shards)

    def _add(self, name: str, module: nn.Module, shards: FSDPModule | None, *, is_block: bool) -> None:
        if isinstance(module, nn.Identity):
            return
        self._seen.update(id(submodule) for submodule in module.modules())
        shards = shards if next(module.parameters(), None) is not None else None
        self.units.append(Unit(name, module, shards, is_block=is_block))

    def _is_block(self, module: nn.Module, shards: FSDPModule | None) -> bool:
        return (
            isinstance(module, OptimizedModule | CheckpointWrapper)
            or module._compiled_call_impl is not None
            or (shards is not None and isinstance(module, FSDPModule))
            or id(module) in self._repeated
        )


def _whole_unit(key: str, model: nn.Module) -> Unit | None:
    """Return the model as one unit; None if one rank alone cannot call it, or if it is one module."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    inner = [module for module in model.modules() if module is not model]
    shards = model if isinstance(model, FSDPModule) else None
    if isinstance(model, FullyShardedDataParallel | nn.ModuleList | nn.ModuleDict) or not inner:
        return None
    if any(
        isinstance(module, FSDPModule) or _describe_collectives(module) for module in inner
    ) or _describe_collectives(model):
        return None
    return Unit(key, model, shards)


def _communicating_wrapper(module: nn.Module) -> str:
    for submodule in module.modules():
        if isinstance(submodule, DistributedDataParallel) or (
            submodule is not module and isinstance(submodule, FSDPModule)
        ):
            return "DistributedDataParallel" if isinstance(submodule, DistributedDataParallel) else "fully_shard"
    return ""


def _describe_collectives(module: nn.Module) -> str:
    """Return why a module's own forward cannot be called on one rank alone, or an empty string."""
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm: its forward pass contains collectives"
    if isinstance(module, DistributedDataParallel):
        return "a DistributedDataParallel inside the model"
    for name, value in vars(module).items():
        if isinstance(value, dist.ProcessGroup | DeviceMesh):
            return f"{type(module).__name__}.{name} is a process group: its forward pass may contain collectives"
    return ""


def _repeated_elements(model: nn.Module) -> set[int]:
    """Return the ids of the elements of containers whose class has the most parameters of all that repeat.

    A class counts if its elements have submodules: single layers in a row are better audited together.
    """
    elements: dict[type[nn.Module], dict[int, nn.Module]] = defaultdict(dict)
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if next(child.children(), None) is not None:
                    elements[type(child)][id(child)] = child
    repeated = [list(found.values()) for found in elements.values() if len(found) > 1]
    if not repeated:
        return set()
    largest = max(repeated, key=lambda found: (sum(_count_parameters(block) for block in found), len(found)))
    return {id(block) for block in largest}


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not _is_lazy(parameter))


def _is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)
