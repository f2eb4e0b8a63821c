"""Loops whose data come from loaders with worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.integration.training.training_styles.loops import BATCH, Training, data
from tests.integration.training.training_styles.style import Work, style

SAMPLES = 480
"""Samples of an epoch: ten batches."""

Pair = tuple[torch.Tensor, torch.Tensor]


class _Stream(IterableDataset[Pair]):
    """Samples in one order, which each reader gets whole."""

    def __iter__(self) -> Iterator[Pair]:
        inputs, targets = data()
        yield from zip(inputs[:SAMPLES], targets[:SAMPLES], strict=True)


def _learn(training: Training, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> None:
    (nn.functional.mse_loss(training.replicas(inputs), targets) * weight).backward()
    training.update()


@style()
def iterable_dataset(work: Work) -> None:
    """run.loader over an IterableDataset, with two workers on each rank."""
    training = Training(work)
    loader = work.run.loader(_Stream(), global_batch=BATCH, seed=1, num_workers=2)
    training.track()
    for step in training.steps():
        inputs, targets = loader.batch(step)
        _learn(training, inputs, targets, loader.loss_weight(step))
    training.finish()


@style()
def epochs_of_dataloader(work: Work) -> None:
    """run.epoch_loader around a shuffled DataLoader with two workers."""
    training = Training(work)
    inputs, targets = data()
    dataset = TensorDataset(inputs[:SAMPLES], targets[:SAMPLES])
    batch = BATCH // work.run.world_size
    loader = work.run.epoch_loader(DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=2), seed=1)
    training.track()
    for _ in loader.epochs(max_steps=work.steps):
        for x, y in loader:
            work.pause()
            _learn(training, x, y, loader.loss_weight)
    training.finish()


@style(package="torchdata")
def stateful_dataloader(work: Work) -> None:
    """A tracked StatefulDataLoader of torchdata, with a worker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata imports what torch deprecates
        from torchdata.stateful_dataloader import StatefulDataLoader
    training = Training(work)
    inputs, targets = data()
    mine = slice(work.run.rank, SAMPLES, work.run.world_size)
    dataset = TensorDataset(inputs[mine], targets[mine])
    loader = StatefulDataLoader(
        dataset,
        batch_size=BATCH // work.run.world_size,
        shuffle=True,
        num_workers=1,
        generator=torch.Generator().manual_seed(5),
    )
    training.track(data=loader)
    batches = iter(loader)
    for _ in training.steps():
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        _learn(training, batch[0], batch[1], 1.0)
    training.finish()
