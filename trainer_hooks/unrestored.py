"""What of replicated models no restore brings: excluded tensors, buffers that are not persistent, untracked modules.

DistributedDataParallel's constructor sends rank 0's state to all. Where a version will be restored that is left out:
the restore makes replicas equal. But not in what is no part of it, which each rank's program made for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from trainer_hooks.module_names import named_modules
from trainer_hooks.sdc.digest import WeightedDigest
from trainer_hooks.snapshot.exclude import Exclusions
from trainer_hooks.tracked_objects import TrackedObjects


class Unrestored:
    """The replicated models of a generation that restores a version."""

    def __init__(self) -> None:
        self._models: list[tuple[nn.Module, frozenset[str], dist.ProcessGroup | None]] = []

    def add(self, model: nn.Module, group: dist.ProcessGroup | None = None, *, ignored: Iterable[str] = ()) -> None:
        """A model with replicas on the ranks of ``group`` (None: on all). ``ignored``: names that are a rank's own."""
        self._models.append((model, frozenset(ignored), group))

    def send(self, objects: Mapping[str, object], exclude: Iterable[str]) -> None:
        """After the restore of ``objects`` without ``exclude``: gives all replicas what rank 0's program made.

        A collective. Ranks compare digests first, since mostly all have read or computed the same.
        """
        restored = {id(tensor) for tensor in _restored(objects, exclude)}
        for model, ignored, group in self._models:
            tensors = [tensor for tensor in _replicated(model, ignored) if id(tensor) not in restored]
            if tensors and not _alike(tensors, group):
                _send_first_ranks(tensors, group)


def _restored(objects: Mapping[str, object], exclude: Iterable[str]) -> Iterator[torch.Tensor]:
    exclusions = Exclusions(exclude)
    for top, root in TrackedObjects(objects).modules:
        for name, module in named_modules(top, root):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                stored = key not in module._non_persistent_buffers_set and not exclusions.covers(f"{name}.{key}")
                if tensor is not None and stored:
                    yield tensor


def _replicated(model: nn.Module, ignored: frozenset[str]) -> Iterator[torch.Tensor]:
    """Not shards, which are no replicas."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dense = not isinstance(tensor, DTensor) and not is_lazy(tensor) and tensor.layout is torch.strided
        if dense and tensor.numel() and name not in ignored:
            yield tensor


def _alike(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> bool:
    own = WeightedDigest(tensors).start().reshape(1)
    everybodys = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, own, group=group)
    return len(set(torch.cat(everybodys).tolist())) == 1


def _send_first_ranks(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    first = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=first, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
