"""The agent's process: one event loop that connects sensors, vault, local ranks and controller.

The event loop never calls a driver and never imports torch: calls that may hang run in child processes. Each task is
restarted when it fails, with the cause in the log. ``everstep_agent.vault.manager`` describes how an agent is upgraded
under running jobs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep import __version__
from everstep.clock import Clock
from everstep.errors import ConfigurationError, Unavailable
from everstep.host.private_files import private_directory
from everstep.vocabulary import Finding
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.agent import GpuGauges
from everstep.wire.v1.directives import Directive, PauseNvml, ProtectVersion, RunProbe, SpillVersion, VersionNotice
from everstep.wire.v1.local import Welcome, WrongProduct
from everstep.wire.v1.node_status import (
    HEALTH_FILE,
    DescribeNode,
    FleetJoined,
    JoinFleet,
    LocalAnswer,
    LocalRequest,
    LogBundleMade,
    MakeLogBundle,
    NodeStatus,
    NvmlPauseSet,
    SetNvmlPause,
)
from everstep.wire.v1.training import AnyReport, FindingCleared, FindingRaised, RankProgress
from everstep_agent.config import (
    JOINED_FILE,
    AgentSettings,
    join_settings,
    parse_listen_address,
    read_token,
)
from everstep_agent.findings.monitor import SensorMonitor, SensorSettings
from everstep_agent.findings.node_findings import ClockSkewEstimate, NodeFindings, find_agent_problems
from everstep_agent.jobs.local_processes import LocalJob
from everstep_agent.jobs.oom_kills import OomKills
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.jobs.socket import AgentSocketServer
from everstep_agent.lifecycle import AgentRunDirectory, write_atomically
from everstep_agent.local.health import HealthFile, gpu_summaries, health_reason, judge_health, port_summaries
from everstep_agent.local.log_bundles import BundleContents, LogBundles
from everstep_agent.local.node_socket import NodeSocketServer
from everstep_agent.local.nvml_pause import NvmlPause
from everstep_agent.notices.watch import NoticeWatch, open_service
from everstep_agent.probes.wrong_products import WrongProductStore
from everstep_agent.sensors.gauges import fresh_report, gpu_gauges, gpu_modes, network_adapters
from everstep_agent.sensors.sensor_messages import SensorReport
from everstep_agent.uplink.client import Uplink
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, NodeDescription
from everstep_agent.uplink.spool import Spool
from everstep_agent.vault.manager import VaultManager, VaultOrderRunner

if TYPE_CHECKING:
    from everstep_agent.metrics import AgentMetrics, MetricsServer
    from everstep_agent.probes.prober import Prober

log = logging.getLogger(__name__)

NVML_PAUSE_FILE = "nvml-pause"
"""File in the run directory that keeps NVML closed while it exists."""

FIRST_REPORT_TIMEOUT_S = 3.0
"""Seconds the first registration waits for the sensors to name the GPUs; a slower driver's report follows later."""

FINAL_FLUSH_TIMEOUT_S = 0.5
"""Seconds an ending agent tries to deliver its last reports; the rest stays in the spool file."""

SELF_CHECK_INTERVAL_S = 1.0
"""Seconds between checks of the agent's own state."""

LOOP_RESTART_S = 0.5

NVML_CLOSE_TIMEOUT_S = 10.0
"""Seconds in which the sensors must have closed NVML."""

NVML_CLOSE_CHECK_S = 0.1


class ReadyFile(msgspec.Struct, frozen=True, kw_only=True):
    """``agent.json``: the agent's addresses and pids, for its starter and for scrapers."""

    pid: int
    node: str
    incarnation: int
    vault: str
    vault_pid: int
    sensor_pid: int
    metrics: str
    metrics_token_file: str


def make_welcome(settings: AgentSettings) -> Welcome:
    """Return the agent's first frame to launchers and ranks."""
    ca_file = settings.credentials.ca_file
    return Welcome(
        protocol=max(SUPPORTED_VERSIONS),
        node=settings.node,
        vault_socket=str(settings.vault_socket.absolute()),
        rank_heartbeat_interval_s=settings.ranks.tick_interval_s,
        controllers=settings.controllers,
        ca_file=str(ca_file.absolute()) if ca_file is not None else "",
    )


def _prepared_state_dir(settings: AgentSettings) -> Path:
    """Return the directory for what outlives a reboot, or the run directory if that cannot be used."""
    try:
        return private_directory(settings.resolved_state_dir.absolute(), "--state-dir")
    except (ConfigurationError, Unavailable) as error:
        log.warning("%s; the node's profile does not survive a reboot", error, extra={"node": settings.node})
        return settings.run_dir.absolute()


class Supervisor:
    """One run of an agent. Create it in a running event loop, then call ``run``.

    ``parent_exited`` is set if the agent ends because the process that started it did. Raises ConfigurationError if the
    settings cannot be used, or another agent holds the run directory.
    """

    def __init__(self, settings: AgentSettings, clock: Clock, parent_exited: asyncio.Event) -> None:
        # This comes before any write, so that a wrong path leaves no files behind.
        read_token(settings.credentials.token_file, "agent token")
        self._settings = settings
        self._domain = settings.placement.domain
        self._clock = clock
        self._parent_exited = parent_exited
        self._directory = AgentRunDirectory(settings.run_dir)
        try:
            self._sensors = SensorMonitor(
                SensorSettings(
                    node=settings.node,
                    expected_gpus=settings.hardware.expected_gpus,
                    virtual=settings.hardware.virtual,
                    virtual_control=str(settings.hardware.virtual_control or ""),
                    virtual_folder=str((settings.run_dir / "virtual-machine").absolute()),
                    sysfs_root=str(settings.hardware.sysfs_root),
                    kernel_log=settings.hardware.kernel_log_path,
                    state_path=str(settings.run_dir / "sensors.state"),
                    reads_gpm=settings.metrics.dcgm_names,
                    pause_file=str(settings.run_dir / NVML_PAUSE_FILE),
                    profile_folder=str(_prepared_state_dir(settings)),
                    site_policy=settings.watch.site_policy,
                    disk_paths=settings.watch.watch_paths,
                    watch_units=settings.watch.watch_units,
                    vault_folder=str(settings.resolved_segment_dir.absolute()),
                ),
                clock,
                self._on_sensor_report,
            )
        except ConfigurationError:
            self._directory.release()
            raise
        self.incarnation = self._directory.next_incarnation(clock.wall(), settings.resolved_state_dir)
        self._loop = asyncio.get_running_loop()
        self._sensor_report: SensorReport | None = None
        self._first_report_received = asyncio.Event()
        self._clock_skew = ClockSkewEstimate()
        self._vault_down_at = self._dropped_at = 0.0
        self._announced: ReadyFile | None = None
        self._prober: Prober | None = None
        self._wrong_products = WrongProductStore(settings.run_dir / "wrong-products", clock)
        self._metrics: MetricsServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._findings = NodeFindings(self.new_trace_id)
        self._vault = VaultManager(settings, clock, self.report_finding, self.report, self._on_vault_change)
        self._orders = VaultOrderRunner(settings.node, self._vault, self.report, clock)
        self._spool = Spool(
            settings.run_dir / "reports.spool",
            max_reports=settings.reports.spool_max_reports,
            max_bytes=settings.reports.spool_max_bytes,
            batch_window_s=settings.reports.report_batch_window_s,
        )
        self._heartbeat_protocol = HeartbeatProtocol(settings.node, self.incarnation, __version__)
        self._uplink: Uplink | None = None  # None while the agent runs standalone
        self._is_joining = False
        if settings.controllers:
            self._uplink = Uplink(settings, self._heartbeat_protocol, self._spool, self, clock)
        self._jobs = JobRegistry(
            settings.node,
            clock,
            self,
            exit_grace_s=settings.ranks.exit_grace_s,
            stopped_after_s=settings.ranks.stopped_after_s,
            unresponsive_after_s=settings.ranks.unresponsive_after_s,
            oom_kills=OomKills(clock, settings.hardware.kernel_log_path),
        )
        sources = settings.notice_sources
        service = open_service(sources.notices, sources.notices_url)
        pace = sources.notice_poll_s, sources.notice_lead_s
        self._notices = NoticeWatch(service, settings.run_dir, *pace, clock, self._on_notices)
        self._socket_server = AgentSocketServer(
            settings.agent_socket, make_welcome(settings), self._jobs, settings.max_connections
        )
        self._node_socket = NodeSocketServer(settings.node_socket, self._handle_local_request)
        self._nvml_pause = NvmlPause(settings.run_dir / NVML_PAUSE_FILE, clock)
        self._health_file = HealthFile(settings.run_dir / HEALTH_FILE)
        self._bundles = LogBundles(settings.resolved_bundle_dir, clock, self._collect_bundle)

    # Start and end

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then end in order. Raises Unavailable if no vault can be started."""
        try:
            if self._uplink is not None:
                await self._serve_jobs()
            await self._node_socket.start()
            self._start_metrics()
            self._start_task(self._keep_running("sensors", self._sensors.run))
            self._start_task(self._keep_running("notices", self._notices.run))
            waits = [asyncio.ensure_future(event.wait()) for event in (self._first_report_received, stop)]
            await asyncio.wait(waits, timeout=FIRST_REPORT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._uplink is not None:
                self._start_task(self._keep_running("uplink", self._uplink.run))
            self._start_task(self._keep_running("self-health", self._run_self_checks))
            log.info("the agent of node %s is running", self._settings.node, extra={"node": self._settings.node})
            await stop.wait()
        finally:
            await self._end()

    async def _serve_jobs(self) -> None:
        """Start the vault, and the socket of launchers and ranks. Raises Unavailable."""
        await self._vault.start()
        await self._socket_server.start()
        self._start_task(self._keep_running("vault", self._vault.run))
        watch = partial(self._socket_server.watch_silence, self._settings.ranks.tick_interval_s / 2)
        self._start_task(self._keep_running("silence watch", watch))

    async def _keep_running(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run ``loop`` for as long as the agent lives, and restart it when it fails."""
        while True:
            try:
                await loop()
            except Exception:  # one failed task must not end the agent's other duties
                log.exception("the agent's %s task failed and is restarted", name, extra={"node": self._settings.node})
            await asyncio.sleep(LOOP_RESTART_S)

    def _start_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        """End in order. Trainers are not notified: they run on and reconnect to the next agent."""
        if self._uplink is not None and self._heartbeat_protocol.is_registered:
            await self._uplink.flush(FINAL_FLUSH_TIMEOUT_S)
        self._socket_server.close()
        self._node_socket.close()
        self._orders.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._prober is not None:
            await self._prober.close()
        obsolete = ["agent.json", "agent.sock", HEALTH_FILE]
        if self._should_detach_vault():
            self._vault.detach()
            log.info("jobs have slots here; the vault keeps running for the next agent in %s", self._settings.run_dir)
        else:
            await self._vault.stop()
            obsolete += ["vault.json", "vault.sock"]
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if not len(self._spool):
            obsolete.append("reports.spool")
        self._spool.close()
        self._directory.release(*obsolete)

    def _should_detach_vault(self) -> bool:
        """Return whether a process may come back for the vault's contents."""
        if not self._vault.has_segments():
            return False
        if self._settings.shutdown.vault_survives_kill_of == "parent" and self._parent_exited.is_set():
            return True
        return not (self._settings.shutdown.die_with_parent or self._settings.shutdown.stop_vault_on_exit)

    async def _run_self_checks(self) -> None:
        while True:
            self._write_ready_file()
            self._update_agent_findings()
            self._report_all(self._findings.expire(self._clock.monotonic()))
            findings = self._findings.findings
            self._health_file.update(self._sensor_report or SensorReport(), findings, self._clock.wall())
            self._nvml_pause.expire()
            self._bundles.note_findings(findings)
            if self._bundles.is_due:
                self._start_task(self._bundles.make_due())
            if self._clock_skew.skew_s is not None:
                self._sensors.set_clock_skew(self._clock_skew.skew_s)
            await asyncio.sleep(SELF_CHECK_INTERVAL_S)

    def _update_agent_findings(self) -> None:
        reason, dropped = self._vault.down_reason, self._spool.dropped_count
        self._vault_down_at = (self._vault_down_at or self._clock.wall()) if reason else 0.0
        self._dropped_at = (self._dropped_at or self._clock.wall()) if dropped else 0.0
        problems = find_agent_problems(reason, self._vault_down_at, dropped, self._dropped_at)
        self._report_all(self._findings.replace_source("agent", problems))

    def _write_ready_file(self) -> None:
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
        if ready != self._announced:
            write_atomically(self._settings.ready_file, ready)
            self._announced = ready

    # Callbacks of sensors, vault and jobs

    def _on_sensor_report(self, report: SensorReport) -> None:
        self._sensor_report = report
        self._report_all(self._findings.replace_source("sensors", report.findings))
        if report.polled_at:
            self._first_report_received.set()

    def _on_notices(self, findings: tuple[Finding, ...]) -> None:
        self._report_all(self._findings.replace_source("notices", findings))
        if self._uplink is not None:
            self._uplink.beat_now()

    def _on_vault_change(self) -> None:
        self._update_agent_findings()
        self._write_ready_file()
        if self._uplink is not None:
            self._uplink.beat_now()

    def _report_all(self, changes: list[FindingRaised | FindingCleared]) -> None:
        for change in changes:
            self.report(change)

    def report_finding(self, raised: FindingRaised) -> None:
        """Report a finding from the vault, a rank or a launcher."""
        self.report(self._findings.add_one_time(raised, self._clock.monotonic()))

    def report(self, report: AnyReport) -> None:
        """Queue a report for the controller. A controller that is joined later gets all findings by a heartbeat."""
        if self._uplink is not None:
            self._uplink.report(report)

    def configure_vault_job(self, job: LocalJob) -> None:
        self._vault.configure(job)

    def delete_from_vault(self, job: str) -> None:
        self._orders.cancel_job(job)
        self._vault.forget(job)

    def drop_seals(self, job: str, before_generation: int) -> None:
        self._spool.drop_seals(job, before_generation)

    def new_trace_id(self) -> str:
        return uuid.uuid4().hex[:16]

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, callback)

    # Uplink callbacks: state for the controller, and its directives

    def describe_node(self) -> NodeDescription:
        poll = (self._sensor_report or SensorReport()).poll
        return NodeDescription(
            vault=self._vault.address,
            boot_id=poll.boot_id,
            driver_version=poll.driver_version,
            domain=self._domain,
            labels=self._settings.placement.parse_labels(),
            gpus=poll.known_gpus,
            host=poll.host_identity,
            takes_nvml_pause=True,
            adapters=network_adapters(poll.ports),
            gpu_modes=gpu_modes(poll.gpus),
        )

    def findings(self) -> tuple[Finding, ...]:
        return self._findings.findings

    def rank_progress(self) -> tuple[RankProgress, ...]:
        return self._jobs.rank_progress()

    def gpu_gauges(self) -> tuple[GpuGauges, ...]:
        return gpu_gauges(self._sensor_report or SensorReport(), self._clock.wall())

    def is_busy(self) -> bool:
        return self._jobs.is_busy()

    def on_new_controller(self, known_jobs: Collection[str]) -> None:
        for offer in self._jobs.launcher_offers(known_jobs):
            self.report(offer)

    def on_server_time(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        self._clock_skew.add_sample(server_at, received_at, round_trip_s)

    def on_directives(self, directives: list[Directive]) -> None:
        """Carry out the controller's directives; ranks are notified before this returns."""
        bodies = [directive.body for directive in directives]
        own = RunProbe | SpillVersion | ProtectVersion | PauseNvml
        self._jobs.handle_directives([body for body in bodies if not isinstance(body, own)])
        for body in bodies:
            if isinstance(body, RunProbe):
                self._start_task(self._probe(body))
            elif isinstance(body, SpillVersion | ProtectVersion):
                self._orders.submit(body)
            elif isinstance(body, PauseNvml):
                self._nvml_pause.order(body.seconds)
            elif not isinstance(body, VersionNotice):
                log.info("directive %s", type(body).__name__, extra={"node": self._settings.node})

    def keep_wrong_product(self, product: WrongProduct) -> None:
        """Keep a product that a rank of this node computed wrongly, for later probes."""
        self._wrong_products.add(product)

    async def _probe(self, body: RunProbe) -> None:
        if self._prober is None:
            # Imported late: only nodes that are probed need it.
            from everstep_agent.probes.prober import Prober

            self._prober = Prober()
        self.report(await self._prober.run(body, self._settings.node, self._wrong_products.products))

    # Requests on node.sock

    async def _handle_local_request(self, request: LocalRequest) -> LocalAnswer:
        """Answer a request. Raises EverstepError if it is refused."""
        match request:
            case DescribeNode():
                return self._describe_status()
            case MakeLogBundle():
                path = await self._bundles.make("a request")
                return LogBundleMade(path=str(path), size_bytes=path.stat().st_size)
            case JoinFleet():
                return await self._join(request)
            case SetNvmlPause():
                return await self._pause_nvml(request.seconds)

    def _describe_status(self) -> NodeStatus:
        report, findings = self._sensor_report or SensorReport(), self._findings.findings
        now, uplink = self._clock.wall(), self._uplink
        poll = fresh_report(report, now).poll
        answered_at = None if uplink is None else uplink.answered_at
        return NodeStatus(
            node=self._settings.node,
            version=__version__,
            at=now,
            polled_at=report.polled_at,
            health=judge_health(findings, report.polled_at, now),
            reason=health_reason(findings),
            driver_version=poll.driver_version,
            findings=findings,
            gpus=gpu_summaries(poll),
            ports=port_summaries(poll),
            controllers=self._settings.controllers,
            controller_silent_s=None if answered_at is None else self._clock.monotonic() - answered_at,
            newest_bundle=str(self._bundles.newest or ""),
        )

    async def _join(self, request: JoinFleet) -> FleetJoined:
        """Connect a standalone agent to controllers. Raises ConfigurationError, Unavailable, EverstepError."""
        if self._uplink is not None or self._is_joining:
            known = ", ".join(self._settings.controllers) or "one that is being joined"
            raise ConfigurationError(f"this agent has a controller ({known}): change its setting and restart it")
        self._is_joining = True
        try:
            settings = join_settings(self._settings, request)
            if settings.credentials.has_to_enrol:
                from everstep_agent.uplink.credentials import enrol  # imports what an enrolled agent does not need

                await asyncio.to_thread(enrol, settings)
            read_token(settings.credentials.token_file, "agent token")
            uplink = Uplink(settings, self._heartbeat_protocol, self._spool, self, self._clock)
            await self._serve_jobs()
            write_atomically(settings.run_dir / JOINED_FILE, request)
        finally:
            self._is_joining = False
        self._settings, self._uplink = settings, uplink
        self._socket_server.welcome = make_welcome(settings)
        self._start_task(self._keep_running("uplink", uplink.run))
        log.info("joined %s", ", ".join(settings.controllers), extra={"node": settings.node})
        return FleetJoined(
            sentence=f"{settings.node} connects to {', '.join(settings.controllers)}. Put the address into the agent's "
            f"settings too, in place of --standalone: {settings.run_dir / JOINED_FILE} may not survive a reboot."
        )

    async def _pause_nvml(self, seconds: float) -> NvmlPauseSet:
        """Have NVML closed, and wait until it is. Raises Unavailable if a call keeps it open."""
        if not seconds:
            self._nvml_pause.end()
            return NvmlPauseSet(until=0.0)
        until, deadline = self._nvml_pause.begin(seconds), self._clock.monotonic() + NVML_CLOSE_TIMEOUT_S
        asked_at = self._clock.wall()
        while self._clock.monotonic() < deadline:
            report = self._sensor_report or SensorReport()
            nvml = report.poll.nvml
            is_closed = nvml.paused_s is not None and not nvml.is_open and not nvml.busy_with
            if report.polled_at > asked_at and is_closed:
                return NvmlPauseSet(until=until)
            await asyncio.sleep(NVML_CLOSE_CHECK_S)
        self._nvml_pause.end()
        raise Unavailable("a call of NVML has not returned, so the agent cannot close it: reboot the node instead")

    def _collect_bundle(self, reason: str) -> BundleContents:
        report = self._sensor_report or SensorReport()
        parts = {
            "status.json": msgspec.json.format(msgspec.json.encode(self._describe_status())),
            "findings.json": msgspec.json.format(msgspec.json.encode(self._findings.findings)),
            "sensors.json": msgspec.json.format(msgspec.json.encode(report.poll)),
            "recent-kernel-lines.txt": "\n".join(self._sensors.recent_kernel_lines).encode(),
        }
        return BundleContents(
            node=self._settings.node,
            reason=reason,
            parts=parts,
            kernel_log=self._settings.hardware.kernel_log_path,
            state_file=str(self._settings.run_dir / "sensors.state"),
            has_bug_report=self._settings.bundles.bundle_bug_report,
        )

    # Metrics

    def _metrics_token_file(self) -> Path | None:
        return self._settings.metrics.metrics_token_file or self._settings.credentials.token_file

    def _start_metrics(self) -> None:
        if not self._settings.metrics.metrics_listen:
            return
        # Imported late: costs 2 MiB that an agent without /metrics does not need.
        from everstep_agent.metrics import AgentCollector, MetricsServer

        def read_metrics() -> AgentMetrics:  # in the thread that serves a scrape
            return asyncio.run_coroutine_threadsafe(self._read_metrics(), self._loop).result(1.5)

        collector = AgentCollector(read_metrics, dcgm_names=self._settings.metrics.dcgm_names)
        host, port = parse_listen_address(self._settings.metrics.metrics_listen)
        file = self._metrics_token_file()
        token = None if file is None else partial(read_token, file, "metrics token")
        self._metrics = MetricsServer(host, port, token, collector, self._clock)

    async def _read_metrics(self) -> AgentMetrics:
        from everstep_agent.metrics import AgentMetrics

        uplink = self._uplink
        answered_at = None if uplink is None else uplink.answered_at
        processes = {"supervisor": os.getpid(), "sensors": self._sensors.pid, "vault": self._vault.pid}
        report = self._sensor_report
        return AgentMetrics(
            node=self._settings.node,
            version=__version__,
            domain=self._domain,
            sensor_report=None if report is None else fresh_report(report, self._clock.wall()),
            findings=self._findings.findings,
            spool_reports=len(self._spool),
            spool_bytes=self._spool.size_bytes,
            spool_dropped=self._spool.dropped_count,
            spool_refused=self._spool.refused_count,
            requests={} if uplink is None else dict(uplink.outcomes),
            registrations=self._heartbeat_protocol.registrations,
            controller_silent_s=None if answered_at is None else self._clock.monotonic() - answered_at,
            local_event_counts=dict(self._jobs.event_counts),
            refused_connections=dict(self._socket_server.refused_counts),
            refused_scrapes=self._metrics.refused_count if self._metrics is not None else 0,
            connections=len(self._socket_server.connections),
            jobs=len(self._jobs.jobs),
            snapshot_interval_steps=self._jobs.snapshot_interval_steps(),
            clock_skew_s=self._clock_skew.skew_s,
            is_vault_up=None if uplink is None else not self._vault.down_reason,
            log_bundles=self._bundles.made_count,
            vault_restarts=self._vault.restarts,
            vault_statistics=None if uplink is None else await self._vault.statistics(0.5),
            processes={name: pid for name, pid in processes.items() if pid},
        )
