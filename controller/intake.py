"""What waits for a transaction: two classes, bounded together; where there is no room the routine one is shed first."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Generic, TypeVar

from everstep.errors import Unavailable

T = TypeVar("T")

ROUTINE_SHARE = 8
"""One in so many places of a transaction is the routine class's, however much urgent waits: a beat that was never
read would make its node look silent."""


class Urgency(StrEnum):
    """How soon a stimulus is wanted."""

    URGENT = "urgent"
    """Reports, registrations, disconnections, operators: something happened, or somebody waits for it."""
    ROUTINE = "routine"
    """A heartbeat with a changed picture: what is bad in it was reported too, and the next beat says it again."""


class Waiting(Generic[T]):
    """A stimulus and who waits for it."""

    __slots__ = ("arrived_at", "done", "stimulus")

    def __init__(self, stimulus: T, done: asyncio.Future[Any]) -> None:
        self.stimulus = stimulus
        self.done = done
        self.arrived_at = time.perf_counter()

    def refuse(self, error: Exception) -> None:
        """Answers with ``error``, unless it is answered or nobody waits any more."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever waited may have gone; that is no error of ours


class Intake(Generic[T]):
    """The queue before the loop.

    Args:
        limit: stimuli that may wait, of both classes together.
        shed: told of each one that is not taken, or is dropped for a more urgent one.
    """

    def __init__(self, limit: int, shed: Callable[[Urgency], None]) -> None:
        self._limit = limit
        self._shed = shed
        self._urgent: deque[Waiting[T]] = deque()
        self._routine: deque[Waiting[T]] = deque()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._routine)

    def put(self, waiting: Waiting[T], urgency: Urgency) -> None:
        """Queues ``waiting``. Raises Unavailable where there is no room for it.

        An urgent one takes the place of the oldest routine one: whoever sent that has waited longest already, and
        will soon say the same again.
        """
        if len(self) >= self._limit:
            if urgency is Urgency.ROUTINE or not self._routine:
                self._shed(urgency)
                raise self._full()
            self._shed(Urgency.ROUTINE)
            self._routine.popleft().refuse(self._full())
        (self._urgent if urgency is Urgency.URGENT else self._routine).append(waiting)

    def take(self, most: int) -> list[Waiting[T]]:
        """The next ``most``: urgent ones first, but a share of the places is kept for routine ones."""
        routine = min(len(self._routine), max(most // ROUTINE_SHARE, most - len(self._urgent)))
        urgent = min(len(self._urgent), most - routine)
        taken = [self._urgent.popleft() for _ in range(urgent)]
        return taken + [self._routine.popleft() for _ in range(routine)]

    def oldest_s(self) -> float:
        """How long the one that waits longest has waited, seconds; 0.0 while none does."""
        heads = [queue[0].arrived_at for queue in (self._urgent, self._routine) if queue]
        return time.perf_counter() - min(heads) if heads else 0.0

    def refuse_all(self, error: Exception) -> None:
        """Empties the queue: everybody in it is answered with ``error``."""
        for queue in (self._urgent, self._routine):
            while queue:
                queue.popleft().refuse(error)

    def _full(self) -> Unavailable:
        return Unavailable(f"{len(self)} requests wait already: send this again in a second")
