"""A DataLoader's worker processes: waited for, found dead, ended.

Fields of torch's iterator are private, and read in torch 2.13: where they are others, torch does what it does alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter, sleep
from typing import Any

from torch.utils.data._utils import signal_handling

from trainer_hooks.interrupt import SLICE_S

ENDED_WITHIN_S = 0.5
"""From the end of a dying process's connections to its own."""


class WorkerLost(RuntimeError):
    """A worker has ended without being told; says which one, and how."""


def next_batch(iterator: Iterator[Any], timeout_s: float = 0.0) -> Any:
    """What the iterator gives next. A Regroup in the main thread ends the wait for it.

    Raises WorkerLost where a worker is gone, whatever it was at, and RuntimeError where nothing came for ``timeout_s``
    (0: waits for ever).
    """
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return next(iterator)
    try:
        with _deaths_told(iterator, workers):
            _await(iterator, workers, timeout_s)
            return next(iterator)
    except WorkerLost:
        raise
    except RuntimeError as error:  # torch's word of a death
        _look_after(workers, error)
        raise
    except (
        OSError,
        EOFError,
    ) as error:  # the batch is there, and its tensors were still to come; or the data set's own
        latest = perf_counter() + ENDED_WITHIN_S
        while perf_counter() < latest:
            _look_after(workers, error)
            sleep(ENDED_WITHIN_S / 100)
        raise


def disown(iterator: Iterator[Any]) -> None:
    """Keeps torch from raising a worker's death wherever the main thread happens to be."""
    if hasattr(iterator, "_worker_pids_set"):
        _forget(iterator)
        iterator._worker_pids_set = False


def _forget(iterator: Iterator[Any]) -> None:
    with contextlib.suppress(ValueError):  # it knows none of it
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # private


@contextlib.contextmanager
def _deaths_told(iterator: Iterator[Any], workers: Sequence[Any]) -> Iterator[None]:
    """In here torch's handler raises a worker's death: a half-written message would be waited for without end."""
    with contextlib.suppress(ValueError):  # it has them still
        pids = tuple(worker.pid for worker in workers)
        signal_handling._set_worker_pids(id(iterator), pids)  # type: ignore[attr-defined]  # private
    try:
        yield
    finally:
        _forget(iterator)


def _look_after(workers: Sequence[Any], error: BaseException | None = None) -> None:
    """Raises WorkerLost for one that is gone: none ends by itself, since portions have no end."""
    for number, worker in enumerate(workers):
        if not worker.is_alive():
            raise WorkerLost(f"worker {number} (pid {worker.pid}) {_manner(worker.exitcode)}") from error


def _manner(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _await(iterator: Any, workers: Sequence[Any], timeout_s: float) -> None:
    """Until a worker has something to say. torch itself waits five seconds at a time, in C."""
    _look_after(workers)
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", None)
    if queue is None or tasks is None or len(tasks.get(getattr(iterator, "_rcvd_idx", -1), ())) == 2:
        return
    reader = getattr(queue, "_reader", None)  # absent where a thread pins memory between the workers and us
    began = perf_counter()
    while not (reader.poll(SLICE_S) if reader is not None else not queue.empty()):
        if reader is None:
            sleep(SLICE_S / 20)
        _look_after(workers)
        if 0 < timeout_s <= perf_counter() - began:
            raise RuntimeError(f"no batch came from the workers within timeout={timeout_s:g} seconds")


def end_workers(iterator: Any) -> None:
    """Workers that fetch something slow, or whose queues were collected before them, would be waited for, five seconds
    each: they are killed instead."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    if not workers:
        return
    disown(iterator)  # else torch takes their end for a failure
    if not hasattr(iterator, "_pin_memory_thread"):  # that one would wait for the rest of half a message
        for worker in workers:
            worker.kill()
    threading.Thread(target=iterator._shutdown_workers, name="everstep-loader-end", daemon=True).start()
