"""What a training function tracks, sorted: modules, optimizers and other objects, lists of them one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from everstep_trainer.data.loader import Loader
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.data.stream import StreamSampler
from everstep_trainer.state.blob import refuse_zero

# ---- module names
# Names of a model's parts as they would be, had nobody wrapped them.

_INSIDE = ".module"
"""Where DistributedDataParallel has what it replicates."""
_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


def strip_wrapper_names(name: str) -> str:
    """``name`` without what torch's wrappers that have a name of their own add to it."""
    return _WRAPPERS.sub("", name)


def named_modules(
    top: str, root: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """``root.named_modules``, named below ``top`` as without compilation, checkpointing and DistributedDataParallel,
    wherever they stand: a model that is compiled around its replica has the names that it has on one rank alone.

    A wrapper and what is in it have one name.
    """
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


def find_replicas(top: str, root: torch.nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Those parts, with their names."""
    for name, module in named_modules(top, root):
        if isinstance(module, DistributedDataParallel):
            yield name, module


class TrackedObjects:
    """The objects by what they are, each with the key under which it is tracked, in the order in which they came.

    ``broadcast_modules``: names of modules whose buffers DDP sends from rank 0. Raises TypeError for what has no state
    to keep, or was sharded by ZeroRedundancyOptimizer.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.broadcast_modules: set[str] = set()
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.others: dict[str, Any] = {}
        for key, tracked in objects.items():
            for one in as_list(tracked):
                self._sort_in(key, one)

    def _sort_in(self, key: str, tracked: object) -> None:
        if isinstance(tracked, torch.nn.Module):
            self.modules.append((key, tracked))
            self.broadcast_modules |= {
                name for name, replicas in find_replicas(key, tracked) if replicas.broadcast_buffers
            }
        elif isinstance(tracked, torch.optim.Optimizer):
            refuse_zero(key, tracked)
            self.optimizers.append((key, tracked))
        elif hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict"):
            self.others[key] = tracked
        else:
            raise TypeError(f"{key} is a {type(tracked).__qualname__}, {_fix_hint(tracked)}")


def _fix_hint(tracked: object) -> str:
    if isinstance(tracked, ElasticSampler | Loader | StreamSampler):
        return "which has nothing to keep, since samples are a function of the step: leave it out"
    if isinstance(tracked, DataLoader | Sampler):
        return "which cannot say how far it is: take run.loader or run.sampler, whose samples follow from the step"
    one = "track each of its members under a name of its own, " if isinstance(tracked, list | tuple | dict) else ""
    return f"which has no state_dict and load_state_dict: {one}give it both, or leave it out"


def as_list(tracked: object) -> Sequence[object]:
    """A list of modules or of optimizers one by one; anything else alone."""
    if isinstance(tracked, list | tuple) and tracked:
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            if all(isinstance(one, kind) for one in tracked):
                return tracked
    return (tracked,)
