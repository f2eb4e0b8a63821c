"""A small training loop that most programs use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import everstep
from bench.calm.program import Diary, pause

SAMPLES, FEATURES, BATCH = 2048, 16, 64
STEP_S = 0.03
"""Pause of each step: the step of a small model on a busy machine."""


def small_model() -> nn.Sequential:
    """Return a model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(dim=1, keepdim=True)


class SmallTraining:
    """A model that learns the sum of its inputs. Built and tracked when it is made.

    Args:
        run: The run.
        diary: The rank's notes.
        model: The model; by default a small one.
        tracked: Further objects to track.
    """

    def __init__(self, run: everstep.Run, diary: Diary, model: nn.Module | None = None, **tracked: Any) -> None:
        self.run, self.diary = run, diary
        self.inputs, self.targets = data()
        self.model = small_model() if model is None else model
        self.replicas = run.replicate(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
        run.track(model=self.replicas, optimizer=self.optimizer, **tracked)

    def steps(self, until: int) -> Iterator[int]:
        """Yield each step after it was trained; what the program does then belongs to the step."""
        for step in self.run.steps(until=until, seed=1):
            self.learn(step)
            yield step

    def train(self, until: int) -> None:
        """Train all steps."""
        for _ in self.steps(until):
            pass

    def learn(self, step: int) -> torch.Tensor:
        """Train one step, and return its loss."""
        loss = self.backward(step)
        self.update(step, loss)
        return loss

    def backward(self, step: int) -> torch.Tensor:
        """Compute the gradients of a step, and return its loss."""
        indices = self.sampler.indices(step)
        loss = nn.functional.mse_loss(self.replicas(self.inputs[indices]), self.targets[indices])
        (loss * self.sampler.loss_weight(step)).backward()
        return loss

    def update(self, step: int, loss: torch.Tensor) -> None:
        """Update the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.diary.loss(step, loss)
        self.run.report(loss=loss)
        pause(STEP_S)

    def finish(self, *others: nn.Module) -> None:
        """Note what the model is in the end."""
        self.diary.final(self.model, *others)
