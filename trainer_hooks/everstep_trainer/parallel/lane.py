"""Run collectives one after another beside the training thread: on a thread of their own, or on a stream of a GPU.

gloo's collectives block, so a thread runs them, over connections of its own: collectives that the training thread
begins meanwhile, such as those of synchronized BatchNorm in the backward pass, would otherwise be mixed up with these.
NCCL's collectives are enqueued by the training thread itself, in the same order on all ranks, on a stream of their own.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from everstep.errors import Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.base import interrupt
from everstep_trainer.base.progress import CollectiveTimer, count_own_collective
from everstep_trainer.slots.layout_exchange import LONG_PAUSES, poll_values

Job = Callable[["Communicator"], Iterator[None]]
"""Collectives, and what happens between them. It yields once, after it has begun its last collective: the next job then
begins. It must not refer to its lane, which ends when nothing refers to it."""

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Its name from torch 2.13 on, where the older name warns."""

CONNECT_TIMEOUT = timedelta(seconds=120)
"""Longest wait in C++ for ranks that have published their addresses: one that is lost just then ends no sooner."""
JOIN_TIMEOUT_S = 0.5
"""Seconds that the end of the process waits for a thread: one that returns from C++ later would abort the process."""


def slice_sizes(count: int, ways: int) -> list[int]:
    """Return how many of ``count`` elements each of ``ways`` ranks adds up; the last ones may have fewer or none."""
    width = -(-count // ways)
    return [max(0, min(width, count - rank * width)) for rank in range(ways)]


class Communicator(Protocol):
    """The collectives of a job."""

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        """Send ``sent_sizes[r]`` elements to each rank ``r``, and receive ``received_sizes[r]`` from it."""

    def all_gather(self, whole: torch.Tensor, slices: torch.Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        """Begin to gather the first row of all ranks' ``slices`` into ``whole``; may overwrite the other rows.

        Args:
            whole: ``[sum(sizes)]``.
            slices: ``[ranks, sizes[rank]]``.
            sizes: Elements of each rank's rows.

        Returns:
            A function that waits for the end.
        """


class Lane(Protocol):
    """Runs jobs in the order in which they are submitted. All ranks of the group must submit equal jobs."""

    rank: int
    world_size: int

    def submit(self, job: Job) -> None:
        """Run the job after those submitted before. Raises the error of an earlier job."""

    def wait(self) -> None:
        """Wait until all jobs have run. Raises the error of a job, or Regroup if the generation is over."""

    def wait_for_older(self, calls: int) -> None:
        """Wait for the jobs submitted before the last ``calls`` calls of this method, to bound their memory."""

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        """Return a communicator of another group, for jobs of this lane. A collective."""

    def close(self) -> None:
        """End the lane; jobs that have not run are dropped."""


def make_lane(
    group: dist.ProcessGroup | None, device: torch.device, timer: CollectiveTimer, *, own_stream: bool = True
) -> Lane:
    """Return a lane. A collective.

    Args:
        group: Its ranks; None: all.
        device: That of the tensors.
        timer: Times the waits for jobs.
        own_stream: On a GPU, use a stream of the lane's own; otherwise that on which jobs are submitted.
    """
    known = dist.distributed_c10d._get_default_group() if group is None else group
    if device.type == "cpu" and isinstance(known._get_backend(device), dist.ProcessGroupGloo):
        return ThreadLane(known, timer)
    made = StreamLane if device.type == "cuda" and own_stream else InlineLane
    return made(known, device, timer)


# ---- a thread, for gloo


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Connections of lanes by their number, which stay open as long as their group. A rank that drops its model early, as
by leaving the training function inside a step, would otherwise look like a lost one to those that wait for it."""


class _PollingStore(Store):
    """A store whose waits look for a key again and again. A wait in C++ could not be ended, and would keep the training
    thread from the connection that both use."""

    def __init__(self, store: Store, stop: threading.Event, is_over: Callable[[], bool], timeout_s: float) -> None:
        super().__init__()
        self._store, self._stop, self._is_over, self._timeout_s = store, stop, is_over, timeout_s

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._look([key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._look(keys)

    def _look(self, keys: list[str]) -> list[bytes]:
        try:
            return poll_values(
                self._store,
                keys,
                stop=self._stop,
                clock=SYSTEM_CLOCK,
                timeout_s=self._timeout_s,
                is_superseded=self._is_over,
                pauses=LONG_PAUSES,
            )
        except Unavailable as error:
            raise dist.DistStoreError(f"not all ranks connect to exchange gradients: {error}") from error


class GlooCommunicator:
    """Connections of a lane's own to the ranks of a group; ``connect`` makes them, in any thread.

    Args:
        group: The ranks.
        stop: Ends waits for collectives.
        process_ends: Ends ``connect``. A lane that is closed still connects: other ranks would wait for it in C++.
    """

    def __init__(self, group: dist.ProcessGroup, stop: threading.Event, process_ends: threading.Event) -> None:
        self._is_over = lambda: stop.is_set() or interrupt.is_generation_over()
        self._rank, self._world_size = group.rank(), group.size()
        self._timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        self._of_group = _connections.setdefault(group, {})
        self._number = len(self._of_group)  # ranks make the lanes of a group in one order
        self._of_group[self._number] = None
        store = PrefixStore(f"everstep-lanes/{self._number}", dist.distributed_c10d._get_process_group_store(group))
        self._store = _PollingStore(store, process_ends, interrupt.is_generation_over, self._timeout.total_seconds())
        self._gloo: Any = None

    def connect(self) -> None:
        """Connect to all ranks, which must do the same. Raises RuntimeError if they do not."""
        within = min(self._timeout, CONNECT_TIMEOUT)
        self._gloo = dist.ProcessGroupGloo(self._store, self._rank, self._world_size, within)
        self._gloo._set_default_timeout(self._timeout)
        self._of_group[self._number] = self._gloo

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        self._begin(received, sent, received_sizes, sent_sizes)()

    def all_gather(self, whole: torch.Tensor, slices: torch.Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        slices[1:] = slices[0]  # gloo's own all-gather allocates its result anew and copies it: that costs more
        return self._begin(whole, slices.view(-1), sizes, [slices.shape[1]] * len(slices))

    def _begin(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        count_own_collective()
        work = self._gloo.alltoall_base(received, sent, received_sizes, sent_sizes)

        def wait() -> None:
            interrupt.wait_or_regroup(work, self._is_over)

        return wait


class _Worker:
    """The thread of a lane, and what the lane and the thread share. It does not refer to the lane.

    The thread connects to the other ranks first, while the training thread builds and restores.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._stop, self._process_ends = threading.Event(), threading.Event()
        self._communicator = GlooCommunicator(group, self._stop, self._process_ends)
        self.jobs: SimpleQueue[Job | threading.Lock | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="everstep-exchange", daemon=True)
        self.thread.start()
        _workers.add(self)

    def connect(self, group: dist.ProcessGroup) -> GlooCommunicator:
        communicator = GlooCommunicator(group, self._stop, self._process_ends)
        communicator.connect()
        return communicator

    def end_with_process(self) -> None:
        """End the thread, also one that connects."""
        self._process_ends.set()
        self.close()

    def close(self) -> None:
        """End the thread, also one that waits for a peer."""
        self._stop.set()
        self.error = self.error or RuntimeError("gradients are exchanged no more: an earlier exchange was interrupted")
        self.jobs.put(None)

    def _connect(self) -> None:
        try:
            self._communicator.connect()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self.error = self.error or error

    def _advance(self, begun: Iterator[None] | None) -> None:
        """Run a job to its next yield, or to its end."""
        if begun is None or self.error is not None:
            return
        try:
            next(begun, None)
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self.error = self.error or error

    def _run(self) -> None:
        """Run jobs and release the locks of those who wait for them. After an error, peers are out of step: no job
        runs any more."""
        torch.set_grad_enabled(False)  # of this thread
        self._connect()
        begun: Iterator[None] | None = None
        while (job := self.jobs.get()) is not None:
            before, begun = begun, None if isinstance(job, _LockType) else _run_job(job, self._communicator)
            self._advance(begun)
            self._advance(before)
            if begun is not None and self.jobs.empty():
                self._advance(begun)
                begun = None
            if isinstance(job, _LockType):
                job.release()
            before = job = None  # and with it the tensors that it refers to


def _run_job(job: Job, communicator: Communicator) -> Iterator[None]:
    yield from job(communicator)  # an error of the call is one of the first step, too


_LockType = type(threading.Lock())
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    workers = list(_workers)
    for worker in workers:
        worker.end_with_process()
    for worker in workers:
        worker.thread.join(JOIN_TIMEOUT_S)


class ThreadLane:
    """A lane of gloo: jobs run on a thread, so their operations on tensors compete with nothing but other threads."""

    def __init__(self, group: dist.ProcessGroup, timer: CollectiveTimer) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._worker, self._timer = _Worker(group), timer
        self._is_idle = True
        self._marks: deque[threading.Lock] = deque()
        self.close = weakref.finalize(self, self._worker.close)

    def submit(self, job: Job) -> None:
        self._raise_error()
        self._is_idle = False
        self._worker.jobs.put(job)

    def wait(self) -> None:
        self._raise_error()
        if self._is_idle:
            return
        self._marks.clear()
        self._wait_for(self._mark())
        self._is_idle = True

    def wait_for_older(self, calls: int) -> None:
        self._marks.append(self._mark())
        while len(self._marks) > calls:
            self._wait_for(self._marks.popleft())

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        return self._worker.connect(group)

    def _mark(self) -> threading.Lock:
        """Return a lock that is released when all jobs so far have run."""
        mark = threading.Lock()
        mark.acquire()
        self._worker.jobs.put(mark)
        return mark

    def _wait_for(self, mark: threading.Lock) -> None:
        try:
            with self._timer.measure(torch.device("cpu")):
                interrupt.wait_for_collectives(mark, self._raise_error)
        except BaseException:
            self.close()  # a job that waits for a peer would wait on
            raise

    def _raise_error(self) -> None:
        if (error := self._worker.error) is not None:
            self.close()
            interrupt.record_wait_error(error)
            raise error


# ---- the training thread, for NCCL and other backends whose collectives it enqueues


class GroupCommunicator:
    """The collectives of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=self._group)

    def all_gather(self, whole: torch.Tensor, slices: torch.Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        if len(set(sizes)) == 1:
            all_gather(whole, slices[0], group=self._group)
        else:
            slices[1:] = slices[0]
            self.all_to_all(whole, slices.view(-1), sizes, [slices.shape[1]] * len(slices))
        return _ended


def _ended() -> None:
    """Wait for a collective that has ended, or whose end the stream waits for."""


class InlineLane:
    """A lane whose jobs run, or are enqueued, where they are submitted."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timer: CollectiveTimer) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._communicator, self._device, self._timer = GroupCommunicator(group), device, timer

    def submit(self, job: Job) -> None:
        with self._timer.measure(self._device):
            self._run(job)

    def wait(self) -> None: ...

    def wait_for_older(self, calls: int) -> None: ...

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        return GroupCommunicator(group)

    def close(self) -> None: ...

    def _run(self, job: Job) -> None:
        for _ in job(self._communicator):
            pass


class StreamLane(InlineLane):
    """A lane of NCCL: jobs are enqueued on a stream. Their tensors must live until ``wait``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timer: CollectiveTimer) -> None:
        super().__init__(group, device, timer)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(job)

    def wait(self) -> None:
        with self._timer.measure(self._device):
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
