"""What a training function tracks, sorted: modules, optimizers and other objects, lists of them one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from trainer_hooks.data import ElasticSampler
from trainer_hooks.loading.loader import Loader
from trainer_hooks.loading.stream import StreamSampler
from trainer_hooks.module_names import replicas_in
from trainer_hooks.snapshot.refusals import refuse_zero


class TrackedObjects:
    """The objects by what they are, each with the key under which it is tracked, in the order in which they came.

    ``broadcast``: names of modules whose buffers DDP sends from rank 0. Raises TypeError for what has no state to keep,
    or was sharded by ZeroRedundancyOptimizer.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.broadcast: set[str] = set()
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.others: dict[str, Any] = {}
        for key, tracked in objects.items():
            for one in several(tracked):
                self._sort_in(key, one)

    def _sort_in(self, key: str, tracked: object) -> None:
        if isinstance(tracked, torch.nn.Module):
            self.modules.append((key, tracked))
            self.broadcast |= {name for name, replicas in replicas_in(key, tracked) if replicas.broadcast_buffers}
        elif isinstance(tracked, torch.optim.Optimizer):
            refuse_zero(key, tracked)
            self.optimizers.append((key, tracked))
        elif hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict"):
            self.others[key] = tracked
        else:
            raise TypeError(f"{key} is a {type(tracked).__qualname__}, {_mend(tracked)}")


def _mend(tracked: object) -> str:
    if isinstance(tracked, ElasticSampler | Loader | StreamSampler):
        return "which has nothing to keep, since samples are a function of the step: leave it out"
    if isinstance(tracked, DataLoader | Sampler):
        return "which cannot say how far it is: take run.loader or run.sampler, whose samples follow from the step"
    one = "track each of its members under a name of its own, " if isinstance(tracked, list | tuple | dict) else ""
    return f"which has no state_dict and load_state_dict: {one}give it both, or leave it out"


def several(tracked: object) -> Sequence[object]:
    """A list of modules or of optimizers one by one; anything else alone."""
    if isinstance(tracked, list | tuple) and tracked:
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            if all(isinstance(one, kind) for one in tracked):
                return tracked
    return (tracked,)
