"""The one task that owns the fleet's state: stimuli in, one transaction, then answers and directives out.

Stimuli that wait together share a transaction (group commit); the effects of one are never split. Nothing is
answered and nothing is pushed before its transaction is durable. The process is crash-only: where a transaction
fails, memory is ahead of the database, so nobody is answered and the process ends; its supervisor starts it again
from the last committed state. The same holds for an error of the core's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from controller.boards import Boards
from controller.core import events as ev
from controller.core import fleet
from controller.core.state import FleetState
from controller.intake import Intake, Urgency, Waiting
from controller.lag import LagMeter
from controller.metrics import Metrics
from controller.push import Outbox
from controller.steady_time import SteadyTime
from controller.store.records import AuditRow, Batch, PoisonedRow
from controller.transaction import AuditNumbers, Transaction, new_trace
from everstep.errors import EverstepError, Unavailable
from everstep.vocabulary import Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")
Stimulus = Callable[[Transaction, float], T]
"""Runs events in a transaction at a time; what it returns is what its submitter gets once all is durable. It raises
EverstepError only before anything was changed."""

Commit = Callable[[Batch], Awaitable[None]]
"""Writes a batch: durable on return, nothing of it after an exception."""


_Waiting = Waiting[Stimulus[Any]]


class _Timer(NamedTuple):
    """The next Tick: the core's deadline, when it could first be served, and the event loop's timer."""

    deadline: float
    due: float
    handle: asyncio.TimerHandle


class FleetLoop:
    """Owns the state. Every method belongs to the event loop's thread.

    Args:
        state: what was restored; ``ControllerStarted`` is the first event.
        commit: writes one transaction.
        on_audit, on_verdicts: told what was committed, after it was.
        group: most stimuli that share a transaction: larger is more throughput, and a longer wait for the first.
        queue_limit: stimuli that may wait; beyond it new ones are refused with Unavailable.
    """

    def __init__(
        self,
        *,
        state: FleetState,
        outbox: Outbox,
        commit: Commit,
        steady: SteadyTime,
        metrics: Metrics,
        numbers: AuditNumbers,
        boards: Boards,
        on_audit: Callable[[list[AuditRow]], None],
        on_verdicts: Callable[[list[Verdict]], None],
        group: int = 256,
        queue_limit: int = 20_000,
    ) -> None:
        self.state = state
        self.outbox = outbox
        self.lag = LagMeter()
        self._commit = commit
        self._steady = steady
        self._metrics = metrics
        self._numbers = numbers
        self.boards = boards
        self._on_audit = on_audit
        self._on_verdicts = on_verdicts
        self._group = group
        self._queue: Intake[Stimulus[Any]] = Intake(queue_limit, metrics.shed)
        self._in_flight: list[_Waiting] = []
        self._work = asyncio.Event()
        self._armed: _Timer | None = None
        self._over = False
        self.started = asyncio.Event()

    def now(self) -> float:
        """The time decisions are made in."""
        return self._steady.now()

    def queued(self) -> int:
        """Stimuli that wait for their transaction."""
        return len(self._queue) + len(self._in_flight)

    async def submit(self, stimulus: Stimulus[T], urgency: Urgency = Urgency.URGENT) -> T:
        """Runs ``stimulus`` in its turn; returns its result when everything it did is durable.

        Raises what the stimulus raises, and Unavailable while too much waits or after a transaction failed.
        """
        return await self.enqueue(stimulus, urgency)

    def enqueue(self, stimulus: Stimulus[T], urgency: Urgency = Urgency.URGENT) -> asyncio.Future[T]:
        """``submit`` for who does not wait: the future of its result. Raises Unavailable."""
        if self._over:
            raise Unavailable("the controller is stopping: send this again to the one that follows", 0.2)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(Waiting(stimulus, done), urgency)
        self._work.set()
        return done

    def touched(self) -> None:
        """Call after a ``touch``: it may have brought the next deadline nearer."""
        deadline = fleet.next_deadline(self.state)
        if deadline is not None and (self._armed is None or deadline < self._armed.deadline):
            self._arm(deadline)

    async def run(self) -> None:
        """Runs until cancelled. Raises what made a transaction fail; nothing was answered after that."""
        self.lag.start()
        try:
            await self._turn([self._first()])
            self.started.set()
            while True:
                await self._something_to_do()
                await self._turn(self._take())
        finally:
            self._end()

    def _first(self) -> _Waiting:
        event = ev.ControllerStarted(trace=new_trace())
        done = asyncio.get_running_loop().create_future()
        return Waiting(lambda tx, now: tx.handle(event, now), done)

    async def _something_to_do(self) -> None:
        if self._queue:
            await asyncio.sleep(0)  # let requests that have just arrived join the group
            return
        self._work.clear()
        self._arm(fleet.next_deadline(self.state))
        await self._work.wait()

    def _arm(self, deadline: float | None) -> None:
        if self._armed is not None:
            self._armed.handle.cancel()
        self._armed = None
        if deadline is not None:
            due = max(deadline, self.now())
            handle = asyncio.get_running_loop().call_later(due - self.now(), self._work.set)
            self._armed = _Timer(deadline, due, handle)

    def _take(self) -> list[_Waiting]:
        return self._queue.take(self._group)

    async def _turn(self, taken: list[_Waiting]) -> None:
        """Everything that waits, then the timer: what was heard counts before anybody is called late."""
        self._in_flight = taken
        transaction = Transaction(self.state, self.outbox, self._numbers, self._metrics, self.boards)
        try:
            results = [(waiting, self._apply(waiting, transaction)) for waiting in taken]
            self._tick(transaction, taken)
        except Exception:
            await self._note_poison(transaction.handling)
            raise
        await self._make_durable(transaction, len(taken))
        for waiting, (result, error) in results:
            if waiting.done.done():
                continue  # its client is gone; what it asked for is done all the same
            if error is not None:
                waiting.done.set_exception(error)
            else:
                waiting.done.set_result(result)
        self._in_flight = []

    def _apply(self, waiting: _Waiting, transaction: Transaction) -> tuple[Any, EverstepError | None]:
        try:
            return waiting.stimulus(transaction, self.now()), None
        except EverstepError as error:
            return None, error

    def _tick(self, transaction: Transaction, taken: Iterable[_Waiting]) -> None:
        deadline, now = fleet.next_deadline(self.state), self.now()
        if deadline is None or deadline > now:
            return
        waited = max(self._queue.oldest_s(), *(time.perf_counter() - waiting.arrived_at for waiting in taken), 0.0)
        late = now - self._armed.due if self._armed is not None and self._armed.deadline == deadline else 0.0
        lag_s = max(self.lag.recent_s(), waited, late)
        transaction.handle(ev.Tick(lag_s=lag_s, trace=new_trace()), now)

    async def _note_poison(self, event: ev.Event | None) -> None:
        """An error of the core's own ends the process; its agent would send the report that led to it again and
        again, to every life that follows. So that one report is remembered, and dropped when it comes."""
        if not isinstance(event, ev.ReportArrived):
            return
        kind = type(event.body).__name__
        sentence = f"report {event.number} ({kind}) of {event.node} met an error of the controller's own; it is dropped"
        row = AuditRow(
            id=self._numbers.take(),
            at=self.now(),
            kind="controller.poisoned",
            sentence=sentence,
            node=event.node,
            trace=event.trace,
        )
        poisoned = PoisonedRow(node=event.node, incarnation=event.incarnation, number=event.number)
        await self._commit(Batch(audit=[row], poisoned=[poisoned]))

    async def _make_durable(self, transaction: Transaction, events: int) -> None:
        batch = transaction.batch()
        if batch:
            started = time.perf_counter()
            await self._commit(batch)
            self._metrics.committed(time.perf_counter() - started, events)
        self.outbox.deliver(transaction.outgoing)
        self._on_audit(transaction.audit)
        self._metrics.audited(transaction.audit)
        if transaction.verdicts:
            self._metrics.judged(transaction.verdicts)
            self._on_verdicts(transaction.verdicts)

    def _end(self) -> None:
        """Refuses everybody who waits; they are told to send it again."""
        self._over = True
        self.lag.stop()
        self._arm(None)
        stopping = Unavailable("the controller is stopping: send this again", 0.2)
        for waiting in self._in_flight:
            waiting.refuse(stopping)
        self._queue.refuse_all(stopping)
