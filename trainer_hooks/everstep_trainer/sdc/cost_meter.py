"""Measure what an audit of the chain costs in each step: its own work, and its waits for other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from everstep_trainer.base.progress import timed_event


class StepCost(NamedTuple):
    """What an audit took of one step, in seconds."""

    work_s: float
    wait_s: float

    @property
    def total_s(self) -> float:
        return self.work_s + self.wait_s


class _GpuInterval(NamedTuple):
    """Two events of a GPU's stream, and how many times the time between them counts as work and as a wait."""

    began: Any  # torch.cuda.Event; its methods carry no types
    ended: Any
    work: float
    wait: float


class StepReading(NamedTuple):
    """What was measured in one step. ``blocks``: on a GPU."""

    host: StepCost
    blocks: tuple[_GpuInterval, ...]

    def cost(self) -> StepCost | None:
        """Return the step's cost, or None while the GPU has not come so far. Never waits."""
        if not self.blocks:
            return StepCost(max(0.0, self.host.work_s), max(0.0, self.host.wait_s))
        if not all(block.ended.query() for block in reversed(self.blocks)):
            return None
        work_s = wait_s = 0.0
        for block in self.blocks:
            seconds = block.began.elapsed_time(block.ended) / 1000.0
            work_s += block.work * seconds
            wait_s += block.wait * seconds
        return StepCost(max(0.0, work_s), max(0.0, wait_s))


class CostMeter:
    """Measures one audit: by the host's clock, or by events in the stream of a GPU.

    The host's clock says little about a GPU. It misses kernels, which the host only enqueues, and it counts the rest of
    the backward pass where the host waits for a result. Between two events lies what delays the stream: kernels, and
    the host's work if the stream has run empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = device.type == "cuda"
        self._work_s = self._wait_s = 0.0
        self._blocks: list[_GpuInterval] = []

    def count(self, *, work: float, wait: float = 0.0) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block this many times as work and as a wait."""
        return _Counting(self, work, wait)

    def take(self) -> StepReading:
        """Return what was measured since the last call."""
        reading = StepReading(StepCost(self._work_s, self._wait_s), tuple(self._blocks))
        self._work_s = self._wait_s = 0.0
        self._blocks.clear()
        return reading

    def mark(self) -> Any:
        """Return an event of the GPU's stream; None without a GPU."""
        if not self._has_events:
            return None
        return torch.cuda.current_stream(self._device).record_event(timed_event())

    def add(self, seconds: float, started: Any, work: float, wait: float) -> None:
        """Count a block that has ended; ``started``: its first mark."""
        self._work_s += work * seconds
        self._wait_s += wait * seconds
        if started is not None:
            self._blocks.append(_GpuInterval(started, self.mark(), work, wait))


class _Counting:
    """One block that is counted. A class: a generator takes four times as long, and each audit counts in each step."""

    __slots__ = ("_began", "_meter", "_started", "_wait", "_work")

    def __init__(self, meter: CostMeter, work: float, wait: float) -> None:
        self._meter, self._work, self._wait = meter, work, wait

    def __enter__(self) -> None:
        self._started = self._meter.mark()
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._meter.add(perf_counter() - self._began, self._started, self._work, self._wait)
