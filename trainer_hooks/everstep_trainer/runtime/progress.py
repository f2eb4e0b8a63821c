"""How far this rank is: written by the main thread at step boundaries, read by the signal thread."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from everstep.clock import Clock
from everstep_trainer.config import HookSettings

# ---- compiling
# How long torch.compile has compiled in this process.

_COUNTED = ("entire_frame_compile", "entire_backward_compile")


def compile_seconds_since(before_s: float) -> float:
    """Seconds since ``total_compile_s`` returned ``before_s``; ``torch.compiler.reset`` in between begins at zero."""
    now_s = total_compile_s()
    return now_s - before_s if now_s >= before_s else now_s


def total_compile_s() -> float:
    """Seconds of all compilations so far, forward and backward; 0.0 where torch does not say.

    Looking up a compiled graph in torch's cache counts as compiling it.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # what has not been imported has compiled nothing
    if utils is None or not hasattr(utils, "calculate_time_spent"):
        return 0.0
    spent = utils.calculate_time_spent()
    return float(sum(spent.get(name, 0.0) for name in _COUNTED))


def _number(loss: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise ValueError("run.report takes a loss that this rank has whole: report loss.full_tensor()")
        loss = loss.to_local()
    if loss.numel() != 1 or loss.is_complex():
        kind = f"{loss.dtype} of shape {list(loss.shape)}"
        raise ValueError(f"run.report takes one real number, and this loss is {kind}: report loss.mean(), say")
    return loss.reshape(())


class LatestLoss:
    """The last reported loss, read when somebody asks and never waited for.

    A CUDA tensor is copied to pinned memory beside the stream; until that copy is done the value before it stands.
    """

    def __init__(self) -> None:
        self._value: float | None = None
        self._pending: torch.Tensor | None = None
        self._ready: Any = None  # a torch.cuda.Event; its methods carry no types

    def update(self, loss: torch.Tensor | float) -> None:
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


class StepProgress:
    """Steps of one rank in one generation. ``finished_step`` is the last finished one (0: none); steps count from 1.

    ``begun_step``: the last step that was begun in this generation; the restored step, or 0, before the first.
    ``snapshot_every``: how many steps apart snapshots are now; 0 where only what is to be committed is stored.
    """

    def __init__(self, window: int) -> None:
        self.generation = 0
        self.rank = 0
        self.finished_step = 0
        self.begun_step = 0
        self.finished_steps_here = 0
        self.snapshot_every = 1
        self.loss = LatestLoss()
        self._durations: deque[float] = deque(maxlen=window)
        self._before_s = 0.0
        self._step_began = perf_counter()
        self._waited_s: float | None = None
        self._busy: deque[float] = deque(maxlen=window)
        self._count_collectives: Callable[[], int] = _none

    def enter(self, generation: int, rank: int, count_collectives: Callable[[], int]) -> None:
        """A generation begins; steps counted so far belong to the one before."""
        self.begun_step = 0  # first: the signal thread must not take it for a step of the new generation
        self.generation, self.rank = generation, rank
        self.finished_steps_here = 0
        self._before_s = self.median_step_s
        self._durations.clear()
        self._busy.clear()
        self._waited_s = None
        self._count_collectives = count_collectives

    def leave(self) -> None:
        """The generation is over: its process group is not asked any more, nor kept alive from here."""
        self._count_collectives = _none

    def resume_from(self, step: int) -> None:
        """State of ``step`` stands restored."""
        self.finished_step = self.begun_step = step
        self._step_began = perf_counter()

    def record_wait(self, seconds: float) -> None:
        """So long of the running step this rank waited for others, in a collective that all of them take part in."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self.begun_step = max(self.begun_step, step)

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
        """Median of the late steps' durations; before any, that of the generation before (0.0 at first)."""
        durations = list(self._durations)  # at once: the main thread goes on adding to it
        return median(durations) if durations else self._before_s

    @property
    def median_busy_s(self) -> float | None:
        """Median of what was left of late steps without the waits that were told of; None where none was."""
        busy = list(self._busy)
        return median(busy) if busy else None

    @property
    def collective_count(self) -> int:
        """Collectives begun in this generation."""
        return self._count_collectives()


# ---- watchdog
# Hangs, by this rank's own measure: no step finished for many times as long as steps take.


class Stall(msgspec.Struct, frozen=True):
    """A rank that made no progress for ``stalled_s`` seconds, over ``threshold_s``."""

    stalled_s: float
    threshold_s: float


class HangWatchdog:
    """Looks at a rank's progress from the signal thread; says each stall, and again when it is twice as long.

    Steps and collectives that are begun are progress. What was called a stall and is as slow at the next try, in a
    generation of fresh groups, is the training's own: an evaluation or a save, say. It has twice the time at each try,
    and once it was made, twice as long as that took is allowed from then on. A threshold that the job gives stays.

    It doubts itself first: when its own looks came late (the process was stopped, or the machine starved), time that
    nobody observed does not count, since it says nothing about the step.
    """

    def __init__(self, settings: HookSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._configured_s: float | None = None
        self._last_position: tuple[int, int, int] = (0, 0, 0)
        self._since = clock.monotonic()
        self._step_since = self._since
        self._last_check_at = self._since
        self._reported_s = 0.0
        self._suspected_stall: tuple[int, float] | None = (
            None  # after which step a stall was said, and at which threshold
        )
        self._allowed_s = 0.0

    def enter(self, configured_s: float | None) -> None:
        """A generation begins. ``configured_s`` is the job's threshold, or None to follow the step time."""
        self._configured_s = configured_s
        self._restart()

    def _restart(self) -> None:
        self._since = self._step_since = self._last_check_at = self._clock.monotonic()
        self._reported_s = 0.0

    def threshold_s(self, progress: StepProgress) -> float:
        """Seconds without progress that are a stall for this rank now."""
        s = self._settings
        if self._configured_s is not None:
            return (
                self._configured_s
                if progress.finished_steps_here
                else max(self._configured_s, s.first_step_allowance_s)
            )
        step, doubted_s = self._suspected_stall or (None, 0.0)
        doubled = 2 * doubted_s if step == progress.finished_step else 0.0
        steady = max(s.min_hang_threshold_s, s.hang_factor * progress.median_step_s, self._allowed_s, doubled)
        return steady if progress.finished_steps_here >= s.hang_warmup_steps else max(steady, s.first_step_allowance_s)

    def check(self, progress: StepProgress) -> Stall | None:
        """A stall that is to be said, or None."""
        now = self._clock.monotonic()
        threshold = self.threshold_s(progress)
        unobserved = now - self._last_check_at
        self._last_check_at = now
        if unobserved > threshold / 2:
            self._since += unobserved
            self._step_since += unobserved
        position = (progress.generation, progress.finished_step, progress.collective_count)
        if position != self._last_position:
            if position[:2] != self._last_position[:2]:
                self._learn_allowance(position, now - self._step_since)
                self._step_since = now
            self._last_position, self._since, self._reported_s = position, now, 0.0
        stalled, threshold = now - self._since, max(threshold, 2 * self._reported_s)
        if stalled < threshold:
            return None
        self._reported_s = threshold
        self._suspected_stall = (progress.finished_step, threshold)
        return Stall(stalled, threshold)

    def _learn_allowance(self, position: tuple[int, int, int], lasted_s: float) -> None:
        """Steps came to their end since the last look, or a generation began."""
        made = position[0] == self._last_position[0] and position[1] > self._last_position[1]
        if made and self._suspected_stall is not None and self._suspected_stall[0] == self._last_position[1]:
            if lasted_s > self._suspected_stall[1]:
                self._allowed_s = max(self._allowed_s, 2 * lasted_s)
            self._suspected_stall = None


def main_stack(limit_bytes: int) -> str:
    """The main thread's Python stack, cut to ``limit_bytes``."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return _cut("".join(traceback.format_stack(frame)), limit_bytes)


def all_stacks(limit_bytes: int) -> str:
    """Every Python thread's stack, main thread first, cut to ``limit_bytes``."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames]
    return _cut("\n".join(parts), limit_bytes)


def _cut(text: str, limit_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")
