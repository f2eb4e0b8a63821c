"""torch's DataLoader, asked for the batches of a step: there is no state to save, and prefetching costs nothing.

Which samples a step has is a function of the step, so a generation begins to load at its first one, whatever workers
had fetched ahead in the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainer_hooks.data import ElasticSampler, Sampler
from trainer_hooks.loading.portions import Mapped, Portions, the_same
from trainer_hooks.loading.stream import Streamed, StreamSampler
from trainer_hooks.loading.workers import WorkerLost, disown, end_workers, next_batch

logger = logging.getLogger(__name__)

LOST_MOST = 3
"""Workers that may be lost, one after the other, before a batch comes: one is what the kernel took when memory was
short, more at the same batch are the data set's."""

_OURS = {
    "batch_size": "global_batch is the samples of a step over all ranks",
    "shuffle": "map-style data are shuffled anew in each epoch, iterable data come in their own order",
    "sampler": "samples are a function of the step",
    "batch_sampler": "samples are a function of the step",
    "generator": "random streams are seeded for each sample",
    "in_order": "a step has its own batch, which may not be the first that is ready",
    "persistent_workers": "workers live as long as their generation",
}


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after another."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Loader:
    """The batches of a data set, by step. Also a sampler: ``indices``, ``weight`` and ``of``.

    Args:
        sampler: of the data set's samples, for this rank.
        parts: the ranks, of how many, whose batches ``batches`` gives; asked when the first is wanted.
        together: as of Mapped.
        options: of DataLoader. Raises TypeError for those that are not the user's to choose here, and for ``together``
            with data that cannot be asked so.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler | StreamSampler,
        parts: Callable[[], Sequence[tuple[int, int]]],
        seed: int,
        options: dict[str, Any],
        *,
        together: bool = False,
    ) -> None:
        for name, why in _OURS.items():
            if name in options:
                raise TypeError(f"run.loader has no {name}: {why}")
        if together and not hasattr(dataset, "__getitems__"):
            raise TypeError(
                f"fetch_together needs a data set with __getitems__, which {type(dataset).__name__} has not"
            )
        self._dataset = dataset
        self._sampler = sampler
        self._parts = parts
        self._seed = seed
        self._options = options
        self._together = together
        self._next: tuple[int, int] | None = None
        self._iterator: Iterator[Any] | None = None

    def indices(self, step: int) -> torch.Tensor:
        """This rank's samples of the step: int64; of a stream, their positions."""
        return self._sampler.indices(step)

    def weight(self, step: int) -> float:
        """See ElasticSampler."""
        return self._sampler.weight(step)

    def of(self, rank: int, world_size: int) -> ElasticSampler | StreamSampler:
        """The sampler of ``rank`` of another number of ranks."""
        return self._sampler.of(rank, world_size)

    def batch(self, step: int) -> Any:
        """What the collate function made of this rank's samples of ``step``.

        Steps that follow one another come from what was fetched ahead. With virtual ranks use ``run.parts``.
        """
        (batch,) = self.batches(step)
        return batch

    def batches(self, step: int) -> Iterator[Any]:
        """One batch for each part of ``step`` that this rank computes, in their order."""
        shares = [self._sampler.of(rank, world) for rank, world in self._parts()]
        if self._iterator is None or (step, 0) != self._next:
            self.close()
            self._iterator = self._begin(step, shares)
        for number in range(len(shares)):
            self._next = None  # unless a batch comes
            batch = self._take(step, shares, number)
            self._next = (step, number + 1) if number + 1 < len(shares) else (step + 1, 0)
            yield batch

    def _take(self, step: int, shares: Sequence[ElasticSampler | StreamSampler], number: int) -> Any:
        """The batch of a step's part; begins there anew where a worker was lost."""
        lost = 0
        while True:
            if self._iterator is None:
                self._iterator = self._begin(step, shares, number)
            try:
                return next_batch(self._iterator, self._options.get("timeout", 0.0))
            except WorkerLost as error:
                self.close()
                lost += 1
                if lost > LOST_MOST:
                    raise WorkerLost(
                        f"{error}, the {lost}th in a row while step {step} was loaded: the data set crashes there, or "
                        "the node is out of memory or of shared memory (/dev/shm)"
                    ) from error
                logger.warning("a loader begins anew at step %d: %s", step, error)

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            end_workers(iterator)

    def _begin(self, step: int, shares: Sequence[ElasticSampler | StreamSampler], number: int = 0) -> Iterator[Any]:
        """From the step's part ``number`` on."""
        iterator = self._iterator_of(Portions(shares, step, number))
        disown(iterator)
        return iterator

    def _iterator_of(self, portions: Portions) -> Iterator[Any]:
        options = dict(self._options)
        if options.get("num_workers"):
            get_temp_dir()  # this process's, for their sockets: else each makes one, which stays when it is killed
        collate = options.pop("collate_fn", None) or default_collate
        generator = torch.Generator()  # the default one would give a number away here, which a restored run takes later
        if not is_stream(self._dataset):
            mapped: Any = Mapped(self._dataset, self._seed, collate, together=self._together)
            batches: Any = portions
            return iter(DataLoader(mapped, batch_sampler=batches, collate_fn=the_same, generator=generator, **options))
        streamed = Streamed(self._dataset, portions, collate, self._seed)
        return iter(DataLoader(streamed, batch_size=None, collate_fn=the_same, generator=generator, **options))


def batches_of(sampler: Sampler, step: int) -> Iterator[Any]:
    """The batches of a step where the sampler loads them, one for each part of it that this rank computes; else None as
    often as is asked."""
    return sampler.batches(step) if isinstance(sampler, Loader) else repeat(None)
