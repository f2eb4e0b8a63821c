"""Load the batches of a step with torch's DataLoader, without loader state to save."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from multiprocessing.util import get_temp_dir
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import signal_handling

from everstep_trainer.base.interrupt import WAIT_SLICE_S
from everstep_trainer.data.sampler import ElasticSampler, Sampler
from everstep_trainer.data.stream import (
    BatchRequests,
    MapBatchDataset,
    StreamBatchDataset,
    WorkerSetup,
    identity_collate,
)

# ---- worker processes of a DataLoader: wait for them, detect their deaths, end them
#
# These functions read private fields of torch's iterator (torch 2.13). If the fields differ, torch's own handling
# applies.

WORKER_EXIT_WAIT_S = 0.5  # longest delay from a dying process's closed connections to its exit


class DataWorkerLost(RuntimeError):
    """A worker process ended unexpectedly; the message names the worker and how it ended."""


def next_batch(iterator: Iterator[Any], timeout_s: float = 0.0) -> Any:
    """Return the next batch. Raises DataWorkerLost, RuntimeError after ``timeout_s`` (0: no limit), or Regroup."""
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return next(iterator)
    try:
        with _raise_worker_deaths(iterator, workers):
            _wait_for_batch(iterator, workers, timeout_s)
            return next(iterator)
    except DataWorkerLost:
        raise
    except RuntimeError as error:  # torch reports a dead worker this way
        _check_workers(workers, error)
        raise
    except (OSError, EOFError) as error:  # a worker died while it sent a batch, or the data set raised it
        latest = perf_counter() + WORKER_EXIT_WAIT_S
        while perf_counter() < latest:
            _check_workers(workers, error)
            sleep(WORKER_EXIT_WAIT_S / 100)
        raise


def suppress_worker_death_errors(iterator: Iterator[Any]) -> None:
    """Keep torch's signal handler from raising a worker's death at an arbitrary point of the main thread."""
    if hasattr(iterator, "_worker_pids_set"):
        _forget(iterator)
        iterator._worker_pids_set = False


def _forget(iterator: Iterator[Any]) -> None:
    with contextlib.suppress(ValueError):  # the iterator is not registered
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # private


@contextlib.contextmanager
def _raise_worker_deaths(iterator: Iterator[Any], workers: Sequence[Any]) -> Iterator[None]:
    """Let torch's handler raise a worker's death inside the block; else a half-written message would block for ever."""
    with contextlib.suppress(ValueError):  # the iterator is still registered
        pids = tuple(worker.pid for worker in workers)
        signal_handling._set_worker_pids(id(iterator), pids)  # type: ignore[attr-defined]  # private
    try:
        yield
    finally:
        _forget(iterator)


def _check_workers(workers: Sequence[Any], error: BaseException | None = None) -> None:
    """Raise DataWorkerLost if a worker has exited; none exits by itself, since requests have no end."""
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
    """Wait until a worker sends something, in short slices: torch itself waits five seconds at a time, in C."""
    _check_workers(workers)
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", None)
    if queue is None or tasks is None or len(tasks.get(getattr(iterator, "_rcvd_idx", -1), ())) == 2:
        return
    reader = getattr(queue, "_reader", None)  # absent if a thread between the workers and this one pins memory
    began = perf_counter()
    while not (reader.poll(WAIT_SLICE_S) if reader is not None else not queue.empty()):
        if reader is None:
            sleep(WAIT_SLICE_S / 20)
        _check_workers(workers)
        if 0 < timeout_s <= perf_counter() - began:
            raise RuntimeError(f"no batch came from the workers within timeout={timeout_s:g} seconds")


def end_workers(iterator: Any) -> None:
    """Kill the workers: torch would wait five seconds for each one that is slow or whose queue was collected first."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    if not workers:
        return
    suppress_worker_death_errors(iterator)  # otherwise torch takes their end for a failure
    # the pinning thread would wait for the rest of a half-written message
    if not hasattr(iterator, "_pin_memory_thread"):
        for worker in workers:
            worker.kill()
    threading.Thread(target=iterator._shutdown_workers, name="everstep-loader-end", daemon=True).start()


logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 3
"""Workers that may die in a row before a batch comes: the kernel may kill one when memory is short."""

_RESERVED_OPTIONS = {
    "batch_size": "global_batch is the samples of a step over all ranks",
    "shuffle": "map-style data are shuffled in each epoch, iterable data keep their own order",
    "sampler": "samples are a function of the step",
    "batch_sampler": "samples are a function of the step",
    "generator": "random streams are seeded for each sample",
    "in_order": "a step has its own batch, which may not be the first that is ready",
    "persistent_workers": "workers live as long as their generation",
}


def is_stream(dataset: Any) -> bool:
    """Return whether samples can only be read in sequence."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Loader:
    """A data set's batches by step, also a sampler; ``assigned_ranks``: (rank, world size) of each in ``batches``."""

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler,
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
            raise TypeError(f"fetch_together needs __getitems__, which {type(dataset).__name__} does not have")
        self._dataset, self._sampler, self._assigned_ranks = dataset, sampler, assigned_ranks
        self._seed, self._options, self._fetch_together = seed, options, fetch_together
        self._next: tuple[int, int] | None = None
        self._last_step: int | None = None  # that is loaded; None: no end is known
        self._iterator: Iterator[Any] | None = None

    def indices(self, step: int) -> torch.Tensor:
        """Return this rank's samples of the step, int64; for a stream, their positions."""
        return self._sampler.indices(step)

    def loss_weight(self, step: int) -> float:
        """Return the loss factor; see `ElasticSampler.loss_weight`."""
        return self._sampler.loss_weight(step)

    def for_rank(self, rank: int, world_size: int) -> ElasticSampler:
        """Return the sampler of ``rank`` among ``world_size`` ranks."""
        return self._sampler.for_rank(rank, world_size)

    def batch(self, step: int) -> Any:
        """Return the collated batch of this rank's samples of ``step``. With virtual ranks use ``run.parts``."""
        (batch,) = self.batches(step)
        return batch

    def batches(self, step: int) -> Iterator[Any]:
        """Yield one batch for each part of ``step`` that this rank computes, in their order."""
        shares = [self._sampler.for_rank(rank, world) for rank, world in self._assigned_ranks()]
        if self._iterator is None or (step, 0) != self._next:
            self.close()
            self._iterator = self._begin(step, shares)
        for number in range(len(shares)):
            self._next = None  # stays so if no batch comes
            batch = self._take(step, shares, number)
            self._next = (step, number + 1) if number + 1 < len(shares) else (step + 1, 0)
            yield batch

    def _take(self, step: int, shares: Sequence[ElasticSampler], number: int) -> Any:
        """Return the batch of a part of the step; restart loading at that part if a worker died."""
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
                logger.warning("restarting a loader at step %d: %s", step, error)

    def restart(self, last_step: int) -> None:
        """Load anew from the next batch on, and nothing after ``last_step``, so that workers are idle when they end."""
        self.close()
        self._last_step = last_step

    def close(self) -> None:
        """End the workers without waiting for them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            end_workers(iterator)

    def _begin(self, step: int, shares: Sequence[ElasticSampler], number: int = 0) -> Iterator[Any]:
        """Return an iterator that begins at part ``number`` of the step."""
        requests: Any = BatchRequests(shares, step, number, self._last_step)
        options = dict(self._options)
        if options.get("num_workers"):
            get_temp_dir()  # one folder for the sockets of all workers: a killed worker leaves its own behind
        collate = options.pop("collate_fn", None) or default_collate
        # the default generator would consume a random number that a restored run draws later
        options |= {"generator": torch.Generator(), "collate_fn": identity_collate}
        if options.get("worker_init_fn") is not None:
            options["worker_init_fn"] = WorkerSetup(options["worker_init_fn"])
        dataset: Any
        if is_stream(self._dataset):
            dataset = StreamBatchDataset(self._dataset, requests, collate, self._seed)
            options["batch_size"] = None
        else:
            dataset = MapBatchDataset(self._dataset, self._seed, collate, self._fetch_together)
            options["batch_sampler"] = requests
        iterator = iter(DataLoader(dataset, **options))
        suppress_worker_death_errors(iterator)
        return iterator


def iter_batches(sampler: Sampler, step: int) -> Iterator[Any]:
    """Yield the batch of each part of the step if the sampler loads batches; otherwise yield None without end."""
    return sampler.batches(step) if isinstance(sampler, Loader) else repeat(None)
