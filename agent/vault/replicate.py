"""Which slot is sent next: for each rank and peer one at a time, and of those that wait only one.

A rank seals a slot at every step. Where a peer is slower than that, what waited is superseded by what is newer, so
that a slow peer costs versions, never time or memory. But for one that may be committed, which comes before newer ones
that may not: else a job whose copies take longer than a step would commit nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial

import msgspec

from agent.vault.jobs import JobBook
from agent.vault.segments import Segment, SegmentKey, SegmentStore
from agent.vault.send import Sender
from agent.vault.statistics import Tally
from everstep.errors import EverstepError, NotFound
from everstep.ids import Version
from everstep.slots import SlotHeader, SlotState
from everstep.wire.v1.local import Replicated, SlotSealed

log = logging.getLogger(__name__)

LaneKey = tuple[str, int, str]


class Task(msgspec.Struct, frozen=True):
    """One slot that wants to go to one peer."""

    generation: int
    segment: Segment
    slot: int
    header: SlotHeader
    keep: tuple[Version, ...]
    kept: bool

    @property
    def version(self) -> Version:
        return self.header.version


class Lane:
    """One rank's slots to one peer. ``copy`` returns "" when the peer holds the slot, else why it does not."""

    def __init__(self, copy: Callable[[Task], Awaitable[str]], superseded: Callable[[], None]) -> None:
        self._copy = copy
        self._superseded = superseded
        self._waiting: tuple[Task, asyncio.Future[str]] | None = None
        self._running: asyncio.Task[None] | None = None

    def submit(self, task: Task) -> asyncio.Future[str]:
        """The outcome to come. Of this one and what still waits in this lane, the lesser is answered as superseded."""
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        mine = (task, outcome)
        if self._waiting is not None:
            self._superseded()
            waits = self._waiting
            first, other = (waits, mine) if waits[0].kept and not task.kept else (mine, waits)
            self._waiting = first
            _settle(other[1], f"superseded by {first[0].version}")
            return outcome
        self._waiting = mine
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return outcome

    async def _run(self) -> None:
        try:
            while self._waiting is not None:
                (task, outcome), self._waiting = self._waiting, None
                try:
                    _settle(outcome, await self._copy(task))
                finally:
                    _settle(outcome, "internal: the copy was broken off")
        finally:
            self._running = None
            if self._waiting is not None:
                _settle(self._waiting[1], "internal: the lane was broken off")
                self._waiting = None


def _settle(outcome: asyncio.Future[str], value: str) -> None:
    if not outcome.done():
        outcome.set_result(value)


class Replicator:
    """Answers SlotSealed. Lives on the event loop; ``threads`` does the sending."""

    def __init__(
        self, node: str, store: SegmentStore, book: JobBook, sender: Sender, tally: Tally, threads: Executor
    ) -> None:
        self._node = node
        self._store = store
        self._book = book
        self._sender = sender
        self._tally = tally
        self._threads = threads
        self._lanes: dict[LaneKey, Lane] = {}

    async def replicate(self, message: SlotSealed) -> Replicated:
        """Raises what ``find`` does."""
        segment, header = self.find(message)
        if not message.replicate:
            return Replicated(request=message.request, nodes=())
        task = Task(message.generation, segment, message.slot, header, message.keep, message.kept)
        nodes = tuple(dict.fromkeys(n for n in message.to if n != self._node))
        outcomes = await asyncio.gather(*(self._lane(message.job, header.rank, n).submit(task) for n in nodes))
        failed = {node: why for node, why in zip(nodes, outcomes, strict=True) if why}
        for node in nodes:
            if node not in failed:
                self._book.saw(message.job, header.rank, node)
        return Replicated(request=message.request, nodes=tuple(n for n in nodes if n not in failed), failed=failed)

    def find(self, message: SlotSealed) -> tuple[Segment, SlotHeader]:
        """The slot. Raises StaleGeneration, and NotFound for an unknown job or a slot that is not sealed as is said."""
        self._book.current(message.job, message.generation)
        key = SegmentKey(message.job, "own", message.local_rank)
        segment = self._store.get(key)
        if segment is None:
            raise NotFound(f"local rank {message.local_rank} has no segment for job {message.job}: open one first")
        if not 0 <= message.slot < segment.view.slots:
            raise NotFound(f"{segment.path} has {segment.view.slots} slots and no slot {message.slot}")
        header = segment.view.header(message.slot)
        said = (SlotState.SEALED, message.rank, message.version)
        if header is None or (header.state, header.rank, header.version) != said:
            raise NotFound(
                f"slot {message.slot} of {segment.path} is not rank {message.rank}'s sealed {message.version}"
            )
        return segment, header

    def _lane(self, job: str, rank: int, node: str) -> Lane:
        async def copy(task: Task) -> str:
            return await self._copy(task, node)

        key = (job, rank, node)
        return self._lanes.setdefault(key, Lane(copy, lambda: self._tally.add("superseded")))

    async def _copy(self, task: Task, node: str) -> str:
        job = task.segment.key.job
        try:
            self._book.current(job, task.generation)
            send = partial(self._sender.send, task.generation, node, task.segment, task.slot, task.header, task.keep)
            await asyncio.get_running_loop().run_in_executor(self._threads, send)
        except EverstepError as error:
            self._tally.refuse(error.code)
            context = {"node": self._node, "job": job, "generation": task.generation}
            log.info("rank %s's %s is not at %s: %s", task.header.rank, task.version, node, error, extra=context)
            return f"{error.code}: {error}"
        return ""

    def forget(self, job: str) -> None:
        """Drops the lanes of a job that is over; what they are at ends by itself."""
        for key in [k for k in self._lanes if k[0] == job]:
            del self._lanes[key]
