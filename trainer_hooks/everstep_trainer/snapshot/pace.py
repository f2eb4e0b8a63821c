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

Moment = Any
"""Seconds, or a torch.cuda.Event of each GPU; their methods carry no types."""
Tell = Callable[[float, float | None], None]


class Time(Protocol):
    """Whose time it is."""

    def now(self) -> Moment:
        """This moment, between what was done so far and what will be."""

    def has_come(self, moment: Moment) -> bool:
        """Whether it has, and with it all before."""

    def between(self, first: Moment, last: Moment) -> float:
        """Seconds between two moments that have come."""


class ThreadTime:
    """The calling thread's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> Moment:
        return self._clock.monotonic()

    def has_come(self, moment: Moment) -> bool:
        return True

    def between(self, first: Moment, last: Moment) -> float:
        return float(last - first)


class StreamTime:
    """That of the streams on which the calling thread's work for ``gpus`` is done; of several, of the slowest."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        self._gpus = gpus

    def now(self) -> Moment:
        return [torch.cuda.current_stream(gpu).record_event(_timed_event()) for gpu in self._gpus]

    def has_come(self, moment: Moment) -> bool:
        return all(event.query() for event in moment)

    def between(self, first: Moment, last: Moment) -> float:
        return max(float(before.elapsed_time(after)) for before, after in zip(first, last, strict=True)) / 1000.0


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Step(msgspec.Struct):
    """From the end of one step to that of the next; ``stored``: a snapshot was begun in it."""

    began: Moment
    ended: Moment = None
    stored: bool = False
    held_up: list[tuple[Moment, Moment]] = []


class Stopwatch:
    """For one training thread.

    Args:
        tell: takes the seconds of each step without what it was held up for, and, of one in which a snapshot was begun,
            for how long it was; in order, from ``step_ends``. None: nothing is measured.
    """

    def __init__(self, tell: Tell | None, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._gpus: Sequence[torch.device] = ()
        self._time: Time = ThreadTime(clock)
        self._step: _Step | None = None
        self._over: deque[_Step] = deque()

    def step_ends(self, gpus: Sequence[torch.device]) -> None:
        """A step is finished, by a GPU when it gets there. ``gpus``: where the state lies; none for the host."""
        if self._tell is None:
            return
        if gpus != self._gpus:
            self._gpus, self._step = gpus, None
            self._time = StreamTime(gpus) if gpus else ThreadTime(self._clock)
            self._over.clear()
        now = self._time.now()
        if self._step is not None:
            self._step.ended = now
            self._over.append(self._step)
        self._step = _Step(now)
        while self._over and self._time.has_come(self._over[0].ended):
            self._say(self._over.popleft(), self._tell)

    def _say(self, step: _Step, tell: Tell) -> None:
        held_up = sum(self._time.between(*pair) for pair in step.held_up)
        tell(max(0.0, self._time.between(step.began, step.ended) - held_up), held_up if step.stored else None)

    @contextmanager
    def held_up(self, *, stored: bool = False) -> Iterator[None]:
        """Around what training waits in, or is ordered to wait by. ``stored``: a snapshot begins there."""
        step = self._step
        if step is None:
            yield
            return
        began = self._time.now()
        yield
        step.held_up.append((began, self._time.now()))
        step.stored = step.stored or stored


log = logging.getLogger(__name__)

SHARE = 0.1
"""Of the training's time that may go by blocked by snapshots before they come less often."""
WORTH_S = 0.02
"""A snapshot that blocks for less than this comes with every step: a lost step costs more than it saves."""
SLACK = 0.8
"""Of SHARE, where they come more often again, so that a pace between two does not change in every window."""
NO_TIME_S = 1e-6
WINDOW = 64
MOST = 8
"""Steps apart, at most. A quarter of a window is twice as long."""


class Store(Protocol):
    """What is used of a generation's store."""

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


def wanted(blocked_s: float, step_s: float, now: int) -> int:
    """Steps from one snapshot to the next, so that training is held up for SHARE of its time at most.

    Args:
        blocked_s: by each snapshot.
        step_s: a step without that.
        now: how many steps apart they are.
    """
    if blocked_s < WORTH_S:
        return 1

    def apart(share: float) -> int:
        return max(1, ceil(min(MOST, blocked_s * (1 - share) / (share * max(step_s, NO_TIME_S)))))

    needed = apart(SHARE)
    return needed if needed >= now else min(now, apart(SHARE * SLACK))


class Pace:
    """One rank's, in one generation. ``every``: fixed by the user; nothing is measured or told then.

    ``step_ends``, ``took`` and ``due`` are for the training thread, ``agree`` for the copier.
    """

    def __init__(self, store: Store, rank: int, every: int | None) -> None:
        self._store = store
        self._rank = rank
        self._fixed = every
        self._paces = [(0, 1)]
        """From which window on, the last one and the one before."""
        self._wishes: dict[int, int] = {}
        self._steps: list[float] = []
        self._blocked: list[float] = []
        self._window = 0
        self._done: set[tuple[str, int]] = set()

    @property
    def fixed(self) -> bool:
        """Whether the user chose it, so that nobody needs to measure."""
        return self._fixed is not None

    def every(self, step: int) -> int:
        """How many steps apart regular snapshots are at ``step``."""
        if self._fixed is not None:
            return self._fixed
        return next(every for window, every in reversed(self._paces) if window <= step // WINDOW)

    def due(self, step: int) -> bool:
        """Whether every rank stores this step. The same on all of them."""
        return step % self.every(step) == 0

    # --- the training thread

    def step_ends(self, step: int) -> None:
        """``step`` is finished; before anything is begun for it."""
        if not self.fixed and step // WINDOW != self._window:
            self._wish(step)

    def took(self, step_s: float, blocked_s: float | None) -> None:
        """A step took so long; and where a snapshot was begun in it, that held up training for so long beside."""
        self._steps.append(step_s)
        if blocked_s is not None:
            self._blocked.append(blocked_s)

    def _wish(self, step: int) -> None:
        if self._blocked and self._steps:
            now = self.every(step)
            self._wishes = {step // WINDOW: wanted(median(self._blocked), median(self._steps), now)}
        self._steps, self._blocked, self._window = [], [], step // WINDOW

    # --- the copier thread

    def agree(self, step: int) -> None:
        """After each snapshot, before the next one may begin. Raises what the store raises."""
        if self._fixed is not None:
            return
        window, at = divmod(step, WINDOW)
        quarter = 4 * at // WINDOW
        if quarter == 0 and self._first("wish", window):
            wish = self._wishes.get(window, 1)
            if wish > 1:
                self._store.add(_wish_key(window, wish), 1)
        if quarter == 1 and self._rank == 0 and self._first("decide", window):
            asked = [apart for apart in range(2, MOST + 1) if self._store.check([_wish_key(window, apart)])]
            self._store.set(_pace_key(window + 1), str(max(asked, default=1)))
        if quarter >= 2 and self._first("take", window) and self._store.check([_pace_key(window + 1)]):
            self._take(window + 1, int(self._store.get(_pace_key(window + 1))))

    def _first(self, what: str, window: int) -> bool:
        known = (what, window) in self._done
        self._done = {done for done in self._done if done[1] >= window} | {(what, window)}
        return not known

    def _take(self, window: int, every: int) -> None:
        before = self.every((window - 1) * WINDOW)
        self._paces = [(0, before), (window, every)]
        if self._rank != 0 or every == before:
            return
        if every > 1:
            message = "snapshots hold up the training for over %.0f %% of its time: one in %d steps from step %d on"
            log.warning(message, 100 * SHARE, every, window * WINDOW)
        else:
            log.info("a snapshot fits under each step again, from step %d on", window * WINDOW)


def _wish_key(window: int, every: int) -> str:
    return f"pace/{window}/wish/{every}"


def _pace_key(window: int) -> str:
    return f"pace/{window}"
