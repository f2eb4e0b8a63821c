"""Send sealed slots to peers, each over as many connections as its size justifies."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from everstep.clock import Clock
from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, NotFound, Unavailable
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.local import Replicated, SlotSealed
from everstep.wire.v1.transfer import Ack, ManifestPart, Part, PartDone, Put, PutDone, Ready, missing_chunks
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.reading import SealedSlotReader
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerPool

# Pacing: one rate limit for all of a vault's transfers together.

BURST_S = 0.05  # seconds of sending that pass at once after a rest, so that a thread that wakes late keeps its share


@dataclass(eq=False)
class RateLimiter:
    """Hold sending threads until their bytes fit ``bytes_per_s``, if there is a limit. Safe to use from any thread."""

    _bytes_per_s: float | None
    _clock: Clock
    _sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = self._clock.monotonic()

    @property
    def piece_bytes(self) -> int:
        """Bytes to send at a time: less under a limit, so that the wire is shared evenly."""
        return CHUNK_BYTES if self._bytes_per_s is None else PACED_PIECE_BYTES

    def acquire(self, byte_count: int) -> None:
        """Return when ``byte_count`` bytes may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            begin = max(now - BURST_S, self._free_at)
            self._free_at = begin + byte_count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)


MAX_CHUNKS_PER_PART = 8  # chunks acknowledged together: 64 MiB, so that the round trip hardly counts
MAX_ATTEMPTS = 8  # broken connections allowed per copied slot; more mean a failing peer or network
PACED_PIECE_BYTES = 1 << 20


class OutgoingTransfer:
    """A slot on its way to a peer; ``sent_chunks`` counts those that the peer has hashed, plus one for the manifest."""

    def __init__(self, reader: SealedSlotReader, ready: Ready, rate_limiter: RateLimiter) -> None:
        self.reader = reader
        self.sent_chunks = 0
        self._rate_limiter = rate_limiter
        self._transfer = ready.transfer
        self._lacks_manifest = ready.needs_manifest
        missing = missing_chunks(chunk_count(len(reader.payload)), ready.present_chunks)
        self._parts = deque(_parts(ready.transfer, missing))
        self.is_stopped = False

    def __len__(self) -> int:
        """Return the number of parts not taken yet."""
        return len(self._parts)

    def send_manifest(self, channel: VaultChannel) -> None:
        """Send the manifest if the peer lacks it. Raises the peer's refusal."""
        if not self._lacks_manifest:
            return
        channel.send(ManifestPart(transfer=self._transfer))
        manifest = memoryview(self.reader.manifest)
        for start in range(0, len(manifest), CHUNK_BYTES):
            self._send_chunk(channel, manifest[start : start + CHUNK_BYTES])
            channel.send_piece_status(True)  # the local copy was hashed and cannot change
        channel.receive_answer(PartDone)
        self.sent_chunks += 1

    def send(self, channel: VaultChannel) -> None:
        """Send parts until none is left. Raises the peer's refusal; an interrupted part is put back."""
        while not self.is_stopped:
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
                self.is_stopped = True
                raise

    def _send_part(self, channel: VaultChannel, part: Part) -> None:
        channel.send(part)
        for index in range(part.first_chunk, part.first_chunk + part.chunks):
            self._send_chunk(channel, self.reader.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            still = self.reader.is_unchanged()
            channel.send_piece_status(still)
            if not still:
                break
        channel.receive_answer(PartDone)
        self.sent_chunks += part.chunks

    def _send_chunk(self, channel: VaultChannel, chunk: memoryview) -> None:
        step = self._rate_limiter.piece_bytes
        for at in range(0, len(chunk), step):
            piece = chunk[at : at + step]
            self._rate_limiter.acquire(len(piece))
            channel.send_bulk([piece])


def _parts(transfer: bytes, missing: list[int]) -> Iterator[Part]:
    """Split the missing chunks into runs of at most MAX_CHUNKS_PER_PART."""
    run: list[int] = []
    for chunk in missing:
        if run and (chunk != run[-1] + 1 or len(run) == MAX_CHUNKS_PER_PART):
            yield Part(transfer=transfer, first_chunk=run[0], chunks=len(run))
            run = []
        run.append(chunk)
    if run:
        yield Part(transfer=transfer, first_chunk=run[0], chunks=len(run))


@dataclass(eq=False)
class SlotSender:
    """Copy slots of this node to other vaults. ``streams`` runs the further connections of a large payload."""

    _settings: VaultSettings
    _peers: PeerPool
    _finding_reporter: FindingReporter
    _counters: VaultCounters
    _streams: Executor
    _clock: Clock

    def __post_init__(self) -> None:
        self._rate_limiter = RateLimiter(self._settings.send_bytes_per_s, self._clock)

    def send(
        self, generation: int, node: str, segment: SegmentFile, slot: int, header: SlotHeader, keep: tuple[Version, ...]
    ) -> None:
        """Send a slot; return once ``node`` has hashed its copy, beside those of ``keep``. Raises EverstepError."""
        reading = SealedSlotReader(segment, slot, header)
        put = _put(reading, generation, keep)
        job = segment.key.job
        started: list[OutgoingTransfer] = []
        for attempt in range(MAX_ATTEMPTS):
            started.clear()
            try:
                self._peers.call(job, node, lambda channel: self._send(channel, job, node, put, reading, started))
                break
            except DigestMismatch:
                self._check_local_slot(reading)
                raise
            except Unavailable:
                if not any(outgoing.sent_chunks for outgoing in started) or attempt + 1 == MAX_ATTEMPTS:
                    raise
        self._counters.add("replicated_slots")
        self._counters.add("replicated_bytes", put.payload_bytes + put.manifest_bytes)

    def _send(
        self,
        channel: VaultChannel,
        job: str,
        node: str,
        put: Put,
        reader: SealedSlotReader,
        started: list[OutgoingTransfer],
    ) -> None:
        channel.send(put)
        channel.set_receive_timeout(self._settings.request_timeout_s)
        answer = channel.receive_any_answer()
        if isinstance(answer, Ack):
            return
        if not isinstance(answer, Ready):
            raise MalformedMessage(f"{node} answered a Put with {type(answer).__name__}")
        channel.set_receive_timeout(self._settings.io_timeout_s)
        outgoing = OutgoingTransfer(reader, answer, self._rate_limiter)
        started.append(outgoing)
        outgoing.send_manifest(channel)
        worthwhile = put.payload_bytes // self._settings.bytes_per_stream
        extra_streams = min(self._settings.streams, worthwhile, len(outgoing)) - 1
        helpers = [self._streams.submit(self._peers.call, job, node, outgoing.send) for _ in range(extra_streams)]
        failures: list[EverstepError] = []
        try:
            outgoing.send(channel)
        except EverstepError as error:
            outgoing.is_stopped = True
            failures.append(error)
        helped = [e for h in helpers if isinstance(e := h.exception(), EverstepError)]
        if failures or any(not isinstance(e, Unavailable) for e in helped):
            raise _root_failure(failures + helped)
        outgoing.send(channel)  # parts that a failed helper connection has put back
        channel.send(PutDone(transfer=answer.transfer))
        channel.set_receive_timeout(self._settings.request_timeout_s)
        channel.receive_answer(Ack)

    def _check_local_slot(self, reader: SealedSlotReader) -> None:
        """Check the local slot after the peer received wrong bytes."""
        try:
            reader.check([(0, len(reader.payload))])
        except Conflict:
            pass  # the slot was refilled and cannot be checked
        except DigestMismatch as error:
            report = self._finding_reporter.report_corrupt_slot
            report(reader.segment, reader.slot, reader.header, error, detected_by="sender")


def _root_failure(failures: list[EverstepError]) -> EverstepError:
    """Return the original refusal; the other streams fail with a broken connection or an unknown transfer."""
    return next((f for f in failures if not isinstance(f, Unavailable | MalformedMessage)), failures[0])


def _put(reader: SealedSlotReader, generation: int, keep: tuple[Version, ...]) -> Put:
    header, view = reader.header, reader.segment.view
    return Put(
        generation=generation,
        rank=header.rank,
        version=header.version,
        slot_bytes=view.slot_bytes,
        slots=view.slots,
        payload_bytes=header.payload_bytes,
        manifest_bytes=len(reader.manifest),
        digests=b"".join(reader.digests),
        keep=keep,
    )


# Replication: per rank and peer, send one slot at a time and keep at most one waiting.
#
# A rank seals a slot at every step. If a peer is slower, a newer slot supersedes the waiting one, so that it costs
# versions, never time or memory. A version that may be committed precedes newer ones that may not: otherwise a job
# whose copies take longer than a step would commit nothing.

log = logging.getLogger(__name__)

SendQueueKey = tuple[str, int, str]


class ReplicationTask(msgspec.Struct, frozen=True):
    """One slot to be sent to one peer, as the rank's ``message`` asks."""

    message: SlotSealed
    segment: SegmentFile
    header: SlotHeader


class SendQueue:
    """One rank's slots to one peer. ``copy`` returns "" when the peer holds the slot, else the reason it does not."""

    def __init__(self, copy: Callable[[ReplicationTask], Awaitable[str]], on_superseded: Callable[[], None]) -> None:
        self._copy, self._on_superseded = copy, on_superseded
        self._waiting: tuple[ReplicationTask, asyncio.Future[str]] | None = None
        self._running: asyncio.Task[None] | None = None

    def submit(self, task: ReplicationTask) -> asyncio.Future[str]:
        """Queue a task and return its future outcome; of it and a waiting task, the lesser is superseded."""
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        mine = (task, outcome)
        if self._waiting is not None:
            self._on_superseded()
            before = self._waiting
            precedes = before[0].message.commit_candidate and not task.message.commit_candidate
            first, other = (before, mine) if precedes else (mine, before)
            self._waiting = first
            _resolve(other[1], f"superseded by {first[0].header.version}")
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
                    _resolve(outcome, await self._copy(task))
                finally:
                    _resolve(outcome, "internal: the copy was cancelled")
        finally:
            self._running = None
            if self._waiting is not None:
                _resolve(self._waiting[1], "internal: the queue was cancelled")
                self._waiting = None


def _resolve(outcome: asyncio.Future[str], value: str) -> None:
    if not outcome.done():
        outcome.set_result(value)


@dataclass(eq=False)
class Replicator:
    """Answer SlotSealed messages on the event loop; ``threads`` does the sending."""

    _node: str
    _store: SegmentStore
    _job_table: JobTable
    _sender: SlotSender
    _counters: VaultCounters
    _threads: Executor
    _send_queues: dict[SendQueueKey, SendQueue] = field(default_factory=dict)

    async def replicate(self, message: SlotSealed) -> Replicated:
        """Copy the sealed slot to its replica nodes. Raises what ``find_slot`` does."""
        segment, header = self.find_slot(message)
        if not message.replicate_ranges:
            return Replicated(request=message.request, nodes=())
        task = ReplicationTask(message, segment, header)
        nodes = tuple(dict.fromkeys(n for n in message.replica_nodes if n != self._node))
        outcomes = await asyncio.gather(*(self._send_queue(message.job, header.rank, n).submit(task) for n in nodes))
        failed = {node: reason for node, reason in zip(nodes, outcomes, strict=True) if reason}
        for node in nodes:
            if node not in failed:
                self._job_table.note_holder(message.job, header.rank, node)
        return Replicated(request=message.request, nodes=tuple(n for n in nodes if n not in failed), failed=failed)

    def find_slot(self, message: SlotSealed) -> tuple[SegmentFile, SlotHeader]:
        """Return the slot. Raises StaleGeneration, NotFound."""
        self._job_table.require_current(message.job, message.generation)
        key = SegmentKey(message.job, "own", message.local_rank)
        segment = self._store.get(key)
        if segment is None:
            raise NotFound(f"local rank {message.local_rank} has no segment for job {message.job}; open one first")
        if not 0 <= message.slot < segment.view.slots:
            raise NotFound(f"{segment.path} has {segment.view.slots} slots and no slot {message.slot}")
        header = segment.view.header(message.slot)
        expected = (SlotState.SEALED, message.rank, message.version)
        if header is None or (header.state, header.rank, header.version) != expected:
            raise NotFound(
                f"slot {message.slot} of {segment.path} is not rank {message.rank}'s sealed {message.version}"
            )
        return segment, header

    def _send_queue(self, job: str, rank: int, node: str) -> SendQueue:
        queue = SendQueue(partial(self._copy, node), partial(self._counters.add, "superseded_copies"))
        return self._send_queues.setdefault((job, rank, node), queue)

    async def _copy(self, node: str, task: ReplicationTask) -> str:
        message, header = task.message, task.header
        try:
            self._job_table.require_current(message.job, message.generation)
            send = partial(
                self._sender.send, message.generation, node, task.segment, message.slot, header, message.keep
            )
            await asyncio.get_running_loop().run_in_executor(self._threads, send)
        except EverstepError as error:
            self._counters.count_refusal(error.code)
            context = {"node": self._node, "job": message.job, "generation": message.generation}
            log.info("rank %s's %s is not at %s: %s", header.rank, header.version, node, error, extra=context)
            return f"{error.code}: {error}"
        return ""

    def forget_job(self, job: str) -> None:
        """Drop the queues of a job that is over; running copies end by themselves."""
        for key in [k for k in self._send_queues if k[0] == job]:
            del self._send_queues[key]
