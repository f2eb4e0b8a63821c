"""A training that loads its data with workers, and writes down which samples each step had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from everstep_trainer.data.sampler import PackedDataset, pack
from everstep_trainer.run import Run

from tests.support.exact_training import Diary, Fault, Faults, fingerprint, hold
from tests.support.loaded_data import Counted, Jumping, Numbers, Stuck

SEED, BATCH = 31, 9
LENGTHS = [1 + 7 * n % 11 for n in range(60)]


def collate(samples: list[tuple[int, float]]) -> tuple[list[int], torch.Tensor]:
    """The samples' numbers, and ``[n, 1]`` of what was drawn for them."""
    return [index for index, _ in samples], torch.tensor([[noise] for _, noise in samples])


def collate_rows(rows: list[list[tuple[int, float]]]) -> tuple[list[int], torch.Tensor]:
    """Rows of several samples: their lengths differ, so the input is each row's mean."""
    means = torch.tensor([[sum(noise for _, noise in row) / len(row)] for row in rows])
    return [index for row in rows for index, _ in row], means


class Sixty(Numbers):
    def __len__(self) -> int:
        return len(LENGTHS)


KINDS = {
    "map-style": (Numbers, collate),
    "stream": (Counted, collate),
    "stream that jumps": (Jumping, collate),
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
    dying, diary = Faults(faults, Path(folder), run.rank), Diary(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        dying.step = step
        hold(run, step, last_steps)
        samples, inputs = loader.batch(step)
        dying.at("forward")
        (replicas(inputs).square().mean() * loader.loss_weight(step)).backward()
        dying.at("reduced")
        optimizer.step()
        optimizer.zero_grad()
        diary.write(step, samples=samples, noise=inputs.flatten().tolist(), state=fingerprint(model.parameters()))


def wait_for_data(run: Run, folder: str) -> None:
    """In its first generation the first sample never comes."""
    dataset = Stuck() if run.generation == 1 else Numbers()
    loader = run.loader(dataset, global_batch=BATCH, num_workers=1, collate_fn=collate)
    for step in run.steps(until=100_000):
        Path(folder, f"waits-{os.getpid()}").touch()
        loader.batch(step)
