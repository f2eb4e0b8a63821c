"""Queue stimuli for a transaction in two classes with a common limit; at the limit, routine ones are dropped first.

Routine stimuli pause between transactions. A node whose log runs wild then costs a few transactions per second, not
hundreds, and heartbeats of other nodes are answered as usual.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from everstep.errors import Unavailable

T = TypeVar("T")

ROUTINE_SHARE = 8
"""One of this many places in a transaction is reserved for routine stimuli, so that no heartbeat waits forever."""


PAUSE_FACTOR = 9.0
"""After a transaction, routine stimuli pause for this many times its duration: alone, they take a tenth of the time."""
MAX_PAUSE_S = 0.5
"""Maximum seconds that a warning or a known node's findings may be delayed."""


class Urgency(StrEnum):
    """How soon a stimulus is handled."""

    URGENT = "urgent"
    """Registrations, disconnections, operators, most reports: a change, or a sender that waits."""
    ROUTINE = "routine"
    """Stimuli that the core allows to be deferred: known findings, and reports of mild or known findings."""


@dataclass(eq=False, slots=True)
class PendingRequest(Generic[T]):
    """A request and the future that its submitter waits for.

    Requests of one ``source`` (a node) keep their order: a routine one becomes urgent beside an urgent one.
    """

    stimulus: T
    future: asyncio.Future[Any]
    source: str
    urgency: Urgency
    arrived_at: float = field(default_factory=time.perf_counter)

    def refuse(self, error: Exception) -> None:
        """Answer with ``error``, unless it is answered already or the sender has left."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks the error as retrieved, in case the submitter is gone


class Intake(Generic[T]):
    """The loop's input queue of at most ``limit`` requests.

    ``group`` routine requests end a pause, because they fill a transaction. ``on_shed`` is called for each request
    that is refused or dropped.
    """

    def __init__(self, limit: int, group: int, on_shed: Callable[[Urgency], None]) -> None:
        self._limit = limit
        self._group = group
        self._shed = on_shed
        self._urgent: deque[PendingRequest[T]] = deque()
        self._routine: deque[PendingRequest[T]] = deque()  # includes expedited ones, which are skipped
        self._paused: dict[str, deque[PendingRequest[T]]] = {}
        self._paused_count = 0
        self._expedited: Counter[str] = Counter()
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._urgent) + self._paused_count

    def put(self, pending: PendingRequest[T]) -> None:
        """Queue a request. Raises Unavailable if there is no room; an urgent one replaces the oldest routine one."""
        if len(self) >= self._limit:
            full = Unavailable(f"{len(self)} requests wait already: send this again in a second")
            if pending.urgency is Urgency.ROUTINE or not self._paused_count:
                self._shed(pending.urgency)
                raise full
            self._shed(Urgency.ROUTINE)
            self._pop_routine().refuse(full)
        if pending.urgency is Urgency.URGENT or self._expedited[pending.source]:
            self.expedite(pending.source)
            self._push_urgent(pending)
        else:
            pending.arrived_at = max(pending.arrived_at, self._paused_until)  # a pause is not lag
            self._routine.append(pending)
            self._paused.setdefault(pending.source, deque()).append(pending)
            self._paused_count += 1

    def expedite(self, source: str) -> None:
        """Make routine stimuli of ``source`` urgent, to keep them before an urgent one of the same source.

        O(1) for each: a whole fleet may need this within a second.
        """
        hurried = self._paused.pop(source, ())
        self._paused_count -= len(hurried)
        for waiting in hurried:
            self._push_urgent(waiting)
        self._skip_expedited()

    def pause_routine_after(self, taken: list[PendingRequest[T]], worked_s: float) -> None:
        """Pause routine stimuli after a transaction that took ``worked_s``."""
        if any(waiting.urgency is Urgency.ROUTINE for waiting in taken):
            self._paused_until = time.perf_counter() + min(MAX_PAUSE_S, PAUSE_FACTOR * worked_s)

    def next_due_in_s(self) -> float | None:
        """Return seconds until a stimulus is due, 0.0 if one is; None while nothing waits."""
        if self._urgent or self._paused_count >= self._group:
            return 0.0
        return max(0.0, self._paused_until - time.perf_counter()) if self._paused_count else None

    def take(self) -> list[PendingRequest[T]]:
        """Return the next batch: urgent ones first, but with places reserved for routine ones that are not paused."""
        ready = self._paused_count
        if ready < self._group and time.perf_counter() < self._paused_until:
            ready = 0
        routine = min(ready, max(self._group // ROUTINE_SHARE, self._group - len(self._urgent)))
        urgent = min(len(self._urgent), self._group - routine)
        taken = [self._pop_urgent() for _ in range(urgent)]
        return taken + [self._pop_routine() for _ in range(routine)]

    def oldest_wait_s(self) -> float:
        """Return seconds that the oldest stimulus has waited beyond its pause; 0.0 while none waits."""
        heads = [queue[0].arrived_at for queue in (self._urgent, self._routine) if queue]
        return max(0.0, time.perf_counter() - min(heads)) if heads else 0.0

    def refuse_all(self, error: Exception) -> None:
        """Empty the queue, and answer each request with ``error``."""
        while self._urgent:
            self._pop_urgent().refuse(error)
        while self._paused_count:
            self._pop_routine().refuse(error)

    def _skip_expedited(self) -> None:
        while self._routine and self._routine[0].urgency is Urgency.URGENT:
            self._routine.popleft()

    def _push_urgent(self, waiting: PendingRequest[T]) -> None:
        waiting.urgency = Urgency.URGENT
        self._urgent.append(waiting)
        self._expedited[waiting.source] += 1

    def _pop_urgent(self) -> PendingRequest[T]:
        waiting = self._urgent.popleft()
        self._expedited[waiting.source] -= 1
        if not self._expedited[waiting.source]:
            del self._expedited[waiting.source]
        return waiting

    def _pop_routine(self) -> PendingRequest[T]:
        waiting = self._routine.popleft()
        of_source = self._paused[waiting.source]
        of_source.popleft()
        if not of_source:
            del self._paused[waiting.source]
        self._paused_count -= 1
        self._skip_expedited()
        return waiting
