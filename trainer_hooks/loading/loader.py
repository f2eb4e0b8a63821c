"""torch's DataLoader, asked for the batches of a step: there is no state to save, and prefetching costs nothing.

Which samples a step has is a function of the step, so a generation begins to load at its first one, whatever workers
had fetched ahead in the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from multiprocessing.util import get_temp_dir
from time import sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainer_hooks.data import ElasticSampler, Sampler
from trainer_hooks.interrupt import SLICE_S
from trainer_hooks.loading.portions import Mapped, Portions, the_same
from trainer_hooks.loading.stream import Streamed, StreamSampler

_OURS = {
    "batch_size": "global_batch is the samples of a step over all ranks",
    "shuffle": "map-style data are shuffled anew in each epoch, iterable data come in their own order",
    "sampler": "samples are a function of the step",
    "batch_sampler": "samples are a function of the step",
    "generator": "random streams are seeded for each sample",
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
        parts = self._parts()
        if self._iterator is None or (step, 0) != self._next:
            self.close()
            self._iterator = self._begin(step, [self._sampler.of(rank, world) for rank, world in parts])
        iterator = self._iterator
        for number in range(1, len(parts) + 1):
            self._next = None  # unless a batch comes
            _await(iterator)
            batch = next(iterator)
            self._next = (step, number) if number < len(parts) else (step + 1, 0)
            yield batch

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            end_workers(iterator)

    def _begin(self, step: int, shares: Sequence[ElasticSampler | StreamSampler]) -> Iterator[Any]:
        portions, options = Portions(shares, step), dict(self._options)
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


def _await(iterator: Any) -> None:
    """Until a worker has something to say, or is gone; whatever it is, ``next`` sorts it out.

    torch itself waits five seconds at a time, in C. Its iterator's fields are private, and read in torch 2.13: where
    they are others there is nothing to wait for here.
    """
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", None)
    if queue is None or tasks is None or len(tasks.get(getattr(iterator, "_rcvd_idx", -1), ())) == 2:
        return
    reader = getattr(queue, "_reader", None)  # absent where a thread pins memory between the workers and us
    while not (reader.poll(SLICE_S) if reader is not None else not queue.empty()):
        if reader is None:
            sleep(SLICE_S / 20)
        if not all(worker.is_alive() for worker in iterator._workers):
            return


def end_workers(iterator: Any) -> None:
    """Workers that fetch something slow, or whose queues were collected before them, would be waited for, five seconds
    each: they are killed instead."""
    workers: Iterable[Any] = getattr(iterator, "_workers", ())
    if not workers:
        return
    pids = getattr(torch.utils.data._utils.signal_handling, "_remove_worker_pids", None)
    if pids is not None and getattr(iterator, "_worker_pids_set", False):
        pids(id(iterator))  # else torch takes their end for a failure
        iterator._worker_pids_set = False
    if not hasattr(iterator, "_pin_memory_thread"):  # that one would wait for the rest of half a message
        for worker in workers:
            worker.kill()
    threading.Thread(target=iterator._shutdown_workers, name="everstep-loader-end", daemon=True).start()
