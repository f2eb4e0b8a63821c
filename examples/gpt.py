"""A byte-level GPT, as small as it can be and still learn: pre-norm blocks, causal attention, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """About ``12 * layers * width**2`` parameters: 1.4 M by default."""

    layers: int = 3
    width: int = 192
    heads: int = 4
    context: int = 64
    vocabulary: int = 256


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Bytes in, logits out: [batch, length] int64 to [batch, length, vocabulary].

    Activations of a block are computed again in backward instead of kept.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / math.sqrt(2 * config.layers) if "project" in name or "contract" in name else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.norm(x), self.embed.weight)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def warm_up_and_cosine(steps: int, warm_up: int = 20, floor: float = 0.1) -> Callable[[int], float]:
    """Factor of the learning rate: linear to 1 over ``warm_up`` steps, then a cosine down to ``floor`` at ``steps``."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
