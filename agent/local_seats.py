"""Who sits where on a node: one job, its launcher and its ranks, as plain records."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import msgspec

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import FromAgent, RankExited, Tick
from everstep.wire.v1.training import GenerationSpec, LauncherJoined

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
