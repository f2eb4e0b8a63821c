"""How long steps are, and for how long of them training is held up by snapshots: in the time of whoever trains.

On the CPU that is the training thread. On a GPU it is the training stream: a thread that runs ahead of it may wait for
as long as there is work left for it, and holds up nothing. There a moment is an event, and the time between one before
a wait and one after it is what the stream stood still for, whether it was the thread that waited or the stream itself.
Nothing waits for the events: what they say is told a step or more later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch

from everstep.clock import Clock

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
