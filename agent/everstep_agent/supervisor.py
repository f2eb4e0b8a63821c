"""The agent's process: one event loop that ties sensors, vault, local ranks and controller together.

It never calls a driver and never imports torch: what may hang lives in children. Each of its loops is started again
when it fails, with the cause in the log; how an agent is upgraded under running jobs is told in
``everstep_agent.vault.keeper``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep import __version__
from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.vocabulary import Finding
from everstep.wire.framing import SPOKEN
from everstep.wire.v1.agent import NO_HOST, Domain
from everstep.wire.v1.directives import Directive, ProtectVersion, RunProbe, SpillVersion, VersionNotice
from everstep.wire.v1.local import Welcome
from everstep.wire.v1.training import AnyReport, FindingCleared, FindingRaised, RankProgress
from everstep_agent.config import AgentSettings, labels_of, listen_address, read_token
from everstep_agent.findings.node_findings import FindingBoard, SelfFacts, SkewEstimate, assess
from everstep_agent.jobs.registry import LocalJobs
from everstep_agent.jobs.seats import LocalJob
from everstep_agent.jobs.socket import LocalServer
from everstep_agent.lifecycle import RunDirectory, write_atomically
from everstep_agent.sensors.monitor import SensorProcess, SensorSettings
from everstep_agent.sensors.sensor_messages import Picture
from everstep_agent.uplink.client import Uplink
from everstep_agent.uplink.heartbeat import Conversation, NodeFacts
from everstep_agent.uplink.spool import Spool
from everstep_agent.vault.keeper import VaultKeeper, VaultOrders

if TYPE_CHECKING:
    from everstep_agent.metrics import AgentNumbers, MetricsServer
    from everstep_agent.probes.prober import Prober

log = logging.getLogger(__name__)

FIRST_PICTURE_WITHIN_S = 3.0
"""How long the first registration waits for the sensors, so that it can name the GPUs; a slow driver comes later."""

LAST_WORDS_S = 0.5
"""How long an ending agent tries to hand over its last reports; what is left waits in the spool's file."""

ROUND_S = 1.0
"""Between looks at itself."""

LOOP_RESTART_S = 0.5


class ReadyFile(msgspec.Struct, frozen=True, kw_only=True):
    """``agent.json``: for whoever started the agent, and for scrapers."""

    pid: int
    node: str
    incarnation: int
    vault: str
    vault_pid: int
    sensor_pid: int
    metrics: str
    metrics_token_file: str


class Supervisor:
    """One life of an agent. Make it in a running event loop, then ``run``. ``orphaned``: set where it ends because the
    process that started it did.

    Raises ConfigurationError for settings that cannot be used, and where another agent holds the run directory.
    """

    def __init__(self, settings: AgentSettings, clock: Clock, orphaned: asyncio.Event) -> None:
        read_token(settings.token_file, "agent token")  # before anything is written: a typo must leave no trace
        self._settings = settings
        self._clock = clock
        self._orphaned = orphaned
        self._directory = RunDirectory(settings.run_dir)
        try:
            self._sensors = SensorProcess(_sensor_settings(settings), clock, self._on_picture)
        except ConfigurationError:
            self._directory.leave()
            raise
        self.incarnation = self._directory.incarnation(clock.wall())
        self._loop = asyncio.get_running_loop()
        self._picture: Picture | None = None
        self._seen = asyncio.Event()
        self._skew = SkewEstimate()
        self._self = SelfFacts()
        self._told: ReadyFile | None = None
        self._prober: Prober | None = None
        self._metrics: MetricsServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._board = FindingBoard(self.new_trace)
        self._vault = VaultKeeper(settings, clock, self.finding, self.report, self._on_vault)
        self._orders = VaultOrders(settings.node, self._vault, self.report, clock)
        self._spool = Spool(
            settings.run_dir / "reports.spool",
            most_reports=settings.spool_reports,
            most_bytes=settings.spool_bytes,
            window_s=settings.seal_window_s,
        )
        self._conversation = Conversation(settings.node, self.incarnation, __version__)
        self._uplink = Uplink(settings, self._conversation, self._spool, self, clock)
        self._jobs = LocalJobs(
            settings.node,
            clock,
            self,
            exit_grace_s=settings.exit_grace_s,
            silence_s=settings.silence_s,
            unresponsive_after_s=settings.unresponsive_after_s,
        )
        self._local = LocalServer(settings.agent_socket, self._welcome(), self._jobs, settings.max_connections)

    def _welcome(self) -> Welcome:
        return Welcome(
            protocol=max(SPOKEN),
            node=self._settings.node,
            vault_socket=str(self._settings.vault_socket.absolute()),
            tick_interval_s=self._settings.tick_interval_s,
        )

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop`` is set, then ends in order. Raises Unavailable where no vault can be started."""
        try:
            await self._vault.start()
            await self._local.start()
            self._start_metrics()
            self._keep("sensors", self._sensors.run)
            self._keep("vault", self._vault.run)
            self._keep("silence watch", lambda: self._local.watch(self._settings.tick_interval_s / 2))
            await self._first_picture(stop)
            self._keep("uplink", self._uplink.run)
            self._keep("self-health", self._look_at_itself)
            log.info("agent of node %s serves", self._settings.node, extra={"node": self._settings.node})
            await stop.wait()
        finally:
            await self._end()

    async def _first_picture(self, stop: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._seen.wait()), asyncio.ensure_future(stop.wait())]
        await asyncio.wait(waits, timeout=FIRST_PICTURE_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Runs ``loop`` for as long as the agent lives, and again when it fails."""
        self._start(self._again_and_again(name, loop))

    async def _again_and_again(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:  # one loop's failure must not take the node's other duties along
                log.exception("the agent's %s failed and is started again", name, extra={"node": self._settings.node})
            await asyncio.sleep(LOOP_RESTART_S)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        """Trainers are told nothing: they run on, and come again to the next agent."""
        if self._conversation.registered:
            await self._uplink.flush(LAST_WORDS_S)
        self._local.close()
        self._orders.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._prober is not None:
            await self._prober.close()
        left = ["agent.json", "agent.sock"]
        if not self._leaves_vault():
            await self._vault.stop()
            left += ["vault.json", "vault.sock"]
        else:
            self._vault.leave()
            log.info("jobs have slots here: the vault serves on, for the next agent over %s", self._settings.run_dir)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if not len(self._spool):
            left.append("reports.spool")
        self._spool.close()
        self._directory.leave(*left)

    def _leaves_vault(self) -> bool:
        """Whether somebody may come back for what the vault holds."""
        if not self._vault.has_segments():
            return False
        if self._settings.leave_vault == "parent" and self._orphaned.is_set():
            return True
        return not (self._settings.die_with_parent or self._settings.stop_vault)

    async def _look_at_itself(self) -> None:
        while True:
            self._announce()
            self._assess()
            for change in self._board.expire(self._clock.monotonic()):
                self.report(change)
            if self._skew.skew_s is not None:
                self._sensors.note_clock_skew(self._skew.skew_s)
            await asyncio.sleep(ROUND_S)

    def _assess(self) -> None:
        lost_at = (self._self.vault_lost_at or self._clock.wall()) if self._vault.lost else 0.0
        since = (self._self.spool_since or self._clock.wall()) if self._spool.dropped else 0.0
        self._self = SelfFacts(
            vault_lost=self._vault.lost,
            vault_lost_at=lost_at,
            spool_dropped=self._spool.dropped,
            spool_since=since,
        )
        self._tell(self._board.replace("agent", assess(self._self)))

    def _announce(self) -> None:
        ready = ReadyFile(
            pid=os.getpid(),
            node=self._settings.node,
            incarnation=self.incarnation,
            vault=self._vault.address,
            vault_pid=self._vault.pid,
            sensor_pid=self._sensors.pid or 0,
            metrics=self._metrics.address if self._metrics is not None else "",
            metrics_token_file=str(self._metrics_token_file() or ""),
        )
        if ready != self._told:
            write_atomically(self._settings.ready_file, ready)
            self._told = ready

    # --- what the parts say --------------------------------------------------------------------------------------

    def _on_picture(self, picture: Picture) -> None:
        self._picture = picture
        self._tell(self._board.replace("sensors", picture.findings))
        if picture.polled_at:
            self._seen.set()

    def _on_vault(self) -> None:
        self._assess()
        self._announce()
        self._uplink.nudge()

    def _tell(self, changes: list[FindingRaised | FindingCleared]) -> None:
        for change in changes:
            self.report(change)

    def finding(self, raised: FindingRaised) -> None:
        """From the vault, a rank or a launcher."""
        self.report(self._board.hold(raised, self._clock.monotonic()))

    def report(self, report: AnyReport) -> None:
        """Something the controller must hear."""
        self._uplink.report(report)

    def configure_vault(self, job: LocalJob) -> None:
        self._vault.configure(job)

    def forget_in_vault(self, job: str) -> None:
        self._orders.forget(job)
        self._vault.forget(job)

    def forget_seals(self, job: str, before: int) -> None:
        self._spool.forget_seals(job, before)

    def new_trace(self) -> str:
        """A new stimulus' id."""
        return uuid.uuid4().hex[:16]

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, call)

    # --- what the controller asks --------------------------------------------------------------------------------

    def facts(self) -> NodeFacts:
        picture = self._picture
        return NodeFacts(
            vault=self._vault.address,
            boot_id=picture.boot_id if picture is not None else "",
            driver_version=picture.driver_version if picture is not None else "",
            domain=Domain(rack=self._settings.rack, switch=self._settings.switch, power=self._settings.power),
            labels=labels_of(self._settings),
            gpus=picture.gpu_ids if picture is not None else (),
            host=picture.host_id if picture is not None else NO_HOST,
        )

    def findings(self) -> tuple[Finding, ...]:
        return self._board.picture

    def progress(self) -> tuple[RankProgress, ...]:
        return self._jobs.progress()

    def is_busy(self) -> bool:
        return self._jobs.is_busy()

    def on_known(self, shown: Collection[str]) -> None:
        for offer in self._jobs.offers(shown):
            self.report(offer)

    def on_clock(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        self._skew.heard(server_at, received_at, round_trip_s)

    def on_directives(self, directives: list[Directive]) -> None:
        """Carries out what the controller asks; ranks hear of it before this returns."""
        bodies = [directive.body for directive in directives]
        apart = RunProbe | SpillVersion | ProtectVersion
        self._jobs.directives([body for body in bodies if not isinstance(body, apart)])
        for body in bodies:
            if isinstance(body, RunProbe):
                self._start(self._probe(body))
            elif isinstance(body, SpillVersion | ProtectVersion):
                self._orders.take(body)
            elif not isinstance(body, VersionNotice):
                log.info("directive %s", type(body).__name__, extra={"node": self._settings.node})

    async def _probe(self, body: RunProbe) -> None:
        if self._prober is None:
            from everstep_agent.probes.prober import (
                Prober,  # its child loads torch: only nodes that are probed pay for it
            )

            self._prober = Prober()
        self.report(await self._prober.run(body, self._settings.node))

    # --- metrics -------------------------------------------------------------------------------------------------

    def _metrics_token_file(self) -> Path | None:
        return self._settings.metrics_token_file or self._settings.token_file

    def _start_metrics(self) -> None:
        if not self._settings.metrics_listen:
            return
        from everstep_agent.metrics import (
            AgentCollector,  # 2 MiB that an agent without /metrics does not need
            MetricsServer,
        )

        collector = AgentCollector(self._numbers_from_thread, dcgm_names=self._settings.dcgm_names)
        host, port = listen_address(self._settings.metrics_listen)
        file = self._metrics_token_file()
        self._metrics = MetricsServer(host, port, lambda: read_token(file, "metrics token"), collector, self._clock)

    def _numbers_from_thread(self) -> AgentNumbers:
        return asyncio.run_coroutine_threadsafe(self._numbers(), self._loop).result(1.5)

    async def _numbers(self) -> AgentNumbers:
        from everstep_agent.metrics import AgentNumbers

        answered_at = self._uplink.answered_at
        processes = {"supervisor": os.getpid(), "sensors": self._sensors.pid, "vault": self._vault.pid}
        return AgentNumbers(
            node=self._settings.node,
            version=__version__,
            picture=self._picture,
            findings=self._board.picture,
            spool_reports=len(self._spool),
            spool_bytes=self._spool.size_bytes,
            spool_dropped=self._spool.dropped,
            spool_refused=self._spool.refused,
            requests=dict(self._uplink.outcomes),
            registrations=self._conversation.registrations,
            silent_s=None if answered_at is None else self._clock.monotonic() - answered_at,
            local=dict(self._jobs.counts),
            refused_connections=dict(self._local.counts),
            refused_scrapes=self._metrics.refused if self._metrics is not None else 0,
            connections=len(self._local.connections),
            jobs=len(self._jobs.jobs),
            snapshot_every=self._jobs.snapshot_every(),
            clock_skew_s=self._skew.skew_s,
            vault_up=not self._vault.lost,
            vault_restarts=self._vault.restarts,
            vault=await self._vault.statistics(0.5),
            processes={name: pid for name, pid in processes.items() if pid},
        )


def _sensor_settings(settings: AgentSettings) -> SensorSettings:
    return SensorSettings(
        node=settings.node,
        expected_gpus=settings.expected_gpus,
        virtual=settings.virtual,
        virtual_control=str(settings.virtual_control or ""),
        kernel_log=settings.kernel_log_path,
        state_path=str(settings.run_dir / "sensors.state"),
        site_policy=settings.site_policy,
    )
