"""Take the epochs of a torch DataLoader as a function of the step, on any number of ranks.

A DataLoader decides how its samples are ordered and collated. Here each epoch's order is computed from (seed, epoch)
instead of a generator's past, and each global batch is split over the ranks of the generation. So a training loop over
epochs continues at the next batch after a restore, without reading what came before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from everstep_trainer.data.loader import Loader, end_workers, is_stream
from everstep_trainer.data.rng import get_host_rng_state, seed_loading, set_host_rng_state, stream_seed
from everstep_trainer.data.sampler import ElasticSampler, Permutation

Samples = npt.NDArray[np.int64]

# ---- orders: the samples of each global batch of an epoch


class EpochOrder(Protocol):
    """The order of a data set's samples in each epoch; ``batches`` is the number of global batches of an epoch."""

    batches: int

    def samples(self, epoch: int, index: int) -> Samples:
        """Return the samples of global batch ``index`` of ``epoch``, both from 0."""


class IndexOrder:
    """Samples in their own order or shuffled by a keyed permutation, in constant memory."""

    def __init__(self, size: int, global_batch: int, seed: int, *, shuffled: bool, drop_last: bool) -> None:
        self._size, self._global_batch = size, global_batch
        self._seed, self._shuffled = seed, shuffled
        self.batches = _count_batches(size, global_batch, drop_last)

    def samples(self, epoch: int, index: int) -> Samples:
        first = index * self._global_batch
        positions = np.arange(first, min(first + self._global_batch, self._size), dtype=np.uint64)
        return (Permutation(self._size, self._seed, epoch)(positions) if self._shuffled else positions).astype(np.int64)


class SamplerOrder:
    """Samples in the order of a torch sampler, which is read whole once in each epoch, alike on all ranks."""

    def __init__(self, sampler: Any, global_batch: int, seed: int, *, drop_last: bool) -> None:
        self._global_batch = global_batch
        self._order = _keep_two(lambda epoch: np.asarray(_draw(sampler, "the sampler", seed, epoch), np.int64))
        self.batches = _count_batches(len(sampler), global_batch, drop_last)

    def samples(self, epoch: int, index: int) -> Samples:
        return self._order(epoch)[index * self._global_batch :][: self._global_batch]


class BatchOrder:
    """Batches of a torch batch sampler; ``together`` consecutive ones form a global batch."""

    def __init__(self, sampler: Any, together: int, seed: int, *, drop_last: bool) -> None:
        self._together = together
        self._order = _keep_two(lambda epoch: _draw(sampler, "the batch sampler", seed, epoch))
        self.batches = _count_batches(len(sampler), together, drop_last)

    def samples(self, epoch: int, index: int) -> Samples:
        batches = self._order(epoch)[index * self._together :][: self._together]
        return np.concatenate([np.asarray(batch, np.int64) for batch in batches])


_T = TypeVar("_T")


def _keep_two(compute: Callable[[int], _T]) -> Callable[[int], _T]:
    """Keep the results of two epochs: loading ahead crosses the border between them."""
    return lru_cache(maxsize=2)(compute)


def _count_batches(size: int, batch: int, drop_last: bool) -> int:
    batches = size // batch if drop_last else -(-size // batch)
    if not batches:
        raise ValueError(f"{size} samples do not make a batch of {batch}: take a smaller batch, or drop_last=False")
    return batches


def _draw(sampler: Any, noun: str, seed: int, epoch: int) -> list[Any]:
    """Read a sampler whole, with random streams that depend on (seed, epoch) alone."""
    parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(stream_seed(seed, epoch, 0))
    before = get_host_rng_state()
    try:
        seed_loading("epoch", seed, epoch)
        drawn = list(sampler)
    finally:
        set_host_rng_state(before)
    if len(drawn) != len(sampler):
        raise ValueError(
            f"{noun} yields {len(drawn)} items in epoch {epoch}, but its length is {len(sampler)}: steps could not be "
            "assigned to epochs. Make its length the same in all epochs"
        )
    return drawn


def order_of(loader: DataLoader[Any], global_batch: int | None, ranks: int, seed: int) -> EpochOrder:
    """Return the order of a DataLoader over map-style data.

    Args:
        loader: The loader as the script made it, or with the sampler that a framework put around its own.
        global_batch: Samples of a global batch; None: the loader's batch on each of ``ranks``.
        ranks: Number of ranks that the loader's batch size was meant for.
        seed: Seed of the shuffle, and of samplers that draw random numbers.

    Raises:
        ValueError: The data do not make one batch, a batch sampler of the script's own meets a ``global_batch``, or a
            sampler of its own splits samples over ranks.
    """
    batch_sampler: Any = _strip(loader.batch_sampler)
    _refuse_split(batch_sampler)
    if type(batch_sampler) is not BatchSampler:
        if global_batch is not None:
            raise ValueError(
                "global_batch cannot be combined with a batch sampler, which determines the batches: take batch_size "
                "and a sampler, or a fixed number of nodes (--nnodes N)"
            )
        return BatchOrder(batch_sampler, ranks, seed, drop_last=bool(getattr(batch_sampler, "drop_last", False)))
    sampler, drop_last = _strip(batch_sampler.sampler), batch_sampler.drop_last
    batch = global_batch or batch_sampler.batch_size * ranks
    if _is_plain_split(sampler):
        length, shuffled = len(sampler.dataset), sampler.shuffle
        return IndexOrder(length, batch, seed + sampler.seed, shuffled=shuffled, drop_last=drop_last)
    _refuse_split(sampler)
    if type(sampler) is SequentialSampler:
        return IndexOrder(len(sampler), batch, seed, shuffled=False, drop_last=drop_last)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return IndexOrder(len(sampler), batch, seed, shuffled=True, drop_last=drop_last)
    return SamplerOrder(sampler, batch, seed, drop_last=drop_last)


def _is_plain_split(sampler: Any) -> bool:
    """Return whether a sampler splits samples as torch's own does, so that its order is known."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def _refuse_split(sampler: Any) -> None:
    """Raise ValueError for a sampler that gives each rank its own samples, which would be split twice."""
    ranks = getattr(sampler, "num_replicas", None)
    if not _is_plain_split(sampler) and isinstance(ranks, int) and ranks > 1:
        raise ValueError(
            f"the loader's {type(sampler).__qualname__} splits its samples over {ranks} ranks, and run.epoch_loader "
            "splits each batch, too: give it num_replicas=1, or a sampler of all ranks' samples"
        )


def _strip(sampler: Any) -> Any:
    """Return the script's own sampler inside those of Lightning 2.6 and accelerate 1.15, which split it by rank."""
    while True:
        inner = getattr(sampler, "batch_sampler", None)  # accelerate's BatchSamplerShard
        if inner is None and isinstance(sampler, DistributedSampler):
            inner = getattr(sampler.dataset, "_sampler", None)  # Lightning's DistributedSamplerWrapper
        if inner is None:
            return sampler
        sampler = inner


# ---- the sampler of a Loader, by step, and the source of batches by epoch


class EpochSampler(ElasticSampler):
    """Splits each global batch of an order over the ranks; steps count batches from 1 across all epochs.

    The last batch of an epoch may be smaller. One with fewer samples than ranks is filled up with its own samples.
    """

    def __init__(self, order: EpochOrder, *, rank: int = 0, world_size: int = 1) -> None:
        self._order, self._rank, self._world = order, rank, world_size

    def epoch(self, step: int) -> int:
        return self._place(step)[0]

    def indices(self, step: int) -> torch.Tensor:
        samples = self._filled(step)
        start, end = self._share(len(samples))
        return torch.from_numpy(samples[start:end])

    def global_indices(self, step: int) -> torch.Tensor:
        return torch.from_numpy(self._order.samples(*self._place(step)))

    def loss_weight(self, step: int) -> float:
        count = len(self._filled(step))
        start, end = self._share(count)
        return (end - start) * self._world / count

    def batch_range(self, step: int = 1) -> tuple[int, int]:
        return self._share(len(self._filled(step)))

    def _place(self, step: int) -> tuple[int, int]:
        """Return the epoch of the step, and the number of its batch in it."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return divmod(step - 1, self._order.batches)

    def _share(self, count: int) -> tuple[int, int]:
        return self._rank * count // self._world, (self._rank + 1) * count // self._world

    def _filled(self, step: int) -> Samples:
        samples = self._order.samples(*self._place(step))
        return samples if len(samples) >= self._world else np.resize(samples, self._world)


class IndexedBatches:
    """Batches of map-style data by (epoch, index), loaded ahead.

    As in torch, workers begin anew with each epoch unless they are persistent: the script may change the data between
    two epochs, and workers have copies.
    """

    def __init__(self, loader: Loader, sampler: EpochSampler, length: int, *, is_persistent: bool = False) -> None:
        self._loader, self._sampler, self._length = loader, sampler, length
        self._is_persistent = is_persistent

    def __len__(self) -> int:
        return self._length

    def iterate(self, epoch: int, first: int) -> Iterator[tuple[Any, float]]:
        """Yield each batch of the epoch from number ``first`` on, with its loss weight."""
        last = (epoch + 1) * self._length
        if not self._is_persistent:
            self._loader.restart(last)
        for step in range(epoch * self._length + first + 1, last + 1):
            yield self._loader.batch(step), self._loader.loss_weight(step)


class SequentialBatches:
    """Batches of an iterable that only yields them in sequence: those that are done are read again and dropped.

    Each rank reads its own iterable, so the script decides about its share. Random numbers that are drawn in this
    process come from a stream of the epoch.
    """

    def __init__(self, iterable: Any, seed: int) -> None:
        self._iterable, self._seed = iterable, seed
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._iterable)

    def iterate(self, epoch: int, first: int) -> Iterator[tuple[Any, float]]:
        """Yield each batch of the epoch from number ``first`` on, with its loss weight."""
        parts = (getattr(self._iterable, name, None) for name in ("sampler", "batch_sampler", "dataset"))
        for part in (self._iterable, *parts):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        before = get_host_rng_state()
        seed_loading("epoch", self._seed, epoch)
        self._iterator = iterator = iter(self._iterable)
        streams = get_host_rng_state()
        set_host_rng_state(before)
        number = 0
        while True:
            before = get_host_rng_state()
            set_host_rng_state(streams)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                streams = get_host_rng_state()
                set_host_rng_state(before)
            if number >= first:
                yield batch, 1.0
            number += 1

    def close(self) -> None:
        """End the iterator's workers without waiting for them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            end_workers(iterator)


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a DataLoader's options that say how to load, without those that say what."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return options


def is_indexed(loader: object) -> bool:
    """Return whether the batches of a loader can be taken by their numbers: torch's own, over map-style data."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return loader.batch_sampler is not None and not is_stream(loader.dataset)


class StepLoop(Protocol):
    """The part of a run that counts steps; the methods are documented at ``Run``."""

    @property
    def last_finished_step(self) -> int: ...

    def seed_step(self, step: int, *, seed: int = 0) -> None: ...

    def step_finished(self) -> None: ...

    def end_steps(self) -> None: ...


class EpochLoader:
    """The epochs of a DataLoader for a training loop, made by ``run.epoch_loader``; see there."""

    def __init__(
        self,
        run: StepLoop,
        batches: IndexedBatches | SequentialBatches,
        dataset: Any,
        *,
        seed: int,
        accumulates: int,
        place: Callable[[Any], Any] | None,
    ) -> None:
        self._run, self._batches, self.dataset = run, batches, dataset
        self._seed, self._accumulates, self._place = seed, accumulates, place
        self._passes = 0
        self._max_steps = sys.maxsize
        self._epoch: int | None = None  # of the loop over ``epochs``, if there is one
        self._unfinished = False  # the epoch's last step waits for the end of the epoch
        self.loss_weight = 1.0
        """Factor for this rank's mean loss of the last batch that makes the mean over ranks the mean over samples."""
        self.is_last_batch = False
        """Whether the last batch taken is the epoch's last."""

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position follows from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def take(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number ``first`` on, for a loop that counts its steps itself.

        Args:
            epoch: The epoch, from 0.
            first: Number of the first batch in its epoch, from 0.
        """
        try:
            length: int | None = len(self)
        except TypeError:  # the length of the iterable is unknown
            length = None
        for number, (batch, weight) in enumerate(self._batches.iterate(epoch, first), first + 1):
            self.loss_weight, self.is_last_batch = weight, number == length
            yield batch if self._place is None else self._place(batch)

    def epochs(self, until: int | None = None, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs still to do.

        The last step of an epoch is finished when the loop asks for the next epoch. A rank that is lost while an epoch
        is evaluated at its end costs that step, and the evaluation is done again.

        Args:
            until: Number of epochs in all; None: as many as ``max_steps`` needs.
            max_steps: Number of steps in all, in whose last one the batches of the last epoch end.

        Raises:
            RuntimeError: A loop over the batches of an epoch was left before its end.
        """
        self._max_steps = sys.maxsize if max_steps is None else max_steps
        for epoch in range(self._position()[0], sys.maxsize if until is None else until):
            if self._run.last_finished_step >= self._max_steps:
                break
            self._epoch = epoch
            yield epoch
            if self._unfinished:
                self._unfinished = False
                self._run.step_finished()
            if self._run.last_finished_step < self._max_steps:
                self._require_epoch(epoch + 1)
        self._epoch = None
        self._run.end_steps()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch that are still to do; a step is finished when its next batch is asked for."""
        epoch = self._passes if self._epoch is None else self._epoch
        self._passes += 1
        begun, updates = self._position()
        if epoch < begun:
            return
        self._require_epoch(epoch)
        length, size = len(self), self._accumulates
        for number, batch in enumerate(self.take(epoch, updates * size), updates * size + 1):
            if number % size == 1 or size == 1:
                self._run.seed_step(self._run.last_finished_step + 1, seed=self._seed)
            yield batch
            if number < length and number % size:
                continue
            is_last_step = self._run.last_finished_step + 1 == self._max_steps
            if self._epoch is not None and (number == length or is_last_step):
                self._unfinished = True
                return
            self._run.step_finished()

    def _position(self) -> tuple[int, int]:
        """Return the first unfinished step's epoch, and the steps of that epoch that are finished."""
        try:
            length = len(self)
        except TypeError as error:
            raise ValueError(
                "the length of the data is unknown, so no epoch can be found again: give the data set a __len__, or "
                "take batches by the step from run.loader"
            ) from error
        return divmod(self._run.last_finished_step, -(-length // self._accumulates))

    def _require_epoch(self, epoch: int) -> None:
        if epoch > self._position()[0]:
            raise RuntimeError(
                f"epoch {self._position()[0]} was left before its last batch: a restored run could not tell where the "
                "next epoch began. End an epoch early by a smaller data set, or leave the loop over epochs, too"
            )
