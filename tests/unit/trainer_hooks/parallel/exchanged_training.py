"""Training functions of ranks that add their gradients through an exchange, and the sums that it must give."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.parallel.ordered_gradients import replicate

STEPS = 4
"""DistributedDataParallel changes its buckets before the second one."""


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, so that its gradient arrives last although used first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 1000).long() % 37
        out: torch.Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return out


class Unused(nn.Module):
    """Two heads, of which each rank uses one; no rank uses the third. Registered in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(24, 5) for _ in range(3))
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.heads[dist.get_rank() % 2]
        out: torch.Tensor = self.last(head(torch.tanh(self.first(x))))
        return out


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total


class Maximum(nn.Module):
    """A layer with a collective of its own in the backward pass, as synchronized BatchNorm has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Max.apply(x)
        return out


def layers(*between: nn.Module, width: int = 24) -> nn.Sequential:
    middle = between or (nn.Tanh(),)
    return nn.Sequential(nn.Linear(24, width), *middle, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 7))


def mixed() -> nn.Sequential:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(24, 24, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x.double()).float()
            return out

    return nn.Sequential(nn.Linear(24, 24), Wide(), nn.Linear(24, 24), Wide(), nn.Linear(24, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (layers, {}),
    "no_sync": (layers, {}),
    "accumulated": (layers, {}),
    "unused": (Unused, {"find_unused_parameters": True}),
    "batch norm": (lambda: layers(nn.BatchNorm1d(24)), {}),
    "collectives in backward": (lambda: layers(Maximum(), nn.Tanh(), nn.Linear(24, 24), Maximum()), {}),
    "layer norm": (lambda: layers(nn.LayerNorm(24), nn.Tanh()), {}),
    "static graph": (layers, {"static_graph": True}),
    "bucket view": (layers, {"gradient_as_bucket_view": True}),
    "bf16": (lambda: layers().to(torch.bfloat16), {}),
    "mixed dtypes": (mixed, {}),
    "tied weights": (Tied, {}),
    "tiny": (lambda: nn.Linear(24, 1, bias=False), {}),
    "large": (lambda: layers(width=2400), {}),
}


def train_each(rank: int, world: int, program: str, bucket_mb: Sequence[float]) -> tuple[str, list[str]]:
    """Return the digest of a model trained with sums by a plain loop, and those with buckets of each size."""
    torch.set_num_threads(1)
    steps = 2 if program == "large" else STEPS
    return train(rank, program, None, steps), [train(rank, program, size, steps) for size in bucket_mb]


def train(rank: int, program: str, bucket_mb: float | None, steps: int) -> str:
    torch.manual_seed(3)
    make, options = MODELS[program]
    model = make()
    if bucket_mb is None:
        replicas = DistributedDataParallel(model, **options)
        replicas.register_comm_hook(None, mean_by_loop)
    else:
        replicas = replicate(model, exact=True, equal_already=False, bucket_cap_mb=bucket_mb, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(2 if program in ("no_sync", "accumulated") else 1):
            with replicas.no_sync() if program == "no_sync" and micro == 0 else nullcontext():
                x = torch.randn(6, 24, generator=batches).to(next(model.parameters()).dtype)
                replicas(x).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)):
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def mean_by_loop(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported at run time
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks, added one after another."""
    everyones = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, bucket.buffer())
    total = everyones[0].clone()
    for other in everyones[1:]:
        total = total + other
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total / len(everyones))
    return done
