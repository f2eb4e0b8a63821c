"""Sort the tracked objects of a training function into modules, optimizers and others, and lists into their members."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from everstep_trainer.data.loader import Loader
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.state.arrays import ArraySource
from everstep_trainer.state.sharded_state import ShardedState
from everstep_trainer.state.supported import refuse_zero

_INSIDE = ".module"  # the attribute in which DistributedDataParallel holds its model
_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


def strip_wrapper_names(name: str) -> str:
    """Return ``name`` without the components that torch's wrappers add."""
    return _WRAPPERS.sub("", name)


def named_modules(
    top: str, root: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield ``root.named_modules``, named below ``top`` as if nothing were compiled, checkpointed or wrapped in DDP."""
    replicas: list[str] = []
    for name, module in root.named_modules(prefix=top, remove_duplicate=remove_duplicate):
        bare = name
        for replica in reversed(replicas):
            inside = replica + _INSIDE
            if name == inside or name.startswith(f"{inside}."):
                bare = replica + bare[len(inside) :]
        if isinstance(module, DistributedDataParallel):
            replicas.append(name)
        yield strip_wrapper_names(bare), module


class TrackedObjects:
    """The tracked objects by kind, each with its key, in order. Raises TypeError for one that cannot be stored."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.broadcast_modules: set[str] = set()  # names of modules whose buffers DDP broadcasts from rank 0
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.arrays: list[tuple[str, ArraySource]] = []  # which are among the others, too
        self.others: dict[str, Any] = {}
        for key, tracked in objects.items():
            for item in as_list(tracked):
                self._sort_in(key, item)

    def _sort_in(self, key: str, tracked: object) -> None:
        if isinstance(tracked, torch.nn.Module):
            self.modules.append((key, tracked))
            for name, module in named_modules(key, tracked):
                if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
                    self.broadcast_modules.add(name)
        elif isinstance(tracked, torch.optim.Optimizer):
            refuse_zero(key, tracked)
            self.optimizers.append((key, tracked))
        elif hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict"):
            self.others[key] = tracked
            if isinstance(tracked, ArraySource):
                self.arrays.append((key, tracked))
        else:
            raise TypeError(f"{key} is a {type(tracked).__qualname__}, {_fix_hint(tracked)}")


def _fix_hint(tracked: object) -> str:
    if isinstance(tracked, ElasticSampler | Loader):
        return "which has no state, since samples are a function of the step: leave it out"
    if isinstance(tracked, DataLoader | Sampler):
        return "which does not know its position: take run.loader or run.sampler, whose samples follow from the step"
    if isinstance(tracked, list | tuple | dict):
        members = tracked.values() if isinstance(tracked, dict) else tracked
        if tracked and all(isinstance(member, torch.nn.Module | torch.optim.Optimizer) for member in members):
            return "which has no state_dict and load_state_dict: track each of its members under a name of its own"
        return (
            "which has no state_dict and load_state_dict: hold its values in an object whose state_dict() returns "
            "them and whose load_state_dict(state) puts them back, and track that"
        )
    return "which has no state_dict and load_state_dict: give it both, or leave it out"


def as_list(tracked: object) -> Sequence[object]:
    """Return the members of a list of modules or of optimizers; any other object alone."""
    if isinstance(tracked, list | tuple) and tracked:
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            if all(isinstance(item, kind) for item in tracked):
                return tracked
    return (tracked,)


def holds_shards(objects: Mapping[str, object]) -> bool:
    """Return whether a rank may hold tracked state that no other rank holds, such as shards of ``fully_shard``."""
    for item in (item for tracked in objects.values() for item in as_list(tracked)):
        if isinstance(item, ShardedState):
            return True
        if isinstance(item, torch.nn.Module) and any(isinstance(each, DTensor) for each in item.parameters()):
            return True
    return False
