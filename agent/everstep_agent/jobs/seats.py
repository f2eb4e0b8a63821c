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
from everstep.wire.v1.local import FromAgent, RankExited, Tick
from everstep.wire.v1.training import AnyReport, GenerationSpec, LauncherJoined, RankLost, RankUnresponsive

# ---- local seats
# Who sits where on a node: one job, its launcher and its ranks, as plain records.

REMEMBERED_ENDS = 256
"""Processes of a job whose end is remembered, so that a late word on one is not taken for another loss."""


class Peer(Protocol):
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


class LauncherSeat:
    """A connected launcher; ``offer`` once it has joined."""

    def __init__(self, job: LocalJob, peer: Peer) -> None:
        self.job = job
        self.peer = peer
        self.offer: LauncherJoined | None = None
        self.orderly = False
        self.detail = ""

    def offer_now(self, wall: float, trace: str = "") -> LauncherJoined:
        """The offer with today's date, and the newest generation that its ranks are in, or were told of."""
        assert self.offer is not None
        return msgspec.structs.replace(
            self.offer,
            at=wall,
            trace=self.offer.trace or trace,
            generation=max(self.offer.generation, self.job.newest),
        )


class RankSeat:
    """A connected rank process.

    ``generation`` and ``rank``: what it was last offered, or ticked from; ``rank`` is None for a spare. ``came_in``:
    the first generation it may play. ``leaving``: it said goodbye. ``finished_in``: the generation in which its
    training function returned. ``condemned``: why it was killed. ``silence_told``: the generation in which its
    present silence was reported.
    """

    def __init__(self, job: LocalJob, peer: Peer, local_rank: int, pid: int, heard_at: float) -> None:
        self.job = job
        self.peer = peer
        self.local_rank = local_rank
        self.pid = pid
        self.heard_at = heard_at
        self.came_in = 0
        self.generation: int | None = None
        self.rank: int | None = None
        self.tick: Tick | None = None
        self.leaving = False
        self.finished_in: int | None = None
        self.condemned = ""
        self.silence_told: int | None = None

    def assigned(self, generation: int, rank: int | None) -> None:
        self.generation, self.rank = generation, rank

    def ticked(self, tick: Tick) -> None:
        """Notes a sign of life; it also tells an agent that has just started which rank this is."""
        self.tick = tick
        if self.generation is None or tick.generation > self.generation:
            self.assigned(tick.generation, tick.rank)

    @property
    def is_done(self) -> bool:
        """Whether its end is in order: it said so, or has nothing left to do in its generation."""
        return self.leaving or (self.finished_in is not None and self.finished_in == self.generation)

    def plays_until(self, generation: int) -> bool:
        """Whether this process, and not a later one in its place, plays in ``generation`` or an older one."""
        return self.tick.generation <= generation if self.tick is not None else self.came_in <= generation


class Loss:
    """A rank's end that is told, or waits a moment for the launcher's word."""

    def __init__(self, seat: RankSeat, *, at: float, trace: str, detail: str) -> None:
        self.seat = seat
        self.at = at
        self.trace = trace
        self.detail = detail
        self.told = False
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
        self.newest = 0
        self.oldest = 0
        self.stopped: StopJob | None = None
        self.end_heard: StopJob | None = None
        self.launcher: LauncherSeat | None = None
        self.launcher_incarnation = 0
        self.launcher_gone = False
        self.ranks: dict[int, RankSeat] = {}
        self.lost_in: dict[int, int] = {}
        self.vacant: set[int] = set()
        self.unattended: set[int] = set()
        self.vacancy_told: dict[int, int] = {}
        self.exits: dict[int, RankExited] = {}
        self.ends: OrderedDict[int, Loss | None] = OrderedDict()
        self.unplaced: dict[int, RankExited] = {}

    def once_more(self) -> LocalJob:
        """A new run under this name: of the run before nothing holds. Ranks that wait for its launcher's word stay."""
        fresh = LocalJob(self.name)
        if self.stopped is None:
            fresh.ranks = self.ranks
            for seat in fresh.ranks.values():
                seat.job, seat.came_in = fresh, 0
        return fresh

    def heard_of(self, generation: int) -> bool:
        """A rank is in ``generation``; returns whether those before it count no longer because of that."""
        before = self.oldest
        self.newest = max(self.newest, generation)
        self.oldest = max(self.oldest, generation)
        return self.oldest > before

    def told_of(self, spec: GenerationSpec) -> None:
        """The controller says that ``spec`` follows: at once, or when its boundary is reached."""
        self.spec, self.newest, self.end_heard = spec, spec.number, None
        if spec.after_step is None:
            self.oldest = spec.number

    def remember_end(self, pid: int, loss: Loss | None) -> None:
        self.ends[pid] = loss
        while len(self.ends) > REMEMBERED_ENDS:
            self.ends.popitem(last=False)

    def vacate(self, local_rank: int, *, by_launcher: bool) -> None:
        """Mark ``local_rank`` as vacant until a process says Hello for it.

        Args:
            local_rank: the place that is empty.
            by_launcher: whether the launcher said that it will not replace the process. Otherwise the place is vacant
                for want of a launcher, and the next one to join replaces the process unless it says that it will not.
        """
        if local_rank not in self.ranks:
            (self.vacant if by_launcher else self.unattended).add(local_rank)

    def seated(self, seat: RankSeat) -> None:
        """Give ``seat`` its place: a process has said Hello for it."""
        self.ranks[seat.local_rank] = seat
        self.vacant.discard(seat.local_rank)
        self.unattended.discard(seat.local_rank)

    def launcher_joined(self, launcher: LauncherSeat, incarnation: int) -> None:
        """Note the launcher. It replaces the processes that ended while there was none."""
        self.launcher, self.launcher_incarnation, self.launcher_gone = launcher, incarnation, False
        self.unattended.clear()

    def is_vacant(self, local_rank: int) -> bool:
        """Whether nobody plays it, and nobody is going to."""
        empty = local_rank in self.vacant or local_rank in self.unattended or self.launcher_gone
        return empty and local_rank not in self.ranks

    def newest_place(self, node: str, seat: RankSeat) -> tuple[int | None, int | None]:
        """Generation and rank of the seat's place in the newest generation known."""
        if self.spec is None or (seat.generation is not None and seat.generation > self.spec.number):
            return seat.generation, seat.rank
        member = self.spec.member(node, seat.local_rank)
        return self.spec.number, member.rank if member is not None else None


log = logging.getLogger(__name__)


class LossOutside(Protocol):
    """Where losses are reported, and what they need."""

    def report(self, report: AnyReport) -> None: ...
    def new_trace(self) -> str: ...
    def later(self, delay_s: float, call: Callable[[], None]) -> Timer: ...


class Losses:
    """Tells each loss of one node's ranks once.

    Args:
        exit_grace_s: how long a loss waits for the launcher's word on how the process ended.
    """

    def __init__(
        self, node: str, clock: Clock, outside: LossOutside, counts: Counter[str], exit_grace_s: float
    ) -> None:
        self._node = node
        self._clock = clock
        self._outside = outside
        self._counts = counts
        self._exit_grace_s = exit_grace_s

    def rank_gone(self, seat: RankSeat, detail: str) -> None:
        """A rank's connection ended."""
        job = seat.job
        if job.ranks.get(seat.local_rank) is seat:
            del job.ranks[seat.local_rank]
        early = job.exits.pop(seat.pid, None)
        if seat.is_done or job.stopped is not None:
            job.remember_end(seat.pid, None)
            return
        if seat.generation is not None:
            job.lost_in[seat.local_rank] = seat.generation
        loss = Loss(seat, at=self._clock.wall(), trace=self._outside.new_trace(), detail=seat.condemned or detail)
        job.remember_end(seat.pid, loss)
        self._log(loss)
        if early is not None:
            self._tell(loss, early)
        else:
            loss.timer = self._outside.later(self._exit_grace_s, lambda: self._tell(loss, None))

    def exited(self, job: LocalJob, exited: RankExited) -> None:
        """The launcher's word on a process that ended: before, with or after the end of its connection."""
        present = job.ranks.get(exited.local_rank)
        if present is not None and present.pid == exited.pid:
            job.exits[exited.pid] = exited  # the end of its connection is on the way
            return
        known = exited.pid in job.ends
        loss = job.ends.get(exited.pid)
        if loss is not None and not loss.told:
            self._tell(loss, exited)
        elif known and loss is None:
            return  # it ended in order
        elif not exited.replacement:
            job.vacate(exited.local_rank, by_launcher=True)
            self.tell_vacancies(job, how(exited))
        elif not known:
            job.remember_end(exited.pid, None)
            self._died_unheard(job, exited)

    def tell_unplaced(self, job: LocalJob) -> None:
        """Reports what ended before a generation was known, now that one is."""
        unplaced, job.unplaced = job.unplaced, {}
        for exited in unplaced.values():
            self._died_unheard(job, exited)

    def tell_vacancies(self, job: LocalJob, detail: str) -> None:
        """Reports the places that the newest generation has here and nobody will take, each once."""
        if job.spec is None or job.stopped is not None:
            return
        for member in job.spec.on(self._node):
            if job.is_vacant(member.local_rank):
                self._vacancy(job, job.spec.number, member.rank, member.local_rank, detail)

    def _vacancy(self, job: LocalJob, generation: int, rank: int, local_rank: int, detail: str) -> None:
        if job.vacancy_told.get(local_rank) == generation:
            return
        job.vacancy_told[local_rank] = job.lost_in[local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=generation,
                rank=rank,
                local_rank=local_rank,
                detail=detail,
                replacement=False,
            )
        )

    def _tell(self, loss: Loss, exited: RankExited | None) -> None:
        """Reports a loss, with the launcher's word on it where that came in time."""
        if loss.told:
            return
        if exited is None and loss.seat.generation is None and loss.seat.job.spec is None:
            return  # the launcher's word, when it comes, says what it was lost in
        loss.told = True
        if loss.timer is not None:
            loss.timer.cancel()
        seat, job = loss.seat, loss.seat.job
        replacement = exited.replacement if exited is not None else job.launcher is not None
        generation, rank = seat.generation, seat.rank
        if not replacement:
            job.vacate(seat.local_rank, by_launcher=exited is not None)
            generation, rank = job.newest_place(self._node, seat)
        if generation is None and job.spec is None and exited is not None:
            self._died_unheard(job, exited)
        if generation is None or rank is None or job.stopped is not None:
            return  # a spare is in nobody's way
        if not replacement:
            job.vacancy_told[seat.local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=loss.at,
                trace=loss.trace,
                generation=generation,
                rank=rank,
                local_rank=seat.local_rank,
                detail=loss.detail if exited is None else f"{loss.detail}; {how(exited)}",
                exit_code=exited.exit_code if exited is not None else None,
                signal=exited.signal if exited is not None else None,
                replacement=replacement,
            )
        )

    def _died_unheard(self, job: LocalJob, exited: RankExited) -> None:
        """A rank ended before it ever said Hello, or before it said it to this agent; another takes its place."""
        if job.stopped is not None:
            return
        if job.spec is None:
            job.unplaced[exited.local_rank] = exited
            return
        member = job.spec.member(self._node, exited.local_rank)
        if member is None or (exited.generation is not None and exited.generation < job.oldest):
            return  # the other one may play: it was not in there
        job.lost_in[exited.local_rank] = job.spec.number
        if exited.local_rank in job.ranks:
            job.ranks[exited.local_rank].came_in = job.spec.number + 1
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=job.spec.number,
                rank=member.rank,
                local_rank=exited.local_rank,
                detail=f"{how(exited)} before this agent heard of it",
                exit_code=exited.exit_code,
                signal=exited.signal,
            )
        )

    def _report(self, lost: RankLost) -> None:
        self._counts["ranks_lost"] += 1
        self._outside.report(lost)

    def _log(self, loss: Loss) -> None:
        log.warning(
            "local rank %d (pid %d) is gone: %s",
            loss.seat.local_rank,
            loss.seat.pid,
            loss.detail,
            extra={
                "node": self._node,
                "job": loss.seat.job.name,
                "generation": loss.seat.generation,
                "trace": loss.trace,
            },
        )


def how(exited: RankExited) -> str:
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

STOPPED = "T"
"""Stopped by a signal. A tracer's stop ("t") is short when a profiler samples, and is treated as mere silence."""


class SilenceWatch:
    """Looks at the ranks of one node; reports each silence once in each generation.

    Args:
        silence_s: after this long without a word, look at the process; report it if it is stopped.
        unresponsive_after_s: after this long report it whatever its state.
    """

    def __init__(
        self,
        clock: Clock,
        outside: LossOutside,
        counts: Counter[str],
        silence_s: float,
        unresponsive_after_s: float,
    ) -> None:
        self._clock = clock
        self._outside = outside
        self._counts = counts
        self._silence_s = silence_s
        self._unresponsive_after_s = unresponsive_after_s

    def look(self, seats: Iterable[RankSeat], own_lag_s: float) -> None:
        """One look at all ranks. ``own_lag_s``: how much later it comes than it should have."""
        now = self._clock.monotonic()
        for seat in seats:
            seat.heard_at = min(now, seat.heard_at + own_lag_s)
            silent_s = now - seat.heard_at
            if silent_s >= self._silence_s and self._matters(seat):
                self._judge(seat, silent_s)

    def _matters(self, seat: RankSeat) -> bool:
        """Ranks of the roster that have ticked, are expected to, and were not reported yet."""
        expected = seat.tick is not None and not seat.condemned and not seat.is_done and seat.job.stopped is None
        return expected and seat.rank is not None and seat.silence_told != seat.generation

    def _judge(self, seat: RankSeat, silent_s: float) -> None:
        state = seat.peer.process_state()
        if state != STOPPED and silent_s < self._unresponsive_after_s:
            return
        assert seat.generation is not None
        assert seat.rank is not None
        seat.silence_told = seat.generation
        self._counts["ranks_unresponsive"] += 1
        self._outside.report(
            RankUnresponsive(
                job=seat.job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=seat.generation,
                rank=seat.rank,
                local_rank=seat.local_rank,
                silent_s=round(silent_s, 3),
                process_state=state,
            )
        )
