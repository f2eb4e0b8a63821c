"""The models that the hooks' cost is measured on. Imports torch and nothing of Everstep, as plain runs have none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from bench.recovery_rows.workload import BATCH, WIDTH, build_model

TOKENS, SEQUENCES, LENGTH = 256, 1, 32
IMAGES, PIXELS = 16, 32


@dataclass(frozen=True)
class Model:
    """A model to train: how it is made, and one rank's input of a step, drawn from the generator."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], torch.Tensor]


class Gpt(nn.Module):
    """A decoder of six blocks of width 384: 10.9 M parameters."""

    def __init__(self, width: int = 384, blocks: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        embedded = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(embedded, mask, is_causal=True))
        return logits


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt()


def _convolutions() -> nn.Module:
    """Six convolutions with batch normalization: 0.29 M parameters."""
    torch.manual_seed(0)
    widths = (3, 32, 32, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        stride = 2 if before != after and number else 1
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


MODELS = {
    "linear": Model(build_model, lambda drawn: torch.randn(BATCH, WIDTH, generator=drawn)),
    "gpt": Model(_gpt, lambda drawn: torch.randint(TOKENS, (SEQUENCES, LENGTH), generator=drawn)),
    "convolutions": Model(_convolutions, lambda drawn: torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=drawn)),
}


def chosen_model() -> Model:
    """The model that ``BENCH_MODEL`` names."""
    return MODELS[os.environ.get("BENCH_MODEL", "linear")]


def batch(step: int, rank: int) -> torch.Tensor:
    """The input of the chosen model, a function of step and rank alone."""
    return chosen_model().draw(torch.Generator().manual_seed(step * 1000 + rank))
