"""Report from the signal thread that a rank makes no progress, and what it does meanwhile."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Protocol

import msgspec

from everstep.clock import Clock
from everstep.vocabulary import RankActivity
from everstep_trainer.base.progress import StepProgress
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadState

FIRST_JUDGEMENT_S = 1.0
"""Seconds by which the first report may be late because it is not known yet what the rank does."""
CHANGE_SHARE = 0.1
"""Share of a stall's length that lies between two reports of changes, so that a rank that alternates says little."""
REPEAT_S = 30.0
"""Longest time between two reports of a rank that waits for no other; others repeat theirs at each doubling."""


class Stall(msgspec.Struct, frozen=True):
    """A rank made no progress for ``stalled_s``; its state is MOVING if that has ended."""

    stalled_s: float
    threshold_s: float
    state: MainThreadState


class Observer(Protocol):
    """Tells what the main thread does (`MainThreadObserver`)."""

    longest_still_s: float

    def observe(self) -> MainThreadState: ...
    def reset(self) -> None: ...


class StallWatch:
    """Watches a rank's progress and says when to report. Time between late checks does not count."""

    def __init__(self, settings: HookSettings, clock: Clock, progress: StepProgress, observer: Observer) -> None:
        self._settings, self._clock, self._progress, self._observer = settings, clock, progress, observer
        self._configured_s: float | None = None
        self._position: tuple[int, int, int] = (0, 0, 0)
        self._since = self._last_check_at = clock.monotonic()
        self._reported: Stall | None = None

    def enter(self, configured_s: float | None) -> None:
        """Begin a generation. ``configured_s`` is the job's threshold, or None to follow the step time."""
        self._configured_s = configured_s
        self._since = self._last_check_at = self._clock.monotonic()
        self._forget()

    def threshold_s(self) -> float:
        """Return the seconds of standing still from which this rank counts as hung, by the rank's own measure."""
        s, progress = self._settings, self._progress
        if self._configured_s is not None:
            allowance = 0.0 if progress.finished_steps_here else s.first_step_allowance_s
            return max(self._configured_s, allowance)
        steady = max(s.min_hang_threshold_s, s.hang_factor * progress.median_step_s)
        return steady if progress.finished_steps_here >= s.hang_warmup_steps else max(steady, s.first_step_allowance_s)

    def check(self) -> Stall | None:
        """Return what to report now, or None."""
        now, progress = self._clock.monotonic(), self._progress
        report_after_s = max(self._settings.stall_report_s, 2 * progress.median_step_s)
        unobserved_s, self._last_check_at = now - self._last_check_at, now
        if unobserved_s > report_after_s / 2:
            self._since += unobserved_s
        position = (progress.generation, progress.finished_step, progress.collective_count)
        if position != self._position:
            ended = self._end(now) if position[0] == self._position[0] else None
            self._position, self._since = position, now
            self._forget()
            return ended
        stalled_s = now - self._since
        if stalled_s < report_after_s / 2:
            return None
        state = self._observer.observe()
        if stalled_s < report_after_s or not self._is_due(stalled_s, report_after_s, state):
            return None
        self._reported = Stall(stalled_s, self.threshold_s(), state)
        return self._reported

    def _is_due(self, stalled_s: float, report_after_s: float, state: MainThreadState) -> bool:
        before = self._reported
        if before is None:
            return state.activity is not None or stalled_s >= report_after_s + FIRST_JUDGEMENT_S
        since_s, known = stalled_s - before.stalled_s, before.state
        if (state.activity, state.operation, state.section) != (known.activity, known.operation, known.section):
            return since_s >= max(FIRST_JUDGEMENT_S, CHANGE_SHARE * stalled_s)
        if state.activity is not RankActivity.COLLECTIVE and since_s >= REPEAT_S:
            return True
        return stalled_s >= 2 * before.stalled_s

    def _end(self, now: float) -> Stall | None:
        """Return the report that ends a stall that was reported."""
        if self._reported is None:
            return None
        state = MainThreadState(activity=RankActivity.MOVING, activity_s=self._observer.longest_still_s)
        return Stall(now - self._since, self.threshold_s(), state)

    def _forget(self) -> None:
        self._reported = None
        self._observer.reset()


def main_stack(limit_bytes: int) -> str:
    """Return the main thread's Python stack, cut to ``limit_bytes``."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return _cut("".join(traceback.format_stack(frame)), limit_bytes)


def all_stacks(limit_bytes: int) -> str:
    """Return every Python thread's stack, main thread first, cut to ``limit_bytes``."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames]
    return _cut("\n".join(parts), limit_bytes)


def _cut(text: str, limit_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")
