"""Whether a model looks as if one replica of it took several ranks, for a word to who has not said so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks.tracked_objects import several

log = logging.getLogger(__name__)


def warn_of_model_parallelism(tracked: Iterable[object], world_size: int) -> None:
    """To be asked where nobody said what a replica is: a line in the log where it seems to be more than one rank."""
    sign = sign_of_model_parallelism(tracked, world_size)
    if sign:
        log.warning(
            "%s, and run.data_parallel was not called: each of %d ranks has samples and random numbers of its own. "
            'Say which ranks are one replica, by run.data_parallel(mesh["dp"]), or that each is one, by '
            "run.data_parallel((run.rank, run.world_size))",
            sign,
            world_size,
        )


def sign_of_model_parallelism(tracked: Iterable[object], world_size: int) -> str:
    """What in the modules among ``tracked`` (or in lists there) looks so; empty where nothing does.

    Stages of a pipeline are not seen where they are plain modules.
    """
    for one in tracked:
        for module in several(one):
            if isinstance(module, nn.Module):
                for sign in _signs(module, "", sharded=False, world_size=world_size):
                    return sign
    return ""


def _signs(module: nn.Module, name: str, *, sharded: bool, world_size: int) -> Iterator[str]:
    """``sharded``: by fully_shard, which is data parallelism, as part of a module further out."""
    if isinstance(module, DistributedDataParallel) and (size := dist.get_world_size(module.process_group)) < world_size:
        yield f"a model is replicated over {size} of {world_size} ranks"
    sharded = sharded or isinstance(module, FSDPModule)
    parameters: Mapping[str, torch.Tensor | None] = module._parameters
    for key, parameter in parameters.items():
        if isinstance(parameter, DTensor) and (how := _how(parameter, sharded, world_size)):
            yield f"{name}{key} {how}"
    for key, part in module.named_children():
        yield from _signs(part, f"{name}{key}.", sharded=sharded, world_size=world_size)


def _how(parameter: DTensor, sharded: bool, world_size: int) -> str:
    mesh, placements = parameter.device_mesh, parameter.placements
    hybrid = len(placements) > 1 and isinstance(placements[0], Replicate)
    of_data = (2 if hybrid else 1) if sharded else 0  # fully_shard's dimensions come first
    for dim in range(of_data, mesh.ndim):
        if mesh.size(dim) > 1 and not isinstance(placements[dim], Replicate):
            return f"is split over {mesh.size(dim)} ranks"
    return f"is sharded over {mesh.size()} of {world_size} ranks" if sharded and mesh.size() < world_size else ""
