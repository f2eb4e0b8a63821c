"""What a node knows of its jobs: who is connected, which generation holds, and what a lost connection means.

No sockets and no clocks: ``everstep_agent.jobs.socket`` brings what was heard, time and timers come as arguments, and
reports,
frames and kills go out through what was passed in. What the end of a rank means is decided in
``everstep_agent.jobs.seats``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from everstep.clock import Clock
from everstep.errors import MalformedMessage
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import Goodbye, Hello, LauncherLost, RankExited, Role, Tick, ToAgent
from everstep.wire.v1.training import (
    CollectiveFailed,
    FindingRaised,
    GenerationSpec,
    LauncherJoined,
    LauncherLeft,
    RankFinished,
    RankProgress,
    RankStalled,
    Resumed,
    Sealed,
    UserError,
)
from everstep_agent.jobs.seats import LauncherSeat, LocalJob, Losses, LossOutside, Peer, RankSeat, SilenceWatch

log = logging.getLogger(__name__)

RankReport = CollectiveFailed | RankStalled | Sealed | Resumed | UserError | RankFinished


MOST_JOBS = 64
EVENTS = ("reports", "reports_stale", "directives_stale", "ranks_lost", "ranks_killed", "ranks_unresponsive")
"""What ``counts`` counts. Each is there from the start, so that a rate over it sees the first one."""
"""Jobs remembered that have no process here (their vaults' holders may still be); the oldest is forgotten first."""


class Outside(LossOutside, Protocol):
    """Where the jobs' words go."""

    def finding(self, raised: FindingRaised) -> None: ...
    def configure_vault(self, job: LocalJob) -> None: ...
    def forget_in_vault(self, job: str) -> None: ...
    def forget_seals(self, job: str, before: int) -> None: ...


class LocalJobs:
    """The jobs of one node.

    Args:
        exit_grace_s: how long a loss waits for the launcher's word on how the process ended.
        silence_s, unresponsive_after_s: see ``AgentSettings``.
    """

    def __init__(
        self,
        node: str,
        clock: Clock,
        outside: Outside,
        *,
        exit_grace_s: float,
        silence_s: float,
        unresponsive_after_s: float,
    ) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self._node = node
        self._clock = clock
        self._outside = outside
        self.losses = Losses(node, clock, outside, self.counts, exit_grace_s)
        self.silence = SilenceWatch(clock, outside, self.counts, silence_s, unresponsive_after_s)
        self._jobs: dict[str, LocalJob] = {}
        self._ranks: dict[Peer, RankSeat] = {}
        self._launchers: dict[Peer, LauncherSeat] = {}

    @property
    def jobs(self) -> tuple[LocalJob, ...]:
        return tuple(self._jobs.values())

    def is_busy(self) -> bool:
        """Whether a launcher or rank is connected."""
        return bool(self._ranks or self._launchers)

    def progress(self) -> tuple[RankProgress, ...]:
        """Every rank's newest tick in a generation that counts, for the heartbeat."""
        return tuple(
            RankProgress(
                job=seat.job.name,
                generation=seat.tick.generation,
                rank=seat.tick.rank,
                step=seat.tick.step,
                step_s=seat.tick.step_s,
                loss=seat.tick.loss,
                busy_s=seat.tick.busy_s,
                begun=seat.tick.begun,
            )
            for seat in self._ranks.values()
            if seat.tick is not None and seat.tick.generation >= seat.job.oldest and not seat.job.stopped
        )

    def snapshot_every(self) -> dict[str, int]:
        """By job how many steps apart its ranks' snapshots are: of the rank here that has the most."""
        found: dict[str, int] = {}
        for seat in self._ranks.values():
            if seat.tick is not None and not seat.job.stopped:
                found[seat.job.name] = max(seat.tick.snapshot_every, found.get(seat.job.name, 0))
        return found

    def offers(self, known: Collection[str] = ()) -> list[LauncherJoined]:
        """The live launchers' offers, as they are said to a controller that has just met this node, and knows those of
        these jobs."""
        return [
            seat.offer_now(self._clock.wall())
            for seat in self._launchers.values()
            if seat.offer is not None and not seat.job.stopped and seat.job.name not in known
        ]

    # --- connections ---------------------------------------------------------------------------------------------

    def hello(self, peer: Peer, hello: Hello) -> None:
        """A launcher or rank is there: it gets the newest generation and versions of its job."""
        job = self._job(hello.job)
        if hello.role is Role.LAUNCHER:
            self._launchers[peer] = LauncherSeat(job, peer)
            if job.spec is not None and not job.stopped and not job.end_heard:
                peer.send(NewGeneration(spec=job.spec))
            return
        if hello.local_rank is None:
            raise MalformedMessage("a rank's Hello must name its local_rank")
        seat = RankSeat(job, peer, hello.local_rank, hello.pid, heard_at=self._clock.monotonic())
        self._ranks[peer] = seat  # before another's end: its job must not be forgotten with that
        self._take_place_of_another(job, seat)
        seat.came_in = job.newest if job.lost_in.get(hello.local_rank) != job.newest else job.newest + 1
        job.seated(seat)
        self._welcome_rank(seat)

    def _take_place_of_another(self, job: LocalJob, seat: RankSeat) -> None:
        former = job.ranks.get(seat.local_rank)
        if former is None:
            return
        if former.pid == seat.pid:  # the same process on a new connection: nobody is lost
            self._ranks.pop(former.peer, None)
        else:
            self.gone(former.peer, "another process took its place")
        former.peer.close()

    def _job(self, name: str) -> LocalJob:
        job = self._jobs.get(name)
        if job is None:
            idle = [j.name for j in self._jobs.values() if not self._is_seated(j)]
            if len(idle) >= MOST_JOBS:
                del self._jobs[idle[0]]
            job = self._jobs[name] = LocalJob(name)
        return job

    def _is_seated(self, job: LocalJob) -> bool:
        return any(s.job is job for s in self._ranks.values()) or any(s.job is job for s in self._launchers.values())

    def _welcome_rank(self, seat: RankSeat) -> None:
        job = seat.job
        if job.stopped is not None:
            seat.peer.send(job.stopped)
            return
        if job.spec is not None and not job.end_heard and seat.came_in <= job.spec.number:
            self._offer(seat, job.spec)

    def _offer(self, seat: RankSeat, spec: GenerationSpec) -> None:
        if seat.tick is None or seat.tick.generation < spec.number:
            seat.peer.send(NewGeneration(spec=spec))
        member = spec.member(self._node, seat.local_rank)
        seat.assigned(spec.number, member.rank if member is not None else None)
        seat.heard_at = self._clock.monotonic()

    def heard(self, peer: Peer, message: ToAgent) -> None:
        """A frame after the Hello. Raises MalformedMessage for one that its sender may not send."""
        rank = self._ranks.get(peer)
        if rank is not None:
            rank.heard_at = self._clock.monotonic()
            rank.silence_told = None
            self._from_rank(rank, message)
        elif peer in self._launchers:
            self._from_launcher(self._launchers[peer], message)

    def _from_rank(self, seat: RankSeat, message: ToAgent) -> None:
        match message:
            case Tick():
                seat.ticked(message)
                self._rank_is_in(seat.job, message.generation)
            case Goodbye():
                seat.leaving = True
            case FindingRaised():
                self._outside.finding(message)
            case CollectiveFailed() | RankStalled() | Sealed() | Resumed() | UserError() | RankFinished():
                self._forward(seat, message)
            case _:
                raise MalformedMessage(f"a rank may not send {type(message).__name__}")

    def _forward(self, seat: RankSeat, report: RankReport) -> None:
        if report.job != seat.job.name:
            raise MalformedMessage(f"a rank of job {seat.job.name} may not speak for job {report.job}")
        if report.generation < seat.job.oldest or seat.job.stopped is not None or seat.condemned:
            self.counts["reports_stale"] += 1
            return
        self._rank_is_in(seat.job, report.generation)
        if isinstance(report, RankFinished):
            seat.finished_in = report.generation
        self.counts["reports"] += 1
        self._outside.report(report)

    def _rank_is_in(self, job: LocalJob, generation: int) -> None:
        """Past an announced boundary nothing counts that belongs to the generation before it."""
        if job.heard_of(generation) and job.spec is not None:
            self._moved_on(job)

    def _moved_on(self, job: LocalJob) -> None:
        """What belongs to older generations the vault refuses; and their versions may not be committed any more, since
        their slots are filled again: a controller that took over may know of no newer generation."""
        self._outside.configure_vault(job)
        self._outside.forget_seals(job.name, job.oldest)

    def _from_launcher(self, seat: LauncherSeat, message: ToAgent) -> None:
        match message:
            case LauncherJoined():
                self._joined(seat, message)
            case RankExited():
                self.losses.exited(seat.job, message)
            case Goodbye():
                seat.orderly, seat.detail = True, message.detail
            case FindingRaised():
                self._outside.finding(message)
            case _:
                raise MalformedMessage(f"a launcher may not send {type(message).__name__}")

    def _joined(self, seat: LauncherSeat, message: LauncherJoined) -> None:
        job = seat.job
        if message.job != job.name or message.spec.job != job.name:
            raise MalformedMessage(f"a launcher of job {job.name} may not join job {message.job}")
        if job.stopped is not None and message.launcher == job.launcher_incarnation:
            seat.peer.send(job.stopped)
            return
        if (end := job.end_heard) is not None and end.means(message.launcher):
            job.launcher_incarnation = message.launcher
            self._end(job, end)
            return
        if job.stopped is not None or job.end_heard is not None:  # the same name, a new run
            job = self._jobs[job.name] = seat.job = job.once_more()
        other = job.launcher
        if other is not None and other is not seat:
            other.peer.close()
        seat.offer = message
        job.launcher_joined(seat, message.launcher)
        self._outside.report(seat.offer_now(self._clock.wall(), self._outside.new_trace()))
        log.info("launcher joined", extra={"node": self._node, "job": job.name})

    def gone(self, peer: Peer, detail: str) -> None:
        """A connection ended: in order, or by the end of its process."""
        rank = self._ranks.pop(peer, None)
        if rank is not None:
            self.losses.rank_gone(rank, detail)
        launcher = self._launchers.pop(peer, None)
        if launcher is not None:
            self._launcher_gone(launcher, detail)
        seat = rank or launcher
        if seat is not None:
            self._forget_if_over(seat.job)

    def _forget_if_over(self, job: LocalJob) -> None:
        """A stopped job whose last process is gone needs no memory."""
        if (
            (job.stopped is not None or job.end_heard is not None)
            and self._jobs.get(job.name) is job
            and not self._is_seated(job)
        ):
            del self._jobs[job.name]

    def _launcher_gone(self, seat: LauncherSeat, detail: str) -> None:
        job = seat.job
        if job.launcher is not seat:
            return  # never joined, or another has taken its place
        assert seat.offer is not None
        job.launcher, job.launcher_gone = None, True
        orderly = seat.orderly or job.stopped is not None
        word = seat.detail or ("it said goodbye" if seat.orderly else detail)
        log.info("launcher left: %s", word, extra={"node": self._node, "job": job.name})
        self._outside.report(
            LauncherLeft(
                job=job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                launcher=seat.offer.launcher,
                orderly=orderly,
                detail=word,
            )
        )
        if job.stopped is None:
            for rank in job.ranks.values():
                rank.peer.send(LauncherLost(detail=word))

    # --- directives ----------------------------------------------------------------------------------------------

    def directives(self, bodies: list[NewGeneration | KillRank | StopJob | VersionNotice]) -> None:
        """What the controller asks, kills before all else: who is to be replaced must not hear what comes after."""
        for body in sorted(bodies, key=lambda b: not isinstance(b, KillRank)):
            match body:
                case KillRank():
                    self._kill(body)
                case NewGeneration():
                    self._new_generation(body.spec)
                case VersionNotice():
                    self._notice(body)
                case StopJob():
                    self._stop(body)

    def _new_generation(self, spec: GenerationSpec) -> None:
        job = self._job(spec.job)
        known = job.spec.number if job.spec is not None else 0
        if job.stopped is not None or spec.number < job.newest or spec.number <= known:
            self.counts["directives_stale"] += 1
            return
        job.told_of(spec)
        self._moved_on(job)  # before the ranks hear of it: they will ask the vault at once
        self.losses.tell_unplaced(job)
        for seat in job.ranks.values():
            if not seat.condemned and seat.came_in <= spec.number:
                self._offer(seat, spec)
        if job.launcher is not None:
            job.launcher.peer.send(NewGeneration(spec=spec))
        self.losses.tell_vacancies(job, "no process here will play this rank")

    def _kill(self, body: KillRank) -> None:
        job = self._jobs.get(body.job)
        seat = job.ranks.get(body.local_rank) if job is not None else None
        if job is not None and job.launcher is not None:
            job.launcher.peer.send(body)
        if seat is None or not seat.plays_until(body.generation):
            self.counts["directives_stale"] += 1
            return
        seat.condemned = f"killed on the controller's word: {body.reason}"
        seat.assigned(body.generation, body.rank)
        self.counts["ranks_killed"] += 1
        log.warning(
            "killing local rank %d (pid %d): %s",
            body.local_rank,
            seat.pid,
            body.reason,
            extra={"node": self._node, "job": body.job, "generation": body.generation, "trace": body.trace},
        )
        seat.peer.kill()

    def _notice(self, body: VersionNotice) -> None:
        job = self._jobs.get(body.job)
        if job is None or job.stopped is not None:
            return
        for seat in job.ranks.values():
            if not seat.condemned:
                seat.peer.send(body)

    def _stop(self, body: StopJob) -> None:
        job = self._jobs.get(body.job)
        self._outside.forget_in_vault(body.job)
        if job is None:
            return
        if job.launcher is None:  # its ranks say nothing of their launcher: it may be one that begins the job anew
            job.end_heard = body
            self._forget_if_over(job)
        elif body.means(job.launcher_incarnation):
            self._end(job, body)

    def _end(self, job: LocalJob, body: StopJob) -> None:
        job.stopped, job.end_heard = body, None
        for seat in job.ranks.values():
            seat.peer.send(body)
        for launcher in self._launchers.values():
            if launcher.job is job:
                launcher.peer.send(body)
        self._forget_if_over(job)

    def watch(self, own_lag_s: float) -> None:
        """Reports ranks that stopped ticking. ``own_lag_s``: how late this look is, which is not the ranks' silence."""
        self.silence.look(self._ranks.values(), own_lag_s)
