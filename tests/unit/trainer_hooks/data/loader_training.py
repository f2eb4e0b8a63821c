"""A training that loads its data with workers, and logs the samples of each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from everstep_trainer.data.sampler import PackedDataset, pack
from everstep_trainer.run import Run
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, fingerprint, wait_for_next_generation
from tests.unit.trainer_hooks.data.loader_datasets import Counted, Numbers, Seekable, Stuck

SEED, BATCH = 31, 9
LENGTHS = [1 + 7 * n % 11 for n in range(60)]


def collate(samples: list[tuple[int, float]]) -> tuple[list[int], torch.Tensor]:
    """Return the indices of the samples, and their random numbers ``[n, 1]``."""
    return [index for index, _ in samples], torch.tensor([[noise] for _, noise in samples])


def collate_rows(rows: list[list[tuple[int, float]]]) -> tuple[list[int], torch.Tensor]:
    """Return the indices of all samples, and the mean random number ``[n, 1]`` of each row."""
    means = torch.tensor([[sum(noise for _, noise in row) / len(row)] for row in rows])
    return [index for row in rows for index, _ in row], means


class Sixty(Numbers):
    def __len__(self) -> int:
        return len(LENGTHS)


KINDS: dict[
    str, tuple[Callable[[], Dataset[Any] | PackedDataset], Callable[[list[Any]], tuple[list[int], torch.Tensor]]]
] = {
    "map-style": (Numbers, collate),
    "stream": (Counted, collate),
    "stream with seek": (Seekable, collate),
    "packed": (lambda: PackedDataset(Sixty(), pack(LENGTHS, 20, seed=SEED)), collate_rows),
}


def train(
    run: Run, folder: str, until: int, kind: str, faults: tuple[Fault, ...], last_steps: Mapping[int, int]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    make, collate_fn = KINDS[kind]
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = run.loader(make(), global_batch=BATCH, seed=SEED, num_workers=1, prefetch_factor=3, collate_fn=collate_fn)
    run.track(model=replicas, optimizer=optimizer)
    injector, step_log = FaultInjector(faults, Path(folder), run.rank), StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        injector.step = step
        wait_for_next_generation(run, step, last_steps)
        samples, inputs = loader.batch(step)
        injector.at("forward")
        (replicas(inputs).square().mean() * loader.loss_weight(step)).backward()
        injector.at("reduced")
        optimizer.step()
        optimizer.zero_grad()
        step_log.write(step, samples=samples, noise=inputs.flatten().tolist(), state=fingerprint(model.parameters()))


def wait_for_data(run: Run, folder: str) -> None:
    """Train with a first sample that never comes in the first generation."""
    dataset = Stuck() if run.generation == 1 else Numbers()
    loader = run.loader(dataset, global_batch=BATCH, num_workers=1, collate_fn=collate)
    for step in run.steps(until=100_000):
        Path(folder, f"waits-{os.getpid()}").touch()
        loader.batch(step)
