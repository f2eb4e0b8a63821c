"""Calling a main thread back out of Python code.

A collective is left by shutting its sockets; a main thread that loads data or computes is not in one. There are two
ways to reach it. *Asking* raises ``Regroup`` where the thread calls a module next: a place like any other where a
training function may raise, with nothing half done. *Interrupting* raises it between two byte codes, wherever that
is. It works in any Python code, but an exception that arrives just after a lock was taken in Python code
(``threading.Condition``, ``queue.Queue``, ``logging``) leaves it taken; so it comes second, when asking did not help.
A thread that waits in Python's own C code (for a lock, a future, a socket, in ``sleep``) runs none of that code until a
signal wakes it, so one is sent along, with a handler that does nothing.

For the same reason locks that this package's own threads share with the main thread are plain ``threading.Lock``
objects in ``with`` statements, where no such gap exists.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import sleep
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # torch's stubs leave it out
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Regroup(BaseException):
    """The generation is over: leave the training function.

    A BaseException, so that ``except Exception`` in training code lets it pass. Code that catches it must raise it
    again; what it protects is restored from a snapshot anyhow.
    """


def _set_async_exception(thread_id: int, kind: type[BaseException] | None) -> None:
    """Asks the interpreter to raise ``kind`` in a thread (None: takes an undelivered request back)."""
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), target)


WAIT_SLICE_S = 0.02
"""Waits of the main thread, where they can be cut, end after so long and begin anew: what is raised between two slices
arrives also where no signal wakes who waits, because it came a moment before, or is the training's own."""

WAKE_SIGNAL = signal.SIGURG
"""Ignored where nobody handles it, so that one that comes late is no harm."""


def _handle_wakes() -> bool:
    """Whether this thread is one that signals wake, and the signal was free for it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(WAKE_SIGNAL) is signal.SIG_DFL:
        signal.signal(WAKE_SIGNAL, _woken)
    return signal.getsignal(WAKE_SIGNAL) is _woken


def _woken(number: int, frame: object) -> None:
    """Regroup is raised as this begins, and leaves it for whatever waits."""


class Interrupter:
    """Raises ``Regroup`` in the thread that makes it, at most once in each ``run``, and only inside one."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._wakes = _handle_wakes()
        self._lock = threading.Lock()
        self._open = False
        self._raised = False
        self._atomic_depth = 0
        self._deferred = False
        self._module_hook: RemovableHandle | None = None
        self._recorded_error: BaseException | None = None

    def record_interruption(self, error: BaseException) -> None:
        """The running ``run`` was told by ``error``, Regroup or that of a collective, that its generation is over."""
        if self._recorded_error is None:
            words = f"the training function caught {type(error).__name__}: {error}"
            self._recorded_error = error if isinstance(error, Regroup) else dist.DistBackendError(words)

    def raise_if_interrupted(self) -> None:
        """Where a step of the running ``run`` is about to count: raises again what it was told by, since training
        code has caught that and gone on."""
        if self._raised:
            raise Regroup
        if self._recorded_error is not None:
            raise self._recorded_error

    def request_regroup(self) -> None:
        """From another thread: the running ``run`` ends with Regroup where it calls a module next."""
        with self._lock:
            if self._open and not self._raised and self._module_hook is None:
                self._module_hook = register_module_forward_pre_hook(self._at_module_call)

    def interrupt(self) -> bool:
        """From another thread: makes the running ``run`` end with Regroup. False where there is none to end."""
        with self._lock:
            if not self._open or self._raised:
                return False
            if self._atomic_depth:
                self._deferred = True
                return True
            self._raised = True
            _set_async_exception(self._thread_id, Regroup)
            if self._wakes:
                signal.pthread_kill(self._thread_id, WAKE_SIGNAL)
            return True

    def _at_module_call(self, module: Any, arguments: Any) -> None:
        if threading.get_ident() != self._thread_id:
            return
        with self._lock:
            due = self._open and not self._raised and self._atomic_depth == 0
            self._raised = self._raised or due
        if due:
            raise Regroup

    def run(self, function: Callable[[], None]) -> BaseException | None:
        """Runs ``function`` and returns what it raised, or None. No interrupt is delivered outside of it."""
        failure: BaseException | None = None
        try:
            try:
                self._set_open(True)
                function()
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who decides
                failure = error
            self._set_open(False)
        except Regroup as error:  # delivered on the way out; there is no second one
            failure = failure or error
            self._set_open(False)
        return failure

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Postpones an interrupt to the end of the block. For writes that must not be torn; keep them short."""
        with self._lock:
            self._atomic_depth += 1
        try:
            yield
        finally:
            self._leave_atomic()

    def _leave_atomic(self) -> None:
        with self._lock:
            self._atomic_depth -= 1
            due = self._deferred and self._atomic_depth == 0 and self._open and not self._raised
            if due:
                self._deferred = False
                self._raised = True
        if due:
            raise Regroup

    def _set_open(self, is_open: bool) -> None:
        with self._lock:
            self._open = is_open
            if is_open:
                self._raised = self._deferred = False
                self._atomic_depth, self._recorded_error = 0, None
                return
            _set_async_exception(self._thread_id, None)
            if self._module_hook is not None:
                self._module_hook.remove()
                self._module_hook = None


# ---- waiting
# Waiting for a collective in a way that can be given up.
#
# gloo wakes whoever waits for an operation when its connection closes, with one exception: an operation whose transfer
# had begun (gloo/transport/tcp/pair.cc, ``signalException`` looks at neither ``rx_.ubuf`` nor ``tx_[i].ubuf``). Its
# waiter sleeps until the group's time-out, in C++, where nothing reaches it. So waits that begin in Python are cut into
# slices: between two of them the interpreter runs, and delivers what was raised in the thread. A message of one rank to
# another cannot be waited for in slices: when the time is up gloo closes the connection (gloo/transport/tcp/pair.cc,
# "Application timeout caused pair closure"). A thread waits for it, and the slices are those of waiting for the thread.
# DistributedDataParallel without a communication hook waits in C++; there a process that cannot be freed is replaced
# (``Presence``).

WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)
"""Bounds how late a thread notices; one that is woken in time never sees it. A slice that ends costs some 10 us."""

POLL_S = 0.001
"""Between two looks at a collective that a GPU computes."""

_original_wait = dist.Work.wait
_is_over: Callable[[], bool] = bool
"""Whether the main thread's generation is over: whoever waits there leaves between two slices."""
_on_error: Callable[[BaseException], object] = bool
"""Told what waits of the main thread end with, Regroup included: training code may catch it."""


_MESSAGES = [int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)]


def _wait_in_slices(work: dist.Work, timeout: timedelta | None = None) -> bool:
    """``Work.wait``: an explicit time-out is kept as it is."""
    if timeout is not None:
        return _original_wait(work, timeout)
    try:
        if work._get_op_type() in _MESSAGES:  # type: ignore[attr-defined]
            return _wait_for_message(work)
        return _wait_for_collective(work)
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            _on_error(error)
        raise


def _wait_for_collective(work: dist.Work) -> bool:
    while True:
        try:
            return _original_wait(work, WAIT_SLICE)
        except RuntimeError:
            if work.is_completed():
                return _original_wait(work)  # at once; raises the work's own error, if that is what it was
        if threading.current_thread() is threading.main_thread() and _is_over():
            raise Regroup


def _wait_for_message(work: dist.Work) -> bool:
    """In the main thread one that is given up is left to its thread, which ends with the connection or the group."""
    if threading.current_thread() is not threading.main_thread():
        return _original_wait(work)
    ended = threading.Lock()
    outcome: list[bool | BaseException] = []

    def wait() -> None:
        try:
            outcome.append(_original_wait(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.append(error)
        ended.release()

    ended.acquire()
    threading.Thread(target=wait, name="everstep-message", daemon=True).start()
    while not ended.acquire(timeout=WAIT_SLICE_S):
        if _is_over():
            raise Regroup
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def set_wait_callbacks(is_over: Callable[[], bool], on_error: Callable[[BaseException], object] = bool) -> None:
    """Waits of the main thread that begin inside the training function raise Regroup once ``is_over`` is true;
    ``on_error`` is told what they raise, but where they have a time-out of their own."""
    global _is_over, _on_error  # one main thread, one training function
    _is_over, _on_error = is_over, on_error


def install_sliced_waits() -> None:
    """Makes every ``work.wait()`` of this process, torch's own Python code included, one in slices.

    For backends whose ``wait`` blocks the calling thread; NCCL's enqueues instead, and is to be left alone.
    """
    dist.Work.wait = _wait_in_slices  # type: ignore[assignment]


def wait_unless(work: dist.Work, is_over: Callable[[], bool]) -> None:
    """Waits for a collective on host tensors; raises Regroup when ``is_over`` becomes true first."""
    while True:
        try:
            _original_wait(work, WAIT_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                _original_wait(work)
                return
        if is_over():
            raise Regroup


def poll_unless(work: dist.Work, is_over: Callable[[], bool]) -> None:
    """Waits for a collective on GPU tensors; raises Regroup when ``is_over`` becomes true first.

    The work is asked whether it is done. NCCL must not be given a time-out: when one passes, torch marks the work as
    failed and aborts the communicator.
    """
    while not work.is_completed():
        if is_over():
            raise Regroup
        sleep(POLL_S)
    _original_wait(work)  # orders the current stream behind the work, or raises the work's own error
