"""Decide what the end of a rank's process means for its job.

Three rules settle the races between a death, its replacement and the next generation:

* A rank is lost *in the generation it was last offered*. A rank that the controller had killed is lost in the
  generation it was killed for: the next one was made for its replacement and must not begin with a loss.
* Without a replacement the loss belongs to the newest generation, whatever the dead process had seen, because that
  generation waits for a rank that no process will take. If a still newer generation counts on it, the loss is reported
  again.
* A process that replaces a rank lost in the newest generation (``LocalJob.lost_generations``) is not offered that
  generation, because it could only join a broken group. It receives the next one.

A restarted agent knows no generation, and no rank that ended while no agent ran. The launcher's report of such an end
waits for the first generation and counts as a loss of it, unless that generation was made after the end.

A rank may also end after a new agent has started and before its launcher has joined that agent. The loss is then
reported without a replacement, so that the other nodes do not wait. The place counts as empty only until the launcher
joins: its offer of the node makes the controller open a generation with this place in it, and a second report of the
vacancy would take the node out of the job for good.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Protocol

import msgspec

from everstep.clock import Clock
from everstep.host.process_activity import ActivityWindow, ProcessSample
from everstep.vocabulary import RankActivity
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import FromAgent, RankExited, RankHeartbeat
from everstep.wire.v1.training import AnyReport, GenerationSpec, LauncherJoined, RankLost, RankUnresponsive
from everstep_agent.jobs.oom_kills import OomKills

# Connected processes of one job: its launcher and its ranks.

MAX_ENDED_PROCESSES = 256
"""Number of ended processes remembered per job, so that a late exit report is not taken for another loss."""


WINDOW_MIN_S, WINDOW_MAX_S = 0.5, 2.0
"""Seconds over which a silent process is judged: at least, and at most."""


def _new_window() -> ActivityWindow:
    return ActivityWindow(min_s=WINDOW_MIN_S, max_s=WINDOW_MAX_S)


class LocalConnection(Protocol):
    """A connected process. Compared by identity."""

    def send(self, message: FromAgent) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def handle_death(self, end: ProcessEnd) -> None:
        """Read what the process sent before it ended, then end the connection: a process that it forked may hold it."""

    def process_state(self) -> str:
        """Return the kernel's state letter for the process (R, S, D, T, ...), or "" if it is gone."""

    def sample(self, at: float) -> ProcessSample | None:
        """Return what the kernel says of the process at the monotonic time ``at``; None if it is gone."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, as far as the kernel tells; both None if it does not."""

    exit_code: int | None = None
    signal: int | None = None

    @property
    def is_known(self) -> bool:
        return self.exit_code is not None or self.signal is not None


class Timer(Protocol):
    """A scheduled callback, such as ``asyncio.TimerHandle``."""

    def cancel(self) -> None: ...


@dataclass(eq=False)
class ConnectedLauncher:
    """A connected launcher."""

    job: LocalJob
    connection: LocalConnection
    offer: LauncherJoined | None = None  # set once it has joined
    has_said_goodbye: bool = False
    goodbye_detail: str = ""

    def build_offer(self, wall: float, trace: str = "") -> LauncherJoined:
        """Return the offer with the current time and the newest generation its ranks are in or were sent."""
        assert self.offer is not None
        return msgspec.structs.replace(
            self.offer,
            at=wall,
            trace=self.offer.trace or trace,
            generation=max(self.offer.generation, self.job.newest_generation),
        )


@dataclass(eq=False)
class ConnectedRank:
    """A connected rank process."""

    job: LocalJob
    connection: LocalConnection
    local_rank: int
    pid: int
    last_seen_at: float
    first_generation: int = 0  # the first generation this process may play
    generation: int | None = None  # last offered or ticked from
    rank: int | None = None  # in that generation; None for a spare
    last_tick: RankHeartbeat | None = None
    has_said_goodbye: bool = False
    finished_generation: int | None = None  # in which its training function returned
    kill_reason: str = ""
    silence_reported: tuple[int, RankActivity] | None = None  # generation and activity of the last report of a silence
    silence_window: ActivityWindow = field(default_factory=_new_window)
    sampled_at: float = 0.0

    def record_tick(self, tick: RankHeartbeat) -> None:
        """Record a sign of life; for a restarted agent the tick also says which rank this is."""
        self.last_tick = tick
        if self.generation is None or tick.generation > self.generation:
            self.generation, self.rank = tick.generation, tick.rank

    @property
    def is_done(self) -> bool:
        """Whether the process may end without a loss: it said goodbye, or its work in this generation is finished."""
        finished = self.finished_generation
        return self.has_said_goodbye or (finished is not None and finished == self.generation)

    def is_member_until(self, generation: int) -> bool:
        """Return whether this process, and not a later one in its place, plays in ``generation`` or an older one."""
        first = self.first_generation if self.last_tick is None else self.last_tick.generation
        return first <= generation


@dataclass(eq=False)
class RankLoss:
    """A rank's end that was reported, or that briefly waits for the launcher's exit report."""

    process: ConnectedRank
    lost_at: float
    trace: str
    detail: str
    end: ProcessEnd | None = None  # as the kernel told it; the launcher's report comes later or not at all
    is_reported: bool = False
    timer: Timer | None = None


@dataclass(eq=False)
class LocalJob:
    """One job on this node. Dictionaries are by local rank, unless they say otherwise."""

    name: str
    spec: GenerationSpec | None = None
    newest_generation: int = 0  # known by directive or from a rank; older directives are refused
    oldest_generation: int = 0  # whose ranks still count; older than the newest until its announced boundary
    stop_directive: StopJob | None = None
    pending_stop: StopJob | None = None  # came without a launcher; the next to join ends by it, or starts a new run
    launcher: ConnectedLauncher | None = None
    launcher_incarnation: int = 0
    has_lost_launcher: bool = False
    ranks: dict[int, ConnectedRank] = field(default_factory=dict)
    lost_generations: dict[int, int] = field(default_factory=dict)  # the generation its last process was lost in
    vacant_local_ranks: set[int] = field(default_factory=set)  # which the launcher will not staff again
    ranks_without_launcher: set[int] = field(default_factory=set)  # ended without a launcher; vacant until one joins
    reported_vacancies: dict[int, int] = field(default_factory=dict)  # the generation of the last report
    pending_exits: dict[int, RankExited] = field(default_factory=dict)  # by pid; the connection has not ended yet
    ended_processes: OrderedDict[int, RankLoss | None] = field(default_factory=OrderedDict)  # by pid; None: orderly end
    unassigned_exits: dict[int, RankExited] = field(default_factory=dict)  # from before any generation was known

    def new_run(self) -> LocalJob:
        """Return a fresh job for a new run under this name. Connected ranks stay unless the job was stopped."""
        fresh = LocalJob(self.name)
        if self.stop_directive is None:
            fresh.ranks = self.ranks
            for process in fresh.ranks.values():
                process.job, process.first_generation = fresh, 0
        return fresh

    def note_generation(self, generation: int) -> bool:
        """Note a rank's generation. Returns whether older generations stopped counting."""
        before = self.oldest_generation
        self.newest_generation = max(self.newest_generation, generation)
        self.oldest_generation = max(self.oldest_generation, generation)
        return self.oldest_generation > before

    def set_next_generation(self, spec: GenerationSpec) -> None:
        """Note that ``spec`` follows, at once or when its boundary is reached."""
        self.spec, self.newest_generation, self.pending_stop = spec, spec.number, None
        if spec.after_step is None:
            self.oldest_generation = spec.number

    def remember_ended(self, pid: int, loss: RankLoss | None) -> None:
        self.ended_processes[pid] = loss
        while len(self.ended_processes) > MAX_ENDED_PROCESSES:
            self.ended_processes.popitem(last=False)

    def mark_vacant(self, local_rank: int, *, by_launcher: bool) -> None:
        """Mark ``local_rank`` as vacant until a process says Hello for it. If not ``by_launcher``, it is vacant only
        for lack of a launcher: the next one to join replaces the process."""
        if local_rank not in self.ranks:
            (self.vacant_local_ranks if by_launcher else self.ranks_without_launcher).add(local_rank)

    def add_rank(self, process: ConnectedRank) -> None:
        """Seat a process that has said Hello."""
        self.ranks[process.local_rank] = process
        self.vacant_local_ranks.discard(process.local_rank)
        self.ranks_without_launcher.discard(process.local_rank)

    def set_launcher(self, launcher: ConnectedLauncher, incarnation: int) -> None:
        """Note the launcher, which replaces the processes that ended while there was none."""
        self.launcher, self.launcher_incarnation, self.has_lost_launcher = launcher, incarnation, False
        self.ranks_without_launcher.clear()

    def is_vacant(self, local_rank: int) -> bool:
        """Return whether no process plays ``local_rank`` and none will."""
        vacant = local_rank in self.vacant_local_ranks | self.ranks_without_launcher or self.has_lost_launcher
        return vacant and local_rank not in self.ranks

    def newest_assignment(self, node: str, process: ConnectedRank) -> tuple[int | None, int | None]:
        """Return the generation and rank of the process in the newest generation known."""
        if self.spec is None or (process.generation is not None and process.generation > self.spec.number):
            return process.generation, process.rank
        member = self.spec.member_at(node, process.local_rank)
        return self.spec.number, member.rank if member is not None else None


log = logging.getLogger(__name__)


class LossCallbacks(Protocol):
    """Receive reports of losses, and supply trace ids and timers."""

    def report(self, report: AnyReport) -> None: ...
    def new_trace_id(self) -> str: ...
    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


@dataclass(eq=False)
class LossReporter:
    """Report each loss among one node's ranks once."""

    _node: str
    _clock: Clock
    _callbacks: LossCallbacks
    _event_counts: Counter[str]
    _exit_grace_s: float  # time that a loss waits for the launcher's report of how the process ended
    _oom_kills: OomKills

    def handle_disconnect(self, process: ConnectedRank, detail: str, end: ProcessEnd | None = None) -> None:
        """Handle the end of a rank's connection, or its death; ``end`` is how the process ended, if that is known."""
        job = process.job
        if job.ranks.get(process.local_rank) is process:
            del job.ranks[process.local_rank]
        early = job.pending_exits.pop(process.pid, None)
        if process.is_done or job.stop_directive is not None:
            job.remember_ended(process.pid, None)
            return
        if process.generation is not None:
            job.lost_generations[process.local_rank] = process.generation
        reason, trace = process.kill_reason or detail, self._callbacks.new_trace_id()
        loss = RankLoss(process, self._clock.wall(), trace, reason, end if end is not None and end.is_known else None)
        job.remember_ended(process.pid, loss)
        context = {"node": self._node, "job": job.name, "generation": process.generation, "trace": loss.trace}
        log.warning("local rank %d (pid %d) ended: %s", process.local_rank, process.pid, loss.detail, extra=context)
        if early is not None:
            self._report_loss(loss, early)
        else:
            loss.timer = self._callbacks.call_later(self._exit_grace_s, lambda: self._report_loss(loss, None))

    def handle_exit(self, job: LocalJob, exited: RankExited) -> None:
        """Handle the launcher's exit report, which may arrive before, with or after the end of the connection."""
        present = job.ranks.get(exited.local_rank)
        if present is not None and present.pid == exited.pid:
            job.pending_exits[exited.pid] = exited
            present.connection.handle_death(ProcessEnd(exited.exit_code, exited.signal))
            return
        known = exited.pid in job.ended_processes
        loss = job.ended_processes.get(exited.pid)
        if loss is not None and not loss.is_reported:
            self._report_loss(loss, exited)
        elif known and loss is None:
            return  # the end was orderly
        elif not exited.has_replacement:
            job.mark_vacant(exited.local_rank, by_launcher=True)
            self.report_vacancies(job, describe_exit(exited))
        elif not known:
            job.remember_ended(exited.pid, None)
            self._report_unseen_exit(job, exited)

    def report_unassigned_exits(self, job: LocalJob) -> None:
        """Report exits from before the first known generation, now that one is known."""
        unplaced, job.unassigned_exits = job.unassigned_exits, {}
        for exited in unplaced.values():
            self._report_unseen_exit(job, exited)

    def report_vacancies(self, job: LocalJob, detail: str) -> None:
        """Report each place of the newest generation here that no process will take, once."""
        if job.spec is None or job.stop_directive is not None:
            return
        generation = job.spec.number
        for member in job.spec.members_on(self._node):
            place = member.local_rank
            if job.is_vacant(place) and job.reported_vacancies.get(place) != generation:
                job.reported_vacancies[place] = job.lost_generations[place] = generation
                self._report(job, generation, member.rank, place, detail, has_replacement=False)

    def _report_loss(self, loss: RankLoss, exited: RankExited | None) -> None:
        """Report a loss, with the launcher's exit report if one came in time."""
        if loss.is_reported:
            return
        if exited is None and loss.process.generation is None and loss.process.job.spec is None:
            return  # the launcher's exit report will assign it to a generation
        loss.is_reported = True
        if loss.timer is not None:
            loss.timer.cancel()
        process, job = loss.process, loss.process.job
        replacement = exited.has_replacement if exited is not None else job.launcher is not None
        generation, rank = process.generation, process.rank
        if not replacement:
            job.mark_vacant(process.local_rank, by_launcher=exited is not None)
            generation, rank = job.newest_assignment(self._node, process)
        if generation is None and job.spec is None and exited is not None:
            self._report_unseen_exit(job, exited)
        if generation is None or rank is None or job.stop_directive is not None:
            return  # losing a spare affects no generation
        if not replacement:
            job.reported_vacancies[process.local_rank] = generation
        end = exited or loss.end
        detail = loss.detail if end is None else f"{loss.detail}; {describe_exit(end)}"
        is_killed = end is not None and end.signal == SIGKILL and not process.kill_reason
        memory = self._oom_kills.explain(process.pid) if is_killed else ""
        self._report(
            job, generation, rank, process.local_rank, detail, end, loss, has_replacement=replacement, memory=memory
        )

    def _report_unseen_exit(self, job: LocalJob, exited: RankExited) -> None:
        """Report a replaced rank that ended before its Hello reached this agent."""
        if job.stop_directive is not None:
            return
        if job.spec is None:
            job.unassigned_exits[exited.local_rank] = exited
            return
        member = job.spec.member_at(self._node, exited.local_rank)
        if member is None or (exited.generation is not None and exited.generation < job.oldest_generation):
            return  # the replacement may play, because the ended process was not in this generation
        job.lost_generations[exited.local_rank] = job.spec.number
        if exited.local_rank in job.ranks:
            job.ranks[exited.local_rank].first_generation = job.spec.number + 1
        detail = f"{describe_exit(exited)} before it connected to this agent"
        self._report(job, job.spec.number, member.rank, exited.local_rank, detail, exited)

    def _report(
        self,
        job: LocalJob,
        generation: int,
        rank: int,
        local_rank: int,
        detail: str,
        end: RankExited | ProcessEnd | None = None,
        loss: RankLoss | None = None,
        *,
        has_replacement: bool = True,
        memory: str = "",
    ) -> None:
        self._event_counts["ranks_lost"] += 1
        self._callbacks.report(
            RankLost(
                job=job.name,
                at=self._clock.wall() if loss is None else loss.lost_at,
                trace=self._callbacks.new_trace_id() if loss is None else loss.trace,
                generation=generation,
                rank=rank,
                local_rank=local_rank,
                detail=detail,
                exit_code=None if end is None else end.exit_code,
                signal=None if end is None else end.signal,
                has_replacement=has_replacement,
                out_of_memory=memory,
            )
        )


def describe_exit(end: RankExited | ProcessEnd) -> str:
    return f"ended with status {end.exit_code}" if end.signal is None else f"ended by signal {end.signal}"


# Silence of ranks.
#
# A rank's signal thread ticks several times a second. Silence has four causes. The process was stopped (SIGSTOP, a
# cgroup freezer): the kernel's state letter shows it, and it is reported soon. Its thread does not get Python's lock (a
# long call in C that holds it), or the process gets no processor: then it works by the kernel's counters, and the
# controller leaves it alone. It stands still: the controller judges it by what the other ranks do. Or the whole machine
# is starved, this agent included: the lateness of our own check does not count as the rank's silence.

STOPPED_STATE = "T"
"""Stopped by a signal. A tracer's stop ("t") is short when a profiler samples, and long for a person who debugs."""
SAMPLE_S = 0.2
"""Seconds between two samples of a silent process."""


@dataclass(eq=False)
class SilenceMonitor:
    """Check the ranks of one node; report each silence, each change of its kind, and its end."""

    _clock: Clock
    _callbacks: LossCallbacks
    _event_counts: Counter[str]
    _stopped_after_s: float
    _unresponsive_after_s: float

    def next_check_s(self, processes: Iterable[ConnectedRank]) -> float:
        """Return the seconds until the first of these ranks may have been silent for too long, if it sends nothing;
        negative if one has been."""
        seen = min((process.last_seen_at for process in processes), default=float("inf"))
        return seen + self._stopped_after_s - self._clock.monotonic()

    def check(self, processes: Iterable[ConnectedRank], loop_lag_s: float) -> None:
        """Check all ranks once. ``loop_lag_s`` is how many seconds late this check runs."""
        now = self._clock.monotonic()
        for process in processes:
            process.last_seen_at = min(now, process.last_seen_at + loop_lag_s)
            silent_s = now - process.last_seen_at
            if silent_s >= self._stopped_after_s and self._is_watched(process):
                self._judge(process, silent_s, now)

    def _judge(self, process: ConnectedRank, silent_s: float, now: float) -> None:
        state = process.connection.process_state()
        if state == STOPPED_STATE:
            self._report(process, silent_s, RankActivity.STOPPED, state, "its process is stopped")
            return
        if process.last_tick is None:
            return  # no tick is expected of it yet
        if now - process.sampled_at < SAMPLE_S:
            return
        process.sampled_at = now
        if (sample := process.connection.sample(now)) is None:
            return  # its connection ends soon
        process.silence_window.add(sample)
        if silent_s < self._unresponsive_after_s or not process.silence_window.is_filled:
            return
        if work := process.silence_window.work():
            doing = f"{work}, and its reports get no turn"
            self._report(process, silent_s, RankActivity.WORKING, state, doing)
        else:
            self._report(process, silent_s, RankActivity.STILL, state, "uses no processor and does no I/O")

    def end(self, process: ConnectedRank) -> None:
        """Handle a message of a rank: a reported silence is over."""
        silent_s, process.last_seen_at = self._clock.monotonic() - process.last_seen_at, self._clock.monotonic()
        process.silence_window.clear()
        if process.silence_reported is None:
            return
        generation, activity = process.silence_reported
        if activity is not RankActivity.STOPPED and generation == process.generation:
            self._report(process, silent_s, RankActivity.MOVING, "", "")
        process.silence_reported = None

    def _is_watched(self, process: ConnectedRank) -> bool:
        """Return whether the rank is a member of a generation whose work goes on."""
        is_over = process.kill_reason or process.is_done or process.job.stop_directive is not None
        return process.rank is not None and not is_over

    def _report(self, process: ConnectedRank, silent_s: float, activity: RankActivity, state: str, doing: str) -> None:
        assert process.generation is not None
        assert process.rank is not None
        if process.silence_reported == (process.generation, activity):
            return
        process.silence_reported = (process.generation, activity)
        self._event_counts["ranks_unresponsive"] += activity is not RankActivity.MOVING
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
                activity=activity,
                doing=doing,
            )
        )
