"""How many steps apart snapshots are, so that training does not stand still for them for long.

Each rank measures for how long a snapshot holds up its training, and how long a step is (stopwatch.py). All take the
same pace, that of the rank that needs the slowest, from the same step on, without a collective: steps are counted in
windows of WINDOW. In a window's first quarter each rank says what it would have needed in the window before; in the
second rank 0 decides for the next window; from the third on all read that. Ranks are in lock step, and each has done
what it had to before it begins its next snapshot, at most MOST steps later: so whoever reads finds it written.

What the controller announces is stored at any pace, about twice a second.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from statistics import median
from typing import Any, Protocol

import msgspec
import torch

from everstep.clock import Clock

# ---- stopwatch
# How long steps are, and for how long of them training is held up by snapshots: in the time of whoever trains.
#
# On the CPU that is the training thread. On a GPU it is the training stream: a thread that runs ahead of it may wait
# for
# as long as there is work left for it, and holds up nothing. There a moment is an event, and the time between one
# before
# a wait and one after it is what the stream stood still for, whether it was the thread that waited or the stream
# itself.
# Nothing waits for the events: what they say is told a step or more later.

TimePoint = Any
"""Seconds, or a torch.cuda.Event of each GPU; their methods carry no types."""
OnStep = Callable[[float, float | None], None]


class StepClock(Protocol):
    """Whose time it is."""

    def now(self) -> TimePoint:
        """This moment, between what was done so far and what will be."""

    def has_passed(self, moment: TimePoint) -> bool:
        """Whether it has, and with it all before."""

    def seconds_between(self, first: TimePoint, last: TimePoint) -> float:
        """Seconds between two moments that have come."""


class ThreadClock:
    """The calling thread's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> TimePoint:
        return self._clock.monotonic()

    def has_passed(self, moment: TimePoint) -> bool:
        return True

    def seconds_between(self, first: TimePoint, last: TimePoint) -> float:
        return float(last - first)


class StreamClock:
    """That of the streams on which the calling thread's work for ``gpus`` is done; of several, of the slowest."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        self._gpus = gpus

    def now(self) -> TimePoint:
        return [torch.cuda.current_stream(gpu).record_event(_timed_event()) for gpu in self._gpus]

    def has_passed(self, moment: TimePoint) -> bool:
        return all(event.query() for event in moment)

    def seconds_between(self, first: TimePoint, last: TimePoint) -> float:
        return max(float(before.elapsed_time(after)) for before, after in zip(first, last, strict=True)) / 1000.0


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Step(msgspec.Struct):
    """From the end of one step to that of the next; ``has_snapshot``: a snapshot was begun in it."""

    began: TimePoint
    ended: TimePoint = None
    has_snapshot: bool = False
    blocked: list[tuple[TimePoint, TimePoint]] = []


class StepStopwatch:
    """For one training thread.

    Args:
        on_step: takes the seconds of each step without what it was held up for, and, of one in which a snapshot was
            begun, for how long it was; in order, from ``end_step``. None: nothing is measured.
    """

    def __init__(self, on_step: OnStep | None, clock: Clock) -> None:
        self._on_step = on_step
        self._clock = clock
        self._gpus: Sequence[torch.device] = ()
        self._time: StepClock = ThreadClock(clock)
        self._step: _Step | None = None
        self._over: deque[_Step] = deque()

    def end_step(self, gpus: Sequence[torch.device]) -> None:
        """A step is finished, by a GPU when it gets there. ``gpus``: where the state lies; none for the host."""
        if self._on_step is None:
            return
        if gpus != self._gpus:
            self._gpus, self._step = gpus, None
            self._time = StreamClock(gpus) if gpus else ThreadClock(self._clock)
            self._over.clear()
        now = self._time.now()
        if self._step is not None:
            self._step.ended = now
            self._over.append(self._step)
        self._step = _Step(now)
        while self._over and self._time.has_passed(self._over[0].ended):
            self._say(self._over.popleft(), self._on_step)

    def _say(self, step: _Step, tell: OnStep) -> None:
        held_up = sum(self._time.seconds_between(*pair) for pair in step.blocked)
        tell(
            max(0.0, self._time.seconds_between(step.began, step.ended) - held_up),
            held_up if step.has_snapshot else None,
        )

    @contextmanager
    def blocked(self, *, has_snapshot: bool = False) -> Iterator[None]:
        """Around what training waits in, or is ordered to wait by. ``has_snapshot``: a snapshot begins there."""
        step = self._step
        if step is None:
            yield
            return
        began = self._time.now()
        yield
        step.blocked.append((began, self._time.now()))
        step.has_snapshot = step.has_snapshot or has_snapshot


log = logging.getLogger(__name__)

MAX_BLOCKED_SHARE = 0.1
"""Of the training's time that may go by blocked by snapshots before they come less often."""
MIN_BLOCKED_S = 0.02
"""A snapshot that blocks for less than this comes with every step: a lost step costs more than it saves."""
RELAX_FACTOR = 0.8
"""Of MAX_BLOCKED_SHARE, where they come more often again, so that a pace between two does not change in every
window."""
MIN_STEP_S = 1e-6
PACE_WINDOW = 64
MAX_INTERVAL = 8
"""Steps apart, at most. A quarter of a window is twice as long."""


class PaceStore(Protocol):
    """What is used of a generation's store."""

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


def wanted_interval(blocked_s: float, step_s: float, current: int) -> int:
    """Steps from one snapshot to the next, so that training is held up for MAX_BLOCKED_SHARE of its time at most.

    Args:
        blocked_s: by each snapshot.
        step_s: a step without that.
        current: how many steps apart they are.
    """
    if blocked_s < MIN_BLOCKED_S:
        return 1

    def apart(share: float) -> int:
        return max(1, ceil(min(MAX_INTERVAL, blocked_s * (1 - share) / (share * max(step_s, MIN_STEP_S)))))

    needed = apart(MAX_BLOCKED_SHARE)
    return needed if needed >= current else min(current, apart(MAX_BLOCKED_SHARE * RELAX_FACTOR))


class SnapshotPace:
    """One rank's, in one generation. ``fixed_interval``: fixed by the user; nothing is measured or told then.

    ``end_step``, ``record_step`` and ``is_due`` are for the training thread, ``agree`` for the copier.
    """

    def __init__(self, store: PaceStore, rank: int, fixed_interval: int | None) -> None:
        self._store = store
        self._rank = rank
        self._fixed = fixed_interval
        self._paces = [(0, 1)]
        """From which window on, the last one and the one before."""
        self._wanted_intervals: dict[int, int] = {}
        self._steps: list[float] = []
        self._blocked: list[float] = []
        self._window = 0
        self._done: set[tuple[str, int]] = set()

    @property
    def is_fixed(self) -> bool:
        """Whether the user chose it, so that nobody needs to measure."""
        return self._fixed is not None

    def interval_at(self, step: int) -> int:
        """How many steps apart regular snapshots are at ``step``."""
        if self._fixed is not None:
            return self._fixed
        return next(every for window, every in reversed(self._paces) if window <= step // PACE_WINDOW)

    def is_due(self, step: int) -> bool:
        """Whether every rank stores this step. The same on all of them."""
        return step % self.interval_at(step) == 0

    # --- the training thread

    def end_step(self, step: int) -> None:
        """``step`` is finished; before anything is begun for it."""
        if not self.is_fixed and step // PACE_WINDOW != self._window:
            self._publish_wanted(step)

    def record_step(self, step_s: float, blocked_s: float | None) -> None:
        """A step took so long; and where a snapshot was begun in it, that held up training for so long beside."""
        self._steps.append(step_s)
        if blocked_s is not None:
            self._blocked.append(blocked_s)

    def _publish_wanted(self, step: int) -> None:
        if self._blocked and self._steps:
            now = self.interval_at(step)
            self._wanted_intervals = {
                step // PACE_WINDOW: wanted_interval(median(self._blocked), median(self._steps), now)
            }
        self._steps, self._blocked, self._window = [], [], step // PACE_WINDOW

    # --- the copier thread

    def agree(self, step: int) -> None:
        """After each snapshot, before the next one may begin. Raises what the store raises."""
        if self._fixed is not None:
            return
        window, at = divmod(step, PACE_WINDOW)
        quarter = 4 * at // PACE_WINDOW
        if quarter == 0 and self._first("wish", window):
            wish = self._wanted_intervals.get(window, 1)
            if wish > 1:
                self._store.add(_wish_key(window, wish), 1)
        if quarter == 1 and self._rank == 0 and self._first("decide", window):
            asked = [apart for apart in range(2, MAX_INTERVAL + 1) if self._store.check([_wish_key(window, apart)])]
            self._store.set(_pace_key(window + 1), str(max(asked, default=1)))
        if quarter >= 2 and self._first("take", window) and self._store.check([_pace_key(window + 1)]):
            self._take(window + 1, int(self._store.get(_pace_key(window + 1))))

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
            message = "snapshots hold up the training for over %.0f %% of its time: one in %d steps from step %d on"
            log.warning(message, 100 * MAX_BLOCKED_SHARE, every, window * PACE_WINDOW)
        else:
            log.info("a snapshot fits under each step again, from step %d on", window * PACE_WINDOW)


def _wish_key(window: int, every: int) -> str:
    return f"pace/{window}/wish/{every}"


def _pace_key(window: int) -> str:
    return f"pace/{window}"
