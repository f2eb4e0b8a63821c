"""Simulate a controller: the real core, transactions and outbox in a process that can die at every point.

The event loop follows ``everstep_controller.runtime.loop`` and ``everstep_controller.runtime.commit_buffer``. Pending
requests share a transaction, and answers and directives are sent only after their transaction is durable. While the
database is unavailable, the controller decides in memory and refuses requests. It writes everything afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import EverstepError, Unavailable
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.effects import Effect, EventLogEntry
from everstep_controller.core.state import FleetState
from everstep_controller.leadership.lease import LeaderReachability, LeaseTenure, Resignation, StandbyContacts
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.clock import SteadyTime
from everstep_controller.runtime.push import Outbox, OutgoingDirective
from everstep_controller.runtime.startup_state import restore_state
from everstep_controller.runtime.transaction import EventNumbers, FindingDelta, Transaction
from everstep_controller.server.agent_service import AgentService
from everstep_controller.server.connections import DescriptorBudget
from everstep_controller.server.session import AgentSession
from everstep_controller.store.rows import Batch, RemediationRow
from tests.sim.cluster.database import LEASE_S, Fenced
from tests.sim.cluster.network import Connection
from tests.sim.cluster.observations import EventHandled, LeaderStarted
from tests.sim.cluster.timeline import MachineClock, Timer
from tests.sim.processes.controller_stubs import METRICS, AdmitAll, Promise, SessionTransport
from tests.sim.processes.remediation_tasks import RemediationTasks

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

MAX_REQUESTS_PER_TRANSACTION = 64
"""Pending requests that one transaction handles at most."""
TRANSACTION_DELAY_S = 0.0002
"""Seconds between a request and the transaction that handles it."""
LEASE_INTERVAL_S = 0.5
"""Seconds between two renewals of the lease."""
RESIGN_AFTER_S = 5.0
"""Seconds after which a leader that no node reaches resigns for a standby that nodes reach."""
RECENT_HEARTBEAT_S = 3.0
"""Seconds within which a heartbeat shows that a node reaches the leader."""
LEADERSHIP_RECHECK_S = 0.05
"""Seconds until a leader whose lease may have expired looks again."""
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 1.0
"""Seconds until the first retry of a failed write, and between two retries at most."""


TransactionFunction = Callable[[Transaction, float], Any]


class _PendingRequest:
    """A function that waits for its transaction, and the promise of its result."""

    __slots__ = ("arrived_at", "promise", "stimulus")

    def __init__(self, stimulus: TransactionFunction, arrived_at: float) -> None:
        self.stimulus = stimulus
        self.promise = Promise()
        self.arrived_at = arrived_at


class _RequestResult(NamedTuple):
    """The result of a request that its transaction has handled."""

    request: _PendingRequest
    value: Any
    error: EverstepError | None
    is_ephemeral: bool

    def resolve(self, outage: str) -> None:
        """Resolve the promise: with the result, or with Unavailable if an outage keeps it from being durable."""
        if self.error is not None or not outage or self.is_ephemeral:
            self.request.promise.set(self.value, self.error)
        else:
            self.request.promise.set(None, Unavailable(f"the database is unavailable: {outage}"))


class ControllerProcess:
    """One of several controllers over one database. A running controller that does not lead waits for the lease.

    Attributes:
        is_alive: Whether the process exists.
        is_leading: Whether it considers itself the leader.
        is_paused: Whether the process is stopped by SIGSTOP.
        epoch: The epoch of its last term as leader.
        incarnation: The number of times that the process was started.
    """

    def __init__(self, world: World, name: str, clock: MachineClock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.is_alive = False
        self.is_leading = False
        self.is_paused = False
        self.epoch = 0
        self.incarnation = 0
        self.state: FleetState
        self._steady: SteadyTime
        self._sessions: dict[Connection, SessionTransport] = {}
        self._queue: deque[_PendingRequest] = deque()
        self._timer: Timer | None = None
        self._armed_deadline: float | None = None
        self._due_at = 0.0
        self._is_running = False
        self._postponed: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the process if it does not exist."""
        if self.is_alive:
            return
        self.is_alive, self.incarnation = True, self.incarnation + 1
        self._standby_contacts = StandbyContacts(self.clock, RESIGN_AFTER_S / 3)
        self._renew_lease(self.incarnation)

    def crash(self, *, restart: bool = True) -> None:
        """End by SIGKILL: unwritten decisions are lost, and connections close."""
        if not self.is_alive:
            return
        if self.is_leading:
            self.remediation_tasks.end()
        self.is_alive = self.is_leading = self.is_paused = self._is_running = False
        self._postponed.clear()
        self._queue.clear()
        self._cancel_timer()
        for connection in list(self._sessions):
            connection.close(1)
        for transport in self._sessions.values():
            transport.session = None
        self._sessions.clear()
        if restart:
            self.world.timeline.after(0.3 + 1.5 * self.world.rng.random(), self.start)

    def pause(self) -> None:
        """Stop the process by SIGSTOP. A leader still considers itself the leader when it resumes."""
        self.is_paused = self.is_alive

    def resume(self) -> None:
        """Continue the process by SIGCONT, and make the postponed calls."""
        self.is_paused = False
        calls, self._postponed = self._postponed, []
        for call in calls:
            call()

    def is_current(self, incarnation: int) -> bool:
        """Return whether that incarnation of the process still exists."""
        return self.is_alive and self.incarnation == incarnation

    def call_when_running(self, incarnation: int, call: Callable[[], None]) -> None:
        """Make a call in one incarnation: now, when a paused process resumes, or never."""
        if not self.is_current(incarnation):
            return
        if self.is_paused:
            self._postponed.append(lambda: self.call_when_running(incarnation, call))
        else:
            call()

    def _renew_lease(self, incarnation: int) -> None:
        def renew() -> None:
            asked_at = self.clock.monotonic()
            held = self.world.database.acquire_lease(self.name)
            if held and not self.is_leading:
                self._lead()
            if held:
                self._tenure.confirm_renewal(asked_at)
                self._check_reachability()
            elif self.is_leading and self.world.database.is_unavailable:
                self._tenure.fail_renewal()
            elif self.is_leading:
                self.crash()
                return
            elif nodes := self._standby_contacts.count_persistent():
                self.world.database.store_standby_contacts(self.name, nodes)
            self._renew_lease_later(incarnation)

        self.call_when_running(incarnation, renew)

    def _check_reachability(self) -> None:
        """Check whether nodes reach this leader, as ``everstep_controller.leadership.leader_checks`` does."""
        report, since = self.world.database.standby_report(), self.now() - RECENT_HEARTBEAT_S
        reaching = sum(runtime.heartbeats.last_seen_at >= since for runtime in self.state.node_runtime.values())
        outcome = self._reachability.evaluate(self.clock.monotonic(), reaching, report)
        if isinstance(outcome, Resignation):
            entry = EventLogEntry(kind="controller.resigned", sentence=outcome.sentence, at=self.now())
            logged = self.enqueue(lambda tx, now: tx.add_event_log_entry(entry))
            incarnation = self.incarnation
            logged.add_done_callback(
                lambda promise: self.call_when_running(incarnation, lambda: self._resign(promise, outcome.successor))
            )

    def _resign(self, logged: Promise, successor: str) -> None:
        if logged.exception() is None and self.is_leading:
            self.world.database.resign(self.name, successor)
            self.crash()

    def _renew_lease_later(self, incarnation: int) -> None:
        self.world.timeline.after(LEASE_INTERVAL_S, lambda: self._renew_lease(incarnation))

    def _lead(self) -> None:
        loaded = self.world.database.take_over()
        self.is_leading, self.epoch, self._is_running = True, loaded.epoch, False
        self._batch_number = loaded.batch
        self._unwritten: list[Batch] = []
        self._held_back: list[OutgoingDirective] = []
        self._unpublished: list[RemediationRow] = []
        self._store_change: ev.DatabaseAvailabilityChanged | None = None
        self._outage, self._retry_finished = "", False
        self._tenure = LeaseTenure(self.clock, LEASE_S)
        self._reachability = LeaderReachability(RESIGN_AFTER_S, LEASE_S)
        self.check_leading = self._tenure.check
        self.state = restore_state(self.world.plan.policy, loaded)
        self._finding_delta = FindingDelta(self.state.nodes.values())
        self._steady = SteadyTime(self.clock, loaded.newest_at)
        self.now = self._steady.now
        self.outbox = Outbox(loaded.epoch, loaded.outbox)
        self._event_numbers = EventNumbers(loaded.newest_event)
        self.read_models = ReadModels(self.state.jobs.values())
        self._agent_service = AgentService(
            loop=self,  # type: ignore[arg-type]
            requests=AgentRequests(self, METRICS, loaded.acknowledged_reports, loaded.poisoned),  # type: ignore[arg-type]
            metrics=METRICS,
            clock=self.clock,
            descriptors=DescriptorBudget(4096),
            defer=lambda work: work(),
            name=self.name,
            heartbeat_interval_s=1.0,
        )
        self.world.observe(LeaderStarted(self.name, loaded.epoch, dict(loaded.acknowledged_reports)))
        started = ev.ControllerStarted(epoch=loaded.epoch, trace=self.world.trace_id(self.name))
        self.enqueue(lambda tx, now: tx.handle(started, now))
        self.remediation_tasks = RemediationTasks(self, loaded.remediations)
        self.remediation_tasks.start()

    def enqueue(self, stimulus: TransactionFunction, _source: str = "", _urgency: Any = None) -> Promise:
        """Run ``stimulus`` in a transaction. The promise is resolved once all its changes are durable."""
        request = _PendingRequest(stimulus, self.world.timeline.now)
        self._queue.append(request)
        self._schedule_transaction()
        return request.promise

    def expedite(self, source: str) -> None:
        """Do nothing: the simulated loop does not delay routine reports."""

    def _schedule_transaction(self) -> None:
        if not self._is_running:
            self._is_running = True
            incarnation = self.incarnation
            self.world.timeline.after(
                TRANSACTION_DELAY_S, lambda: self.call_when_running(incarnation, self._run_transaction)
            )

    def _decide(self, state: FleetState, event: ev.Event, now: float) -> list[Effect]:
        effects = engine.handle(state, event, now)
        self.world.observe(EventHandled(self.name, self.epoch, event, effects, now))
        self.world.check_invariants(state)
        return effects

    def _run_transaction(self) -> None:
        """Handle the pending requests, then the timer, and commit or buffer the result."""
        if not self._is_leadership_sure():
            incarnation = self.incarnation
            self.world.timeline.after(
                LEADERSHIP_RECHECK_S, lambda: self.call_when_running(incarnation, self._run_transaction)
            )
            return
        tx = Transaction(
            self.state, self.outbox, self._event_numbers, METRICS, self.read_models, self._finding_delta, self._decide
        )
        self._report_store_change(tx)
        requests = [self._queue.popleft() for _ in range(min(MAX_REQUESTS_PER_TRANSACTION, len(self._queue)))]
        results = [self._apply(request, tx) for request in requests]
        self._tick(tx, requests)
        self._commit(tx, results)

    def _is_leadership_sure(self) -> bool:
        try:
            self.check_leading()
        except EverstepError:
            return False
        return True

    def _apply(self, request: _PendingRequest, tx: Transaction) -> _RequestResult:
        tx.is_ephemeral = False
        try:
            value = request.stimulus(tx, self.now())
        except EverstepError as error:
            return _RequestResult(request, None, error, True)
        return _RequestResult(request, value, None, tx.is_ephemeral)

    def _tick(self, tx: Transaction, requests: list[_PendingRequest]) -> None:
        deadline, now = engine.next_deadline(self.state), self.now()
        if deadline is None or deadline > now:
            return
        waited_s = max((self.world.timeline.now - request.arrived_at for request in requests), default=0.0)
        late_s = self.world.timeline.now - self._due_at if self._armed_deadline == deadline else 0.0
        tx.handle(ev.Tick(lag_s=max(waited_s, late_s), trace=self.world.trace_id(self.name)), now)

    def _report_store_change(self, tx: Transaction) -> None:
        change, self._store_change = self._store_change, None
        if change is None:
            return
        tx.handle(change, self.now())
        if not change.is_unavailable:
            held_back, self._held_back = self._held_back, []
            tx.resend(held_back)

    def _commit(self, tx: Transaction, results: list[_RequestResult]) -> None:
        """Commit the transaction, or buffer it while the database is unavailable."""
        batch = tx.batch()
        unsent = tuple(dict.fromkeys(row.job for row in batch.generations))
        self._unpublished += tx.remediations
        if batch:
            self._batch_number += 1
            batch.number = self._batch_number
            self._unwritten.append(batch)
        if not self._unwritten or (self._outage and not self._retry_finished):
            self._finish(tx, results, durable=not self._unwritten)
            return
        incarnation = self.incarnation
        self.world.database.commit(
            self.epoch,
            list(self._unwritten),
            lambda error: self.call_when_running(incarnation, lambda: self._handle_commit(tx, results, unsent, error)),
        )

    def _handle_commit(
        self, tx: Transaction, results: list[_RequestResult], unsent: tuple[str, ...], error: Exception | None
    ) -> None:
        if isinstance(error, Fenced):
            self.crash()
        elif error is None:
            self._unwritten.clear()
            if self._outage:
                self._outage, self._retry_finished = "", False
                self._store_change = ev.DatabaseAvailabilityChanged(
                    is_unavailable=False, trace=self.world.trace_id(self.name)
                )
            self._finish(tx, results, durable=True)
        else:
            is_first, self._outage, self._retry_finished = not self._outage, str(error), False
            if is_first:
                self._held_back += tx.outgoing
                tx.outgoing = []
                self._store_change = ev.DatabaseAvailabilityChanged(
                    is_unavailable=True, reason=self._outage, unsent_jobs=unsent, trace=self.world.trace_id(self.name)
                )
            self._retry_later(self.incarnation, FIRST_RETRY_S)
            self._finish(tx, results, durable=False)

    def _retry_later(self, incarnation: int, wait_s: float) -> None:
        def answered(error: Exception | None) -> None:
            if isinstance(error, Fenced):
                self.crash()
            elif error is None:
                self._retry_finished = True
                self._schedule_transaction()
            else:
                self._retry_later(incarnation, min(2 * wait_s, MAX_RETRY_S))

        def attempt() -> None:
            batches = list(self._unwritten)
            self.world.database.commit(
                self.epoch, batches, lambda error: self.call_when_running(incarnation, lambda: answered(error))
            )

        self.world.timeline.after(wait_s, lambda: self.call_when_running(incarnation, attempt))

    def _finish(self, tx: Transaction, results: list[_RequestResult], *, durable: bool) -> None:
        """Send answers and directives. Refuse the requests that an outage of the database keeps from being durable."""
        self._is_running = False
        for result in results:
            result.resolve("" if durable else self._outage or "it does not answer")
        if not durable:
            self._held_back += tx.take_final()
        self.outbox.deliver(tx.outgoing)
        if durable:
            remediations, self._unpublished = self._unpublished, []
            self.remediation_tasks.enqueue(remediations)
        self._schedule_next()

    def _schedule_next(self) -> None:
        """Begin the next transaction at once if there is work, else at the core's next deadline."""
        self._cancel_timer()
        incarnation = self.incarnation
        if self._queue or self._store_change is not None or self._retry_finished:
            self._schedule_transaction()
            return
        deadline = engine.next_deadline(self.state)
        if deadline is None:
            return
        wait_s = max(0.0, self.clock.to_world_s(deadline - self._steady.now())) + 1e-6
        due_at = self.world.timeline.now + wait_s
        self._armed_deadline, self._due_at = deadline, due_at
        self._timer = self.world.timeline.at(due_at, lambda: self.call_when_running(incarnation, self._handle_deadline))

    def _handle_deadline(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._run_transaction()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._armed_deadline = None

    def accept(self, connection: Connection) -> ControllerProcess | None:
        """Accept a node's connection. Return None while this controller does not lead."""
        if self.is_alive and not self.is_leading and not self.is_paused:
            self._standby_contacts.record(connection.hosts[0])
        if not self.is_alive or not self.is_leading:
            return None
        transport: Any = SessionTransport(connection, self.world.timeline)
        identity = Identity(role=TokenRole.AGENT, subject=connection.hosts[0])
        credentials: Any = AdmitAll()
        transport.session = AgentSession(self._agent_service, credentials, identity, transport, lambda _session: None)
        self._sessions[connection] = transport
        return self

    def closed(self, connection: Connection) -> None:
        self.call_when_running(self.incarnation, lambda: self._closed(connection))

    def _closed(self, connection: Connection) -> None:
        transport = self._sessions.pop(connection, None)
        if transport is not None:
            transport.end_session()

    def received(self, connection: Connection, frame: bytes) -> None:
        self.call_when_running(self.incarnation, lambda: self._received(connection, frame))

    def _received(self, connection: Connection, frame: bytes) -> None:
        transport = self._sessions.get(connection)
        if transport is not None and transport.session is not None and connection.is_open(1):
            transport.session.data_received(frame)

    def submit_command(self, command: ev.OperatorCommand, answer: Callable[[EverstepError | None], None]) -> None:
        """Handle an operator's command as the API does."""
        if not self.is_leading or self.is_paused:
            answer(Unavailable("this controller does not lead"))
            return
        handled = self.enqueue(lambda tx, now: tx.handle(command, now))
        handled.add_done_callback(lambda promise: answer(promise.exception()))
