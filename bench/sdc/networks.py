"""Networks of small models: blocks of transformers, residual layers, convolutions, and a stack of them with a loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, VOCABULARY = 256, 4, 64, 64
FEATURES, CLASSES = 128, 10


class AttentionBlock(nn.Module):
    """The first half of a transformer block: attention beside the identity.

    Args:
        width: Of its input.
        heads: Of attention.
        is_causal: Whether tokens see only those before them.
        bias: Whether linear layers add one.
    """

    def __init__(self, width: int, heads: int = HEADS, *, is_causal: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before_attention = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        out: torch.Tensor = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(AttentionBlock):
    """A transformer block; see `AttentionBlock`."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, *, is_causal: bool = True, bias: bool = True) -> None:
        super().__init__(width, heads, is_causal=is_causal, bias=bias)
        self.before_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        x = self.attend(x)
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return out


class Residual(nn.Module):
    """Two linear layers beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, features]`` to the same."""
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Convolution(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, height, width]`` to the outputs' channels."""
        return functional.relu(self.norm(self.convolution(x)))


class Network(nn.Module):
    """A model that returns the mean loss of a batch.

    Attributes:
        blocks: Layers that are computed again in the backward pass, if ``recompute`` is set.
        recompute: Whether they are.
    """

    blocks: nn.ModuleList
    recompute: bool = False


class Stack(Network):
    """A first layer, blocks and a last layer."""

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

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` to ``[batch, length, width]``."""
        out: torch.Tensor = self.tokens(tokens) + self.positions.weight
        return out


class Pooled(nn.Module):
    """The mean over an image, and classes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, channels, height, width]`` to ``[batch, classes]``."""
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def sentences(draw: torch.Generator, count: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return characters, of which each mostly follows from the one before it, and the next ones."""
    tokens = torch.randint(vocabulary, (count, length + 1), generator=draw)
    is_regular = torch.rand((count, length + 1), generator=draw) < 0.8
    for at in range(1, length + 1):
        tokens[:, at] = torch.where(is_regular[:, at], (5 * tokens[:, at - 1] + 1) % vocabulary, tokens[:, at])
    return tokens[:, :-1], tokens[:, 1:]


def patterns(draw: torch.Generator, count: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy copies of ten patterns, and which they are."""
    labels = torch.randint(CLASSES, (count,), generator=draw)
    known = torch.randn((CLASSES, *shape), generator=torch.Generator().manual_seed(7))
    return known[labels] * 0.5 + torch.randn((count, *shape), generator=draw), labels
