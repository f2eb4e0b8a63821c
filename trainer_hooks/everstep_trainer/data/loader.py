"""torch's DataLoader, asked for the batches of a step: there is no state to save, and prefetching costs nothing.

Which samples a step has is a function of the step, so a generation begins to load at its first one, whatever workers
had fetched ahead in the one before.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from multiprocessing.util import get_temp_dir
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import signal_handling

from everstep_trainer.data.sampler import ElasticSampler, Sampler
from everstep_trainer.data.stream import (
    BatchRequests,
    MapBatchDataset,
    StreamBatchDataset,
    StreamSampler,
    identity_collate,
)
from everstep_trainer.runtime.interrupt import WAIT_SLICE_S
from everstep_trainer.state.python_state import PerRankState

# ---- workers
# A DataLoader's worker processes: waited for, found dead, ended.
#
# Fields of torch's iterator are private, and read in torch 2.13: where they are others, torch does what it does alone.

WORKER_EXIT_WAIT_S = 0.5
"""From the end of a dying process's connections to its own."""


class DataWorkerLost(RuntimeError):
    """A worker has ended without being told; says which one, and how."""


def next_batch(iterator: Iterator[Any], timeout_s: float = 0.0) -> Any:
    """What the iterator gives next. A Regroup in the main thread ends the wait for it.

    Raises DataWorkerLost where a worker is gone, whatever it was at, and RuntimeError where nothing came for
    ``timeout_s`` (0: waits for ever).
    """
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return next(iterator)
    try:
        with _raise_worker_deaths(iterator, workers):
            _wait_for_batch(iterator, workers, timeout_s)
            return next(iterator)
    except DataWorkerLost:
        raise
    except RuntimeError as error:  # torch's word of a death
        _check_workers(workers, error)
        raise
    except (
        OSError,
        EOFError,
    ) as error:  # the batch is there, and its tensors were still to come; or the data set's own
        latest = perf_counter() + WORKER_EXIT_WAIT_S
        while perf_counter() < latest:
            _check_workers(workers, error)
            sleep(WORKER_EXIT_WAIT_S / 100)
        raise


def suppress_worker_death_errors(iterator: Iterator[Any]) -> None:
    """Keeps torch from raising a worker's death wherever the main thread happens to be."""
    if hasattr(iterator, "_worker_pids_set"):
        _forget(iterator)
        iterator._worker_pids_set = False


def _forget(iterator: Iterator[Any]) -> None:
    with contextlib.suppress(ValueError):  # it knows none of it
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # private


@contextlib.contextmanager
def _raise_worker_deaths(iterator: Iterator[Any], workers: Sequence[Any]) -> Iterator[None]:
    """In here torch's handler raises a worker's death: a half-written message would be waited for without end."""
    with contextlib.suppress(ValueError):  # it has them still
        pids = tuple(worker.pid for worker in workers)
        signal_handling._set_worker_pids(id(iterator), pids)  # type: ignore[attr-defined]  # private
    try:
        yield
    finally:
        _forget(iterator)


def _check_workers(workers: Sequence[Any], error: BaseException | None = None) -> None:
    """Raises DataWorkerLost for one that is gone: none ends by itself, since portions have no end."""
    for number, worker in enumerate(workers):
        if not worker.is_alive():
            raise DataWorkerLost(f"worker {number} (pid {worker.pid}) {_describe_exit(worker.exitcode)}") from error


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _wait_for_batch(iterator: Any, workers: Sequence[Any], timeout_s: float) -> None:
    """Until a worker has something to say. torch itself waits five seconds at a time, in C."""
    _check_workers(workers)
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", None)
    if queue is None or tasks is None or len(tasks.get(getattr(iterator, "_rcvd_idx", -1), ())) == 2:
        return
    reader = getattr(queue, "_reader", None)  # absent where a thread pins memory between the workers and us
    began = perf_counter()
    while not (reader.poll(WAIT_SLICE_S) if reader is not None else not queue.empty()):
        if reader is None:
            sleep(WAIT_SLICE_S / 20)
        _check_workers(workers)
        if 0 < timeout_s <= perf_counter() - began:
            raise RuntimeError(f"no batch came from the workers within timeout={timeout_s:g} seconds")


def end_workers(iterator: Any) -> None:
    """Workers that fetch something slow, or whose queues were collected before them, would be waited for, five seconds
    each: they are killed instead."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    if not workers:
        return
    suppress_worker_death_errors(iterator)  # else torch takes their end for a failure
    if not hasattr(iterator, "_pin_memory_thread"):  # that one would wait for the rest of half a message
        for worker in workers:
            worker.kill()
    threading.Thread(target=iterator._shutdown_workers, name="everstep-loader-end", daemon=True).start()


logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 3
"""Workers that may be lost, one after the other, before a batch comes: one is what the kernel took when memory was
short, more at the same batch are the data set's."""

_RESERVED_OPTIONS = {
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
    """The batches of a data set, by step. Also a sampler: ``indices``, ``weight`` and ``for_rank``.

    Args:
        sampler: of the data set's samples, for this rank.
        assigned_ranks: the ranks, of how many, whose batches ``batches`` gives; asked when the first is wanted.
        fetch_together: as of MapBatchDataset.
        options: of DataLoader. Raises TypeError for those that are not the user's to choose here, and for
            ``fetch_together`` with data that cannot be asked so.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler | StreamSampler,
        assigned_ranks: Callable[[], Sequence[tuple[int, int]]],
        seed: int,
        options: dict[str, Any],
        *,
        fetch_together: bool = False,
    ) -> None:
        for name, why in _RESERVED_OPTIONS.items():
            if name in options:
                raise TypeError(f"run.loader has no {name}: {why}")
        if fetch_together and not hasattr(dataset, "__getitems__"):
            raise TypeError(
                f"fetch_together needs a data set with __getitems__, which {type(dataset).__name__} has not"
            )
        self._dataset = dataset
        self._sampler = sampler
        self._assigned_ranks = assigned_ranks
        self._seed = seed
        self._options = options
        self._fetch_together = fetch_together
        self._next: tuple[int, int] | None = None
        self._iterator: Iterator[Any] | None = None

    def indices(self, step: int) -> torch.Tensor:
        """This rank's samples of the step: int64; of a stream, their positions."""
        return self._sampler.indices(step)

    def weight(self, step: int) -> float:
        """See ElasticSampler."""
        return self._sampler.loss_weight(step)

    def for_rank(self, rank: int, world_size: int) -> ElasticSampler | StreamSampler:
        """The sampler of ``rank`` of another number of ranks."""
        return self._sampler.for_rank(rank, world_size)

    def batch(self, step: int) -> Any:
        """What the collate function made of this rank's samples of ``step``.

        Steps that follow one another come from what was fetched ahead. With virtual ranks use ``run.parts``.
        """
        (batch,) = self.batches(step)
        return batch

    def batches(self, step: int) -> Iterator[Any]:
        """One batch for each part of ``step`` that this rank computes, in their order."""
        shares = [self._sampler.for_rank(rank, world) for rank, world in self._assigned_ranks()]
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
            except DataWorkerLost as error:
                self.close()
                lost += 1
                if lost > MAX_LOST_WORKERS:
                    raise DataWorkerLost(
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
        iterator = self._iterator_of(BatchRequests(shares, step, number))
        suppress_worker_death_errors(iterator)
        return iterator

    def _iterator_of(self, portions: BatchRequests) -> Iterator[Any]:
        options = dict(self._options)
        if options.get("num_workers"):
            get_temp_dir()  # this process's, for their sockets: else each makes one, which stays when it is killed
        collate = options.pop("collate_fn", None) or default_collate
        generator = torch.Generator()  # the default one would give a number away here, which a restored run takes later
        if not is_stream(self._dataset):
            mapped: Any = MapBatchDataset(self._dataset, self._seed, collate, fetch_together=self._fetch_together)
            batches: Any = portions
            return iter(
                DataLoader(mapped, batch_sampler=batches, collate_fn=identity_collate, generator=generator, **options)
            )
        streamed = StreamBatchDataset(self._dataset, portions, collate, self._seed)
        return iter(DataLoader(streamed, batch_size=None, collate_fn=identity_collate, generator=generator, **options))


def iter_batches(sampler: Sampler, step: int) -> Iterator[Any]:
    """The batches of a step where the sampler loads them, one for each part of it that this rank computes; else None as
    often as is asked."""
    return sampler.batches(step) if isinstance(sampler, Loader) else repeat(None)


# ---- stateful
# torchdata's StatefulDataLoader among tracked objects: a state that is one rank's, and fits no other.

_FIX_HINT = (
    "Use run.loader, whose samples are a function of the step, or go on with the ranks that there were "
    "(everstep-launch --nnodes N:N)"
)


def is_stateful_loader(tracked: object) -> bool:
    """Whether it is one; torchdata need not be installed."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(tracked, module.StatefulDataLoader)


class PerRankLoader(PerRankState):
    """Stands in for a StatefulDataLoader.

    Where workers are, and how far each was, is a matter of one rank; no other number of ranks can go on from there
    without samples that are skipped or repeated.

    Ranks count as data goes by them (``Run.data_parallel``): those of one replica are at the same samples.
    """

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        super().__init__(
            loader, rank, world_size, label="a StatefulDataLoader", rank_noun="data-parallel rank", fix_hint=_FIX_HINT
        )

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        iterator = getattr(self._tracked, "_iterator", None)
        if iterator is not None:
            end_workers(iterator)
