"""Record a rank's progress at step boundaries."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

# ---- time of torch.compile in this process

_COUNTED = ("entire_frame_compile", "entire_backward_compile")


def total_compile_s() -> float:
    """Return the seconds of all compilations so far, from torch's cache too; 0.0 if torch does not report them."""
    utils = sys.modules.get("torch._dynamo.utils")  # a module that was not imported has compiled nothing
    if utils is None or not hasattr(utils, "calculate_time_spent"):
        return 0.0
    spent = utils.calculate_time_spent()
    return float(sum(spent.get(name, 0.0) for name in _COUNTED))


def _number(loss: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise ValueError("run.report takes an unsharded loss: report loss.full_tensor()")
        loss = loss.to_local()
    if loss.numel() != 1 or loss.is_complex():
        kind = f"{loss.dtype} of shape {list(loss.shape)}"
        raise ValueError(f"run.report takes one real number, but this loss is {kind}: report loss.mean(), for example")
    return loss.reshape(())


class LatestLoss:
    """The last reported loss, read without a wait: while a CUDA tensor is copied, the previous value remains."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._pending: torch.Tensor | None = None
        self._ready: Any = None  # a torch.cuda.Event; its methods carry no types

    def update(self, loss: torch.Tensor | float) -> None:
        """Set the loss. Raises ValueError unless it is one number: a later reader could not report the error."""
        if not isinstance(loss, torch.Tensor):
            self._pending, self._value = None, float(loss)
            return
        loss = _number(loss.detach())
        if loss.is_cuda:
            host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            host.copy_(loss, non_blocking=True)
            self._ready = torch.cuda.current_stream(loss.device).record_event()
            loss = host
        self._pending = loss

    def value(self) -> float | None:
        pending = self._pending
        if pending is not None and (self._ready is None or self._ready.query()):
            self._value, self._pending = float(pending), None
        return self._value

    def wait(self) -> float | None:
        """Return the value after a wait for the device, for a thread that may wait."""
        if self._pending is not None and self._ready is not None:
            self._ready.synchronize()
        return self.value()


class WorkSection(msgspec.Struct, frozen=True):
    """A part of the training function in which a rank works on purpose while others may wait for it.

    Attributes:
        name: Its name in messages.
        limit_s: Seconds after which the rank counts as hung in it; None for the job's limit.
    """

    name: str
    limit_s: float | None = None


AFTER_LAST_STEP = WorkSection("the work after the last step")

MAX_PLANNED_STEP = 10**12
"""Last steps beyond this number stand for a loop without end."""


_own_collectives = 0
_counting = threading.Lock()


def count_own_collective() -> None:
    """Count a collective over connections of Everstep's own, which torch does not count in the process group."""
    global _own_collectives
    with _counting:
        _own_collectives += 1


class StepProgress:
    """Steps of one rank in one generation; written by the main thread, read by the signal thread."""

    def __init__(self, window: int) -> None:
        self.generation = 0
        self.finished_step = 0  # steps count from 1
        self.begun_step = 0  # in this generation; before the first, the restored step or 0
        self.finished_steps_here = 0
        self.finished_before = 0  # the last step that this process had finished before this generation
        self.until_step = 0  # the last step that the training function asked for; 0 if it did not say
        self.snapshot_every = 1  # 0 if only versions to be committed are stored
        self.are_cores_full = False  # training waits for cores, so that any other work takes them from it
        self.loss = LatestLoss()
        self._durations: deque[float] = deque(maxlen=window)
        self._before_s = 0.0
        self._step_began = perf_counter()
        self._waited_s: float | None = None
        self._busy: deque[float] = deque(maxlen=window)
        self._count_collectives: Callable[[], int] = int  # 0
        self._own_before = 0  # collectives of Everstep's own before this generation
        self._sections: list[WorkSection] = []
        self.world_size = 1
        self.uses_gpu = False
        self._has_ended = False  # no step follows

    def enter(
        self, generation: int, count_collectives: Callable[[], int], *, world_size: int = 1, uses_gpu: bool = False
    ) -> None:
        """Begin a generation; steps counted so far belong to the one before."""
        self.world_size, self.uses_gpu = world_size, uses_gpu
        self.begun_step = 0  # first: the signal thread must not take it for a step of the new generation
        self.generation = generation
        self.finished_before = self.finished_step
        self.finished_steps_here = self.until_step = 0
        self._sections, self._has_ended = [], False
        self._before_s = self.median_step_s
        self._durations.clear()
        self._busy.clear()
        self._waited_s = None
        self._own_before = _own_collectives
        self._count_collectives = count_collectives

    def leave(self) -> None:
        """End the generation, and release its process group."""
        self._count_collectives, self._own_before = int, _own_collectives

    def resume_from(self, step: int) -> None:
        """Continue from the restored state of ``step``."""
        self.finished_step = self.begun_step = step
        self._step_began = perf_counter()

    def record_wait(self, seconds: float) -> None:
        """Record seconds of the running step that this rank waited for others in a collective of all ranks."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    @contextmanager
    def section(self, name: str, limit_s: float | None = None) -> Iterator[None]:
        """Mark the block as work on purpose, during which the rank is not taken for hung; blocks may be nested."""
        sections = self._sections
        sections.append(WorkSection(name, limit_s))
        try:
            yield
        finally:
            sections.pop()

    def end_steps(self, step: int) -> None:
        """Record that no step follows ``step``. Other ranks may wait for the work that does, such as a last save."""
        self.until_step, self._has_ended = step, True

    @property
    def had_no_step_left(self) -> bool:
        """Whether this generation began after the last step, so that its training function ran no step."""
        return bool(self.until_step) and self.finished_step >= self.until_step and not self.finished_steps_here

    @property
    def current_section(self) -> WorkSection | None:
        """The innermost section that the main thread is in; after the last step it is in one to the end."""
        sections = list(self._sections)  # one copy, since the main thread changes it
        if sections:
            return sections[-1]
        return AFTER_LAST_STEP if self._has_ended else None

    def plan(self, until: int) -> None:
        """Record the last step; a number without meaning, such as ``sys.maxsize``, counts as not known."""
        self.until_step, self._has_ended = int(until) if 0 < until <= MAX_PLANNED_STEP else 0, False

    def begin_step(self, step: int) -> None:
        self.begun_step, self._has_ended = max(self.begun_step, step), False

    def finish_step(self, step: int) -> None:
        now = perf_counter()
        self._durations.append(now - self._step_began)
        if self._waited_s is not None:
            self._busy.append(max(0.0, now - self._step_began - self._waited_s))
            self._waited_s = None
        self._step_began = now
        self.finished_step = step
        self.begin_step(step)
        self.finished_steps_here += 1

    @property
    def median_step_s(self) -> float:
        """Median duration of the last steps; before the first, that of the previous generation (0.0 at first)."""
        durations = list(self._durations)  # one copy, since the main thread keeps adding to it
        return median(durations) if durations else self._before_s

    @property
    def median_busy_s(self) -> float | None:
        """Median duration of the last steps without recorded waits; None if no wait was recorded."""
        busy = list(self._busy)
        return median(busy) if busy else None

    @property
    def collective_count(self) -> int:
        """Number of collectives begun in this generation."""
        return self._count_collectives() + _own_collectives - self._own_before


# ---- waits for other ranks in collectives, which tell a slow rank from those that wait for it


class CollectiveTimer:
    """Times the blocks inside ``measure`` for ``on_wait``, on a GPU by events that may be read a step late."""

    def __init__(self, on_wait: Callable[[float], object]) -> None:
        self._on_wait = on_wait
        self._pending: deque[tuple[Any, Any]] = deque()  # torch.cuda.Event; its methods carry no types

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Time a collective on tensors of ``device``; one that raises is not reported."""
        if device.type != "cuda":
            began = perf_counter()
            yield
            self._on_wait(perf_counter() - began)
            return
        stream = torch.cuda.current_stream(device)
        began_at = stream.record_event(timed_event())
        yield
        self._pending.append((began_at, stream.record_event(timed_event())))
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._on_wait(first.elapsed_time(last) / 1000.0)


def timed_event() -> torch.cuda.Event:
    """Return an event that records when its stream reaches it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
