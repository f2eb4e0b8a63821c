"""A decoder-only transformer and its AdamW in one dtype, of the size that a step asks for, with tokens to train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bench.sdc.networks import Block

STATES = 3
"""A parameter and its two moments, each in the parameter's dtype."""


@dataclass(frozen=True)
class Shape:
    """``batch`` sequences of ``length`` tokens a step."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int = 8192
    batch: int = 16
    length: int = 1024
    dtype: torch.dtype = torch.bfloat16

    @property
    def parameters(self) -> int:
        """Within a per mille: norms and positions are left out."""
        return 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width

    @property
    def state_bytes(self) -> int:
        return STATES * self.parameters * self.dtype.itemsize


class Gpt(nn.Module):
    """Predicts the next token; ``forward`` returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.length, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, bias=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: ``[batch, length + 1]``."""
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """Model, optimizer and a step. ``compiled``: a backend of torch.compile for the model, "" for none."""

    def __init__(self, shape: Shape, device: torch.device, compiled: str = "") -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Gpt(shape).to(shape.dtype)
            self._tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._loss = torch.compile(self.model, backend=compiled) if compiled else self.model

    def gradients(self) -> torch.Tensor:
        """Forward and backward pass; the loss, not read."""
        loss: torch.Tensor = self._loss(self._tokens)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        """Parameters, then the moments of each."""
        parameters = list(self.model.parameters())
        moments = [self.optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [p.detach() for p in parameters] + moments
