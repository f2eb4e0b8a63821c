"""Loops of plain PyTorch whose ranks hold replicas of one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.integration.training.training_styles.style import Work, style

SAMPLES, FEATURES, BATCH = 2048, 16, 48
"""The batch can be shared evenly by two, three and four ranks."""
MICRO_BATCHES = 4


def small_model() -> nn.Sequential:
    """Return a model with dropout, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(dim=1, keepdim=True)


class Training:
    """A model that learns the sum of its inputs. Built when it is made, and tracked by `track`.

    Args:
        work: The run.
        wrap: Wraps the model; by default ``run.replicate`` does.
    """

    def __init__(self, work: Work, wrap: Any = None) -> None:
        self.work, self.run = work, work.run
        self.inputs, self.targets = data()
        self.model = small_model()
        self.replicas: nn.Module = (wrap or self.run.replicate)(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sampler = self.run.sampler(SAMPLES, global_batch=BATCH, seed=1)

    def track(self, **more: Any) -> None:
        """Track the model, its optimizer and ``more``."""
        self.run.track(model=self.replicas, optimizer=self.optimizer, **more)

    def steps(self) -> Iterator[int]:
        """Yield each step; the update of a step belongs to the loop's body."""
        for step in self.run.steps(until=self.work.steps, seed=1):
            self.work.pause()
            yield step

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss of a step, weighted for the mean over the ranks."""
        return self.loss_of(self.sampler.indices(step)) * self.sampler.loss_weight(step)

    def loss_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the loss of some samples."""
        return nn.functional.mse_loss(self.replicas(self.inputs[indices]), self.targets[indices])

    def update(self) -> None:
        """Update the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """Track the model, make all steps, and finish."""
        self.track()
        for step in self.steps():
            self.loss(step).backward()
            self.update()
        self.finish()

    def finish(self, *more: object) -> None:
        """Print the digest of the state."""
        self.work.finish(self.model.state_dict(), self.optimizer.state_dict(), *more)


def _accumulate(training: Training) -> None:
    for step in training.steps():
        parts = training.sampler.indices(step).chunk(MICRO_BATCHES)
        for number, indices in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else training.replicas.no_sync():  # type: ignore[operator]
                (training.loss_of(indices) * training.sampler.loss_weight(step) / len(parts)).backward()
        training.update()


@style()
def ddp(work: Work) -> None:
    """torch's DistributedDataParallel."""
    Training(work, DistributedDataParallel).train()


@style()
def ddp_no_sync(work: Work) -> None:
    """torch's DistributedDataParallel, which gathers the gradients of four micro-batches under no_sync."""
    training = Training(work, DistributedDataParallel)
    training.track()
    _accumulate(training)
    training.finish()


@style(ranks=3)
def replicate(work: Work) -> None:
    """run.replicate on three ranks."""
    Training(work).train()


@style(ranks=3)
def replicate_no_sync(work: Work) -> None:
    """run.replicate on three ranks, which gathers the gradients of four micro-batches under no_sync."""
    training = Training(work)
    training.track()
    _accumulate(training)
    training.finish()


@style()
def autocast_and_scaler(work: Work) -> None:
    """Autocast to bfloat16, with a gradient scaler."""
    training = Training(work)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    training.track(scaler=scaler)
    for step in training.steps():
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(step)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    training.finish(scaler.state_dict())


@style()
def weight_average(work: Work) -> None:
    """An exponential average of the weights."""
    training = Training(work)
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training.track(average=average)
    for step in training.steps():
        training.loss(step).backward()
        training.update()
        average.update_parameters(training.model)
    training.finish(average.state_dict())


@style()
def schedule_and_clipping(work: Work) -> None:
    """A warm-up, a cosine schedule and clipped gradients."""
    training = Training(work)
    schedules = torch.optim.lr_scheduler
    warm_up = schedules.LinearLR(training.optimizer, start_factor=0.1, total_iters=10)
    cosine = schedules.CosineAnnealingLR(training.optimizer, T_max=work.steps)
    schedule = schedules.SequentialLR(training.optimizer, [warm_up, cosine], milestones=[10])
    training.track(schedule=schedule)
    for step in training.steps():
        training.loss(step).backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        training.update()
        schedule.step()
    training.finish(schedule.state_dict())


@style()
def gan(work: Work) -> None:
    """A generator and a discriminator with an optimizer each."""
    run = work.run
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    makes, judges = run.replicate(generator), run.replicate(critic)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    run.track(generator=makes, critic=judges, of_generator=of_generator, of_critic=of_critic)
    inputs, _ = data()
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
    judge = nn.functional.binary_cross_entropy_with_logits
    for step in run.steps(until=work.steps, seed=1):
        work.pause()
        real = inputs[sampler.indices(step)]
        fake = makes(torch.randn(len(real), 8))
        both = judges(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        judge(both, labels).backward()
        of_critic.step()
        of_critic.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        judge(critic(fake), torch.ones(len(real), 1)).backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        of_generator.step()
        of_generator.zero_grad()
    states = (generator, critic, of_generator, of_critic)
    work.finish(*(state.state_dict() for state in states))
