"""Small models for tests of audits, and steps of training with one unit captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep_trainer.sdc.replay.capture import Capture
from everstep_trainer.sdc.replay.units import Unit, find_units

CPU = torch.device("cpu")
WIDTH, TOKENS, WORDS = 16, 6, 11


class Block(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.project(attended) * scale
        result: torch.Tensor = x + self.mlp(x)
        return result


class Gpt(nn.Module):
    """Embedding, blocks and a head with the embedding's weight. ``checkpointing``: None, or use_reentrant."""

    def __init__(self, blocks: int = 3, *, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.checkpointing = checkpointing
        self.scale = 0.5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x, scale=self.scale, mask=mask)
            else:
                x = checkpoint(block, x, 0.5, mask, use_reentrant=self.checkpointing)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class Cache:
    """An object that cannot be sent to another rank, since it is neither a tensor nor a constant."""


class CachedBlock(Block):
    """A block that takes an object."""

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class CachedGpt(Gpt):
    """A model whose blocks cannot be computed alone on another rank, although the whole model can."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(CachedBlock() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, Cache())
        result: torch.Tensor = self.head(self.norm(x))
        return result


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(x + self.norm(self.convolution(x)))
        return result


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.Sequential(ConvBlock(4), ConvBlock(4))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(self.first(x)))
        return result


def images(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class WithMean(nn.Module):
    """A layer that returns its outputs and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.layer(x)
        return outputs, outputs.mean()


class Means(nn.Module):
    """Layers whose outputs and their mean are both used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithMean() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            outputs, mean = layer(x)
            x = outputs + mean
        return x


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Model:
    """The functions that make a model, and its input from a seed."""

    build: Callable[[], nn.Module]
    data: Callable[[int], torch.Tensor]


MODELS = {
    "mlp": Model(mlp, vectors),
    "convolutions": Model(ConvNet, images),
    "gpt": Model(Gpt, tokens),
    "checkpointed": Model(lambda: Gpt(checkpointing=False), tokens),
    "reentrant": Model(lambda: Gpt(checkpointing=True), tokens),
}


UNUSUAL = {"cached": Model(CachedGpt, tokens), "means": Model(Means, vectors)}
"""Models that are replayed as a whole, or in part."""


def one_step(module: nn.Module, model: Model, *, micro_batches: int = 2, autocast: bool = False) -> None:
    """Run the forward and backward passes of one step."""
    for seed in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(model.data(seed)).float().square().mean() / micro_batches
        loss.backward()


def captured_step(module: nn.Module, model: Model, unit: Unit, call: int, *, autocast: bool = False) -> Capture:
    """Return what was captured of one step."""
    capture = Capture(unit, call, CPU)
    capture.install()
    one_step(module, model, autocast=autocast)
    capture.remove()
    return capture


def units_of(module: nn.Module) -> list[Unit]:
    return list(find_units({"model": module}).units)
