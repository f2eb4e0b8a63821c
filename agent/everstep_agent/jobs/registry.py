"""Track the jobs of one node: connected processes, the current generation, and lost connections.

The registry has no sockets and no clocks. ``everstep_agent.jobs.socket`` passes messages in; time and timers are
arguments; reports, frames and kills leave through callbacks. ``everstep_agent.jobs.local_processes`` decides what the
end of a rank means.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from everstep.clock import Clock
from everstep.errors import MalformedMessage
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import (
    ConnectionRole,
    Goodbye,
    Hello,
    LauncherLost,
    RankExited,
    RankHeartbeat,
    ToAgent,
    WrongProduct,
)
from everstep.wire.v1.training import (
    AuditsClean,
    AuditStatement,
    CollectiveFailed,
    FindingRaised,
    GenerationSpec,
    LauncherJoined,
    LauncherLeaving,
    LauncherLeft,
    RankFinished,
    RankProgress,
    RankStalled,
    Resumed,
    UserError,
    VersionSealed,
)
from everstep_agent.jobs.local_processes import (
    ConnectedLauncher,
    ConnectedRank,
    LocalConnection,
    LocalJob,
    LossCallbacks,
    LossReporter,
    ProcessEnd,
    SilenceMonitor,
)
from everstep_agent.jobs.oom_kills import OomKills

log = logging.getLogger(__name__)

RankReport = (
    CollectiveFailed | RankStalled | VersionSealed | AuditStatement | AuditsClean | Resumed | UserError | RankFinished
)


MAX_REMEMBERED_JOBS = 64
"""Remembered jobs without a process here, whose vault data may remain; the oldest is dropped first."""
COUNTED_EVENTS = ("reports", "reports_stale", "directives_stale", "ranks_lost", "ranks_killed", "ranks_unresponsive")
"""Keys of ``event_counts``; each starts at 0, so that a rate over it sees the first event."""


class RegistryCallbacks(LossCallbacks, Protocol):
    """Receive the registry's reports and vault requests."""

    def report_finding(self, raised: FindingRaised) -> None: ...
    def configure_vault_job(self, job: LocalJob) -> None: ...
    def delete_from_vault(self, job: str) -> None: ...
    def drop_seals(self, job: str, before_generation: int) -> None: ...
    def keep_wrong_product(self, product: WrongProduct) -> None: ...


class JobRegistry:
    """The jobs of one node. The times are settings of the agent."""

    def __init__(
        self,
        node: str,
        clock: Clock,
        callbacks: RegistryCallbacks,
        *,
        exit_grace_s: float,
        stopped_after_s: float,
        unresponsive_after_s: float,
        oom_kills: OomKills | None = None,
    ) -> None:
        self.event_counts: Counter[str] = Counter(dict.fromkeys(COUNTED_EVENTS, 0))
        self._node, self._clock, self._callbacks = node, clock, callbacks
        counts = self.event_counts
        self._oom_kills = oom_kills or OomKills(clock)
        self.loss_reporter = LossReporter(node, clock, callbacks, counts, exit_grace_s, self._oom_kills)
        self.silence_monitor = SilenceMonitor(clock, callbacks, counts, stopped_after_s, unresponsive_after_s)
        self._jobs: dict[str, LocalJob] = {}
        self._ranks: dict[LocalConnection, ConnectedRank] = {}
        self._launchers: dict[LocalConnection, ConnectedLauncher] = {}

    @property
    def jobs(self) -> tuple[LocalJob, ...]:
        return tuple(self._jobs.values())

    def is_busy(self) -> bool:
        """Return whether a launcher or rank is connected."""
        return bool(self._ranks or self._launchers)

    def rank_progress(self) -> tuple[RankProgress, ...]:
        """Return every rank's newest tick in a generation that still counts, for the heartbeat."""
        return tuple(
            RankProgress(
                job=process.job.name,
                generation=tick.generation,
                rank=tick.rank,
                step=tick.step,
                step_s=tick.step_s,
                loss=tick.loss,
                busy_s=tick.busy_s,
                started_step=tick.started_step,
                until_step=tick.until_step,
                snapshot_every=tick.snapshot_every,
            )
            for process in self._ranks.values()
            if (tick := process.last_tick) is not None
            and tick.generation >= process.job.oldest_generation
            and not process.job.stop_directive
        )

    def snapshot_interval_steps(self) -> dict[str, int]:
        """Return the steps between snapshots per job: the largest interval of its ranks here."""
        found: dict[str, int] = {}
        for process in self._ranks.values():
            if process.last_tick is not None and not process.job.stop_directive:
                found[process.job.name] = max(process.last_tick.snapshot_every, found.get(process.job.name, 0))
        return found

    def launcher_offers(self, known_jobs: Collection[str] = ()) -> list[LauncherJoined]:
        """Return the live launchers' offers for a controller that has just met this node, without ``known_jobs``."""
        return [
            process.build_offer(self._clock.wall())
            for process in self._launchers.values()
            if process.offer is not None and not process.job.stop_directive and process.job.name not in known_jobs
        ]

    # Connections

    def handle_hello(self, connection: LocalConnection, hello: Hello) -> None:
        """Register a launcher or rank and send it the newest generation and versions of its job."""
        job = self._get_or_create_job(hello.job)
        if hello.role is ConnectionRole.LAUNCHER:
            self._launchers[connection] = ConnectedLauncher(job, connection)
            if job.spec is not None and not job.stop_directive and not job.pending_stop:
                connection.send(NewGeneration(spec=job.spec))
            return
        if hello.local_rank is None:
            raise MalformedMessage("a rank's Hello must name its local_rank")
        process = ConnectedRank(job, connection, hello.local_rank, hello.pid, last_seen_at=self._clock.monotonic())
        # Register before the former process ends: its end must not make the registry forget the job.
        self._ranks[connection] = process
        self._oom_kills.watch(hello.pid)
        self._replace_former_process(job, process)
        is_replacement = job.lost_generations.get(hello.local_rank) == job.newest_generation
        process.first_generation = job.newest_generation + is_replacement
        job.add_rank(process)
        if job.stop_directive is not None:
            connection.send(job.stop_directive)
        elif job.spec is not None and not job.pending_stop and process.first_generation <= job.spec.number:
            self._send_generation(process, job.spec)

    def _replace_former_process(self, job: LocalJob, process: ConnectedRank) -> None:
        former = job.ranks.get(process.local_rank)
        if former is None:
            return
        if former.pid == process.pid:  # the same process on a new connection is no loss
            self._ranks.pop(former.connection, None)
        else:
            self.handle_disconnect(former.connection, "another process took its place")
        former.connection.close()

    def _get_or_create_job(self, name: str) -> LocalJob:
        job = self._jobs.get(name)
        if job is None:
            idle = [j.name for j in self._jobs.values() if not self._has_processes(j)]
            if len(idle) >= MAX_REMEMBERED_JOBS:
                del self._jobs[idle[0]]
            job = self._jobs[name] = LocalJob(name)
        return job

    def _has_processes(self, job: LocalJob) -> bool:
        jobs = [*(rank.job for rank in self._ranks.values()), *(each.job for each in self._launchers.values())]
        return any(each is job for each in jobs)

    def _send_generation(self, process: ConnectedRank, spec: GenerationSpec) -> None:
        if process.last_tick is None or process.last_tick.generation < spec.number:
            process.connection.send(NewGeneration(spec=spec))
        member = spec.member_at(self._node, process.local_rank)
        process.generation, process.rank = spec.number, None if member is None else member.rank
        process.last_seen_at = self._clock.monotonic()

    def handle_message(self, connection: LocalConnection, message: ToAgent) -> None:
        """Handle a frame after the Hello. Raises MalformedMessage if the sender may not send this message."""
        rank = self._ranks.get(connection)
        if rank is not None:
            self.silence_monitor.end(rank)
            self._handle_rank_message(rank, message)
        elif connection in self._launchers:
            self._handle_launcher_message(self._launchers[connection], message)

    def _handle_rank_message(self, process: ConnectedRank, message: ToAgent) -> None:
        match message:
            case RankHeartbeat():
                process.record_tick(message)
                self._note_rank_generation(process.job, message.generation)
            case Goodbye():
                process.has_said_goodbye = True
            case FindingRaised():
                self._callbacks.report_finding(message)
            case WrongProduct():
                self._callbacks.keep_wrong_product(message)
            case (
                CollectiveFailed()
                | RankStalled()
                | VersionSealed()
                | AuditStatement()
                | AuditsClean()
                | Resumed()
                | UserError()
                | RankFinished()
            ):
                self._forward(process, message)
            case _:
                raise MalformedMessage(f"a rank may not send {type(message).__name__}")

    def _forward(self, process: ConnectedRank, report: RankReport) -> None:
        if report.job != process.job.name:
            raise MalformedMessage(f"a rank of job {process.job.name} may not send reports of job {report.job}")
        job = process.job
        if report.generation < job.oldest_generation or job.stop_directive is not None or process.kill_reason:
            self.event_counts["reports_stale"] += 1
            return
        self._note_rank_generation(process.job, report.generation)
        if isinstance(report, RankFinished):
            process.finished_generation = report.generation
        self.event_counts["reports"] += 1
        self._callbacks.report(report)

    def _note_rank_generation(self, job: LocalJob, generation: int) -> None:
        """Note that a rank has passed an announced boundary: older generations no longer count."""
        if job.note_generation(generation) and job.spec is not None:
            self._drop_older_generations(job)

    def _drop_older_generations(self, job: LocalJob) -> None:
        """Make the vault refuse older generations, and drop their seals.

        Versions of older generations must not be committed any more, since their slots are filled again. A controller
        that took over may not know the newer generation.
        """
        self._callbacks.configure_vault_job(job)
        self._callbacks.drop_seals(job.name, job.oldest_generation)

    def _handle_launcher_message(self, process: ConnectedLauncher, message: ToAgent) -> None:
        match message:
            case LauncherJoined():
                self._handle_launcher_joined(process, message)
            case LauncherLeaving():
                if message.job != process.job.name:
                    raise MalformedMessage(f"a launcher of job {process.job.name} may not speak for job {message.job}")
                self._callbacks.report(message)
            case RankExited():
                self.loss_reporter.handle_exit(process.job, message)
            case Goodbye():
                process.has_said_goodbye, process.goodbye_detail = True, message.detail
            case FindingRaised():
                self._callbacks.report_finding(message)
            case _:
                raise MalformedMessage(f"a launcher may not send {type(message).__name__}")

    def _handle_launcher_joined(self, process: ConnectedLauncher, message: LauncherJoined) -> None:
        job = process.job
        if message.job != job.name or message.spec.job != job.name:
            raise MalformedMessage(f"a launcher of job {job.name} may not join job {message.job}")
        if job.stop_directive is not None and message.launcher == job.launcher_incarnation:
            process.connection.send(job.stop_directive)
            return
        if (end := job.pending_stop) is not None and end.applies_to(message.launcher):
            job.launcher_incarnation = message.launcher
            self._end_job(job, end)
            return
        if job.stop_directive is not None or job.pending_stop is not None:  # a new run under the same name
            job = self._jobs[job.name] = process.job = job.new_run()
        if job.launcher is not None and job.launcher is not process:
            job.launcher.connection.close()
        process.offer = message
        job.set_launcher(process, message.launcher)
        self._callbacks.report(process.build_offer(self._clock.wall(), self._callbacks.new_trace_id()))
        log.info("launcher joined", extra={"node": self._node, "job": job.name})

    def handle_disconnect(self, connection: LocalConnection, detail: str, end: ProcessEnd | None = None) -> None:
        """Handle the end of a connection, orderly or by the end of its process, which ``end`` describes if it is known
        (``everstep_agent.jobs.death_watch``)."""
        if (rank := self._ranks.pop(connection, None)) is not None:
            self.loss_reporter.handle_disconnect(rank, detail, end)
            self._forget_if_ended(rank.job)
        if (launcher := self._launchers.pop(connection, None)) is not None:
            self._handle_launcher_disconnect(launcher, detail)
            self._forget_if_ended(launcher.job)

    def _forget_if_ended(self, job: LocalJob) -> None:
        """Forget a stopped job once its last process is gone."""
        is_stopped = job.stop_directive is not None or job.pending_stop is not None
        if is_stopped and self._jobs.get(job.name) is job and not self._has_processes(job):
            del self._jobs[job.name]

    def _handle_launcher_disconnect(self, process: ConnectedLauncher, detail: str) -> None:
        job = process.job
        if job.launcher is not process:
            return  # the launcher never joined, or another has taken its place
        assert process.offer is not None
        job.launcher, job.has_lost_launcher = None, True
        orderly = process.has_said_goodbye or job.stop_directive is not None
        reason = process.goodbye_detail or ("orderly exit" if process.has_said_goodbye else detail)
        log.info("launcher left: %s", reason, extra={"node": self._node, "job": job.name})
        self._callbacks.report(
            LauncherLeft(
                job=job.name,
                at=self._clock.wall(),
                trace=self._callbacks.new_trace_id(),
                launcher=process.offer.launcher,
                orderly=orderly,
                detail=reason,
            )
        )
        if job.stop_directive is None:
            for rank in job.ranks.values():
                rank.connection.send(LauncherLost(detail=reason))

    # Directives

    def handle_directives(self, bodies: list[NewGeneration | KillRank | StopJob | VersionNotice]) -> None:
        """Carry out the controller's directives, kills first: a rank being replaced must not see later directives."""
        for body in sorted(bodies, key=lambda b: not isinstance(b, KillRank)):
            match body:
                case KillRank():
                    self._kill(body)
                case NewGeneration():
                    self._new_generation(body.spec)
                case VersionNotice():
                    self._forward_version_notice(body)
                case StopJob():
                    self._stop(body)

    def _new_generation(self, spec: GenerationSpec) -> None:
        job = self._get_or_create_job(spec.job)
        known = job.spec.number if job.spec is not None else 0
        if job.stop_directive is not None or spec.number < job.newest_generation or spec.number <= known:
            self.event_counts["directives_stale"] += 1
            return
        job.set_next_generation(spec)
        # Before the ranks learn of the generation, because they ask the vault at once.
        self._drop_older_generations(job)
        self.loss_reporter.report_unassigned_exits(job)
        for process in job.ranks.values():
            if not process.kill_reason and process.first_generation <= spec.number:
                self._send_generation(process, spec)
        if job.launcher is not None:
            job.launcher.connection.send(NewGeneration(spec=spec))
        self.loss_reporter.report_vacancies(job, "no local process is available for this rank")

    def _kill(self, body: KillRank) -> None:
        job = self._jobs.get(body.job)
        process = job.ranks.get(body.local_rank) if job is not None else None
        if job is not None and job.launcher is not None:
            job.launcher.connection.send(body)
        if process is None or not process.is_member_until(body.generation):
            self.event_counts["directives_stale"] += 1
            return
        process.kill_reason = f"killed by order of the controller: {body.reason}"
        process.generation, process.rank = body.generation, body.rank
        if body.has_grace and job is not None and job.launcher is not None:
            return  # the launcher, whose option the grace time is, signals it and kills it afterwards
        self.event_counts["ranks_killed"] += 1
        context = {"node": self._node, "job": body.job, "generation": body.generation, "trace": body.trace}
        log.warning("killing local rank %d (pid %d): %s", body.local_rank, process.pid, body.reason, extra=context)
        process.connection.kill()

    def _forward_version_notice(self, body: VersionNotice) -> None:
        job = self._jobs.get(body.job)
        for process in job.ranks.values() if job is not None and job.stop_directive is None else ():
            if not process.kill_reason:
                process.connection.send(body)

    def _stop(self, body: StopJob) -> None:
        job = self._jobs.get(body.job)
        if not body.keeps_checkpoints:
            self._callbacks.delete_from_vault(body.job)
        if job is None:
            return
        # Without a launcher, the next one to join may belong to this run or to a new run of the same name.
        if job.launcher is None:
            job.pending_stop = body
            self._forget_if_ended(job)
        elif body.applies_to(job.launcher_incarnation):
            self._end_job(job, body)

    def _end_job(self, job: LocalJob, body: StopJob) -> None:
        job.stop_directive, job.pending_stop = body, None
        connections = [rank.connection for rank in job.ranks.values()]
        connections += [launcher.connection for launcher in self._launchers.values() if launcher.job is job]
        for connection in connections:
            connection.send(body)
        self._forget_if_ended(job)

    def next_check_s(self) -> float:
        """Return the seconds until ``check_silence`` may find a silent rank."""
        return self.silence_monitor.next_check_s(self._ranks.values())

    def check_silence(self, loop_lag_s: float) -> None:
        """Report ranks that stopped ticking. This check's own delay, ``loop_lag_s``, does not count as silence."""
        self.silence_monitor.check(self._ranks.values(), loop_lag_s)
        self._oom_kills.poll(process.pid for process in self._ranks.values())
