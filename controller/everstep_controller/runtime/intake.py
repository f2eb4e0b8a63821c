"""What waits for a transaction: two classes, bounded together; where there is no room the routine one is shed first.

What is routine rests between transactions, so that one node whose log has gone mad costs a few of them a second and
not hundreds, and everybody else's beats are answered as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Generic, TypeVar

from everstep.errors import Unavailable

T = TypeVar("T")

ROUTINE_SHARE = 8
"""One in so many places of a transaction is the routine class's, however much urgent waits: a beat that was never
read would make its node look silent."""


PAUSE_FACTOR = 9.0
"""A transaction with routine stimuli is followed by a rest of so many times its length: alone, they take a tenth of
the controller's time."""
MAX_PAUSE_S = 0.5
"""So long may a warning wait, at most, or a picture of a node that is well known."""


class Urgency(StrEnum):
    """How soon a stimulus is wanted."""

    URGENT = "urgent"
    """Registrations, disconnections, operators, most reports: something happened, or somebody waits for it."""
    ROUTINE = "routine"
    """What ``core.fleet`` lets wait: pictures and reports of mild findings, and of those that stand already."""


class PendingStimulus(Generic[T]):
    """A stimulus and who waits for it.

    Args:
        source: the node that it is about; its stimuli are never reordered.
        urgency: what is routine becomes urgent beside something urgent of its source, whichever came first.
    """

    __slots__ = ("arrived_at", "future", "source", "stimulus", "urgency")

    def __init__(self, stimulus: T, future: asyncio.Future[Any], source: str, urgency: Urgency) -> None:
        self.stimulus = stimulus
        self.future = future
        self.source = source
        self.urgency = urgency
        self.arrived_at = time.perf_counter()

    def refuse(self, error: Exception) -> None:
        """Answers with ``error``, unless it is answered or nobody waits any more."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # whoever waited may have gone; that is no error of ours


class Intake(Generic[T]):
    """The queue before the loop.

    Args:
        limit: stimuli that may wait, of both classes together.
        group: routine stimuli that make a transaction of their own: so many do not rest.
        shed: told of each one that is not taken, or is dropped for a more urgent one.
    """

    def __init__(self, limit: int, group: int, on_shed: Callable[[Urgency], None]) -> None:
        self._limit = limit
        self._group = group
        self._shed = on_shed
        self._urgent: deque[PendingStimulus[T]] = deque()
        self._routine: deque[PendingStimulus[T]] = deque()  # with what was hurried meanwhile, which is passed over
        self._paused: dict[str, deque[PendingStimulus[T]]] = {}
        self._paused_count = 0
        self._expedited: Counter[str] = Counter()
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._urgent) + self._paused_count

    def put(self, waiting: PendingStimulus[T]) -> None:
        """Queues ``waiting``. Raises Unavailable where there is no room for it.

        An urgent one takes the place of the oldest routine one: whoever sent that has waited longest already, and
        will say the same again.
        """
        if len(self) >= self._limit:
            full = Unavailable(f"{len(self)} requests wait already: send this again in a second")
            if waiting.urgency is Urgency.ROUTINE or not self._paused_count:
                self._shed(waiting.urgency)
                raise full
            self._shed(Urgency.ROUTINE)
            self._pop_routine().refuse(full)
        if waiting.urgency is Urgency.URGENT or self._expedited[waiting.source]:
            self.expedite(waiting.source)
            self._push_urgent(waiting)
        else:
            waiting.arrived_at = max(waiting.arrived_at, self._paused_until)  # a rest is no lag
            self._routine.append(waiting)
            self._paused.setdefault(waiting.source, deque()).append(waiting)
            self._paused_count += 1

    def expedite(self, source: str) -> None:
        """Something urgent of ``source`` has come, or is behind what rests: that is urgent too, and goes before it.

        O(1) for each that it hurries: a whole fleet may do so in a second.
        """
        hurried = self._paused.pop(source, ())
        self._paused_count -= len(hurried)
        for waiting in hurried:
            self._push_urgent(waiting)
        self._skip_expedited()

    def pause_routine_after(self, taken: list[PendingStimulus[T]], worked_s: float) -> None:
        """A transaction is done, and took so long."""
        if any(waiting.urgency is Urgency.ROUTINE for waiting in taken):
            self._paused_until = time.perf_counter() + min(MAX_PAUSE_S, PAUSE_FACTOR * worked_s)

    def next_due_in_s(self) -> float | None:
        """Seconds until something is to be taken, 0.0 where something is; None while nothing waits."""
        if self._urgent or self._paused_count >= self._group:
            return 0.0
        return max(0.0, self._paused_until - time.perf_counter()) if self._paused_count else None

    def take(self) -> list[PendingStimulus[T]]:
        """The next group: urgent ones first, but a share of the places is kept for routine ones that do not rest."""
        ready = self._paused_count
        if ready < self._group and time.perf_counter() < self._paused_until:
            ready = 0
        routine = min(ready, max(self._group // ROUTINE_SHARE, self._group - len(self._urgent)))
        urgent = min(len(self._urgent), self._group - routine)
        taken = [self._pop_urgent() for _ in range(urgent)]
        return taken + [self._pop_routine() for _ in range(routine)]

    def oldest_wait_s(self) -> float:
        """How long the one that could have been taken longest ago has waited, seconds; 0.0 while none does."""
        heads = [queue[0].arrived_at for queue in (self._urgent, self._routine) if queue]
        return max(0.0, time.perf_counter() - min(heads)) if heads else 0.0

    def refuse_all(self, error: Exception) -> None:
        """Empties the queue: everybody in it is answered with ``error``."""
        while self._urgent:
            self._pop_urgent().refuse(error)
        while self._paused_count:
            self._pop_routine().refuse(error)

    def _skip_expedited(self) -> None:
        while self._routine and self._routine[0].urgency is Urgency.URGENT:
            self._routine.popleft()

    def _push_urgent(self, waiting: PendingStimulus[T]) -> None:
        waiting.urgency = Urgency.URGENT
        self._urgent.append(waiting)
        self._expedited[waiting.source] += 1

    def _pop_urgent(self) -> PendingStimulus[T]:
        waiting = self._urgent.popleft()
        self._expedited[waiting.source] -= 1
        if not self._expedited[waiting.source]:
            del self._expedited[waiting.source]
        return waiting

    def _pop_routine(self) -> PendingStimulus[T]:
        waiting = self._routine.popleft()
        of_source = self._paused[waiting.source]
        of_source.popleft()
        if not of_source:
            del self._paused[waiting.source]
        self._paused_count -= 1
        self._skip_expedited()
        return waiting
