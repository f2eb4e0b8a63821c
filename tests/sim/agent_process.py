"""One life of a node's agent: its real conversation, inbox, spool and local jobs over a simulated session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.local_jobs import LocalJobs
from agent.local_seats import LocalJob
from agent.uplink.heartbeat import Conversation, Inbox, NodeFacts, Refusal, meaning_of
from agent.uplink.spool import Spool
from everstep.backoff import Backoff
from everstep.errors import EverstepError, Unavailable
from everstep.wire.v1.agent import Heartbeat, HeartbeatAnswer, Register, Registered, Reports, ReportsAnswer
from everstep.wire.v1.directives import Directive, RunProbe
from everstep.wire.v1.session import Acknowledge
from everstep.wire.v1.training import AnyReport, FindingRaised, ProbeFinished
from tests.sim import facts
from tests.sim.timeline import Timer
from tests.sim.wires import Line

if TYPE_CHECKING:
    from tests.sim.machine import Machine

REQUEST_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.5
BACKOFF = Backoff(floor_s=0.05, ceiling_s=1.0)


class Refusing:
    """A controller's frame instead of an answer to ``of``."""

    __slots__ = ("error", "of")

    def __init__(self, of: type, error: EverstepError) -> None:
        self.of = of
        self.error = error


class AgentProcess:
    """Runs from its construction to ``die``. It is the ``Outside`` of its local jobs, too."""

    def __init__(self, machine: Machine, incarnation: int, spool_file: Path) -> None:
        self.machine = machine
        self.world = machine.world
        self.alive = True
        self.conversation = Conversation(machine.name, incarnation, "sim")
        self.inbox = Inbox()
        self.spool = Spool(spool_file, most_reports=4096, most_bytes=4 << 20, window_s=0.02)
        self.jobs = LocalJobs(
            machine.name, machine.clock, self, exit_grace_s=0.003, silence_s=2.5, unresponsive_after_s=4.0
        )
        self._line: Line | None = None
        self._controller = self.world.rng.randrange(len(self.world.controllers))
        self._failures = 0
        self._waiting: Heartbeat | Register | None = None
        self._asked_facts: NodeFacts | None = None
        self._reporting = False
        self._timers: dict[str, Timer] = {}
        self._looked_at = machine.clock.monotonic()
        self._later("watch", WATCH_INTERVAL_S, self._watch)
        self._connect()

    def die(self, *, power: bool = False) -> None:
        """SIGKILL, or the end of the machine's power: then nobody hears of the connection's end."""
        self.alive = False
        self.spool.close()
        for timer in self._timers.values():
            timer.cancel()
        if self._line is not None:
            if power:
                self._line.vanish()
            else:
                self._line.close(0)

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """One timer of each name; asleep while the machine is frozen."""
        if (old := self._timers.get(name)) is not None:
            old.cancel()

        def fire() -> None:
            if not self.alive:
                return
            if self.machine.frozen:
                self._later(name, 0.1, call)
            else:
                call()

        self._timers[name] = self.world.timeline.after(self.machine.clock.real_s(delay_s), fire)

    # --- the line to the controller ----------------------------------------------------------------------------------

    def _connect(self) -> None:
        controller = self.world.controllers[self._controller % len(self.world.controllers)]
        self._waiting, self._reporting = None, False
        self._line = self.world.wires.connect(self.machine.name, controller.name, self, controller.accept)
        self._speak()

    def _hang_up(self) -> None:
        """Tries the next controller after a pause."""
        if self._line is not None:
            self._line.close(0)
            self._line = None
        for name in ("timeout", "beat", "report"):
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()
        self._controller += 1
        self._failures += 1
        self._later("connect", BACKOFF.delay_s(self._failures, self.world.rng.random()), self._connect)

    def closed(self, line: Line) -> None:
        if self.alive and line is self._line:
            self._line = None
            self._hang_up()

    def _send(self, frame: Any) -> None:
        if self._line is not None:
            self._line.send(0, frame)

    def _speak(self) -> None:
        """Registers or beats, and expects an answer."""
        if self._line is None or self._waiting is not None:
            return
        self._asked_facts = self.machine.node_facts()
        message = self.conversation.next_message(
            self._asked_facts,
            self.machine.findings(),
            self.jobs.progress(),
            self.spool.sent_through,
            self.machine.clock.wall(),
        )
        self._waiting = message
        self._send(message)
        self._later("timeout", REQUEST_TIMEOUT_S, self._hang_up)

    def received(self, line: Line, frame: Any) -> None:
        """A frame of the controller's."""
        if not self.alive or line is not self._line:
            return
        if self.machine.frozen:
            self.machine.when_thawed(lambda: self.received(line, frame))
            return
        match frame:
            case Registered():
                self._registered(frame)
            case HeartbeatAnswer():
                self._beat_answered(frame)
            case ReportsAnswer():
                self._reports_answered(frame)
            case Refusing():
                self._refused(frame)
            case tuple():
                self._pushed(frame)

    def _registered(self, answer: Registered) -> None:
        if not isinstance(self._waiting, Register) or self._asked_facts is None:
            return
        self.conversation.registration_answered(self._waiting, self._asked_facts, answer)
        self.inbox.start_at(answer.next_directive)
        self._heard_from()
        for offer in self.jobs.offers():
            self.report(offer)
        self._report_soon()

    def _beat_answered(self, answer: HeartbeatAnswer) -> None:
        if not isinstance(self._waiting, Heartbeat):
            return
        self.conversation.beat_answered(self._waiting, answer)
        self._heard_from()
        if answer.resend:
            self._speak()
        else:
            self._report_soon()

    def _heard_from(self) -> None:
        self._failures, self._waiting = 0, None
        self._timers.pop("timeout").cancel()
        self._later("beat", self.conversation.interval_s, self._speak)

    def nudge(self) -> None:
        """Something the next beat would tell is worth telling now."""
        if self.conversation.registered:
            self._speak()

    def _refused(self, frame: Refusing) -> None:
        meaning = meaning_of(frame.error, registering=frame.of is Register)
        self._waiting, self._reporting = None, False
        if meaning is Refusal.REGISTER:
            self.conversation.forget_registration()
            self._later("beat", 0.05, self._speak)
        elif meaning is Refusal.RETRY and isinstance(frame.error, Unavailable):
            self._hang_up()
        else:
            self._later("beat", 1.0, self._speak)

    # --- reports -----------------------------------------------------------------------------------------------------

    def report(self, report: AnyReport) -> None:
        self.spool.add(report, self.machine.clock.monotonic())
        self._report_soon()

    def _report_soon(self) -> None:
        wait_s = self.spool.wait_s(self.machine.clock.monotonic())
        if wait_s is not None and not self._reporting and self.conversation.registered and self._line is not None:
            self._later("report", wait_s, self._send_reports)

    def _send_reports(self) -> None:
        if self._line is None or self._reporting or not self.conversation.registered:
            return
        wait_s = self.spool.wait_s(self.machine.clock.monotonic())
        if wait_s is None or wait_s > 1e-9:
            self._report_soon()
            return
        self._reporting = True
        self._send(Reports(incarnation=self.conversation.incarnation, reports=self.spool.batch()))
        if "timeout" not in self._timers or self._waiting is None:
            self._later("timeout", REQUEST_TIMEOUT_S, self._hang_up)

    def _reports_answered(self, answer: ReportsAnswer) -> None:
        self._reporting = False
        if self._waiting is None and (timer := self._timers.pop("timeout", None)) is not None:
            timer.cancel()
        self.spool.acknowledged(answer.through)
        self.world.see(facts.Acknowledged(self.machine.name, self.conversation.incarnation, answer.through))
        self._report_soon()

    # --- directives --------------------------------------------------------------------------------------------------

    def _pushed(self, directives: tuple[Directive, ...]) -> None:
        news = self.inbox.take(directives)
        for directive in news:
            self.world.see(
                facts.Delivered(self.machine.name, self.conversation.incarnation, directive.seq, directive.body)
            )
        bodies: list[Any] = [directive.body for directive in news]
        self.jobs.directives([body for body in bodies if not isinstance(body, RunProbe)])
        for body in bodies:
            if isinstance(body, RunProbe):
                self.machine.probe(body, self._probe_finished)
        self._send(Acknowledge(through=self.inbox.through))

    def _probe_finished(self, result: ProbeFinished) -> None:
        if self.alive:
            self.report(result)

    # --- what local jobs need (agent.local_jobs.Outside) --------------------------------------------------------------

    def _watch(self) -> None:
        now = self.machine.clock.monotonic()
        late_s = max(0.0, now - self._looked_at - WATCH_INTERVAL_S)
        self._looked_at = now
        self.jobs.watch(late_s)
        self._later("watch", WATCH_INTERVAL_S, self._watch)

    def new_trace(self) -> str:
        return self.world.trace_id(self.machine.name)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        def fire() -> None:
            if self.alive:
                call()

        return self.world.timeline.after(delay_s, fire)

    def finding(self, raised: FindingRaised) -> None:
        self.report(raised)

    def configure_vault(self, job: LocalJob) -> None:
        if job.spec is not None:
            self.machine.vault.configure(job.name, job.oldest)

    def forget_in_vault(self, job: str) -> None:
        self.machine.vault.forget(job)
