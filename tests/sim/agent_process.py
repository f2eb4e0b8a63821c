"""One life of a node's agent: its real session, inbox, spool and local jobs, over a simulated connection."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from everstep_agent.jobs.local_processes import LocalJob
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, NodeDescription
from everstep_agent.uplink.session import ControllerSession, UplinkState
from everstep_agent.uplink.spool import Spool
from everstep_agent.vault.manager import VaultOrderRunner

from everstep.clock import Backoff
from everstep.errors import EverstepError
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import PREFIX_BYTES, FrameKind, GpuGauges, ReportsAnswer, encode_frame
from everstep.wire.v1.directives import Directive, ProtectVersion, RunProbe, SpillVersion
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import AnyReport, FindingRaised, ProbeFinished, RankProgress
from tests.sim import facts
from tests.sim.event_loop import VirtualLoop
from tests.sim.timeline import Timer
from tests.sim.vault_process import VaultLink
from tests.sim.wires import Line

if TYPE_CHECKING:
    from tests.sim.machine import Machine

ANSWER_WITHIN_S = 2.0
WATCH_INTERVAL_S = 0.5
BACKOFF = Backoff(floor_s=0.05, ceiling_s=1.0)


class AgentProcess:
    """Runs from its construction to ``die``. To its session it is the node, to its local jobs the outside."""

    def __init__(self, machine: Machine, incarnation: int, spool_file: Path) -> None:
        self.machine = machine
        self.world = machine.world
        self.alive = True
        self.incarnation = incarnation
        self.spool = Spool(spool_file, max_reports=4096, max_bytes=4 << 20, batch_window_s=0.02)
        self.words = UplinkState(
            heartbeat_protocol=HeartbeatProtocol(machine.name, incarnation, "sim"), spool=self.spool
        )
        self.jobs = JobRegistry(
            machine.name, machine.clock, self, exit_grace_s=0.003, stopped_after_s=2.5, unresponsive_after_s=4.0
        )
        self._loop = VirtualLoop(self.world.timeline, do=self._do, real_s=machine.clock.real_s, carry=_no_threads)
        self.vault = VaultLink(machine, self._loop)
        self.orders = VaultOrderRunner(machine.name, self.vault, self.report, machine.clock)  # type: ignore[arg-type]
        self._line: Line | None = None
        self._session: ControllerSession | None = None
        self._controller = self.world.rng.randrange(len(self.world.controllers))
        self._failures = 0
        self._timers: dict[str, Timer] = {}
        self._looked_at = machine.clock.monotonic()
        self._later("watch", WATCH_INTERVAL_S, self._watch)
        self._connect()

    def die(self, *, power: bool = False) -> None:
        """SIGKILL, or the end of the machine's power: then nobody hears of the connection's end."""
        self.alive = False
        self._loop.end()
        self.spool.close()
        for timer in self._timers.values():
            timer.cancel()
        if self._line is not None and not power:
            self._line.close(0)

    def _do(self, call: Callable[[], None]) -> None:
        if self.alive and self.machine.frozen:
            self.machine.when_thawed(lambda: self._do(call))
        elif self.alive:
            call()

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """One timer of each name, by this machine's clock; asleep while the machine is frozen."""
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

    # --- the session -------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        controllers = self.world.controllers
        controller = controllers[self._controller % len(controllers)]
        line = self._line = self.world.wires.connect(self.machine.name, controller.name, self, controller.accept)
        self._session = ControllerSession(
            self.words,
            self,
            self.machine.clock,
            lambda kind, body: line.send(0, encode_frame(kind, body)),
            url=controller.name,
            uniform=self.world.rng.random,
            spread_beat=False,
            answer_timeout_s=ANSWER_WITHIN_S,
            has_other_controllers=len(controllers) > 1,
        )
        self._pump()

    def _pump(self) -> None:
        """Says what is due, and comes back when more will be."""
        if self._session is None:
            return
        try:
            due = self._session.send_due()
        except EverstepError:
            self._hang_up()
            return
        if due < math.inf:
            self._later("pump", max(0.0, due - self.machine.clock.monotonic()) + 1e-6, self._pump)

    def _hang_up(self) -> None:
        """Tries the next controller after a pause."""
        line, self._line, self._session = self._line, None, None
        if line is not None:
            line.close(0)
        if (timer := self._timers.pop("pump", None)) is not None:
            timer.cancel()
        self._controller += 1
        self._failures += 1
        self._later("connect", BACKOFF.delay_s(self._failures, self.world.rng.random()), self._connect)

    def closed(self, line: Line) -> None:
        if self.alive and line is self._line:
            self._hang_up()

    def received(self, line: Line, frame: bytes) -> None:
        """A frame of the controller's."""
        if not self.alive or line is not self._line or self._session is None:
            return
        if self.machine.frozen:
            self.machine.when_thawed(lambda: self.received(line, frame))
            return
        kind, body = frame[PREFIX_BYTES], frame[PREFIX_BYTES + 1 :]
        try:
            self._session.handle_frame(kind, body)
        except EverstepError:
            self._hang_up()
            return
        self._failures = 0
        if kind == FrameKind.REPORTS_ANSWER:
            through = msgspec.json.decode(body, type=ReportsAnswer).through
            self.world.see(facts.Acknowledged(self.machine.name, self.incarnation, through))
        self._pump()

    def nudge(self) -> None:
        """Something the next beat would tell is worth telling now."""
        if self._session is not None:
            self._session.next_beat_at = self.machine.clock.monotonic()
            self._pump()

    def report(self, report: AnyReport) -> None:
        """Keeps a report, and sends it when it is due."""
        self.spool.add(report, self.machine.clock.monotonic())
        if "pump" in self._timers:
            self._later("pump", 0.0, self._pump)

    # --- what the session asks of its node (everstep_agent.uplink.session.Node)
    # ---------------------------------------------

    def describe_node(self) -> NodeDescription:
        return self.machine.describe_node()

    def findings(self) -> tuple[Finding, ...]:
        return self.machine.findings()

    def rank_progress(self) -> tuple[RankProgress, ...]:
        return self.jobs.rank_progress()

    def gpu_gauges(self) -> tuple[GpuGauges, ...]:
        return ()

    def is_busy(self) -> bool:
        return self.jobs.is_busy()

    def on_new_controller(self, known_jobs: Collection[str]) -> None:
        for offer in self.jobs.launcher_offers(known_jobs):
            self.report(offer)

    def on_server_time(self, server_at: float, received_at: float, round_trip_s: float) -> None: ...

    def on_directives(self, directives: list[Directive]) -> None:
        for directive in directives:
            self.world.see(facts.Delivered(self.machine.name, self.incarnation, directive.seq, directive.body))
        bodies: list[Any] = [directive.body for directive in directives]
        apart = RunProbe | SpillVersion | ProtectVersion
        self.jobs.handle_directives([body for body in bodies if not isinstance(body, apart)])
        for body in bodies:
            if isinstance(body, RunProbe):
                self.machine.probe(body, self._probe_finished)
            elif isinstance(body, SpillVersion | ProtectVersion):
                self._loop.enter(lambda order=body: self.orders.submit(order))  # type: ignore[misc]

    def _probe_finished(self, result: ProbeFinished) -> None:
        if self.alive:
            self.report(result)

    # --- what local jobs need (everstep_agent.jobs.registry.Outside)
    # --------------------------------------------------------------

    def _watch(self) -> None:
        now = self.machine.clock.monotonic()
        late_s = max(0.0, now - self._looked_at - WATCH_INTERVAL_S)
        self._looked_at = now
        self.jobs.check_silence(late_s)
        self._later("watch", WATCH_INTERVAL_S, self._watch)

    def new_trace_id(self) -> str:
        return self.world.trace_id(self.machine.name)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        def fire() -> None:
            if self.alive:
                callback()

        return self.world.timeline.after(delay_s, fire)

    def report_finding(self, raised: FindingRaised) -> None:
        self.report(raised)

    def configure_vault_job(self, job: LocalJob) -> None:
        if job.spec is not None:
            self.vault.configure(job.name, job.oldest_generation)

    def delete_from_vault(self, job: str) -> None:
        self._loop.enter(lambda: self.orders.cancel_job(job))
        self.vault.forget(job)

    def drop_seals(self, job: str, before_generation: int) -> None:
        numbers = self.spool.drop_seals(job, before_generation)
        self.world.see(facts.LeftOut(self.machine.name, self.words.heartbeat_protocol.incarnation, frozenset(numbers)))

    def keep_wrong_product(self, product: WrongProduct) -> None:
        raise AssertionError("simulated ranks multiply nothing")


def _no_threads(*_: Any) -> None:
    raise AssertionError("orders to a vault block nowhere")
