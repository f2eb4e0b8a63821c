"""Small models with synthetic data, as they are trained on each rank of the bench."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.sdc import architectures
from bench.sdc.networks import (
    CLASSES,
    FEATURES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    Convolution,
    Embedding,
    Network,
    Pooled,
    Residual,
    Stack,
    patterns,
    sentences,
)
from everstep_trainer.parallel.ordered_gradients import replicate

BLOCKS = 2
SEQUENCES = 16
"""Sequences of a rank's batch. What audits of products and gradients cost, as a share of a step, falls with the tokens
of a batch, and ranks train on thousands of them elsewhere."""
RESIDUAL_BLOCKS = 4
IMAGE = 16


@dataclass(frozen=True)
class Config:
    """A model, how its ranks share the work, its dtype, and whether activations are computed again."""

    model: str = "gpt"
    parallel: str = "ddp"
    dtype: str = "float32"
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """The name in cells, such as ``gpt-ddp-float32``."""
        parts = [self.model, self.parallel, self.dtype, *(["recompute"] if self.checkpointing else [])]
        return "-".join(parts)

    @staticmethod
    def parse(name: str) -> Config:
        """Return the configuration of this name. Raises ValueError if there is none."""
        model, parallel, dtype, *rest = name.split("-")
        known = model in MODELS and parallel in ("ddp", "fsdp2") and dtype in ("float32", "bfloat16")
        if not known or rest not in ([], ["recompute"]):
            raise ValueError(f"{name}: give MODEL-PARALLEL-DTYPE[-recompute], such as gpt-ddp-float32")
        return Config(model, parallel, dtype, bool(rest))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()


def _gpt(recompute: bool) -> Stack:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Stack(Embedding(VOCABULARY, LENGTH, WIDTH), [Block() for _ in range(BLOCKS)], head, recompute)


def _mlp(recompute: bool) -> Stack:
    blocks: list[nn.Module] = [Residual() for _ in range(RESIDUAL_BLOCKS)]
    return Stack(nn.Linear(FEATURES, FEATURES), blocks, nn.Linear(FEATURES, CLASSES), recompute)


def _convnet(recompute: bool) -> Stack:
    blocks: list[nn.Module] = [Convolution(16, 32, 2), Convolution(32, 32, 1), Convolution(32, 64, 2)]
    return Stack(Convolution(3, 16, 1), blocks, Pooled(64), recompute)


MODELS: dict[str, Callable[[bool], Network]] = {
    "gpt": _gpt,
    "mlp": _mlp,
    "convnet": _convnet,
    "vit": architectures.vision_transformer,
    "lstm": architectures.recurrent,
    "moe": architectures.mixture_of_experts,
    "unet": architectures.unet,
}

Batch = tuple[torch.Tensor, ...]


@lru_cache(maxsize=1024)
def batch_of(model: str, seed: int, step: int, rank: int) -> Batch:
    """Return what the model is called with on one rank and step; the same on each call."""
    draw = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1009 + rank)
    if model == "gpt":
        return sentences(draw, SEQUENCES, LENGTH, VOCABULARY)
    if model in architectures.BATCHES:
        return architectures.BATCHES[model](draw)
    return patterns(draw, 16, (FEATURES,) if model == "mlp" else (3, IMAGE, IMAGE))


def build(config: Config, world: int) -> tuple[nn.Module, Network, torch.optim.Optimizer]:
    """Return the model as ranks call it, the model inside, and its optimizer. A collective."""
    torch.manual_seed(0)
    inner = MODELS[config.model](config.checkpointing)
    whole: nn.Module = inner
    if config.parallel == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for part in (*inner.blocks, *(child for child in inner.children() if child is not inner.blocks)):
            fully_shard(part, mesh=mesh)
        fully_shard(inner, mesh=mesh)
    else:
        whole = replicate(inner, exact=True, equal_already=False)
    return whole, inner, torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=True)
