"""What the end of a rank's process means for its job.

Three rules settle the races between a death, its replacement and the next generation:

* A rank is lost *in the generation it was last offered*. One that the controller had killed is lost in the generation
  it was killed for: the next one was made for its replacement and must not begin with a loss.
* Without a replacement the loss is one of the newest generation, whatever the dead process had seen, because that
  generation waits for a rank that nobody will play. Should a yet newer one still count on it, it is told again.
* A process that takes the place of a rank lost in the newest generation is not offered that generation
  (``LocalJob.lost_in``): it could only join what is broken. It hears of the next.

An agent that begins anew knows of no generation, and of no rank that ended while there was no agent. The launcher's
word on such an end waits for the first generation, and counts as a loss of it unless that was made since.

A rank may also end after a new agent has started and before its launcher has joined that agent. The loss is then
reported without a replacement, so that the other nodes do not wait. The place counts as empty only until the launcher
joins: its offer of the node makes the controller open a generation with this place in it, and a second report of the
vacancy would take the node out of the job for good.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from everstep.clock import Clock
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import FromAgent, RankExited, RankHeartbeat
from everstep.wire.v1.training import AnyReport, GenerationSpec, LauncherJoined, RankLost, RankUnresponsive

# ---- local seats
# Who sits where on a node: one job, its launcher and its ranks, as plain records.

MAX_ENDED_PROCESSES = 256
"""Processes of a job whose end is remembered, so that a late word on one is not taken for another loss."""


class LocalConnection(Protocol):
    """A connected process. Compared by identity."""

    def send(self, message: FromAgent) -> None: ...
    def kill(self) -> None:
        """SIGKILL to the process that connected, and to no other that may have its number by now."""

    def close(self) -> None: ...
    def process_state(self) -> str:
        """The kernel's letter for the process (R, S, D, T, ...), empty where it is gone."""

    def __hash__(self) -> int: ...


class Timer(Protocol):
    """A call to come, as ``asyncio.TimerHandle`` is one."""

    def cancel(self) -> None: ...


class ConnectedLauncher:
    """A connected launcher; ``offer`` once it has joined."""

    def __init__(self, job: LocalJob, connection: LocalConnection) -> None:
        self.job = job
        self.connection = connection
        self.offer: LauncherJoined | None = None
        self.has_said_goodbye = False
        self.goodbye_detail = ""

    def build_offer(self, wall: float, trace: str = "") -> LauncherJoined:
        """The offer with today's date, and the newest generation that its ranks are in, or were told of."""
        assert self.offer is not None
        return msgspec.structs.replace(
            self.offer,
            at=wall,
            trace=self.offer.trace or trace,
            generation=max(self.offer.generation, self.job.newest_generation),
        )


class ConnectedRank:
    """A connected rank process.

    ``generation`` and ``rank``: what it was last offered, or ticked from; ``rank`` is None for a spare. ``came_in``:
    the first generation it may play. ``leaving``: it said goodbye. ``finished_in``: the generation in which its
    training function returned. ``condemned``: why it was killed. ``silence_told``: the generation in which its
    present silence was reported.
    """

    def __init__(
        self, job: LocalJob, connection: LocalConnection, local_rank: int, pid: int, last_seen_at: float
    ) -> None:
        self.job = job
        self.connection = connection
        self.local_rank = local_rank
        self.pid = pid
        self.last_seen_at = last_seen_at
        self.first_generation = 0
        self.generation: int | None = None
        self.rank: int | None = None
        self.last_tick: RankHeartbeat | None = None
        self.has_said_goodbye = False
        self.finished_generation: int | None = None
        self.kill_reason = ""
        self.silence_reported_generation: int | None = None

    def assign(self, generation: int, rank: int | None) -> None:
        self.generation, self.rank = generation, rank

    def record_tick(self, tick: RankHeartbeat) -> None:
        """Notes a sign of life; it also tells an agent that has just started which rank this is."""
        self.last_tick = tick
        if self.generation is None or tick.generation > self.generation:
            self.assign(tick.generation, tick.rank)

    @property
    def is_done(self) -> bool:
        """Whether its end is in order: it said so, or has nothing left to do in its generation."""
        return self.has_said_goodbye or (
            self.finished_generation is not None and self.finished_generation == self.generation
        )

    def is_member_until(self, generation: int) -> bool:
        """Whether this process, and not a later one in its place, plays in ``generation`` or an older one."""
        return (
            self.last_tick.generation <= generation
            if self.last_tick is not None
            else self.first_generation <= generation
        )


class RankLoss:
    """A rank's end that is told, or waits a moment for the launcher's word."""

    def __init__(self, process: ConnectedRank, *, lost_at: float, trace: str, detail: str) -> None:
        self.process = process
        self.lost_at = lost_at
        self.trace = trace
        self.detail = detail
        self.is_reported = False
        self.timer: Timer | None = None


class LocalJob:
    """One job on this node.

    ``newest``: the newest generation heard of, by directive or from a rank; an older directive is refused. ``oldest``:
    the oldest one whose ranks still count: behind ``newest`` while that is announced for a boundary. ``lost_in``: per
    local rank, the generation its last process was lost in. ``vacant``: local ranks that the launcher will not staff
    again. ``unattended``: local ranks whose process ended without a launcher; they are vacant until one joins.
    ``vacancy_told``: the generation in which a vacancy was last reported. ``exits``: words on processes whose
    connection has not ended yet. ``ends``: processes that are gone, with the loss each was (None where it was none).
    ``unplaced``: words on processes that ended before this agent knew any generation. ``end_heard``: the job's end,
    heard while no launcher was there; the one that joins next is meant by it, or begins the job anew.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: GenerationSpec | None = None
        self.newest_generation = 0
        self.oldest_generation = 0
        self.stop_directive: StopJob | None = None
        self.pending_stop: StopJob | None = None
        self.launcher: ConnectedLauncher | None = None
        self.launcher_incarnation = 0
        self.has_lost_launcher = False
        self.ranks: dict[int, ConnectedRank] = {}
        self.lost_generations: dict[int, int] = {}
        self.vacant_local_ranks: set[int] = set()
        self.ranks_without_launcher: set[int] = set()
        self.reported_vacancies: dict[int, int] = {}
        self.pending_exits: dict[int, RankExited] = {}
        self.ended_processes: OrderedDict[int, RankLoss | None] = OrderedDict()
        self.unassigned_exits: dict[int, RankExited] = {}

    def new_run(self) -> LocalJob:
        """A new run under this name: of the run before nothing holds. Ranks that wait for its launcher's word stay."""
        fresh = LocalJob(self.name)
        if self.stop_directive is None:
            fresh.ranks = self.ranks
            for seat in fresh.ranks.values():
                seat.job, seat.first_generation = fresh, 0
        return fresh

    def note_generation(self, generation: int) -> bool:
        """A rank is in ``generation``; returns whether those before it count no longer because of that."""
        before = self.oldest_generation
        self.newest_generation = max(self.newest_generation, generation)
        self.oldest_generation = max(self.oldest_generation, generation)
        return self.oldest_generation > before

    def set_next_generation(self, spec: GenerationSpec) -> None:
        """The controller says that ``spec`` follows: at once, or when its boundary is reached."""
        self.spec, self.newest_generation, self.pending_stop = spec, spec.number, None
        if spec.after_step is None:
            self.oldest_generation = spec.number

    def remember_ended(self, pid: int, loss: RankLoss | None) -> None:
        self.ended_processes[pid] = loss
        while len(self.ended_processes) > MAX_ENDED_PROCESSES:
            self.ended_processes.popitem(last=False)

    def mark_vacant(self, local_rank: int, *, by_launcher: bool) -> None:
        """Mark ``local_rank`` as vacant until a process says Hello for it.

        Args:
            local_rank: the place that is empty.
            by_launcher: whether the launcher said that it will not replace the process. Otherwise the place is vacant
                for want of a launcher, and the next one to join replaces the process unless it says that it will not.
        """
        if local_rank not in self.ranks:
            (self.vacant_local_ranks if by_launcher else self.ranks_without_launcher).add(local_rank)

    def add_rank(self, process: ConnectedRank) -> None:
        """Give ``seat`` its place: a process has said Hello for it."""
        self.ranks[process.local_rank] = process
        self.vacant_local_ranks.discard(process.local_rank)
        self.ranks_without_launcher.discard(process.local_rank)

    def set_launcher(self, launcher: ConnectedLauncher, incarnation: int) -> None:
        """Note the launcher. It replaces the processes that ended while there was none."""
        self.launcher, self.launcher_incarnation, self.has_lost_launcher = launcher, incarnation, False
        self.ranks_without_launcher.clear()

    def is_vacant(self, local_rank: int) -> bool:
        """Whether nobody plays it, and nobody is going to."""
        empty = (
            local_rank in self.vacant_local_ranks or local_rank in self.ranks_without_launcher or self.has_lost_launcher
        )
        return empty and local_rank not in self.ranks

    def newest_assignment(self, node: str, process: ConnectedRank) -> tuple[int | None, int | None]:
        """Generation and rank of the seat's place in the newest generation known."""
        if self.spec is None or (process.generation is not None and process.generation > self.spec.number):
            return process.generation, process.rank
        member = self.spec.member_at(node, process.local_rank)
        return self.spec.number, member.rank if member is not None else None


log = logging.getLogger(__name__)


class LossCallbacks(Protocol):
    """Where losses are reported, and what they need."""

    def report(self, report: AnyReport) -> None: ...
    def new_trace_id(self) -> str: ...
    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


class LossReporter:
    """Tells each loss of one node's ranks once.

    Args:
        exit_grace_s: how long a loss waits for the launcher's word on how the process ended.
    """

    def __init__(
        self, node: str, clock: Clock, callbacks: LossCallbacks, event_counts: Counter[str], exit_grace_s: float
    ) -> None:
        self._node = node
        self._clock = clock
        self._callbacks = callbacks
        self._event_counts = event_counts
        self._exit_grace_s = exit_grace_s

    def handle_disconnect(self, process: ConnectedRank, detail: str) -> None:
        """A rank's connection ended."""
        job = process.job
        if job.ranks.get(process.local_rank) is process:
            del job.ranks[process.local_rank]
        early = job.pending_exits.pop(process.pid, None)
        if process.is_done or job.stop_directive is not None:
            job.remember_ended(process.pid, None)
            return
        if process.generation is not None:
            job.lost_generations[process.local_rank] = process.generation
        loss = RankLoss(
            process,
            lost_at=self._clock.wall(),
            trace=self._callbacks.new_trace_id(),
            detail=process.kill_reason or detail,
        )
        job.remember_ended(process.pid, loss)
        self._log(loss)
        if early is not None:
            self._report_loss(loss, early)
        else:
            loss.timer = self._callbacks.call_later(self._exit_grace_s, lambda: self._report_loss(loss, None))

    def handle_exit(self, job: LocalJob, exited: RankExited) -> None:
        """The launcher's word on a process that ended: before, with or after the end of its connection."""
        present = job.ranks.get(exited.local_rank)
        if present is not None and present.pid == exited.pid:
            job.pending_exits[exited.pid] = exited  # the end of its connection is on the way
            return
        known = exited.pid in job.ended_processes
        loss = job.ended_processes.get(exited.pid)
        if loss is not None and not loss.is_reported:
            self._report_loss(loss, exited)
        elif known and loss is None:
            return  # it ended in order
        elif not exited.has_replacement:
            job.mark_vacant(exited.local_rank, by_launcher=True)
            self.report_vacancies(job, describe_exit(exited))
        elif not known:
            job.remember_ended(exited.pid, None)
            self._report_unseen_exit(job, exited)

    def report_unassigned_exits(self, job: LocalJob) -> None:
        """Reports what ended before a generation was known, now that one is."""
        unplaced, job.unassigned_exits = job.unassigned_exits, {}
        for exited in unplaced.values():
            self._report_unseen_exit(job, exited)

    def report_vacancies(self, job: LocalJob, detail: str) -> None:
        """Reports the places that the newest generation has here and nobody will take, each once."""
        if job.spec is None or job.stop_directive is not None:
            return
        for member in job.spec.members_on(self._node):
            if job.is_vacant(member.local_rank):
                self._report_vacancy(job, job.spec.number, member.rank, member.local_rank, detail)

    def _report_vacancy(self, job: LocalJob, generation: int, rank: int, local_rank: int, detail: str) -> None:
        if job.reported_vacancies.get(local_rank) == generation:
            return
        job.reported_vacancies[local_rank] = job.lost_generations[local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._callbacks.new_trace_id(),
                generation=generation,
                rank=rank,
                local_rank=local_rank,
                detail=detail,
                has_replacement=False,
            )
        )

    def _report_loss(self, loss: RankLoss, exited: RankExited | None) -> None:
        """Reports a loss, with the launcher's word on it where that came in time."""
        if loss.is_reported:
            return
        if exited is None and loss.process.generation is None and loss.process.job.spec is None:
            return  # the launcher's word, when it comes, says what it was lost in
        loss.is_reported = True
        if loss.timer is not None:
            loss.timer.cancel()
        seat, job = loss.process, loss.process.job
        replacement = exited.has_replacement if exited is not None else job.launcher is not None
        generation, rank = seat.generation, seat.rank
        if not replacement:
            job.mark_vacant(seat.local_rank, by_launcher=exited is not None)
            generation, rank = job.newest_assignment(self._node, seat)
        if generation is None and job.spec is None and exited is not None:
            self._report_unseen_exit(job, exited)
        if generation is None or rank is None or job.stop_directive is not None:
            return  # a spare is in nobody's way
        if not replacement:
            job.reported_vacancies[seat.local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=loss.lost_at,
                trace=loss.trace,
                generation=generation,
                rank=rank,
                local_rank=seat.local_rank,
                detail=loss.detail if exited is None else f"{loss.detail}; {describe_exit(exited)}",
                exit_code=exited.exit_code if exited is not None else None,
                signal=exited.signal if exited is not None else None,
                has_replacement=replacement,
            )
        )

    def _report_unseen_exit(self, job: LocalJob, exited: RankExited) -> None:
        """A rank ended before it ever said Hello, or before it said it to this agent; another takes its place."""
        if job.stop_directive is not None:
            return
        if job.spec is None:
            job.unassigned_exits[exited.local_rank] = exited
            return
        member = job.spec.member_at(self._node, exited.local_rank)
        if member is None or (exited.generation is not None and exited.generation < job.oldest_generation):
            return  # the other one may play: it was not in there
        job.lost_generations[exited.local_rank] = job.spec.number
        if exited.local_rank in job.ranks:
            job.ranks[exited.local_rank].first_generation = job.spec.number + 1
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._callbacks.new_trace_id(),
                generation=job.spec.number,
                rank=member.rank,
                local_rank=exited.local_rank,
                detail=f"{describe_exit(exited)} before this agent heard of it",
                exit_code=exited.exit_code,
                signal=exited.signal,
            )
        )

    def _report(self, lost: RankLost) -> None:
        self._event_counts["ranks_lost"] += 1
        self._callbacks.report(lost)

    def _log(self, loss: RankLoss) -> None:
        log.warning(
            "local rank %d (pid %d) is gone: %s",
            loss.process.local_rank,
            loss.process.pid,
            loss.detail,
            extra={
                "node": self._node,
                "job": loss.process.job.name,
                "generation": loss.process.generation,
                "trace": loss.trace,
            },
        )


def describe_exit(exited: RankExited) -> str:
    """How a process ended, in words."""
    if exited.signal is not None:
        return f"ended by signal {exited.signal}"
    return f"ended with status {exited.exit_code}"


# ---- silence
# When a rank's silence is worth a report.
#
# A rank's signal thread ticks ten times a second. Silence has three causes: the process was stopped (SIGSTOP, a cgroup
# freezer), its thread does not get Python's lock (a long call in C that holds it, which ends by itself), or the whole
# machine is starved, this agent with it. The first shows in the kernel's state letter and is told soon; the second is
# given longer; the third is seen by the lateness of our own look and is not held against the rank.

STOPPED_STATE = "T"
"""Stopped by a signal. A tracer's stop ("t") is short when a profiler samples, and is treated as mere silence."""


class SilenceMonitor:
    """Looks at the ranks of one node; reports each silence once in each generation.

    Args:
        stopped_after_s: after this long without a word, look at the process; report it if it is stopped.
        unresponsive_after_s: after this long report it whatever its state.
    """

    def __init__(
        self,
        clock: Clock,
        callbacks: LossCallbacks,
        event_counts: Counter[str],
        stopped_after_s: float,
        unresponsive_after_s: float,
    ) -> None:
        self._clock = clock
        self._callbacks = callbacks
        self._event_counts = event_counts
        self._stopped_after_s = stopped_after_s
        self._unresponsive_after_s = unresponsive_after_s

    def check(self, processes: Iterable[ConnectedRank], loop_lag_s: float) -> None:
        """One look at all ranks. ``own_lag_s``: how much later it comes than it should have."""
        now = self._clock.monotonic()
        for seat in processes:
            seat.last_seen_at = min(now, seat.last_seen_at + loop_lag_s)
            silent_s = now - seat.last_seen_at
            if silent_s >= self._stopped_after_s and self._is_watched(seat):
                self._report_if_silent(seat, silent_s)

    def _is_watched(self, process: ConnectedRank) -> bool:
        """Ranks of the roster that have ticked, are expected to, and were not reported yet."""
        expected = (
            process.last_tick is not None
            and not process.kill_reason
            and not process.is_done
            and process.job.stop_directive is None
        )
        return expected and process.rank is not None and process.silence_reported_generation != process.generation

    def _report_if_silent(self, process: ConnectedRank, silent_s: float) -> None:
        state = process.connection.process_state()
        if state != STOPPED_STATE and silent_s < self._unresponsive_after_s:
            return
        assert process.generation is not None
        assert process.rank is not None
        process.silence_reported_generation = process.generation
        self._event_counts["ranks_unresponsive"] += 1
        self._callbacks.report(
            RankUnresponsive(
                job=process.job.name,
                at=self._clock.wall(),
                trace=self._callbacks.new_trace_id(),
                generation=process.generation,
                rank=process.rank,
                local_rank=process.local_rank,
                unresponsive_s=round(silent_s, 3),
                process_state=state,
            )
        )
