"""Data sets whose samples show their index and the random numbers drawn for them."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SIZE = 41
Sample = tuple[int, float]


def sample(index: int) -> Sample:
    """Return a sample with random numbers of every generator."""
    return index, torch.rand(1).item() + random.random() + float(np.random.rand())


def as_tuple(samples: Sequence[Any]) -> tuple[Any, ...]:
    """A collate function that changes nothing."""
    return tuple(samples)


class Numbers(Dataset[Sample]):
    """A map-style data set."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class BatchFetching(Numbers):
    """A data set that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        noise = torch.rand(1).item()
        return [(index, noise) for index in indices]


class Counted(IterableDataset[Sample]):
    """An iterable data set. ``read`` counts the samples."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.size):
            self.read += 1
            yield sample(index)


class Shuffling(IterableDataset[Sample]):
    """A data set in an order that each epoch draws from a global generator, with a shuffle buffer."""

    def __init__(self, generator: str = "random", *, lazy: bool = True) -> None:
        self._generator = generator
        self._lazy = lazy

    def __iter__(self) -> Iterator[Sample]:
        return self._shuffled() if self._lazy else iter(list(self._shuffled()))

    def _shuffled(self) -> Iterator[Sample]:
        waiting: list[int] = []
        for index in range(SIZE):
            waiting.append(index)
            if len(waiting) > SIZE // 3:
                yield sample(waiting.pop(self._draw(len(waiting))))
        while waiting:
            yield sample(waiting.pop(self._draw(len(waiting))))

    def _draw(self, below: int) -> int:
        if self._generator == "torch":
            return int(torch.randint(below, ()))
        return int(np.random.randint(below)) if self._generator == "numpy" else random.randrange(below)


class Seekable(Counted):
    """A data set that can seek."""

    def __init__(self) -> None:
        super().__init__()
        self._at = 0

    def seek(self, position: int) -> None:
        self._at = position % SIZE

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self._at, SIZE):
            self.read += 1
            yield sample(index)


class SplitByWorker(Counted):
    """A data set that gives each worker its part, as in Example 1 of torch's documentation of IterableDataset."""

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(mine * self.size // workers, (mine + 1) * self.size // workers):
            yield sample(index)


def masked(samples: Sequence[Any]) -> tuple[tuple[Any, ...], float]:
    """A collate function that draws at random, as one that masks tokens does."""
    return tuple(samples), torch.rand(1).item() + random.random() + float(np.random.rand())


class Stuck(Numbers):
    """A data set that never returns a sample."""

    def __getitem__(self, index: int) -> Sample:
        threading.Event().wait()
        return sample(index)


class WorkerKilling(Numbers):
    """A data set with a sample that kills its worker, once for each file in the folder ``lives``."""

    def __init__(self, index: int, lives: Path) -> None:
        self._index = index
        self._lives = lives

    def __getitem__(self, index: int) -> Sample:
        life = next(self._lives.iterdir(), None) if index == self._index else None
        if life is not None:
            life.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)
