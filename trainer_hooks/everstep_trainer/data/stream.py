"""Split data that can only be read in sequence over ranks and workers by position.

A sample's position is its place in the endless repetition of the data set. A data set that can jump (`Seekable`) reads
only its own samples. Any other reads everything up to them: with ``n`` ranks and ``w`` workers it reads ``n * w`` times
what is used and, after a restore, everything before it.

All readers of data that cannot jump must read the same sequence. They get random streams of their own, seeded by
(seed, epoch), while they read. Draws for a batch after reading have another stream, and do not affect the sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from everstep_trainer.data.rng import get_host_rng_state, seed_loading, set_host_rng_state
from everstep_trainer.data.sampler import ElasticSampler

# ---- batch requests: what a loader fetches, in order, with its random numbers


class BatchRequest(msgspec.Struct, frozen=True):
    """The samples of one part (see ``run.parts``) of one step."""

    step: int
    first_position: int
    indices: tuple[int, ...]


@dataclass(eq=False)
class BatchRequests:
    """Requests for this rank's parts, from part ``first_part`` (from 0) of ``first_step`` on, until ``last_step`` ends;
    None: without end."""

    samplers: Sequence[ElasticSampler]
    first_step: int
    first_part: int = 0
    last_step: int | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        steps = count(self.first_step) if self.last_step is None else range(self.first_step, self.last_step + 1)
        parts = ((step, share) for step in steps for share in self.samplers)
        for step, share in islice(parts, self.first_part, None):
            yield BatchRequest(step, share.batch_range(step)[0], tuple(share.indices(step).tolist()))


Collate = Callable[[list[Any]], Any]


def build_batch(request: BatchRequest, seed: int, fetch: Callable[[int], Any], collate: Collate) -> Any:
    """Fetch and collate samples with random streams of their own; the process's random state is preserved."""
    before = get_host_rng_state()
    try:
        fetched = []
        for place, index in enumerate(request.indices, request.first_position):
            seed_loading("sample", seed, request.step, place)
            fetched.append(fetch(index))
        seed_loading("batch", seed, request.step, request.first_position)
        return collate(fetched)
    finally:
        set_host_rng_state(before)


def build_batch_in_one_fetch(
    request: BatchRequest, seed: int, fetch: Callable[[list[int]], list[Any]], collate: Collate
) -> Any:
    """Build a batch from one call that fetches all samples, with streams seeded from the position of the first."""
    first = msgspec.structs.replace(request, indices=request.indices[:1])
    return build_batch(first, seed, lambda _: fetch(list(request.indices)), lambda fetched: collate(fetched[0]))


@dataclass(eq=False)
class MapBatchDataset:
    """Adapts a map-style data set to batch requests: torch's fetcher passes a whole request to ``__getitems__``."""

    dataset: Any
    seed: int
    collate: Collate
    fetch_together: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: BatchRequest) -> Any:
        if not self.fetch_together:
            return build_batch(request, self.seed, self._one, self.collate)
        return build_batch_in_one_fetch(request, self.seed, self.dataset.__getitems__, self.collate)

    def _one(self, index: int) -> Any:
        """Return one sample; prefer ``__getitems__`` as torch does, since a data set may have only that method."""
        several = getattr(self.dataset, "__getitems__", None)
        return self.dataset[index] if several is None else several([index])[0]


@dataclass(frozen=True)
class WorkerSetup:
    """Calls a script's ``worker_init_fn``, which expects its own data set in ``get_worker_info()``."""

    function: Callable[[int], object]

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        assert info is not None, "a DataLoader calls it in workers"
        worker._worker_info = replace(info, dataset=info.dataset.dataset)
        try:
            self.function(worker_id)
        finally:
            worker._worker_info = info


def identity_collate(value: Any) -> Any:
    """Return the batch unchanged, in place of a collate function: requests are collated already."""
    return value


@runtime_checkable
class Seekable(Protocol):
    """An iterable data set that can jump to a position."""

    def seek(self, position: int) -> None:
        """Make the next ``iter()`` begin at sample ``position`` of the endless sequence, counted from 0."""


class StreamSampler(ElasticSampler):
    """Positions of a stream in their own order."""

    def __init__(self, *, global_batch: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(sys.maxsize, global_batch=global_batch, rank=rank, world_size=world_size)

    def _samples(self, step: int, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end) + self._first(step)


class StreamReader:
    """Reads samples of one stream at rising positions. Raises ValueError if an epoch of the data has no samples."""

    def __init__(self, dataset: Iterable[Any], seed: int = 0) -> None:
        self._dataset, self._seed = dataset, seed
        self.is_seekable = isinstance(dataset, Seekable)
        self._streams: tuple[Any, ...] | None = None
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._epoch = 0

    def read(self, position: int) -> Any:
        """Return the sample at ``position``, not behind the last one, by a jump or by reading up to it."""
        if self.is_seekable and position != self._next:
            self._iterator = None
            self._next = position
        while self._next < position:
            self._step()
        return self._step()

    def read_with_epoch_rng(self, positions: Iterable[int]) -> list[Any]:
        """Return these samples, read with the epoch's random streams; the process's random state is left changed."""
        if self._streams is not None:
            set_host_rng_state(self._streams)
        samples = [self.read(position) for position in positions]
        self._streams = get_host_rng_state()
        return samples

    def _step(self) -> Any:
        """Return the sample at ``_next``, beginning a new epoch at the end of the data."""
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
        raise ValueError(f"the data end before sample {self._next}: an epoch has no samples")

    def _begin(self) -> Iterator[Any]:
        if self.is_seekable:
            self._dataset.seek(self._next)  # type: ignore[attr-defined]  # Seekable
        elif hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        if not self.is_seekable:
            seed_loading("epoch", self._seed, self._epoch, 0)
        return iter(self._dataset)


@dataclass(eq=False)
class StreamBatchDataset(IterableDataset[Any]):
    """Yields whole batches to a DataLoader without a batch size; worker ``w`` of ``n`` makes each ``n``-th batch. The
    worker info is hidden from data sets that would split themselves by it, as Hugging Face's do."""

    dataset: Iterable[Any]
    requests: BatchRequests
    collate: Collate
    seed: int

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        worker._worker_info = None
        reader, collate = StreamReader(self.dataset, self.seed), partial(self._collated, info)
        for request in islice(self.requests, mine, None, workers):
            if reader.is_seekable:
                yield build_batch(request, self.seed, reader.read, collate)
            else:
                yield build_batch_in_one_fetch(request, self.seed, reader.read_with_epoch_rng, collate)

    def _collated(self, info: Any, samples: list[Any]) -> Any:
        """Collate with the worker info visible, so that torch's own collate function makes tensors in shared memory."""
        worker._worker_info = info
        try:
            return self.collate(samples)
        finally:
            worker._worker_info = None
