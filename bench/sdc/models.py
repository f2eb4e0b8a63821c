"""Small models with synthetic data, as they are trained on each rank of the bench."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from everstep_trainer.parallel.gradients import replicate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, BLOCKS, LENGTH, VOCABULARY = 256, 4, 2, 64, 64
SEQUENCES = 16
"""Sequences of a rank's batch. What audits of products and gradients cost, as a share of a step, falls with the tokens
of a batch, and ranks train on thousands of them elsewhere."""
RESIDUAL_BLOCKS = 4
FEATURES, CLASSES, IMAGE = 128, 10, 16


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


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Residual(nn.Module):
    """Two linear layers beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, features]`` to the same."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Convolution(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, height, width]`` to the outputs' channels."""
        return functional.relu(self.norm(self.convolution(x)))


class Stack(nn.Module):
    """A first layer, blocks and a last layer; returns the mean loss of a batch."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.first(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return functional.cross_entropy(self.last(x).flatten(0, -2).float(), targets.flatten())


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` to ``[batch, length, width]``."""
        return self.tokens(tokens) + self.positions.weight


class Pooled(nn.Module):
    """The mean over an image, and classes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, channels, height, width]`` to ``[batch, classes]``."""
        return self.head(x.mean((2, 3)))


def _gpt(recompute: bool) -> Stack:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Stack(Embedding(), [Block() for _ in range(BLOCKS)], head, recompute)


def _mlp(recompute: bool) -> Stack:
    blocks: list[nn.Module] = [Residual() for _ in range(RESIDUAL_BLOCKS)]
    return Stack(nn.Linear(FEATURES, FEATURES), blocks, nn.Linear(FEATURES, CLASSES), recompute)


def _convnet(recompute: bool) -> Stack:
    blocks: list[nn.Module] = [Convolution(16, 32, 2), Convolution(32, 32, 1), Convolution(32, 64, 2)]
    return Stack(Convolution(3, 16, 1), blocks, Pooled(64), recompute)


MODELS: dict[str, Callable[[bool], Stack]] = {"gpt": _gpt, "mlp": _mlp, "convnet": _convnet}

Batch = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=1024)
def batch_of(model: str, seed: int, step: int, rank: int) -> Batch:
    """Return the inputs and targets of one rank and step; the same on each call."""
    draw = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1009 + rank)
    if model == "gpt":
        return _sentences(draw)
    labels = torch.randint(CLASSES, (16,), generator=draw)
    shape = (FEATURES,) if model == "mlp" else (3, IMAGE, IMAGE)
    patterns = torch.randn((CLASSES, *shape), generator=torch.Generator().manual_seed(7))
    return patterns[labels] * 0.5 + torch.randn((16, *shape), generator=draw), labels


def _sentences(draw: torch.Generator) -> Batch:
    """Return characters, of which each mostly follows from the one before it."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=draw)
    is_regular = torch.rand((SEQUENCES, LENGTH + 1), generator=draw) < 0.8
    for at in range(1, LENGTH + 1):
        tokens[:, at] = torch.where(is_regular[:, at], (5 * tokens[:, at - 1] + 1) % VOCABULARY, tokens[:, at])
    return tokens[:, :-1], tokens[:, 1:]


def build(config: Config, world: int) -> tuple[nn.Module, Stack, torch.optim.Optimizer]:
    """Return the model as ranks call it, the model inside, and its optimizer. A collective."""
    torch.manual_seed(0)
    inner = MODELS[config.model](config.checkpointing)
    whole: nn.Module = inner
    if config.parallel == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for part in (inner.first, *inner.blocks, inner.last):
            fully_shard(part, mesh=mesh)
        fully_shard(inner, mesh=mesh)
    else:
        whole = replicate(inner, exact=True, equal_already=False)
    return whole, inner, torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=True)
