"""Small models of the structure of a vision transformer, an LSTM, a mixture of experts and a U-Net, with their batches.

They are small enough for some ten steps a second of four ranks on two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from bench.sdc.networks import CLASSES, AttentionBlock, Block, Embedding, Network, Stack, patterns, sentences

Batch = tuple[torch.Tensor, ...]
WIDTH = 96
IMAGE, PATCH, IMAGES, VISION_BLOCKS = 16, 4, 16, 4
HIDDEN, LAYERS = 128, 2
EXPERTS, CHOSEN, EXPERT_BLOCKS, BALANCE = 4, 2, 2, 0.01
WORDS, LENGTH, SEQUENCES = 64, 32, 16
CHANNELS, GROUPS, NOISY_IMAGES, TIMES = 24, 8, 4, 100


class Patches(nn.Module):
    """Patches of an image behind a token for its class, with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (IMAGE // PATCH) ** 2, WIDTH))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, height, width]`` to ``[batch, tokens, width]``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(images), -1, -1), tokens], 1) + self.positions


class ClassHead(nn.Module):
    """The class of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, width]`` to ``[batch, classes]``."""
        out: torch.Tensor = self.head(self.norm(x[:, 0]))
        return out


def vision_transformer(recompute: bool) -> Network:
    """Return a vision transformer."""
    blocks: list[nn.Module] = [Block(WIDTH, is_causal=False) for _ in range(VISION_BLOCKS)]
    return Stack(Patches(), blocks, ClassHead(), recompute)


class Recurrent(nn.Module):
    """An LSTM of several layers with dropout between them; returns its outputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, hidden]`` to the same."""
        outputs: torch.Tensor = self.lstm(x)[0]
        return outputs


def recurrent(recompute: bool) -> Network:
    """Return a language model with an LSTM."""
    return Stack(nn.Embedding(WORDS, HIDDEN), [Recurrent()], nn.Linear(HIDDEN, WORDS), recompute)


class Mixture(nn.Module):
    """Experts, of which each token goes to two, and the loss that keeps them equally busy."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, length, width]`` to the same, and the loss."""
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        weights, chosen = shares.topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        busy = functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        return mixed.view_as(x), EXPERTS * (busy * shares.mean(0)).sum()


class ExpertBlock(AttentionBlock):
    """A transformer block whose layers after attention are a mixture of experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.before_mixture, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, length, width]`` to the same, and the loss of the mixture."""
        x = self.attend(x)
        mixed, loss = self.mixture(self.before_mixture(x))
        return x + mixed, loss


class ExpertModel(Network):
    """A language model whose blocks are mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Embedding(WORDS, LENGTH, WIDTH)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(EXPERT_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.first(tokens)
        balance = torch.zeros(())
        for block in self.blocks:
            x, loss = block(x)
            balance = balance + loss
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten()) + BALANCE * balance


def mixture_of_experts(recompute: bool) -> Network:
    """Return a language model whose blocks are mixtures of experts. Raises ValueError if it is to recompute."""
    _refuse_recomputation(recompute)
    return ExpertModel()


class ResidualBlock(nn.Module):
    """Two convolutions with a time between them, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(GROUPS, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(4 * CHANNELS, outputs)
        self.second_norm, self.second = nn.GroupNorm(GROUPS, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, height, width]`` to the outputs' channels."""
        inside = self.first(functional.silu(self.norm(x))) + self.time(functional.silu(time))[:, :, None, None]
        out: torch.Tensor = self.shortcut(x) + self.second(functional.silu(self.second_norm(inside)))
        return out


class PixelAttention(nn.Module):
    """Attention between all places of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, channels, height, width]`` to the same."""
        batch, channels, height, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, 3, 4, channels // 4, -1).transpose(-1, -2)
        attended = functional.scaled_dot_product_attention(*parts.unbind(1))
        out: torch.Tensor = x + self.out(attended.transpose(-1, -2).reshape(batch, channels, height, width))
        return out


class UNet(Network):
    """Finds the noise in images, at two sizes, with shortcuts between them and attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        small, large = CHANNELS, 2 * CHANNELS
        self.time = nn.Sequential(nn.Linear(small, 4 * small), nn.SiLU(), nn.Linear(4 * small, 4 * small))
        self.first = nn.Conv2d(3, small, 3, padding=1)
        self.down = ResidualBlock(small, small)
        self.shrink = nn.Conv2d(small, small, 3, stride=2, padding=1)
        self.deep_down = ResidualBlock(small, large)
        self.middle, self.attention = ResidualBlock(large, large), PixelAttention(large)
        self.deep_up = ResidualBlock(2 * large, large)
        self.grow = nn.Conv2d(large, large, 3, padding=1)
        self.up = ResidualBlock(large + small, small)
        self.last_norm, self.last = nn.GroupNorm(GROUPS, small), nn.Conv2d(small, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the noise that is found in images at a time, from 0 to 1."""
        time = self.time(_waves(times, CHANNELS))
        strength = times[:, None, None, None]
        x = self.first((1 - strength).sqrt() * images + strength.sqrt() * noise)
        high = self.down(x, time)
        low = self.deep_down(self.shrink(high), time)
        x = self.attention(self.middle(low, time))
        x = self.deep_up(torch.cat([x, low], 1), time)
        x = self.grow(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up(torch.cat([x, high], 1), time)
        return functional.mse_loss(self.last(functional.silu(self.last_norm(x))), noise)


def unet(recompute: bool) -> Network:
    """Return a U-Net of a diffusion model. Raises ValueError if it is to recompute."""
    _refuse_recomputation(recompute)
    return UNet()


def _waves(times: torch.Tensor, width: int) -> torch.Tensor:
    rates = torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2))
    angles = TIMES * times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def _refuse_recomputation(recompute: bool) -> None:
    if recompute:
        raise ValueError("this model computes no activations again: leave out -recompute")


def _noisy_images(draw: torch.Generator) -> Batch:
    images, _ = patterns(draw, NOISY_IMAGES, (3, IMAGE, IMAGE))
    return images, torch.randn(images.shape, generator=draw), torch.rand(NOISY_IMAGES, generator=draw)


BATCHES: dict[str, Callable[[torch.Generator], Batch]] = {
    "vit": lambda draw: patterns(draw, IMAGES, (3, IMAGE, IMAGE)),
    "lstm": lambda draw: sentences(draw, SEQUENCES, LENGTH, WORDS),
    "moe": lambda draw: sentences(draw, SEQUENCES, LENGTH, WORDS),
    "unet": _noisy_images,
}
"""Batch of a rank, by the model's name."""
