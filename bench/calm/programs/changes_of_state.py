"""Changes of parameters, gradients and generators by ordinary scripts, besides an optimizer's update.

Most are programs that also train under audits; here they run under the launcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from bench.calm.audited_training import WIDTH, AuditedTraining
from bench.calm.honest_programs import HONEST, Train
from bench.calm.program import Diary, TrainingFunction, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.training import STEP_S, SmallTraining, small_model

STEPS = 80
SHARED = (
    "average_of_weights",
    "average_swapped_by_data",
    "weight_clipping",
    "hooks_registered_in_the_step",
    "hook_after_accumulation",
    "adversarial_pair",
    "accumulation",
    "fake_quantisation",
    "batch_norm",
)
"""Names of the programs that both parts have."""


class LaunchedTraining(AuditedTraining):
    """An honest program's interface under the launcher: default audits, pauses in steps, and notes."""

    def __init__(self, run: everstep.Run, diary: Diary) -> None:
        super().__init__(run, "off")
        self._diary, self._step = diary, 0
        self._modules: list[nn.Module] = []

    def track(self, **objects: Any) -> None:
        """Track objects."""
        self._modules = [value for value in objects.values() if isinstance(value, nn.Module)]
        self.run.track(**objects)

    def steps(self, until: int = STEPS) -> Iterator[int]:
        """Yield steps, and pause in each."""
        for step in self.run.steps(until=until, seed=1):
            self._step = step
            yield step
            pause(STEP_S)

    def loss(self, model: nn.Module, width: int = WIDTH) -> torch.Tensor:
        """Return the loss of a random batch, and note it."""
        loss = super().loss(model, width)
        self._diary.loss(self._step, loss)
        return loss

    def finish(self) -> None:
        """Note what the models are in the end."""
        self._diary.final(*self._modules)


def launched(train: Train) -> TrainingFunction:
    """Return the training function of a rank under the launcher."""

    def train_launched(run: everstep.Run, diary: Diary) -> None:
        training = LaunchedTraining(run, diary)
        train(training)
        training.finish()

    return train_launched


for name in SHARED:
    CATALOGUE.insert(name, HONEST[name].sentence, launched(HONEST[name].train))


@CATALOGUE.add("Noise from a torch.Generator of the script's own, tracked.")
def own_generator(run: everstep.Run, diary: Diary) -> None:
    noise = torch.Generator().manual_seed(7)
    training = SmallTraining(run, diary, noise=noise)
    for step in run.steps(until=STEPS, seed=1):
        with torch.no_grad():
            training.inputs[training.sampler.indices(step)] += 0.01 * torch.randn(1, generator=noise)
        training.learn(step)
    training.finish()


@contextlib.contextmanager
def _own_checkpoint(folder: Path) -> Iterator[Mapping[str, str]]:
    torch.manual_seed(5)
    model = small_model()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5)
    torch.save(model.state_dict(), folder / "own.pt")
    yield {}


@CATALOGUE.add("The script loads a checkpoint of its own after run.track.", beside=_own_checkpoint)
def own_resume_after_track(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    if run.last_finished_step == 0:
        training.model.load_state_dict(torch.load(diary.folder / "own.pt"))
    training.train(STEPS)
    training.finish()
