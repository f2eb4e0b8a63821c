"""How far this rank is: written by the main thread at step boundaries, read by the signal thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def _number(loss: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise ValueError("run.report takes a loss that this rank has whole: report loss.full_tensor()")
        loss = loss.to_local()
    if loss.numel() != 1 or loss.is_complex():
        kind = f"{loss.dtype} of shape {list(loss.shape)}"
        raise ValueError(f"run.report takes one real number, and this loss is {kind}: report loss.mean(), say")
    return loss.reshape(())


class LossReading:
    """The last reported loss, read when somebody asks and never waited for.

    A CUDA tensor is copied to pinned memory beside the stream; until that copy is done the value before it stands.
    """

    def __init__(self) -> None:
        self._value: float | None = None
        self._pending: torch.Tensor | None = None
        self._ready: Any = None  # a torch.cuda.Event; its methods carry no types

    def offer(self, loss: torch.Tensor | float) -> None:
        """Raises ValueError for what is not one number: whoever reads it later could tell nobody."""
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


def _none() -> int:
    return 0


class Progress:
    """Steps of one rank in one generation. ``step`` is the last finished one (0: none); steps count from 1.

    ``begun``: the last step that was begun in this generation; the restored step, or 0, before the first.
    ``snapshot_every``: how many steps apart snapshots are now; 0 where only what is to be committed is stored.
    """

    def __init__(self, window: int) -> None:
        self.generation = 0
        self.rank = 0
        self.step = 0
        self.begun = 0
        self.finished_here = 0
        self.snapshot_every = 1
        self.loss = LossReading()
        self._durations: deque[float] = deque(maxlen=window)
        self._before_s = 0.0
        self._step_began = perf_counter()
        self._waited_s: float | None = None
        self._busy: deque[float] = deque(maxlen=window)
        self._collectives: Callable[[], int] = _none

    def enter(self, generation: int, rank: int, collectives: Callable[[], int]) -> None:
        """A generation begins; steps counted so far belong to the one before."""
        self.begun = 0  # first: the signal thread must not take it for a step of the new generation
        self.generation, self.rank = generation, rank
        self.finished_here = 0
        self._before_s = self.step_s
        self._durations.clear()
        self._busy.clear()
        self._waited_s = None
        self._collectives = collectives

    def leave(self) -> None:
        """The generation is over: its process group is not asked any more, nor kept alive from here."""
        self._collectives = _none

    def resume_from(self, step: int) -> None:
        """State of ``step`` stands restored."""
        self.step = self.begun = step
        self._step_began = perf_counter()

    def waited(self, seconds: float) -> None:
        """So long of the running step this rank waited for others, in a collective that all of them take part in."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    def begin(self, step: int) -> None:
        """A step begins."""
        self.begun = max(self.begun, step)

    def finish(self, step: int) -> None:
        now = perf_counter()
        self._durations.append(now - self._step_began)
        if self._waited_s is not None:
            self._busy.append(max(0.0, now - self._step_began - self._waited_s))
            self._waited_s = None
        self._step_began = now
        self.step = step
        self.begin(step)
        self.finished_here += 1

    @property
    def step_s(self) -> float:
        """Median of the late steps' durations; before any, that of the generation before (0.0 at first)."""
        durations = list(self._durations)  # at once: the main thread goes on adding to it
        return median(durations) if durations else self._before_s

    @property
    def busy_s(self) -> float | None:
        """Median of what was left of late steps without the waits that were told of; None where none was."""
        busy = list(self._busy)
        return median(busy) if busy else None

    @property
    def collectives(self) -> int:
        """Collectives begun in this generation."""
        return self._collectives()
