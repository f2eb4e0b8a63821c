"""Simulate a node's agent: its real session, inbox, spool and local jobs over a simulated connection."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.clock import Backoff
from everstep.errors import EverstepError
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import PREFIX_BYTES, FrameKind, GpuGauges, ReportsAnswer, encode_frame
from everstep.wire.v1.directives import Directive, PauseNvml, ProtectVersion, RunProbe, SpillVersion
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import AnyReport, FindingRaised, ProbeFinished, RankProgress
from everstep_agent.jobs.local_processes import LocalJob
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, NodeDescription
from everstep_agent.uplink.session import ControllerSession, UplinkState
from everstep_agent.uplink.spool import Spool
from everstep_agent.vault.manager import VaultOrderRunner
from tests.sim.cluster.event_loop import VirtualLoop
from tests.sim.cluster.network import Connection
from tests.sim.cluster.observations import DirectiveDelivered, ReportsAcknowledged, SealsDropped
from tests.sim.cluster.timeline import Timer
from tests.sim.processes.vault import VaultClient

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine

ANSWER_TIMEOUT_S = 2.0
"""Seconds after which an agent leaves a controller that does not answer."""
LOCAL_CHECK_S = 0.5
"""Seconds between two checks for silent local processes."""
BACKOFF = Backoff(floor_s=0.05, ceiling_s=1.0)
"""Waits between two connections, in seconds."""


class AgentProcess:
    """An agent from construction to ``die``. It implements the callbacks of its session and of its local jobs."""

    def __init__(self, machine: Machine, incarnation: int, spool_file: Path) -> None:
        self.machine = machine
        self.world = machine.world
        self.is_alive = True
        self.incarnation = incarnation
        self.spool = Spool(spool_file, max_reports=4096, max_bytes=4 << 20, batch_window_s=0.02)
        self.uplink_state = UplinkState(
            heartbeat_protocol=HeartbeatProtocol(machine.name, incarnation, "sim"), spool=self.spool
        )
        self.jobs = JobRegistry(
            machine.name, machine.clock, self, exit_grace_s=0.003, stopped_after_s=2.5, unresponsive_after_s=4.0
        )
        self._loop = VirtualLoop(  # type: ignore[abstract]  # asyncio calls none of the other methods
            self.world.timeline,
            call_when_running=self._call_when_running,
            to_world_s=machine.clock.to_world_s,
            call_blocking=_reject_blocking_call,
        )
        self.vault_client = VaultClient(machine, self._loop)
        self.vault_order_runner = VaultOrderRunner(machine.name, self.vault_client, self.report, machine.clock)  # type: ignore[arg-type]
        self._connection: Connection | None = None
        self._session: ControllerSession | None = None
        self._controller_index = self.world.rng.randrange(len(self.world.controllers))
        self._failures = 0
        self._timers: dict[str, Timer] = {}
        self._checked_at = machine.clock.monotonic()
        self._set_timer("local jobs", LOCAL_CHECK_S, self._check_local_jobs)
        self._connect()

    def die(self, *, with_machine: bool = False) -> None:
        """End by SIGKILL, or ``with_machine`` by a loss of power. Then the peer does not see the connection close."""
        self.is_alive = False
        self._loop.end()
        self.spool.close()
        for timer in self._timers.values():
            timer.cancel()
        if self._connection is not None and not with_machine:
            self._connection.close(0)

    def _call_when_running(self, call: Callable[[], None]) -> None:
        if self.is_alive and self.machine.is_frozen:
            self.machine.call_when_unfrozen(lambda: self._call_when_running(call))
        elif self.is_alive:
            call()

    def _set_timer(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Set the timer of that name by this machine's clock. A frozen machine postpones the call."""
        if (previous := self._timers.get(name)) is not None:
            previous.cancel()

        def fire() -> None:
            if not self.is_alive:
                return
            if self.machine.is_frozen:
                self._set_timer(name, 0.1, call)
            else:
                call()

        self._timers[name] = self.world.timeline.after(self.machine.clock.to_world_s(delay_s), fire)

    def _connect(self) -> None:
        controllers = self.world.controllers
        controller = controllers[self._controller_index % len(controllers)]
        connection = self._connection = self.world.network.connect(
            self.machine.name, controller.name, self, controller.accept
        )
        self._session = ControllerSession(
            self.uplink_state,
            self,
            self.machine.clock,
            lambda kind, body: connection.send(0, encode_frame(kind, body)),
            url=controller.name,
            uniform=self.world.rng.random,
            spread_beat=False,
            answer_timeout_s=ANSWER_TIMEOUT_S,
            has_other_controllers=len(controllers) > 1,
        )
        self._send_due()

    def _send_due(self) -> None:
        """Send the messages that are due, and set a timer for the next ones."""
        if self._session is None:
            return
        try:
            due = self._session.send_due()
        except EverstepError:
            self._disconnect()
            return
        if due < math.inf:
            self._set_timer("send", max(0.0, due - self.machine.clock.monotonic()) + 1e-6, self._send_due)

    def _disconnect(self) -> None:
        """Close the connection, and try the next controller after a pause."""
        connection, self._connection, self._session = self._connection, None, None
        if connection is not None:
            connection.close(0)
        if (timer := self._timers.pop("send", None)) is not None:
            timer.cancel()
        self._controller_index += 1
        self._failures += 1
        self._set_timer("connect", BACKOFF.delay_s(self._failures, self.world.rng.random()), self._connect)

    def closed(self, connection: Connection) -> None:
        """Handle the close of a connection by the controller or the network."""
        if self.is_alive and connection is self._connection:
            self._disconnect()

    def received(self, connection: Connection, frame: bytes) -> None:
        """Handle a frame that the controller sent."""
        if not self.is_alive or connection is not self._connection or self._session is None:
            return
        if self.machine.is_frozen:
            self.machine.call_when_unfrozen(lambda: self.received(connection, frame))
            return
        kind, body = frame[PREFIX_BYTES], frame[PREFIX_BYTES + 1 :]
        try:
            self._session.handle_frame(kind, body)
        except EverstepError:
            self._disconnect()
            return
        self._failures = 0
        if kind == FrameKind.REPORTS_ANSWER:
            through = msgspec.json.decode(body, type=ReportsAnswer).through
            self.world.observe(ReportsAcknowledged(self.machine.name, self.incarnation, through))
        self._send_due()

    def send_heartbeat_now(self) -> None:
        """Send the next heartbeat now, because its content has changed."""
        if self._session is not None:
            self._session.next_beat_at = self.machine.clock.monotonic()
            self._send_due()

    def report(self, report: AnyReport) -> None:
        """Add a report to the spool, and send it when it is due."""
        self.spool.add(report, self.machine.clock.monotonic())
        if "send" in self._timers:
            self._set_timer("send", 0.0, self._send_due)

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
            self.world.observe(DirectiveDelivered(self.machine.name, self.incarnation, directive.seq, directive.body))
        bodies: list[Any] = [directive.body for directive in directives]
        not_for_jobs = RunProbe | SpillVersion | ProtectVersion | PauseNvml
        self.jobs.handle_directives([body for body in bodies if not isinstance(body, not_for_jobs)])
        for body in bodies:
            if isinstance(body, RunProbe):
                self.machine.run_probe(body, self._probe_finished)
            elif isinstance(body, SpillVersion | ProtectVersion):
                self._loop.enter(lambda order=body: self.vault_order_runner.submit(order))  # type: ignore[misc]

    def _probe_finished(self, result: ProbeFinished) -> None:
        if self.is_alive:
            self.report(result)

    def _check_local_jobs(self) -> None:
        now = self.machine.clock.monotonic()
        late_s = max(0.0, now - self._checked_at - LOCAL_CHECK_S)
        self._checked_at = now
        self.jobs.check_silence(late_s)
        self._set_timer("local jobs", LOCAL_CHECK_S, self._check_local_jobs)

    def new_trace_id(self) -> str:
        return self.world.trace_id(self.machine.name)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        def fire() -> None:
            if self.is_alive:
                callback()

        return self.world.timeline.after(delay_s, fire)

    def report_finding(self, raised: FindingRaised) -> None:
        self.report(raised)

    def configure_vault_job(self, job: LocalJob) -> None:
        if job.spec is not None:
            self.vault_client.configure(job.name, job.oldest_generation)

    def delete_from_vault(self, job: str) -> None:
        self._loop.enter(lambda: self.vault_order_runner.cancel_job(job))
        self.vault_client.forget(job)

    def drop_seals(self, job: str, before_generation: int) -> None:
        numbers = self.spool.drop_seals(job, before_generation)
        self.world.observe(
            SealsDropped(self.machine.name, self.uplink_state.heartbeat_protocol.incarnation, frozenset(numbers))
        )

    def keep_wrong_product(self, product: WrongProduct) -> None:
        raise AssertionError("simulated ranks report no wrong products")


def _reject_blocking_call(*_: Any) -> None:
    raise AssertionError("an agent's task made a blocking call")
