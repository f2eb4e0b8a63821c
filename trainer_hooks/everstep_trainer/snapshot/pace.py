"""Choose the number of steps between snapshots, so that they block training only for a small share of its time.

Each rank measures how long a snapshot blocks its training and how long a step is (StepStopwatch). All ranks take the
pace of the slowest from the same step on, without a collective: steps are counted in windows of PACE_WINDOW. In a
window's first quarter each rank publishes the pace that it needed in the window before. In the second quarter rank 0
decides for the next window; from the third on all ranks read the decision. Ranks run in lock step and do their part
before the next snapshot, at most MAX_INTERVAL steps later, so readers find the decision written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep_trainer.runtime.progress import timed_event

# ---- stopwatch: duration of steps, and how long snapshots block training in them
#
# On a GPU the training stream's time counts: a thread ahead of the stream delays nothing while it waits. There a time
# point is an event. The time between one event before a wait and one after it is how long the stream stood still,
# whether the thread or the stream itself waited. Nothing waits for the events; they are read a step or more later.

TimePoint = Any  # seconds, or a torch.cuda.Event of each GPU; their methods carry no types
OnStep = Callable[[float, float | None], None]


class _Step(msgspec.Struct):
    """One step, from the end of the previous one to its own; ``has_snapshot``: a snapshot began in it."""

    began: TimePoint
    ended: TimePoint = None
    has_snapshot: bool = False
    blocked: list[tuple[TimePoint, TimePoint]] = []


@dataclass(eq=False)
class StepStopwatch:
    """Times one training thread's steps. ``on_step``: each step's seconds and, if a snapshot began, blocked ones."""

    _on_step: OnStep | None
    _clock: Clock

    def __post_init__(self) -> None:
        self._gpus: Sequence[torch.device] = ()
        self._step: _Step | None = None
        self._over: deque[_Step] = deque()

    def end_step(self, gpus: Sequence[torch.device]) -> None:
        """Record that a step is finished, by a GPU when it gets there. ``gpus``: those of the state, if any."""
        if self._on_step is None:
            return
        if gpus != self._gpus:
            self._gpus, self._step = gpus, None
            self._over.clear()
        now = self._now()
        if self._step is not None:
            self._step.ended = now
            self._over.append(self._step)
        self._step = _Step(now)
        while self._over and (not gpus or all(event.query() for event in self._over[0].ended)):
            step = self._over.popleft()
            blocked_s = sum(self._seconds_between(*pair) for pair in step.blocked)
            step_s = max(0.0, self._seconds_between(step.began, step.ended) - blocked_s)
            self._on_step(step_s, blocked_s if step.has_snapshot else None)

    def _now(self) -> TimePoint:
        """Return a time point between the work so far, of this thread or of the GPUs' streams, and later work."""
        if not self._gpus:
            return self._clock.monotonic()
        return [torch.cuda.current_stream(gpu).record_event(timed_event()) for gpu in self._gpus]

    def _seconds_between(self, first: TimePoint, last: TimePoint) -> float:
        """Return the seconds between two time points that have passed; of several streams, the slowest's."""
        if not self._gpus:
            return float(last - first)
        return max(float(before.elapsed_time(after)) for before, after in zip(first, last, strict=True)) / 1000.0

    @contextmanager
    def blocked(self, *, has_snapshot: bool = False) -> Iterator[None]:
        """Measure a wait of training, or an order to wait. ``has_snapshot``: a snapshot begins in it."""
        step = self._step
        if step is None:
            yield
            return
        began = self._now()
        yield
        step.blocked.append((began, self._now()))
        step.has_snapshot = step.has_snapshot or has_snapshot


log = logging.getLogger(__name__)

MAX_BLOCKED_SHARE = 0.1  # largest share of training's time that snapshots may block before they become less frequent
MIN_BLOCKED_S = 0.02
"""A snapshot that blocks for less than this is made in every step: losing a step costs more than it saves."""
RELAX_FACTOR = 0.8
"""Factor of MAX_BLOCKED_SHARE below which snapshots become more frequent again, so that the pace does not alternate."""
MIN_STEP_S = 1e-6
PACE_WINDOW = 64
MAX_INTERVAL = 8
"""Most steps between snapshots. A quarter of a window is twice as long."""


def target_interval(blocked_s: float, step_s: float, current: int) -> int:
    """Return the steps between snapshots that keep blocked time within MAX_BLOCKED_SHARE, given the present."""
    if blocked_s < MIN_BLOCKED_S:
        return 1

    def apart(share: float) -> int:
        return max(1, ceil(min(MAX_INTERVAL, blocked_s * (1 - share) / (share * max(step_s, MIN_STEP_S)))))

    needed = apart(MAX_BLOCKED_SHARE)
    return needed if needed >= current else min(current, apart(MAX_BLOCKED_SHARE * RELAX_FACTOR))


class SnapshotPace:
    """The pace of one rank in one generation: ``agree`` is for the copier; a ``fixed_interval`` measures nothing."""

    def __init__(self, store: Store, rank: int, fixed_interval: int | None) -> None:
        self._store, self._rank, self.fixed_interval = store, rank, fixed_interval
        self._paces = [(0, 1)]  # (first window, interval): the last two decisions
        self._wanted_intervals: dict[int, int] = {}
        self._steps: list[float] = []
        self._blocked: list[float] = []
        self._window = 0
        self._done: set[tuple[str, int]] = set()

    def interval_at(self, step: int) -> int:
        """Return the number of steps between regular snapshots at ``step``."""
        if self.fixed_interval is not None:
            return self.fixed_interval
        return next(every for window, every in reversed(self._paces) if window <= step // PACE_WINDOW)

    def is_due(self, step: int) -> bool:
        """Return whether every rank stores this step; the same on all of them."""
        return step % self.interval_at(step) == 0

    # --- for the training thread

    def end_step(self, step: int) -> None:
        """Record that ``step`` is finished, before its snapshot begins."""
        if self.fixed_interval is not None or step // PACE_WINDOW == self._window:
            return
        if self._blocked and self._steps:
            target = target_interval(median(self._blocked), median(self._steps), self.interval_at(step))
            self._wanted_intervals = {step // PACE_WINDOW: target}
        self._steps, self._blocked, self._window = [], [], step // PACE_WINDOW

    def record_step(self, step_s: float, blocked_s: float | None) -> None:
        """Record a step's seconds and, if a snapshot began in it, the seconds that it blocked training."""
        self._steps.append(step_s)
        if blocked_s is not None:
            self._blocked.append(blocked_s)

    # --- for the copier thread

    def agree(self, step: int) -> None:
        """Take part in the agreement after each snapshot, before the next one. Raises what the store raises."""
        if self.fixed_interval is not None:
            return
        window, at = divmod(step, PACE_WINDOW)
        quarter = 4 * at // PACE_WINDOW
        decision = f"pace/{window + 1}"
        if quarter == 0 and self._first("wish", window) and (wish := self._wanted_intervals.get(window, 1)) > 1:
            self._store.add(f"pace/{window}/wish/{wish}", 1)
        if quarter == 1 and self._rank == 0 and self._first("decide", window):
            wishes = (n for n in range(2, MAX_INTERVAL + 1) if self._store.check([f"pace/{window}/wish/{n}"]))
            self._store.set(decision, str(max(wishes, default=1)))
        if quarter >= 2 and self._first("take", window) and self._store.check([decision]):
            self._take(window + 1, int(self._store.get(decision)))

    def _first(self, kind: str, window: int) -> bool:
        known = (kind, window) in self._done
        self._done = {done for done in self._done if done[1] >= window} | {(kind, window)}
        return not known

    def _take(self, window: int, every: int) -> None:
        before = self.interval_at((window - 1) * PACE_WINDOW)
        self._paces = [(0, before), (window, every)]
        if self._rank != 0 or every == before:
            return
        if every > 1:
            message = "snapshots block training for over %.0f %% of the time: taking one every %d steps from step %d"
            log.warning(message, 100 * MAX_BLOCKED_SHARE, every, window * PACE_WINDOW)
        else:
            log.info("taking a snapshot every step again, from step %d", window * PACE_WINDOW)
