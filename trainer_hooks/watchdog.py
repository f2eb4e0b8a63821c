"""Hangs, by this rank's own measure: no step finished for many times as long as steps take."""

from __future__ import annotations

import sys
import threading
import traceback

import msgspec

from everstep.clock import Clock
from trainer_hooks.config import HookSettings
from trainer_hooks.progress import Progress


class Stall(msgspec.Struct, frozen=True):
    """A rank that made no progress for ``stalled_s`` seconds, over ``threshold_s``."""

    stalled_s: float
    threshold_s: float


class Watchdog:
    """Looks at a rank's progress from the signal thread; says each stall once.

    It doubts itself first: when its own looks came late (the process was stopped, or the machine starved), time that
    nobody observed does not count, since it says nothing about the step.
    """

    def __init__(self, settings: HookSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._configured_s: float | None = None
        self._seen: tuple[int, int] = (0, 0)
        self._since = clock.monotonic()
        self._looked = self._since
        self._reported = False

    def enter(self, configured_s: float | None) -> None:
        """A generation begins. ``configured_s`` is the job's threshold, or None to follow the step time."""
        self._configured_s = configured_s
        self._restart()

    def _restart(self) -> None:
        self._since = self._looked = self._clock.monotonic()
        self._reported = False

    def threshold_s(self, progress: Progress) -> float:
        """Seconds without progress that are a stall for this rank now."""
        s = self._settings
        learned = max(s.hang_floor_s, s.hang_factor * progress.step_s)
        steady = self._configured_s if self._configured_s is not None else learned
        needed = 1 if self._configured_s is not None else s.hang_warmup_steps
        return steady if progress.finished_here >= needed else max(steady, s.first_step_allowance_s)

    def check(self, progress: Progress) -> Stall | None:
        """A stall that was not said before, or None."""
        now = self._clock.monotonic()
        threshold = self.threshold_s(progress)
        unobserved = now - self._looked
        self._looked = now
        if unobserved > threshold / 2:
            self._since += unobserved
        position = (progress.generation, progress.step)
        if position != self._seen:
            self._seen, self._since, self._reported = position, now, False
        stalled = now - self._since
        if self._reported or stalled < threshold:
            return None
        self._reported = True
        return Stall(stalled, threshold)


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
