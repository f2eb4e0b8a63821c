"""Replicate a model with gradients that do not depend on DistributedDataParallel's buckets.

DistributedDataParallel rearranges its buckets after its first step, and a ring all-reduce adds each element in an order
that depends on its place in the bucket. So the first step after a regroup would round differently from an undisturbed
run. Here every element is added in the order of ranks (``exchange.py``), beside the backward pass.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the hook's annotations as objects.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.parallel.exchange import Exchange, LocalGradient

BUCKET_MB = 25.0
"""Megabytes (2**20 bytes) of gradients that are exchanged together by default."""
REFUSED_OPTIONS = {
    "mixed_precision": "adds gradients by a hook of its own",
    "skip_all_reduce_unused_params": "leaves gradients out of the exchange",
}
"""Options of DistributedDataParallel under which gradients cannot be exact, and what each does."""


def mean_in_rank_order(
    exchange: Exchange,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported at run time
) -> torch.futures.Future[torch.Tensor]:
    """Submit a bucket's gradients to the exchange: a DDP hook.

    DistributedDataParallel reads the results after its last bucket. There this waits for the exchange, in Python, where
    errors and interrupts reach the training function.
    """
    buffer = bucket.buffer()
    begin = buffer.storage_offset()
    gradients = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        offset = gradient.storage_offset() - begin
        gradients.append(LocalGradient(parameter, gradient, buffer[offset : offset + gradient.numel()]))
    if exchange.submit(gradients):
        exchange.wait()
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
    on_wait: Callable[[float], object] = lambda _: None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Return ``module`` in a DistributedDataParallel over ``process_group`` (None: all ranks).

    Args:
        exact: Add gradients in the order of ranks. Raises TypeError for sparse gradients, and for REFUSED_OPTIONS.
        equal_already: Every replica will be restored from one checkpoint, so the constructor need not broadcast rank
            0's parameters (25 to 35 ms for 2.1 M parameters over loopback).
        on_wait: Receives the seconds that an exact replica waited for others at the end of a backward pass.
        options: Passed to DistributedDataParallel.
    """
    if exact:
        refuse_sparse(module, "be added in the order of ranks: take sparse=False, or run.replicate(model, exact=False)")
    exact = exact and dist.get_world_size(process_group) > 1
    if exact:
        options.setdefault("bucket_cap_mb", BUCKET_MB)
    replicas = DistributedDataParallel(module, process_group=process_group, init_sync=not equal_already, **options)
    if exact:
        _register_exchange(replicas, process_group, on_wait)
    return replicas


def add_in_rank_order(replicas: DistributedDataParallel, on_wait: Callable[[float], object]) -> None:
    """Make replicas that a framework has built exact, as ``replicate`` does; raises what it raises."""
    refuse_sparse(replicas, "be added in the order of ranks: take sparse=False, or exact=False")
    if dist.get_world_size(replicas.process_group) > 1:
        _register_exchange(replicas, replicas.process_group, on_wait)


def exchanges_of(replicas: DistributedDataParallel) -> list[Exchange]:
    """Return the exchange of replicas that are exact; none of others."""
    return [state for _, state in replicas._comm_hooks if isinstance(state, Exchange)]


def refuse_second_hook(state: object, hook: object) -> None:
    """Raise RuntimeError in place of torch's, which does not say whose the first hook is."""
    raise RuntimeError(
        "these replicas have a hook already, which adds gradients in the order of ranks: take run.replicate(model, "
        "exact=False) to register another one"
    )


def _register_exchange(
    replicas: DistributedDataParallel, group: dist.ProcessGroup | None, on_wait: Callable[[float], object]
) -> None:
    for option, effect in REFUSED_OPTIONS.items():
        if getattr(replicas, option, None):
            raise TypeError(
                f"DistributedDataParallel's option {option} {effect}, so gradients cannot be added in the order of "
                "ranks: leave it out, or take exact=False"
            )
    if complex_names := [name for name, one in replicas.module.named_parameters() if one.is_complex()]:
        raise TypeError(
            f"{complex_names[0]} is complex, and DistributedDataParallel passes no hook such a gradient whole, so it "
            "cannot be added in the order of ranks: take exact=False"
        )
    parameters, _ = replicas._build_params_for_reducer()  # type: ignore[no-untyped-call]
    # cut as DistributedDataParallel cuts its own: gradients of a bucket then mostly lie together
    first = _DEFAULT_FIRST_BUCKET_BYTES if replicas.bucket_bytes_cap_default else replicas.bucket_bytes_cap
    exchange = Exchange(parameters, group, [first, replicas.bucket_bytes_cap], on_wait)
    replicas.register_comm_hook(exchange, mean_in_rank_order)
    replicas.register_comm_hook = refuse_second_hook  # type: ignore[method-assign]
