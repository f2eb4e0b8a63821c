"""Data that can only be read one after another, split over ranks and workers by position.

A sample's number is its place in an endless sequence: the data set, over and over. Each step takes the next
``global_batch`` of it. Who can jump (``Seekable``) reads its own samples only. Who cannot reads everything up to them:
on ``n`` ranks with ``w`` workers ``n * w`` times as much as is used, and after a restore all that came before again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from trainer_hooks.data import share_of
from trainer_hooks.loading.portions import Collate, Portions, batch_of


@runtime_checkable
class Seekable(Protocol):
    """An iterable data set that can jump."""

    def seek(self, position: int) -> None:
        """The next ``iter()`` begins at sample ``position`` of the endless sequence, counted from 0."""


class StreamSampler:
    """Positions of a stream: step ``s`` (from 1) takes ``(s - 1) * global_batch`` up to ``s * global_batch``."""

    def __init__(self, *, global_batch: int, rank: int = 0, world_size: int = 1) -> None:
        self._batch = global_batch
        self._rank, self._world = rank, world_size
        share_of(rank, world_size, global_batch)

    def of(self, rank: int, world_size: int) -> StreamSampler:
        """The same samples, as ``rank`` of another number of ranks has them."""
        other = copy(self)
        other._rank, other._world = rank, world_size
        return other

    def share(self) -> tuple[int, int]:
        """Where this rank's samples begin and end in the global batch."""
        return share_of(self._rank, self._world, self._batch)

    def indices(self, step: int) -> torch.Tensor:
        """This rank's positions of the step: int64."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        start, end = self.share()
        return torch.arange(start, end) + (step - 1) * self._batch

    def weight(self, step: int) -> float:
        """See ElasticSampler."""
        start, end = self.share()
        return (end - start) * self._world / self._batch


class Reader:
    """Reads samples of one stream by rising position.

    Raises ValueError where the data end for good.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._seekable = isinstance(dataset, Seekable)
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._epoch = 0

    def approach(self, position: int) -> None:
        """Goes to a position that is not behind, by a jump or by reading what lies between."""
        if self._seekable and position != self._next:
            self._iterator = None
            self._next = position
        while self._next < position:
            self._step()

    def read(self, position: int) -> Any:
        """The sample at ``position``."""
        self.approach(position)
        return self._step()

    def _step(self) -> Any:
        """The sample at ``_next``."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._begin()
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._iterator = None
                self._epoch += 1
                continue
            self._next += 1
            return sample
        raise ValueError(f"the data end before sample {self._next}: an epoch of them has no samples")

    def _begin(self) -> Iterator[Any]:
        if self._seekable:
            self._dataset.seek(self._next)  # type: ignore[attr-defined]  # Seekable
        elif hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        return iter(self._dataset)


class Streamed(IterableDataset[Any]):
    """Whole batches for a DataLoader without a batch size: worker ``w`` of ``n`` makes each ``n``-th, which is the
    order in which the DataLoader asks them.

    Each worker reads the whole sequence. Data sets that split themselves by ``get_worker_info()``, as torch's
    documentation shows and Hugging Face's do, would give it a part: it is hidden from them, from their threads too.
    """

    def __init__(self, dataset: Iterable[Any], portions: Portions, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._portions = portions
        self._collate = collate
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        worker._worker_info = None
        reader = Reader(self._dataset)
        for number, portion in enumerate(self._portions):
            if number % workers == mine:
                yield batch_of(portion, self._seed, reader.read, partial(self._collated, info), reader.approach)

    def _collated(self, info: Any, samples: list[Any]) -> Any:
        """With the worker to be seen: torch's own collate function then makes tensors in shared memory."""
        worker._worker_info = info
        try:
            return self._collate(samples)
        finally:
            worker._worker_info = None
