"""A controller: the real core, transaction and outbox in a shell whose every step can be its last.

It does what ``everstep_controller.runtime.loop`` and ``everstep_controller.server.session`` do: stimuli that wait
together share a transaction; nobody is answered and nothing is pushed before it is durable. While the database is away
it decides on in memory, promises nothing, and writes everything when it is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.effects import AuditEntry, Effect
from everstep_controller.core.state import FleetState
from everstep_controller.leadership.lease import LeaderReachability, LeaseTenure, Resignation, StandbyContacts
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.clock import SteadyTime
from everstep_controller.runtime.push import Outbox, OutgoingDirective
from everstep_controller.runtime.startup_state import restore_state
from everstep_controller.runtime.transaction import AuditNumbers, FindingDelta, Transaction
from everstep_controller.server.agent_service import AgentService
from everstep_controller.server.connections import DescriptorBudget
from everstep_controller.server.session import AgentSession
from everstep_controller.store.rows import Batch, RemediationRow

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import EverstepError, Unavailable
from tests.sim import facts
from tests.sim.database import LEASE_S, Fenced
from tests.sim.shell_parts import METRICS, Gate, Promise, Wire
from tests.sim.timeline import MachineClock, Timer
from tests.sim.towards_outside import TowardsOutside
from tests.sim.wires import Line

if TYPE_CHECKING:
    from tests.sim.world import World

GROUP = 64
LEASE_INTERVAL_S = 0.5
RESIGN_AFTER_S = 5.0
HEARD_WITHIN_S = 3.0
UNSURE_S = 0.05
RETRY_S, LONGEST_RETRY_S = 0.1, 1.0


TransactionFunction = Callable[[Transaction, float], Any]


class _Waiting:
    __slots__ = ("arrived", "promise", "stimulus")

    def __init__(self, stimulus: TransactionFunction, arrived: float) -> None:
        self.stimulus = stimulus
        self.promise = Promise()
        self.arrived = arrived


class _Result(NamedTuple):
    """What became of a stimulus."""

    waiting: _Waiting
    value: Any
    error: EverstepError | None
    forgettable: bool

    def tell(self, away: str) -> None:
        if self.error is not None or not away or self.forgettable:
            self.waiting.promise.set(self.value, self.error)
        else:
            self.waiting.promise.set(None, Unavailable(f"the database is away: {away}"))


class ControllerProcess:
    """One of several over one database. ``alive`` and not leading: it waits for the lease."""

    def __init__(self, world: World, name: str, clock: MachineClock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.alive = False
        self.leading = False
        self.paused = False
        self.epoch = 0
        self.life = 0
        self.state: FleetState
        self._steady: SteadyTime
        self._sessions: dict[Line, Wire] = {}
        self._queue: deque[_Waiting] = deque()
        self._timer: Timer | None = None
        self._armed_for: float | None = None
        self._due_at = 0.0
        self._busy = False
        self._thawing: list[Callable[[], None]] = []

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.alive:
            return
        self.alive, self.life = True, self.life + 1
        self._knocks = StandbyContacts(self.clock, RESIGN_AFTER_S / 3)
        self._keep_lease(self.life)

    def crash(self, *, restart: bool = True) -> None:
        """SIGKILL: what was not written is gone, connections close."""
        if not self.alive:
            return
        if self.leading:
            self.towards_outside.end()
        self.alive = self.leading = self.paused = self._busy = False
        self._thawing.clear()
        self._queue.clear()
        self._cancel_timer()
        for line in list(self._sessions):
            line.close(1)
        for wire in self._sessions.values():
            wire.session = None
        self._sessions.clear()
        if restart:
            self.world.timeline.after(0.3 + 1.5 * self.world.rng.random(), self.start)

    def pause(self) -> None:
        """SIGSTOP: it sleeps through everything, and wakes believing that it leads."""
        self.paused = self.alive

    def resume(self) -> None:
        self.paused = False
        calls, self._thawing = self._thawing, []
        for call in calls:
            call()

    def lives(self, life: int) -> bool:
        return self.alive and self.life == life

    def do(self, life: int, call: Callable[[], None]) -> None:
        """Runs ``call`` in this life: now, when it runs again, or never."""
        if not self.lives(life):
            return
        if self.paused:
            self._thawing.append(lambda: self.do(life, call))
        else:
            call()

    def _keep_lease(self, life: int) -> None:
        def look() -> None:
            asked_at = self.clock.monotonic()
            held = self.world.database.lease(self.name)
            if held and not self.leading:
                self._lead()
            if held:
                self._tenure.confirm_renewal(asked_at)
                self._look_elsewhere()
            elif self.leading and self.world.database.away:
                self._tenure.fail_renewal()
            elif self.leading:
                self.crash()
                return
            elif nodes := self._knocks.count_persistent():
                self.world.database.tell(self.name, nodes)
            self._keep_lease_later(life)

        self.do(life, look)

    def _look_elsewhere(self) -> None:
        """As ``everstep_controller.leadership.leader_checks`` does with each renewal."""
        told, since = self.world.database.told(), self.now() - HEARD_WITHIN_S
        heard = sum(live.heartbeats.last_seen_at >= since for live in self.state.node_runtime.values())
        found = self._reach.evaluate(self.clock.monotonic(), heard, told)
        if isinstance(found, Resignation):
            entry = AuditEntry(kind="controller.resigned", sentence=found.sentence, at=self.now())
            noted = self.enqueue(lambda tx, now: tx.add_audit_entry(entry))
            life = self.life
            noted.add_done_callback(lambda done: self.do(life, lambda: self._resign(done, found.successor)))

    def _resign(self, noted: Promise, heir: str) -> None:
        if noted.exception() is None and self.leading:
            self.world.database.resign(self.name, heir)
            self.crash()

    def _keep_lease_later(self, life: int) -> None:
        self.world.timeline.after(LEASE_INTERVAL_S, lambda: self._keep_lease(life))

    def _lead(self) -> None:
        loaded = self.world.database.take_over()
        self.leading, self.epoch, self._busy = True, loaded.epoch, False
        self._number = loaded.batch
        self._unwritten: list[Batch] = []
        self._held_back: list[OutgoingDirective] = []
        self._unpublished: list[RemediationRow] = []
        self._news: ev.DatabaseAvailabilityChanged | None = None
        self._away, self._ready = "", False
        self._tenure = LeaseTenure(self.clock, LEASE_S)
        self._reach = LeaderReachability(RESIGN_AFTER_S, LEASE_S)
        self.check_leading = self._tenure.check
        self.state = restore_state(self.world.plan.policy, loaded)
        self._standing = FindingDelta(self.state.nodes.values())
        self._steady = SteadyTime(self.clock, loaded.newest_at)
        self.now = self._steady.now
        self.outbox = Outbox(loaded.epoch, loaded.outbox)
        self._numbers = AuditNumbers(loaded.newest_audit)
        self.read_models = ReadModels(self.state.jobs.values())
        self._desk = AgentService(
            loop=self,  # type: ignore[arg-type]
            requests=AgentRequests(self, METRICS, loaded.acknowledged_reports, loaded.poisoned),  # type: ignore[arg-type]
            metrics=METRICS,
            clock=self.clock,
            descriptors=DescriptorBudget(4096),
            defer=lambda work: work(),
            name=self.name,
            heartbeat_interval_s=1.0,
        )
        self.world.see(facts.TookOver(self.name, loaded.epoch, dict(loaded.acknowledged_reports)))
        started = ev.ControllerStarted(epoch=loaded.epoch, trace=self.world.trace_id(self.name))
        self.enqueue(lambda tx, now: tx.handle(started, now))
        self.towards_outside = TowardsOutside(self, loaded.remediations)
        self.towards_outside.start()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def enqueue(self, stimulus: TransactionFunction, _source: str = "", _urgency: Any = None) -> Promise:
        """Runs ``stimulus`` in its turn; the promise is kept once all it did is durable. Nothing rests here."""
        waiting = _Waiting(stimulus, self.world.timeline.now)
        self._queue.append(waiting)
        self._begin_turn()
        return waiting.promise

    def expedite(self, source: str) -> None:
        """What is routine does not wait for company here."""

    def _begin_turn(self) -> None:
        if not self._busy:
            self._busy = True
            life = self.life
            self.world.timeline.after(0.0002, lambda: self.do(life, self._turn))

    def _decide(self, state: FleetState, event: ev.Event, now: float) -> list[Effect]:
        effects = engine.handle(state, event, now)
        self.world.see(facts.Handled(self.name, self.epoch, event, effects, now))
        self.world.check(state)
        return effects

    def _turn(self) -> None:
        """Everything that waits, then the timer; and then all of it is written, or kept until it can be."""
        if not self._leads():
            life = self.life
            self.world.timeline.after(UNSURE_S, lambda: self.do(life, self._turn))
            return
        tx = Transaction(
            self.state, self.outbox, self._numbers, METRICS, self.read_models, self._standing, self._decide
        )
        self._tell_of_store(tx)
        taken = [self._queue.popleft() for _ in range(min(GROUP, len(self._queue)))]
        results = [self._apply(waiting, tx) for waiting in taken]
        self._tick(tx, taken)
        self._keep(tx, results)

    def _leads(self) -> bool:
        try:
            self.check_leading()
        except EverstepError:
            return False
        return True

    def _apply(self, waiting: _Waiting, tx: Transaction) -> _Result:
        tx.is_ephemeral = False
        try:
            value = waiting.stimulus(tx, self.now())
        except EverstepError as error:
            return _Result(waiting, None, error, True)
        return _Result(waiting, value, None, tx.is_ephemeral)

    def _tick(self, tx: Transaction, taken: list[_Waiting]) -> None:
        deadline, now = engine.next_deadline(self.state), self.now()
        if deadline is None or deadline > now:
            return
        waited = max((self.world.timeline.now - waiting.arrived for waiting in taken), default=0.0)
        late = self.world.timeline.now - self._due_at if self._armed_for == deadline else 0.0
        tx.handle(ev.Tick(lag_s=max(waited, late), trace=self.world.trace_id(self.name)), now)

    # --- keeping (everstep_controller.runtime.commit_buffer)
    # --------------------------------------------------------------------------------

    def _tell_of_store(self, tx: Transaction) -> None:
        news, self._news = self._news, None
        if news is None:
            return
        tx.handle(news, self.now())
        if not news.is_unavailable:
            held_back, self._held_back = self._held_back, []
            tx.resend(held_back)

    def _keep(self, tx: Transaction, results: list[_Result]) -> None:
        """While the database is away memory goes ahead of it, until a try has succeeded."""
        batch = tx.batch()
        unsent = tuple(dict.fromkeys(row.job for row in batch.generations))
        self._unpublished += tx.remediations
        if batch:
            self._number += 1
            batch.number = self._number
            self._unwritten.append(batch)
        if not self._unwritten or (self._away and not self._ready):
            self._finish(tx, results, durable=not self._unwritten)
            return
        life = self.life
        self.world.database.commit(
            self.epoch,
            list(self._unwritten),
            lambda error: self.do(life, lambda: self._written(tx, results, unsent, error)),
        )

    def _written(
        self, tx: Transaction, results: list[_Result], unsent: tuple[str, ...], error: Exception | None
    ) -> None:
        if isinstance(error, Fenced):
            self.crash()
        elif error is None:
            self._unwritten.clear()
            if self._away:
                self._away, self._ready = "", False
                self._news = ev.DatabaseAvailabilityChanged(is_unavailable=False, trace=self.world.trace_id(self.name))
            self._finish(tx, results, durable=True)
        else:
            first, self._away, self._ready = not self._away, str(error), False
            if first:
                self._held_back += tx.outgoing
                tx.outgoing = []
                self._news = ev.DatabaseAvailabilityChanged(
                    is_unavailable=True, reason=self._away, unsent_jobs=unsent, trace=self.world.trace_id(self.name)
                )
            self._try_again_later(self.life, RETRY_S)
            self._finish(tx, results, durable=False)

    def _try_again_later(self, life: int, wait_s: float) -> None:
        def answered(error: Exception | None) -> None:
            if isinstance(error, Fenced):
                self.crash()
            elif error is None:
                self._ready = True
                self._begin_turn()
            else:
                self._try_again_later(life, min(2 * wait_s, LONGEST_RETRY_S))

        def attempt() -> None:
            waiting = list(self._unwritten)
            self.world.database.commit(self.epoch, waiting, lambda error: self.do(life, lambda: answered(error)))

        self.world.timeline.after(wait_s, lambda: self.do(life, attempt))

    def _finish(self, tx: Transaction, results: list[_Result], *, durable: bool) -> None:
        """Answers and pushes. What an absent database does not let us promise is refused."""
        self._busy = False
        for result in results:
            result.tell("" if durable else self._away or "it does not answer")
        if not durable:
            self._held_back += tx.take_final()
        self.outbox.deliver(tx.outgoing)
        if durable:
            told, self._unpublished = self._unpublished, []
            self.towards_outside.requested(told)
        self._go_on()

    def _go_on(self) -> None:
        """The next turn: at once where somebody waits, else at the core's next deadline."""
        self._cancel_timer()
        life = self.life
        if self._queue or self._news is not None or self._ready:
            self._begin_turn()
            return
        deadline = engine.next_deadline(self.state)
        if deadline is None:
            return
        wait_s = max(0.0, self.clock.real_s(deadline - self._steady.now())) + 1e-6
        due = self.world.timeline.now + wait_s
        self._armed_for, self._due_at = deadline, due
        self._timer = self.world.timeline.at(due, lambda: self.do(life, self._due))

    def _due(self) -> None:
        if not self._busy:
            self._busy = True
            self._turn()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._armed_for = None

    # --- sessions ----------------------------------------------------------------------------------------------------

    def accept(self, line: Line) -> ControllerProcess | None:
        """A node connects; None while this is not the leader."""
        if self.alive and not self.leading and not self.paused:
            self._knocks.record(line.names[0])
        if not self.alive or not self.leading:
            return None
        wire: Any = Wire(line, self.world.timeline)
        identity = Identity(role=TokenRole.AGENT, subject=line.names[0])
        gate: Any = Gate()
        wire.session = AgentSession(self._desk, gate, identity, wire, lambda _session: None)
        self._sessions[line] = wire
        return self

    def closed(self, line: Line) -> None:
        self.do(self.life, lambda: self._closed(line))

    def _closed(self, line: Line) -> None:
        wire = self._sessions.pop(line, None)
        if wire is not None:
            wire.lost()

    def received(self, line: Line, frame: bytes) -> None:
        self.do(self.life, lambda: self._received(line, frame))

    def _received(self, line: Line, frame: bytes) -> None:
        wire = self._sessions.get(line)
        if wire is not None and wire.session is not None and line.open(1):
            wire.session.data_received(frame)

    # --- operators ---------------------------------------------------------------------------------------------------

    def order(self, command: ev.OperatorCommand, answer: Callable[[EverstepError | None], None]) -> None:
        """An operator's order over the API."""
        if not self.leading or self.paused:
            answer(Unavailable("this controller does not lead"))
            return
        done = self.enqueue(lambda tx, now: tx.handle(command, now))
        done.add_done_callback(lambda promise: answer(promise.exception()))
