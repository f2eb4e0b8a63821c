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
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._since = clock.monotonic()
        self._step_since = self._since
        self._looked = self._since
        self._said_s = 0.0
        self._doubted: tuple[int, float] | None = None  # after which step a stall was said, and at which threshold
        self._allowed_s = 0.0

    def enter(self, configured_s: float | None) -> None:
        """A generation begins. ``configured_s`` is the job's threshold, or None to follow the step time."""
        self._configured_s = configured_s
        self._restart()

    def _restart(self) -> None:
        self._since = self._step_since = self._looked = self._clock.monotonic()
        self._said_s = 0.0

    def threshold_s(self, progress: Progress) -> float:
        """Seconds without progress that are a stall for this rank now."""
        s = self._settings
        if self._configured_s is not None:
            return self._configured_s if progress.finished_here else max(self._configured_s, s.first_step_allowance_s)
        step, doubted_s = self._doubted or (None, 0.0)
        doubled = 2 * doubted_s if step == progress.step else 0.0
        steady = max(s.hang_floor_s, s.hang_factor * progress.step_s, self._allowed_s, doubled)
        return steady if progress.finished_here >= s.hang_warmup_steps else max(steady, s.first_step_allowance_s)

    def check(self, progress: Progress) -> Stall | None:
        """A stall that is to be said, or None."""
        now = self._clock.monotonic()
        threshold = self.threshold_s(progress)
        unobserved = now - self._looked
        self._looked = now
        if unobserved > threshold / 2:
            self._since += unobserved
            self._step_since += unobserved
        position = (progress.generation, progress.step, progress.collectives)
        if position != self._seen:
            if position[:2] != self._seen[:2]:
                self._learn(position, now - self._step_since)
                self._step_since = now
            self._seen, self._since, self._said_s = position, now, 0.0
        stalled, threshold = now - self._since, max(threshold, 2 * self._said_s)
        if stalled < threshold:
            return None
        self._said_s = threshold
        self._doubted = (progress.step, threshold)
        return Stall(stalled, threshold)

    def _learn(self, position: tuple[int, int, int], lasted_s: float) -> None:
        """Steps came to their end since the last look, or a generation began."""
        made = position[0] == self._seen[0] and position[1] > self._seen[1]
        if made and self._doubted is not None and self._doubted[0] == self._seen[1]:
            if lasted_s > self._doubted[1]:
                self._allowed_s = max(self._allowed_s, 2 * lasted_s)
            self._doubted = None


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
