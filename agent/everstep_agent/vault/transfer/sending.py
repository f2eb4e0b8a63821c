"""Sending one sealed slot to one peer, over as many connections as it is worth."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from functools import partial

import msgspec

from everstep.clock import Clock
from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, NotFound, Unavailable
from everstep.ids import Version
from everstep.layout.segments import SlotHeader, SlotState
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.wire.framing import Channel
from everstep.wire.v1.local import Replicated, SlotSealed
from everstep.wire.v1.transfer import Ack, ManifestPart, Part, PartDone, Put, PutDone, Ready, chunks_without
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.reading import Reading
from everstep_agent.vault.memory.segments import Segment, SegmentKey, SegmentStore
from everstep_agent.vault.reporting import Findings, Tally
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import Peers

# ---- pacing
# How fast a vault may send: one pace for all its transfers together.

BURST_S = 0.05
"""Of sending that passes at once after a rest, so that a thread that wakes late does not lose its share."""


class Pace:
    """Threads ask before they send, and are held until their bytes fit. Safe to use from any thread.

    Args:
        bytes_per_s: None for no bound.
    """

    def __init__(self, bytes_per_s: float | None, clock: Clock, sleep: Callable[[float], object] = time.sleep) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()

    @property
    def bounded(self) -> bool:
        return self._bytes_per_s is not None

    def take(self, count: int) -> None:
        """Returns when ``count`` bytes may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            begin = max(now - BURST_S, self._free_at)
            self._free_at = begin + count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)


PART_CHUNKS = 8
"""Chunks for which one answer is awaited: 64 MiB, so that the round trip is lost in the transfer."""


MOST_ATTEMPTS = 8
"""Connections that one slot's copy may break; more is a peer, or a network, that does not work."""
PIECE_BYTES = 1 << 20
"""Sent at a time where a pace is kept, so that the wire is shared evenly."""


class Outgoing:
    """A slot under way to a peer, and the parts of it that nobody has sent yet.

    Args:
        ready: the peer's answer, which says what it has already.

    Attributes:
        sent: chunks that the peer has hashed, and the manifest where it had to be sent.
    """

    def __init__(self, reading: Reading, ready: Ready, pace: Pace) -> None:
        self.reading = reading
        self.sent = 0
        self._pace = pace
        self._transfer = ready.transfer
        self._lacks_manifest = ready.manifest
        missing = chunks_without(chunk_count(len(reading.payload)), ready.here)
        self._parts = deque(_parts(ready.transfer, missing))
        self._stop = threading.Event()

    def __len__(self) -> int:
        """Parts that nobody sends."""
        return len(self._parts)

    def send_manifest(self, channel: Channel) -> None:
        """Where the peer has none like it. Raises what it refuses it for."""
        if not self._lacks_manifest:
            return
        channel.send(ManifestPart(transfer=self._transfer))
        manifest = memoryview(self.reading.manifest)
        for start in range(0, len(manifest), CHUNK_BYTES):
            for piece in self._pieces(manifest[start : start + CHUNK_BYTES]):
                self._pace.take(len(piece))
                channel.send_bulk([piece])
            channel.send_status(True)  # it is a copy, and hashed right
        channel.answer(PartDone)
        self.sent += 1

    def send(self, channel: Channel) -> None:
        """Sends parts until none is left. Raises what the peer refuses them for; a part that broke off is put back."""
        while not self._stop.is_set():
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            try:
                self._send_part(channel, part)
            except Unavailable:
                self._parts.appendleft(part)
                raise
            except EverstepError:
                self._stop.set()
                raise

    def stop(self) -> None:
        """No further part is begun."""
        self._stop.set()

    def _send_part(self, channel: Channel, part: Part) -> None:
        channel.send(part)
        for index in range(part.first, part.first + part.chunks):
            for piece in self._pieces(self.reading.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]):
                self._pace.take(len(piece))
                channel.send_bulk([piece])
            still = self.reading.still()
            channel.send_status(still)
            if not still:
                break
        channel.answer(PartDone)
        self.sent += part.chunks

    def _pieces(self, chunk: memoryview) -> list[memoryview]:
        if not self._pace.bounded:
            return [chunk]
        return [chunk[at : at + PIECE_BYTES] for at in range(0, len(chunk), PIECE_BYTES)]


def _parts(transfer: bytes, missing: list[int]) -> Iterator[Part]:
    """Runs of missing chunks, none longer than is worth one answer."""
    first, count = 0, 0
    for chunk in missing:
        if count and (chunk != first + count or count == PART_CHUNKS):
            yield Part(transfer=transfer, first=first, chunks=count)
            count = 0
        if not count:
            first = chunk
        count += 1
    if count:
        yield Part(transfer=transfer, first=first, chunks=count)


class Sender:
    """Copies slots of this node to other vaults. ``streams`` runs the further connections of a large payload."""

    def __init__(
        self, settings: VaultSettings, peers: Peers, findings: Findings, tally: Tally, streams: Executor, clock: Clock
    ) -> None:
        self._pace = Pace(settings.send_bytes_per_s, clock)
        self._settings = settings
        self._peers = peers
        self._findings = findings
        self._tally = tally
        self._streams = streams

    def send(
        self, generation: int, node: str, segment: Segment, slot: int, header: SlotHeader, keep: tuple[Version, ...]
    ) -> None:
        """Returns once ``node`` holds a copy that it has hashed; its copies of the versions ``keep`` stay.

        Where a connection breaks after some of it arrived, another goes on from there.

        Raises Conflict where the rank filled the slot anew meanwhile, DigestMismatch where the bytes did not arrive as
        sealed (this vault then looks at its own), and what the peer refuses for.
        """
        reading = Reading(segment, slot, header)
        put = _put(reading, generation, keep)
        job = segment.key.job
        begun: list[Outgoing] = []
        for attempt in range(MOST_ATTEMPTS):
            begun.clear()
            try:
                self._peers.call(job, node, lambda channel: self._send(channel, job, node, put, reading, begun))
                break
            except DigestMismatch:
                self._doubt_own(reading)
                raise
            except Unavailable:
                if not any(outgoing.sent for outgoing in begun) or attempt + 1 == MOST_ATTEMPTS:
                    raise
        self._tally.add("replicated_slots")
        self._tally.add("replicated_bytes", put.payload_bytes + put.manifest_bytes)

    def _send(self, channel: Channel, job: str, node: str, put: Put, reading: Reading, begun: list[Outgoing]) -> None:
        channel.send(put)
        channel.patience(self._settings.settle_timeout_s)
        answer = channel.any_answer()
        if isinstance(answer, Ack):
            return
        if not isinstance(answer, Ready):
            raise MalformedMessage(f"{node} answered a Put with {type(answer).__name__}")
        channel.patience(self._settings.io_timeout_s)
        outgoing = Outgoing(reading, answer, self._pace)
        begun.append(outgoing)
        outgoing.send_manifest(channel)
        count = self._helpers(put, len(outgoing))
        helpers = [self._streams.submit(self._peers.call, job, node, outgoing.send) for _ in range(count)]
        failures: list[EverstepError] = []
        try:
            outgoing.send(channel)
        except EverstepError as error:
            outgoing.stop()
            failures.append(error)
        helped = [e for h in helpers if isinstance(e := h.exception(), EverstepError)]
        if failures or any(not isinstance(e, Unavailable) for e in helped):
            raise _most_telling(failures + helped)
        outgoing.send(channel)  # what a helper that could not connect has put back
        channel.send(PutDone(transfer=answer.transfer))
        channel.patience(self._settings.settle_timeout_s)
        channel.answer(Ack)

    def _helpers(self, put: Put, parts: int) -> int:
        worth = put.payload_bytes // self._settings.stream_bytes
        return max(0, min(self._settings.streams, worth, parts) - 1)

    def _doubt_own(self, reading: Reading) -> None:
        """The peer saw wrong bytes: were they wrong here already?"""
        try:
            reading.check([(0, len(reading.payload))])
        except Conflict:
            pass  # no longer there to be judged
        except DigestMismatch as error:
            self._findings.slot_corrupt(reading.segment, reading.slot, reading.header, error, seen_by="sender")


def _most_telling(failures: list[EverstepError]) -> EverstepError:
    """One stream's refusal ends the others too: with a broken connection, or as a transfer no longer under way."""
    return next((f for f in failures if not isinstance(f, Unavailable | MalformedMessage)), failures[0])


def _put(reading: Reading, generation: int, keep: tuple[Version, ...]) -> Put:
    header, view = reading.header, reading.segment.view
    return Put(
        generation=generation,
        rank=header.rank,
        version=header.version,
        slot_bytes=view.slot_bytes,
        slots=view.slots,
        payload_bytes=header.payload_bytes,
        manifest_bytes=len(reading.manifest),
        digests=b"".join(reading.digests),
        keep=keep,
    )


# ---- replicate
# Which slot is sent next: for each rank and peer one at a time, and of those that wait only one.
#
# A rank seals a slot at every step. Where a peer is slower than that, what waited is superseded by what is newer, so
# that a slow peer costs versions, never time or memory. But for one that may be committed, which comes before newer
# ones
# that may not: else a job whose copies take longer than a step would commit nothing.

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
