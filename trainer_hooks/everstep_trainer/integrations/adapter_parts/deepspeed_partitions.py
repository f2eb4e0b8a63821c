"""Find the master weights of each parameter in the flat tensors of DeepSpeed's optimizers.

ZeRO 1 and 2 lay the parameters of a group one behind the other and give each rank an equal part. ZeRO 3 cuts each
parameter. Without ZeRO every rank has all of them. The attributes read here are private, of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from everstep.layout.manifests import Box
from everstep_trainer.state.sharded_state import Shard


class ParameterRange(NamedTuple):
    """The elements of a parameter from ``start`` on lie at ``offset`` of a flat tensor."""

    name: str
    numel: int  # of the whole parameter
    start: int
    offset: int
    length: int


class Flat(NamedTuple):
    """A tensor ``holder[at]`` that the basic optimizer updates for the parameters of group ``group``."""

    holder: Sequence[torch.Tensor]
    at: int
    group: int
    pieces: tuple[ParameterRange, ...]

    @property
    def tensor(self) -> torch.Tensor:
        return self.holder[self.at]

    def shards(self, key: str, container: Any, at: Any) -> Iterator[Shard]:
        """Yield the pieces of ``container[at]``, a tensor of this one's size, as shards ``key`` of their parameters."""
        whole = container[at].detach().view(-1)
        for piece in self.pieces:
            local = whole.narrow(0, piece.offset, piece.length)
            box = Box((piece.start,), (piece.length,))
            yield Shard(f"{piece.name}.{key}", (piece.numel,), box, local, container, at)


Names = Mapping[torch.Tensor, str]
Placed = tuple[str, int, int]
"""A parameter's name, number of elements, and offset in the flat tensor of all ranks."""


def cut(parameters: Iterable[Placed], low: int, high: int) -> tuple[ParameterRange, ...]:
    """Return the pieces of a group's parameters in elements ``low`` to ``high`` of its flat tensor."""
    found = []
    for name, numel, at in parameters:
        start, end = max(at, low), min(at + numel, high)
        if start < end:
            found.append(ParameterRange(name, numel, start - at, start - low, end - start))
    return tuple(found)


def in_sequence(group: Sequence[torch.Tensor], names: Names) -> list[Placed]:
    """Place a group's parameters one behind the other."""
    sizes = [parameter.numel() for parameter in group]
    offsets = itertools.accumulate(sizes[:-1], initial=0)
    return [(names[p], size, at) for p, size, at in zip(group, sizes, offsets, strict=True)]


def _stage_1_and_2_flats(optimizer: Any, names: Names, rank: int) -> Iterator[Flat]:
    for i, group in enumerate(optimizer.round_robin_bit16_groups):
        sizes = [meta.numel() for meta in optimizer.round_robin_bit16_meta[i]]
        placed = zip((names[p] for p in group), sizes, optimizer.round_robin_bit16_offsets[i], strict=True)
        low = rank * optimizer.partition_size[i]
        pieces = cut(placed, low, low + optimizer.partition_size[i])
        yield Flat(optimizer.single_partition_of_fp32_groups, i, i, pieces)


def _stage_3_flats(optimizer: Any, names: Names, rank: int) -> Iterator[Flat]:
    for i, group in enumerate(optimizer.fp16_groups):
        pieces, at = list[ParameterRange](), 0
        for parameter in group:
            if (length := stage_3_length(parameter, rank)) > 0:
                start = rank * parameter.partition_numel()
                pieces.append(ParameterRange(names[parameter], parameter.ds_numel, start, at, length))
            at += parameter.partition_numel()
        yield Flat(optimizer.fp32_partitioned_groups_flat, i, optimizer.sub_group_to_group_id[i], tuple(pieces))


def _bf16_flats(optimizer: Any, names: Names, rank: int) -> Iterator[Flat]:
    for i, group in enumerate(optimizer.bf16_groups):
        size = optimizer.fp32_groups_flat_partition[i].numel()
        pieces = cut(in_sequence(group, names), rank * size, (rank + 1) * size)
        yield Flat(optimizer.fp32_groups_flat_partition, i, i, pieces)


def _fp16_flats(optimizer: Any, names: Names, rank: int) -> Iterator[Flat]:
    for i, group in enumerate(optimizer.fp16_groups):
        pieces = cut(in_sequence(group, names), 0, optimizer.fp32_groups_flat[i].numel())
        yield Flat(optimizer.fp32_groups_flat, i, i, pieces)


def _fp16_unfused_flats(optimizer: Any, names: Names, rank: int) -> Iterator[Flat]:
    for i, group in enumerate(optimizer.fp16_groups):
        for j, parameter in enumerate(group):
            pieces = cut(in_sequence([parameter], names), 0, parameter.numel())
            yield Flat(optimizer.fp32_groups[i], j, i, pieces)


_LAYOUTS: dict[type, Callable[[Any, Names, int], Iterator[Flat]]] = {
    DeepSpeedZeroOptimizer: _stage_1_and_2_flats,
    DeepSpeedZeroOptimizer_Stage3: _stage_3_flats,
    BF16_Optimizer: _bf16_flats,  # ZeRO-1 in bfloat16 with gradients in float32
    FP16_Optimizer: _fp16_flats,  # no ZeRO, with DeepSpeed's fused Adam
    FP16_UnfusedOptimizer: _fp16_unfused_flats,  # no ZeRO, with any other optimizer
}


def flats_of(engine: DeepSpeedEngine) -> list[Flat]:
    """Return the flat tensors of an engine's optimizer; none if it is the basic one. Raises TypeError for another."""
    kind = type(engine.optimizer)
    if kind in _LAYOUTS:
        return list(_LAYOUTS[kind](engine.optimizer, engine.param_names, dist.get_rank()))
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return []
    raise TypeError(
        f"the engine's optimizer is a {kind.__qualname__}, whose layout is not known: use ZeRO stages 0 to 3 "
        "without ZenFlow and SuperOffload"
    )


def stage_3_length(parameter: Any, rank: int) -> int:
    """Return how many elements of a parameter, without padding, this rank has; not above zero if it has none."""
    size = int(parameter.partition_numel())
    return min(size, int(parameter.ds_numel) - rank * size)
