"""Interrupt a main thread in Python code.

A collective is left by shutting its sockets, but a main thread that loads data or computes is not in one. Two ways
reach it. *Asking* raises ``Regroup`` at the thread's next module call, where a training function may raise anyway and
nothing is half done. *Interrupting* raises it between two byte codes, anywhere in Python code, when asking did not
help. An exception right after Python code took a lock (``threading.Condition``, ``queue.Queue``, ``logging``) leaves
the lock taken. So locks that this package's threads share with the main thread are plain ``threading.Lock`` objects in
``with`` statements, which have no such gap.

A thread that waits in Python's own C code (for a lock, a future, a socket, in ``sleep``) runs no byte code until a
signal wakes it. So signals are sent along until the exception is raised: a single one is lost if the thread gets it
right before it begins to wait.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
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
    again; the state is restored from a snapshot in any case.

    Example::

        try:
            validate(model)
        except everstep.Regroup:
            close_files()
            raise
    """


def _raise_in_thread(thread_id: int, kind: type[BaseException]) -> None:
    """Ask the interpreter to raise ``kind`` in a thread, as soon as that runs byte code.

    The request is never withdrawn. Withdrawing leaves the interpreter's flag for it set for good (CPython 3.11 and
    3.12, ``PyThreadState_SetAsyncExc``): each call and loop then looks for an exception, and the first call under a
    profiler or a debugger never ends.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))


def _receive_exceptions() -> None:
    """Run byte code, in which an exception that was asked for in this thread is raised."""


WAIT_SLICE_S = 0.02
"""Seconds of one slice of a main thread's wait: an exception arrives between slices even if no signal wakes it."""

WAKE_SIGNAL = signal.SIGURG  # ignored by default, so that a late one does no harm
WAKE_INTERVAL_S = 0.05
"""Seconds between two wake signals."""

_handled_wakes = 0  # wake signals that found no exception to raise


def _handle_wakes() -> bool:
    """Install the handler and return whether signals wake this thread: the main thread, with the signal unused.

    It is installed anew each time: a library written in Go takes SIGURG for itself when it is loaded.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(WAKE_SIGNAL) not in (signal.SIG_DFL, _woken):
        return False
    signal.signal(WAKE_SIGNAL, _woken)
    return True


def _woken(number: int, frame: object) -> None:
    """Count the signal. A pending Regroup is raised as this function begins, ends the wait, and leaves no count."""
    global _handled_wakes
    _handled_wakes += 1


class Interrupter:
    """Raises ``Regroup`` in the thread that makes it, at most once in each ``run``, and only inside one."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._wakes = False
        self._lock = threading.Lock()
        self._open = False
        self._runs = 0
        self._raised = False
        self._atomic_depth = 0
        self._deferred = False
        self._module_hook: RemovableHandle | None = None
        self._recorded_error: BaseException | None = None

    def record_interruption(self, error: BaseException) -> None:
        """Record that ``error``, Regroup or a collective's, told the running ``run`` that its generation is over."""
        if self._recorded_error is None:
            message = f"the training function caught {type(error).__name__}: {error}"
            self._recorded_error = error if isinstance(error, Regroup) else dist.DistBackendError(message)

    def raise_if_interrupted(self) -> None:
        """Raise the interruption of the running ``run`` again before a step counts, if training code caught it."""
        if self._raised:
            raise Regroup
        if self._recorded_error is not None:
            raise self._recorded_error

    def request_regroup(self) -> None:
        """Raise Regroup in the running ``run`` at its next module call; from another thread."""
        with self._lock:
            if self._open and not self._raised and self._module_hook is None:
                self._module_hook = register_module_forward_pre_hook(self._at_module_call)

    def interrupt(self) -> bool:
        """Raise Regroup in the running ``run``; return False if there is none. From another thread."""
        with self._lock:
            if not self._open or self._raised:
                return False
            if self._atomic_depth:
                self._deferred = True
                return True
            self._raised = True
            _raise_in_thread(self._thread_id, Regroup)
            if self._wakes:
                signal.pthread_kill(self._thread_id, WAKE_SIGNAL)
                threading.Thread(target=self._repeat_wakes, args=(self._runs,), daemon=True).start()
            return True

    def _repeat_wakes(self, run: int) -> None:
        """Send wake signals until Regroup is raised in the run of that number, or the run has ended."""
        before = _handled_wakes
        while _handled_wakes == before:
            sleep(WAKE_INTERVAL_S)
            with self._lock:
                if not self._open or self._runs != run:
                    return
                signal.pthread_kill(self._thread_id, WAKE_SIGNAL)

    def _at_module_call(self, module: Any, arguments: Any) -> None:
        if threading.get_ident() != self._thread_id:
            return
        with self._lock:
            due = self._open and not self._raised and self._atomic_depth == 0
            self._raised = self._raised or due
        if due:
            raise Regroup

    def run(self, function: Callable[[], None]) -> BaseException | None:
        """Run ``function`` and return what it raised, or None. No interrupt is delivered outside of it."""
        failure: BaseException | None = None
        try:
            try:
                self._wakes = _handle_wakes()
                self._set_open(True)
                function()
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who decides
                failure = error
            self._set_open(False)
            _receive_exceptions()
        except Regroup as error:  # delivered on the way out; there is no second one
            failure = failure or error
            self._set_open(False)
        return failure

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Postpone an interrupt to the end of the block, for writes that must not be torn; keep them short."""
        with self._lock:
            self._atomic_depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._atomic_depth -= 1
                due = self._deferred and self._atomic_depth == 0 and self._open and not self._raised
                if due:
                    self._deferred, self._raised = False, True
            if due:
                raise Regroup

    def _set_open(self, is_open: bool) -> None:
        with self._lock:
            self._open = is_open
            if is_open:
                self._runs += 1
                self._raised = self._deferred = False
                self._atomic_depth, self._recorded_error = 0, None
                return
            if self._module_hook is not None:
                self._module_hook.remove()
                self._module_hook = None


# ---- interruptible waits for collectives
#
# gloo wakes the waiters of a closed connection, except for an operation whose transfer had begun
# (gloo/transport/tcp/pair.cc, ``signalException`` looks at neither ``rx_.ubuf`` nor ``tx_[i].ubuf``). That waiter
# sleeps in C++ until the group's time-out. So waits that begin in Python are cut into slices; between two slices the
# interpreter delivers exceptions raised in the thread. DistributedDataParallel without a communication hook waits in
# C++; a process that hangs there is replaced (``GenerationMembership``).
#
# A message from rank to rank cannot be awaited in slices: on time-out gloo closes the connection (pair.cc, "Application
# timeout caused pair closure"). Another thread waits for it, and the main thread waits for that thread in slices.

WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)  # a slice that ends costs about 10 us

POLL_S = 0.001  # seconds between two checks of a collective that a GPU computes

_original_wait = dist.Work.wait
_is_over: Callable[[], bool] | None = None  # whether the main thread's generation is over; its waits then end
_on_error: Callable[[BaseException], object] | None = None  # receives errors that end its waits
_MESSAGES = [int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)]
_OPERATIONS = {int(kind): name.strip("_").lower() for name, kind in OpType.__members__.items()} | {
    int(OpType.ALLREDUCE): "all_reduce",
    int(OpType.ALLGATHER): "all_gather",
    int(OpType.REDUCE_SCATTER): "reduce_scatter",
    int(OpType.ALLTOALL): "all_to_all",
}
_awaited: int | None = None  # kind of the operation that the main thread waits for
_has_sent_messages = False  # from rank to rank; they count as collectives of the ranks that take part


def awaited_operation() -> str | None:
    """Return the collective or message that the main thread waits for in slices; None if it waits for none."""
    kind = _awaited
    return None if kind is None else _OPERATIONS.get(kind, "a collective")


def has_only_collectives_of_all() -> bool:
    """Return whether each collective of this process is one of all ranks: no other group exists, and no message."""
    return not _has_sent_messages and len(dist.distributed_c10d._world.pg_map) == 1


def wait_for_audit_messages(works: Iterable[dist.Work]) -> None:
    """Wait for messages of audits, which leave no rank behind: the script itself has sent none by them."""
    global _has_sent_messages
    before = _has_sent_messages
    try:
        for work in works:
            work.wait()
    finally:
        _has_sent_messages = before


def _wait_in_slices(work: dist.Work, timeout: timedelta | None = None) -> bool:
    """Wait for ``work`` in slices; an explicit time-out is kept as it is."""
    global _awaited, _has_sent_messages
    if threading.current_thread() is not threading.main_thread():
        return _wait_elsewhere(work, timeout)
    kind = work._get_op_type()  # type: ignore[attr-defined]
    _awaited = kind
    try:
        if timeout is not None:
            return _original_wait(work, timeout)
        if kind in _MESSAGES:
            _has_sent_messages = True
            return _wait_for_message(work)
        return wait_or_regroup(work, is_generation_over)
    except BaseException as error:
        if timeout is None and _on_error is not None:
            _on_error(error)
        raise
    finally:
        _awaited = None


def _wait_elsewhere(work: dist.Work, timeout: timedelta | None) -> bool:
    """Wait in another thread than the main one, which no Regroup interrupts."""
    if timeout is not None:
        return _original_wait(work, timeout)
    if work._get_op_type() in _MESSAGES:  # type: ignore[attr-defined]
        return _original_wait(work)
    return wait_or_regroup(work, lambda: False)


def is_generation_over() -> bool:
    """Return whether the generation of the main thread is over, so that no rank answers its collectives any more."""
    return _is_over is not None and _is_over()


def _wait_for_message(work: dist.Work) -> bool:
    """Wait in another thread; if the wait is given up, that thread ends with the connection or the group."""
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
        if is_generation_over():
            raise Regroup
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def wait_for_collectives(ended: threading.Lock, raise_error: Callable[[], None]) -> None:
    """Wait until another thread, which runs collectives for this one, releases ``ended``; then call ``raise_error``.

    The main thread counts as waiting in an all-to-all, and raises Regroup once its generation is over.
    """
    global _awaited
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        _awaited = int(OpType.ALLTOALL)
    try:
        while not ended.acquire(timeout=WAIT_SLICE_S):
            if is_main and is_generation_over():
                raise Regroup
        raise_error()
    except BaseException as error:
        record_wait_error(error)
        raise
    finally:
        if is_main:
            _awaited = None


def record_wait_error(error: BaseException) -> None:
    """Record an error that a collective raises in the main thread: the step is then not finished, even if the script
    catches the error. Does nothing in other threads."""
    if _on_error is not None and threading.current_thread() is threading.main_thread():
        _on_error(error)


def set_wait_callbacks(is_over: Callable[[], bool], on_error: Callable[[BaseException], object]) -> None:
    """Make waits of the main thread raise Regroup once ``is_over`` is true; ``on_error`` receives what waits raise."""
    global _is_over, _on_error  # one main thread, one training function
    _is_over, _on_error = is_over, on_error


def install_sliced_waits() -> None:
    """Make every ``work.wait()`` wait in slices. Not for NCCL, whose ``wait`` enqueues instead of blocking."""
    dist.Work.wait = _wait_in_slices  # type: ignore[assignment]


def wait_or_regroup(work: dist.Work, is_over: Callable[[], bool]) -> bool:
    """Wait for a collective on host tensors; raise Regroup when ``is_over`` becomes true first."""
    while True:
        try:
            return _original_wait(work, WAIT_SLICE)
        except RuntimeError:
            if work.is_completed():
                return _original_wait(work)  # returns at once, or raises the work's own error
        if is_over():
            raise Regroup


def poll_or_regroup(work: dist.Work, is_over: Callable[[], bool]) -> None:
    """Poll a collective on GPU tensors, since a time-out would abort it; raise Regroup if ``is_over`` comes first."""
    while not work.is_completed():
        if is_over():
            raise Regroup
        sleep(POLL_S)
    _original_wait(work)  # orders the current stream behind the work, or raises the work's own error
