"""Own the fleet's state in one task: apply stimuli, commit one transaction, then send answers and directives.

Stimuli that wait together share a transaction (group commit); the effects of one are never split. No answer and no
directive is sent before its transaction is durable.

During a database outage the loop runs ahead in memory. The core decides only what needs no promise. Later directives
are pushed, but no request is acknowledged, so each sender retries. When the database returns, everything is written
before anything is acknowledged. Directives of the failed transaction are held back until then, because a successor
could reuse their numbers if this controller dies. A job's end, which is irreversible, is held back too.

On an internal error the process is crash-only: it answers no request and ends, and its supervisor restarts it from the
last committed state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from everstep.errors import EverstepError, Unavailable
from everstep.vocabulary import Verdict
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.clock import LagMeter, SteadyTime
from everstep_controller.runtime.commit_buffer import Commit, CommitBuffer
from everstep_controller.runtime.intake import Intake, PendingRequest, Urgency
from everstep_controller.runtime.push import Outbox, OutgoingDirective
from everstep_controller.runtime.rate_limits import EventQuota
from everstep_controller.runtime.transaction import DecideFunction, EventNumbers, FindingDelta, Transaction, new_trace
from everstep_controller.store.database_errors import DatabaseOutage
from everstep_controller.store.rows import Batch, EventLogRow, PoisonedRow, RemediationRow

# ---- answers

T = TypeVar("T")
TransactionFunction = Callable[[Transaction, float], T]
"""Runs events in a transaction at a given time. Its submitter gets the return value once all is durable. A stimulus may
raise EverstepError only before it changes anything."""

AnyPendingRequest = PendingRequest[TransactionFunction[Any]]

ANSWERS_PER_LOOP_ITERATION = 16
"""Answers sent per turn of the event loop: half a millisecond of work."""
NOT_DURABLE = (
    "the database is unavailable, so this request is only in memory and may be lost: send it again; an order may still "
    "take effect once the database is back"
)


class RequestResult(NamedTuple):
    """The result of one stimulus. ``is_ephemeral``: see ``Transaction``."""

    pending: AnyPendingRequest
    value: Any
    error: EverstepError | None
    is_ephemeral: bool


async def resolve_all(results: Iterable[RequestResult], outage: DatabaseOutage | None) -> None:
    """Answer all submitters. During an outage, refuse promises that need the database.

    Each future's callback builds and sends its answer in the event loop's next turn.
    """
    for number, result in enumerate(results, 1):
        done = result.pending.future
        if done.done():
            pass  # the client is gone, but its request was carried out
        elif result.error is not None:
            done.set_exception(result.error)
        elif outage is None or result.is_ephemeral:
            done.set_result(result.value)
        else:
            done.set_exception(Unavailable(f"{NOT_DURABLE}: {outage.reason}"))
        if number % ANSWERS_PER_LOOP_ITERATION == 0:
            await asyncio.sleep(0)


log = logging.getLogger(__name__)


LEADERSHIP_RECHECK_S = 0.05
"""Seconds between checks whether this controller is certain to lead again."""
MAX_BLOCKING_S = 0.0005
"""Seconds of work after which heartbeats are read and answered, also between a transaction's events. About fifteen
heartbeats of 12,500 nodes arrive meanwhile."""
MIN_TICK_INTERVAL_S = 0.01
"""Minimum seconds between two Ticks. A healthy fleet of 12,500 nodes has 2,500 deadlines per second; with twenty-five
per Tick they cost a tenth. Every interval measured in deadlines is at least five times this."""


class _TickTimer(NamedTuple):
    """The timer for the next Tick."""

    deadline: float  # the core's deadline
    due: float  # earliest time of the Tick
    handle: asyncio.TimerHandle


@dataclass(eq=False, kw_only=True)
class FleetLoop:
    """Owns the state. Every method belongs to the event loop's thread."""

    state: FleetState
    outbox: Outbox
    commit: Commit  # writes one transaction
    clock: SteadyTime
    metrics: Metrics
    event_numbers: EventNumbers
    read_models: ReadModels
    on_events: Callable[[list[EventLogRow]], None]  # called with committed records
    on_remediations: Callable[[list[RemediationRow]], None]  # called with committed records
    decide: DecideFunction = engine.handle  # the core, or a journal around it
    quota: EventQuota | None = None  # limits each node's entries in the event log; None for no limit
    epoch: int = 1
    # Raises NotLeadingError while this controller is not certain to lead.
    check_leading: Callable[[], None] = lambda: None
    max_batch: int = 256  # maximum stimuli per transaction; larger raises throughput and delays the first
    queue_limit: int = 20_000  # stimuli that may wait; beyond it new ones are refused with Unavailable
    outage_buffer_bytes: int = 64 << 20  # approximate bytes that may wait in memory during an outage

    def __post_init__(self) -> None:
        self._finding_delta = FindingDelta(self.state.nodes.values())
        self.lag = LagMeter()
        self._work = asyncio.Event()
        self._commit_buffer = CommitBuffer(
            self.commit, now=self.now, wake=self._work.set, limit_bytes=self.outage_buffer_bytes
        )
        self._store_change: ev.DatabaseAvailabilityChanged | None = None
        self._held_back: list[OutgoingDirective] = []
        self._unpublished: list[tuple[list[EventLogRow], list[Verdict], list[RemediationRow]]] = []
        self._queue: Intake[TransactionFunction[Any]] = Intake(
            self.queue_limit, self.max_batch, self.metrics.count_shed
        )
        self._in_flight: list[AnyPendingRequest] = []
        self._pause_timer: asyncio.TimerHandle | None = None
        self._armed: _TickTimer | None = None
        self._ticked_at = 0.0
        self._stopped = False
        self.started = asyncio.Event()

    def now(self) -> float:
        """Return the time used for decisions."""
        return self.clock.now()

    def queued(self) -> int:
        """Return the number of stimuli that wait for their transaction."""
        return len(self._queue) + len(self._in_flight)

    async def submit(self, stimulus: TransactionFunction[T]) -> T:
        """Run ``stimulus`` in turn, and return its result once everything it did is durable. Raises as ``enqueue``."""
        return await self.enqueue(stimulus)

    def enqueue(
        self, stimulus: TransactionFunction[T], source: str = "", urgency: Urgency = Urgency.URGENT
    ) -> asyncio.Future[T]:
        """Queue ``stimulus`` and return the future of its result, or of the EverstepError that it raises.

        Stimuli of one ``source`` (a node) keep their order; routine ones may be delayed. Raises Unavailable if too many
        wait, or if the controller stops or does not lead.
        """
        if self._stopped:
            raise Unavailable("the controller is stopping: send this again to the next one", 0.2)
        self.check_leading()
        self._commit_buffer.check_room()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(PendingRequest(stimulus, done, source, urgency))
        self._schedule_wake()
        return done

    def expedite(self, source: str) -> None:
        """Make a node's waiting routine stimuli urgent, because an urgent one waits behind them."""
        self._queue.expedite(source)
        self._schedule_wake()

    def database_outage(self) -> DatabaseOutage | None:
        """Return the database's current outage, or None."""
        return self._commit_buffer.outage

    async def run(self) -> None:
        """Run until cancelled. Raise the error of a failed transaction; nothing is answered after that."""
        self.lag.start()
        try:
            event = ev.ControllerStarted(epoch=self.epoch, trace=new_trace())
            done = asyncio.get_running_loop().create_future()
            first = PendingRequest(lambda tx, now: tx.handle(event, now), done, "", Urgency.URGENT)
            await self._run_transaction([first])
            self.started.set()
            while True:
                await self._something_to_do()
                try:
                    self.check_leading()
                except Unavailable:
                    await asyncio.sleep(LEADERSHIP_RECHECK_S)
                else:
                    await self._run_transaction(self._queue.take())
        finally:
            self._end()

    async def _something_to_do(self) -> None:
        if self._queue.next_due_in_s() == 0.0 or self._store_change is not None or self._commit_buffer.retry_finished:
            await asyncio.sleep(0)  # requests that have just arrived join the batch
            return
        self._work.clear()
        self._arm(engine.next_deadline(self.state))
        self._schedule_wake()
        await self._work.wait()

    def _schedule_wake(self) -> None:
        """Wake the loop for queued stimuli, now or at the end of their pause."""
        wait_s = self._queue.next_due_in_s()
        if wait_s == 0.0:
            self._work.set()
        elif wait_s is not None and self._pause_timer is None:
            self._pause_timer = asyncio.get_running_loop().call_later(wait_s, self._pause_over)

    def _pause_over(self) -> None:
        self._pause_timer = None
        self._work.set()

    def _arm(self, deadline: float | None) -> None:
        if self._armed is not None:
            self._armed.handle.cancel()
        self._armed = None
        if deadline is not None:
            due = max(deadline, self.now(), self._ticked_at + MIN_TICK_INTERVAL_S)
            handle = asyncio.get_running_loop().call_later(self.clock.seconds_until(due), self._work.set)
            self._armed = _TickTimer(deadline, due, handle)

    async def _run_transaction(self, batch: list[AnyPendingRequest]) -> None:
        """Run all waiting stimuli, then the timer: received messages count before a node is declared late."""
        started = time.perf_counter()
        self._in_flight = batch
        transaction = Transaction(
            self.state,
            self.outbox,
            self.event_numbers,
            self.metrics,
            self.read_models,
            self._finding_delta,
            self.decide,
            self.quota,
        )
        try:
            self._report_store_change(transaction)
            results = await self._apply_all(batch, transaction)
            self._tick(transaction, batch)
        except Exception:
            await self._record_poisoned(transaction.handling)
            raise
        durable = await self._commit(transaction, len(batch))
        await resolve_all(results, None if durable else self._commit_buffer.outage)
        self._in_flight = []
        self._queue.pause_routine_after(batch, time.perf_counter() - started)

    async def _apply_all(self, batch: list[AnyPendingRequest], transaction: Transaction) -> list[RequestResult]:
        """Apply all stimuli, and yield to heartbeats in between; their effects are in no transaction."""
        results: list[RequestResult] = []
        until = time.perf_counter() + MAX_BLOCKING_S
        for pending in batch:
            results.append(self._apply(pending, transaction))
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + MAX_BLOCKING_S
        return results

    def _apply(self, pending: AnyPendingRequest, transaction: Transaction) -> RequestResult:
        transaction.is_ephemeral = False
        try:
            value = pending.stimulus(transaction, self.now())
        except EverstepError as error:
            return RequestResult(pending, None, error, True)
        return RequestResult(pending, value, None, transaction.is_ephemeral)

    def _report_store_change(self, transaction: Transaction) -> None:
        """Tell the core about a change of the database's availability before any later event."""
        news, self._store_change = self._store_change, None
        if news is None:
            return
        transaction.handle(news, self.now())
        if not news.is_unavailable:
            held_back, self._held_back = self._held_back, []
            transaction.resend(held_back)

    def _tick(self, transaction: Transaction, batch: Iterable[AnyPendingRequest]) -> None:
        deadline, now = engine.next_deadline(self.state), self.now()
        if deadline is None or deadline > now:
            return
        waited = max(self._queue.oldest_wait_s(), *(time.perf_counter() - request.arrived_at for request in batch), 0.0)
        late = now - self._armed.due if self._armed is not None and self._armed.deadline == deadline else 0.0
        lag_s = max(self.lag.recent_s(), waited, late)
        self._ticked_at = now
        transaction.handle(ev.Tick(lag_s=lag_s, trace=new_trace()), now)

    async def _record_poisoned(self, event: ev.Event | None) -> None:
        """Record a report whose handling raised an internal error: repeated, it would end every later process too."""
        if not isinstance(event, ev.ReportArrived):
            return
        kind = type(event.body).__name__
        row = EventLogRow(
            id=self.event_numbers.take(),
            at=self.now(),
            kind="controller.report_dropped",
            sentence=f"report {event.number} ({kind}) of {event.node} caused an internal error and is dropped",
            node=event.node,
            trace=event.trace,
        )
        poisoned = PoisonedRow(node=event.node, incarnation=event.incarnation, number=event.number)
        await self._commit_buffer.write(Batch(event_log=[row], poisoned=[poisoned]))

    async def _commit(self, transaction: Transaction, events: int) -> bool:
        """Return whether this transaction and all before it are durable."""
        was_unavailable = self._commit_buffer.outage is not None
        while transaction.encode(MAX_BLOCKING_S):
            await asyncio.sleep(0)
        batch = transaction.batch()
        unsent = tuple(dict.fromkeys(row.job for row in batch.generations))
        started, wrote = time.perf_counter(), bool(batch)
        self._unpublished.append((transaction.event_log, transaction.verdicts, transaction.remediations))
        if not await self._commit_buffer.write(batch):
            if was_unavailable:
                self._held_back += transaction.take_final()
                self.outbox.deliver(transaction.outgoing)
            else:
                assert self._commit_buffer.outage is not None
                self._held_back += transaction.outgoing
                self._store_change = ev.DatabaseAvailabilityChanged(
                    is_unavailable=True, reason=self._commit_buffer.outage.reason, unsent_jobs=unsent, trace=new_trace()
                )
            return False
        if wrote:
            self.metrics.observe_commit(time.perf_counter() - started, events)
        if was_unavailable:
            self._store_change = ev.DatabaseAvailabilityChanged(is_unavailable=False, trace=new_trace())
        self.outbox.deliver(transaction.outgoing)
        self._publish()
        return True

    def _publish(self) -> None:
        """Publish durable records, in order."""
        durable, self._unpublished = self._unpublished, []
        for entries, verdicts, remediations in durable:
            self.on_events(entries)
            self.metrics.count_user_errors(entries)
            self.metrics.count_verdicts(verdicts)
            if remediations:
                self.on_remediations(remediations)

    def _end(self) -> None:
        """Refuse all waiting stimuli, and ask their senders to retry."""
        self._stopped = True
        self._commit_buffer.close()
        self.lag.stop()
        self._arm(None)
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        stopping = Unavailable("the controller is stopping: send this again", 0.2)
        for pending in self._in_flight:
            pending.refuse(stopping)
        self._queue.refuse_all(stopping)
