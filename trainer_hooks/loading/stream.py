"""Data that can only be read one after another, split over ranks and workers by position.

A sample's number is its place in an endless sequence: the data set, over and over. Each step takes the next
``global_batch`` of it. Who can jump (``Seekable``) reads its own samples only. Who cannot reads everything up to them:
on ``n`` ranks with ``w`` workers ``n * w`` times as much as is used, and after a restore all that came before again.

All of these must read the same. So data that cannot jump have random streams of their own while they are read, seeded
from (seed, epoch) where each begins: whoever shuffles there does so alike. Who can jump draws for each sample from
(seed, step, place in the global batch), and must not shuffle by what it draws.
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
from trainer_hooks.loading.portions import Collate, Portion, Portions, batch_of, batch_together
from trainer_hooks.rng import host_streams, seed_epoch, set_host_streams


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

    def __init__(self, dataset: Iterable[Any], seed: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed
        self.seekable = isinstance(dataset, Seekable)
        self._streams: tuple[Any, ...] | None = None
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._epoch = 0

    def read(self, position: int) -> Any:
        """The sample at ``position``, which is not behind: by a jump, or by reading what lies between."""
        if self.seekable and position != self._next:
            self._iterator = None
            self._next = position
        while self._next < position:
            self._step()
        return self._step()

    def read_apart(self, positions: Iterable[int]) -> list[Any]:
        """These samples, with the epoch's random streams. Leaves others behind than there were."""
        if self._streams is not None:
            set_host_streams(self._streams)
        samples = [self.read(position) for position in positions]
        self._streams = host_streams()
        return samples

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
        if self.seekable:
            self._dataset.seek(self._next)  # type: ignore[attr-defined]  # Seekable
        elif hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        if not self.seekable:
            seed_epoch(self._seed, self._epoch)
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
        reader, collate = Reader(self._dataset, self._seed), partial(self._collated, info)
        for number, portion in enumerate(self._portions):
            if number % workers == mine:
                yield self._batch(reader, portion, collate)

    def _batch(self, reader: Reader, portion: Portion, collate: Collate) -> Any:
        if reader.seekable:
            return batch_of(portion, self._seed, reader.read, collate)
        return batch_together(portion, self._seed, reader.read_apart, collate)

    def _collated(self, info: Any, samples: list[Any]) -> Any:
        """With the worker to be seen: torch's own collate function then makes tensors in shared memory."""
        worker._worker_info = info
        try:
            return self._collate(samples)
        finally:
            worker._worker_info = None
