"""Replicate a model with gradients that do not depend on DistributedDataParallel's buckets.

DistributedDataParallel rearranges its buckets after its first step, and a ring all-reduce adds each element in an order
that depends on its place in the bucket. So the first step after a regroup would round differently from an undisturbed
run. Here every element is added in the order of ranks: an all-to-all gives each rank its part of all gradients, the
rank adds them, and an all-gather returns the sums. The traffic equals a ring's.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the hook's annotations as objects.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.runtime.progress import CollectiveTimer

GradientExchange = tuple[dist.ProcessGroup | None, CollectiveTimer]
"""State of the hook: the group (None: the default one), and a timer of its collectives."""


class ExchangeObserver(Protocol):
    """Reads gradients at the steps of their exchange, and changes nothing."""

    def on_local(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], slices: torch.Tensor
    ) -> None:
        """Read this rank's gradients before the exchange. Row ``r`` of ``slices`` goes to rank ``r``."""

    def on_received(self, slices: torch.Tensor) -> None:
        """Read what this rank received: row ``r`` came from rank ``r``."""

    def on_sum(self, total: torch.Tensor) -> None:
        """Read this rank's slice of the sum over all ranks."""


_observer: ExchangeObserver | None = None


def observe_exchanges(observer: ExchangeObserver | None) -> None:
    """Let ``observer`` read all exchanges of this process from now on; None: nobody."""
    global _observer  # DistributedDataParallel keeps the hook's state, which cannot be exchanged later
    _observer = observer


def mean_in_rank_order(
    exchange: GradientExchange,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported at run time
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks in their order: a DDP hook. Blocks: gloo's callbacks must start no collectives."""
    buffer, (group, timer) = bucket.buffer(), exchange
    world = dist.get_world_size(group)
    padding = -buffer.numel() % world
    padded = nn.functional.pad(buffer, (0, padding)) if padding else buffer
    everybodys = torch.empty_like(padded)
    observer = _observer
    if observer is not None:
        observer.on_local(bucket.parameters(), bucket.gradients(), padded.view(world, -1))
    with timer.measure(buffer.device):
        dist.all_to_all_single(everybodys, padded, group=group)
    parts = everybodys.view(world, -1)
    if observer is not None:
        observer.on_received(parts)
    mine = parts[0]
    for other in parts[1:]:
        mine += other
    if observer is not None:
        observer.on_sum(mine)
    mine /= world
    with timer.measure(buffer.device):
        all_gather(padded, mine, group=group)
    if padding:
        buffer.copy_(padded[: buffer.numel()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def refuse_sparse(module: nn.Module, cannot: str) -> None:
    """Raise TypeError for a part with sparse gradients, by name; ``cannot``: what is not possible with them."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise TypeError(f"{name} has sparse gradients, which cannot {cannot}")


def replicate(
    module: nn.Module,
    *,
    exact: bool,
    equal_already: bool,
    on_wait: Callable[[float], object] = bool,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Return ``module`` in a DistributedDataParallel over ``process_group`` (None: all ranks).

    Args:
        exact: Add gradients in the order of ranks, without overlap of communication with the backward pass. Raises
            TypeError for sparse gradients.
        equal_already: Every replica will be restored from one checkpoint, so the constructor need not broadcast rank
            0's parameters (25 to 35 ms for 2.1 M parameters over loopback).
        on_wait: Receives the seconds that each collective of an exact replica took.
        options: Passed to DistributedDataParallel.
    """
    if exact:
        refuse_sparse(module, "be added in the order of ranks: take sparse=False, or run.replicate(model, exact=False)")
    exact = exact and dist.get_world_size(process_group) > 1
    if exact:
        options.setdefault("bucket_cap_mb", 256)  # one bucket: without overlap, more buckets only cost latency
    replicas = DistributedDataParallel(module, process_group=process_group, init_sync=not equal_already, **options)
    if exact:
        replicas.register_comm_hook((process_group, CollectiveTimer(on_wait)), mean_in_rank_order)
    return replicas


def add_in_rank_order(replicas: DistributedDataParallel, on_wait: Callable[[float], object]) -> None:
    """Make replicas that a framework has built exact, as ``replicate`` does. Raises TypeError for sparse gradients."""
    refuse_sparse(replicas, "be added in the order of ranks: take sparse=False, or exact=False")
    if dist.get_world_size(replicas.process_group) > 1:
        replicas.register_comm_hook((replicas.process_group, CollectiveTimer(on_wait)), mean_in_rank_order)
