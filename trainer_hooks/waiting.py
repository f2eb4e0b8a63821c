"""Waiting for a collective in a way that can be given up.

gloo wakes whoever waits for an operation when its connection closes, with one exception: an operation whose transfer
had begun (gloo/transport/tcp/pair.cc, ``signalException`` looks at neither ``rx_.ubuf`` nor ``tx_[i].ubuf``). Its
waiter sleeps until the group's time-out, in C++, where nothing reaches it. So waits that begin in Python are cut into
slices: between two of them the interpreter runs, and delivers what was raised in the thread. A message of one rank to
another cannot be waited for in slices: when the time is up gloo closes the connection (gloo/transport/tcp/pair.cc,
"Application timeout caused pair closure"). A thread waits for it, and the slices are those of waiting for the thread.
DistributedDataParallel without a communication hook waits in C++; there a process that cannot be freed is replaced
(``Presence``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from time import sleep

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # torch's stubs leave it out

from trainer_hooks.interrupt import SLICE_S, Regroup

SLICE = timedelta(seconds=SLICE_S)
"""Bounds how late a thread notices; one that is woken in time never sees it. A slice that ends costs some 10 us."""

POLL_S = 0.001
"""Between two looks at a collective that a GPU computes."""

_wait = dist.Work.wait
_over: Callable[[], bool] = bool
"""Whether the main thread's generation is over: whoever waits there leaves between two slices."""
_failed: Callable[[BaseException], object] = bool
"""Told what waits of the main thread end with, Regroup included: training code may catch it."""


_MESSAGES = [int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)]


def _wait_in_slices(work: dist.Work, timeout: timedelta | None = None) -> bool:
    """``Work.wait``: an explicit time-out is kept as it is."""
    if timeout is not None:
        return _wait(work, timeout)
    try:
        if work._get_op_type() in _MESSAGES:  # type: ignore[attr-defined]
            return _wait_for_message(work)
        return _wait_for_collective(work)
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            _failed(error)
        raise


def _wait_for_collective(work: dist.Work) -> bool:
    while True:
        try:
            return _wait(work, SLICE)
        except RuntimeError:
            if work.is_completed():
                return _wait(work)  # at once; raises the work's own error, if that is what it was
        if threading.current_thread() is threading.main_thread() and _over():
            raise Regroup


def _wait_for_message(work: dist.Work) -> bool:
    """In the main thread one that is given up is left to its thread, which ends with the connection or the group."""
    if threading.current_thread() is not threading.main_thread():
        return _wait(work)
    ended = threading.Lock()
    outcome: list[bool | BaseException] = []

    def wait() -> None:
        try:
            outcome.append(_wait(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.append(error)
        ended.release()

    ended.acquire()
    threading.Thread(target=wait, name="everstep-message", daemon=True).start()
    while not ended.acquire(timeout=SLICE_S):
        if _over():
            raise Regroup
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def leave_when(over: Callable[[], bool], failed: Callable[[BaseException], object] = bool) -> None:
    """Waits of the main thread that begin inside the training function raise Regroup once ``over`` is true; ``failed``
    is told what they raise, but where they have a time-out of their own."""
    global _over, _failed  # one main thread, one training function
    _over, _failed = over, failed


def install() -> None:
    """Makes every ``work.wait()`` of this process, torch's own Python code included, one in slices.

    For backends whose ``wait`` blocks the calling thread; NCCL's enqueues instead, and is to be left alone.
    """
    dist.Work.wait = _wait_in_slices  # type: ignore[assignment]


def wait_unless(work: dist.Work, over: Callable[[], bool]) -> None:
    """Waits for a collective on host tensors; raises Regroup when ``over`` becomes true first."""
    while True:
        try:
            _wait(work, SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                _wait(work)
                return
        if over():
            raise Regroup


def poll_unless(work: dist.Work, over: Callable[[], bool]) -> None:
    """Waits for a collective on GPU tensors; raises Regroup when ``over`` becomes true first.

    The work is asked whether it is done. NCCL must not be given a time-out: when one passes, torch marks the work as
    failed and aborts the communicator.
    """
    while not work.is_completed():
        if over():
            raise Regroup
        sleep(POLL_S)
    _wait(work)  # orders the current stream behind the work, or raises the work's own error
