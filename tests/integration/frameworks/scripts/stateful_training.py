r"""A training that reads by two torchdata loaders with worker processes each. Its ranks log each step.

everstep-launch --nproc-per-node 2 -m tests.integration.frameworks.scripts.stateful_training FOLDER UNTIL \
    [RANK:STEP:POINT ...]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import everstep
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

WORLD, WORKERS, BATCH = 2, 2, 3
SIZES = {"map": 8, "stream": 12}
"""Samples of a rank in an epoch. The epochs end at different steps, and the epoch of the map inside a batch.

In the stream all workers have equally many batches, all complete, since torchdata 0.11 does not restore other streams
correctly (docs/concepts/limits.md)."""


class Mapped(Dataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return SIZES["map"]

    def __getitem__(self, index: int) -> int:
        return index * WORLD + self.rank


class Stream(IterableDataset[int]):
    """A stream in which each worker has every other sample, and saves its position."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        mine = range(info.id, SIZES["stream"], info.num_workers)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1] * WORLD + self.rank
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader_of(dataset: Dataset[int], **options: Any) -> StatefulDataLoader[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(
            dataset, BATCH, num_workers=WORKERS, persistent_workers=True, generator=generator, **options
        )


def batches(loader: StatefulDataLoader[int]) -> Iterator[torch.Tensor]:
    """Yield batches of consecutive epochs."""
    while True:
        yield from loader


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    model = run.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    mapped, stream = loader_of(Mapped(run.rank), shuffle=True), loader_of(Stream(run.rank))
    run.track(model=model, optimizer=optimizer, mapped=mapped, stream=stream)
    reading = {"map": batches(mapped), "stream": batches(stream)}
    injector, step_log = FaultInjector(faults, Path(folder), run.rank), StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=1):
        injector.step = step
        injector.at("begun")
        read = {name: next(source) for name, source in reading.items()}
        injector.at("forward")
        loss = model(read["map"].float()[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.mean(loss)
        step_log.write(step, **{name: batch.tolist() for name, batch in read.items()})


if __name__ == "__main__":
    main(train, sys.argv[1:])
