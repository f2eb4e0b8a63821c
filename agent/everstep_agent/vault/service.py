"""The vault's request service for the node's ranks and supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.clock import Clock
from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, OutOfSlotMemory, Unavailable
from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.framing import FrameDecoder, VaultChannel, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.training import PeerConnectionLost
from everstep_agent.lifecycle import peer_credentials
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.reading import SlotFinder
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import ADVICE_FEWER_COPIES, ADVICE_FEWER_SLOTS, prefer_numa_node
from everstep_agent.vault.parity.coding import ParityDecoder, ParityEncoder
from everstep_agent.vault.parity.shards import ShardReader
from everstep_agent.vault.repair import Scrubber, SlotRepairer
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.spill_jobs import Spiller
from everstep_agent.vault.transfer.peer_server import PeerServer
from everstep_agent.vault.transfer.peers import PeerLossDetector, PeerPool, fetch_inventory
from everstep_agent.vault.transfer.receiving import SlotReceiver
from everstep_agent.vault.transfer.sending import Replicator, SlotSender

# The vault's unix socket: requests in, answers out, for processes of the same user.

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20  # bytes of answers that a client may leave unread before it is disconnected
MAX_REQUESTS_PER_CLIENT = 64
"""Requests of one client handled at once; further ones are read when one of them is answered."""


class VaultClientConnection:
    """One connected process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_supervisor = False  # whether it receives findings: it has sent a request that only a supervisor sends

    def send(self, message: local.FromVault) -> None:
        """Queue a frame. Nothing is sent to a client that is gone or does not read."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("disconnecting a client that left %d bytes unread", transport.get_write_buffer_size())
            transport.abort()
            return
        self._writer.write(encode_frame(message))

    def send_with_descriptor(self, message: local.FromVault, descriptor: int) -> None:
        """Send a frame with a descriptor. Raises Unavailable if unsent data would separate the two."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            raise Unavailable("the client has disconnected, or reads its answers too slowly")
        frame = encode_frame(message)
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
            try:
                sent = socket.send_fds(own, [frame], [descriptor])
            except OSError as error:
                raise Unavailable(f"the client cannot receive a descriptor: {error}") from error
        self._writer.write(frame[sent:])

    def close(self) -> None:
        self._writer.close()


class AnswerWithSocket(msgspec.Struct, frozen=True):
    """An answer and the connection handed over with it."""

    answer: local.FromVault
    peer_channel: VaultChannel


RequestHandler = Callable[[local.ToVault, VaultClientConnection], Awaitable[local.FromVault | AnswerWithSocket]]


class VaultSocketServer:
    """Serve ``handle_request`` on a unix socket; ``on_refused`` receives the code of each refusal."""

    def __init__(self, path: Path, handle_request: RequestHandler, on_refused: Callable[[str], None]) -> None:
        self._path, self._handle_request, self._on_refused = path, handle_request, on_refused
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: set[VaultClientConnection] = set()

    async def start(self) -> None:
        """Start listening in place of a dead vault's socket; the caller holds the run directory's lock."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._handle_connection, str(self._path))
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """End all connections and remove the socket."""
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = VaultClientConnection(writer)
        self.clients.add(client)
        try:
            _check_peer(writer)
            await self._serve_client(reader, client)
        except (AuthenticationError, MalformedMessage) as error:
            self._refuse(client, 0, error)
        except ConnectionError:
            pass  # the process is gone
        finally:
            self.clients.discard(client)
            client.close()

    async def _serve_client(self, reader: asyncio.StreamReader, client: VaultClientConnection) -> None:
        frames: FrameDecoder[local.ToVault] = FrameDecoder(local.ToVault, local.MAX_FRAME_BYTES)
        room = asyncio.Semaphore(MAX_REQUESTS_PER_CLIENT)
        while data := await reader.read(1 << 18):
            for message in frames.feed(data):
                await room.acquire()
                task = asyncio.create_task(self._answer(message, client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: room.release())
        if frames.pending_bytes:
            raise MalformedMessage(f"the connection ended {frames.pending_bytes} bytes into a frame")

    async def _answer(self, message: local.ToVault, client: VaultClientConnection) -> None:
        try:
            answer = await self._handle_request(message, client)
            if isinstance(answer, AnswerWithSocket):
                with answer.peer_channel.detach() as sock:
                    client.send_with_descriptor(answer.answer, sock.fileno())
            else:
                client.send(answer)
        except EverstepError as error:
            self._refuse(client, message.request, error)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            self._refuse(client, message.request, EverstepError(f"{type(error).__name__}: {error}"))

    def _refuse(self, client: VaultClientConnection, request: int, error: EverstepError) -> None:
        self._on_refused(error.code)
        client.send(local.RequestFailed(request=request, code=error.code, message=str(error)[:4096]))


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Raise AuthenticationError if the other process belongs neither to this user nor to root."""
    (pid, uid), own = peer_credentials(writer.get_extra_info("socket")), os.geteuid()
    if uid not in (0, own):
        raise AuthenticationError(f"process {pid} belongs to user {uid}; this vault serves user {own} and root")


# Capacity check: whether this node has memory for all of a job's slots before they are made.

TRAINING_MEMORY_SHARE = 0.25
"""Share of the free memory kept for the training, which may not have taken all of its memory yet, if slots can wait."""


def check_room(store: SegmentStore, finding_reporter: FindingReporter, request: local.CheckCapacity) -> None:
    """Raise OutOfSlotMemory, with the arithmetic, if memory is missing; report a finding if no fallback is left."""
    keyed = {SegmentKey(request.job, "replica" if need.replica else "own", need.number): need for need in request.needs}
    planned = [
        store.plan_file(key, need.slot_bytes, need.slots + need.pinned_slots, request.keep)
        for key, need in keyed.items()
    ]
    missing = [file for file in planned if file is not None]
    margin = TRAINING_MEMORY_SHARE if request.has_fallback else 0.0
    description, advice = _describe_needs(request.job, request.needs), _memory_advice(request)
    check = partial(store.budget.require_room, missing, description, advice, margin)
    try:
        try:
            check()
        except OutOfSlotMemory:
            if not _free_unneeded_copies(store, request, keyed.keys()):
                raise
            check()
    except OutOfSlotMemory as error:
        if not request.has_fallback:
            finding_reporter.report_memory_shortage(request.job, str(error))
        raise


def _free_unneeded_copies(store: SegmentStore, request: local.CheckCapacity, needed: Collection[SegmentKey]) -> bool:
    """Free the copies made for another roster, except those the job may still restore from."""
    freed = False
    for segment in store.segments(request.job):
        key = segment.key
        if key.kind != "replica" or key.number >= request.reclaim_below_rank or key in needed:
            continue
        for slot, header in enumerate(segment.view.headers()):
            if header is None or header.state is not SlotState.SEALED or header.version not in request.keep:
                segment.free_slot(slot)
                freed = True
    return freed


def _memory_advice(request: local.CheckCapacity) -> str:
    """Return how to save memory; fewer slots are no advice if the job asks for them next, or has the minimum."""
    fewer = not request.has_fallback and any(need.slots >= SLOTS_PER_RANK for need in request.needs)
    return f"{ADVICE_FEWER_SLOTS}; or {ADVICE_FEWER_COPIES}" if fewer else ADVICE_FEWER_COPIES


def _describe_needs(job: str, needs: Sequence[local.SegmentRequirement]) -> str:
    own, copies = ([need for need in needs if need.replica is replica] for replica in (False, True))
    pinned = sum(need.pinned_slots * (need.slot_bytes + PAGE_BYTES) for need in needs)
    slots = "/".join(str(count) for count in sorted({need.slots for need in needs}))
    detail = f"{slots} slots of {len(own)} ranks here: {_needed_bytes(own)} bytes"
    detail += f", copies of {len(copies)} ranks of other nodes: {_needed_bytes(copies)} bytes" if copies else ""
    detail += f", {pinned} of these for versions kept for storage, parity or audits" if pinned else ""
    return f"job {job} ({detail}; without the slots that exist already)"


def _needed_bytes(needs: Sequence[local.SegmentRequirement]) -> int:
    return sum(segment_bytes(need.slots + need.pinned_slots, need.slot_bytes) for need in needs)


T = TypeVar("T")

INVENTORY_TIMEOUT_S = 5.0
"""Seconds a rank's answer waits for slots that are not checked yet; half of the rank's own time-out."""
MAX_CONCURRENT_INVENTORIES = 128
"""Other vaults asked at once: in a rack that lost its power, each takes its whole time-out."""
MAX_UNSENT_FINDINGS = 256  # findings kept while no supervisor is connected; the oldest are dropped first


class Vault:
    """One running vault. Created and used on the event loop; everything that moves bytes runs in threads."""

    def __init__(self, settings: VaultSettings, store: SegmentStore, adoption: SegmentAdoption, clock: Clock) -> None:
        self._settings, self._store, self._adoption = settings, store, adoption
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(settings.worker_threads, "vault")
        self._streams = ThreadPoolExecutor(settings.worker_threads, "stream")
        self._unsent_findings: deque[local.VaultFinding] = deque(maxlen=MAX_UNSENT_FINDINGS)
        counters = self._counters = VaultCounters()
        job_table = self._job_table = JobTable()
        findings = self._finding_reporter = FindingReporter(
            settings.node, clock, counters, lambda raised: self._report(local.VaultFinding(finding=raised))
        )
        library = SlotFinder(store, findings)
        losses = self._peer_loss_detector = PeerLossDetector(settings.node, job_table, clock, self._report)
        self._peers = PeerPool(settings, job_table, clock, losses)
        sender = SlotSender(settings, self._peers, findings, counters, self._streams, clock)
        self._replicator = Replicator(settings.node, store, job_table, sender, counters, self._threads)
        shards = ShardReader(settings, library, self._peers, findings)
        parts = (settings.node, store, job_table, shards, counters, self._streams)
        self._encoder = ParityEncoder(*parts)
        self._decoder = ParityDecoder(*parts)
        self._spiller = Spiller(*parts)
        self._receiver = SlotReceiver(store, job_table, findings, counters)
        self.peer_server = PeerServer(settings, adoption, job_table, library, self._receiver, counters, losses, clock)
        self._local = VaultSocketServer(settings.socket_path, self.handle_request, counters.count_refusal)
        self.clients: Collection[VaultClientConnection] = self._local.clients
        repairer = SlotRepairer(settings, job_table, store, self._peers, self._decoder)
        self._scrubber = Scrubber(
            repairer, findings, counters, clock, settings.scrub_interval_s, settings.scrub_bytes_per_s
        )

    @property
    def has_jobs(self) -> bool:
        """Whether any job may still need this vault."""
        return bool(self._store.jobs()) or len(self._job_table) > 0

    async def start(self) -> None:
        self._store.set_damage_handler(self._finding_reporter.report_damage)
        self.peer_server.start()
        await self._local.start()
        self._adoption.start()
        if self._settings.scrub_interval_s:
            self._scrubber.start()

    async def stop(self) -> None:
        """End all connections and threads; the segments stay."""
        self._peer_loss_detector.close()
        await self._local.stop()
        self._peers.close()
        self._spiller.close()
        await asyncio.to_thread(self.peer_server.stop)
        await asyncio.to_thread(self._adoption.stop)
        await asyncio.to_thread(self._scrubber.stop)
        for pool in (self._threads, self._streams):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    async def handle_request(
        self, message: local.ToVault, client: VaultClientConnection
    ) -> local.FromVault | AnswerWithSocket:
        """Return the answer to one request. Raises EverstepError for a refusal."""
        if isinstance(message, local.ConfigureJob | local.ForgetJob | local.Protect | local.Spill | local.Statistics):
            client.is_supervisor = True
            while self._unsent_findings:
                client.send(self._unsent_findings.popleft())
        match message:
            case local.OpenSegment():
                return await self._open_segment(message)
            case local.CheckCapacity():
                await self._run_in_thread(lambda: check_room(self._store, self._finding_reporter, message))
            case local.SlotSealed():
                return await self._handle_slot_sealed(message)
            case local.Fetch():
                landed = await self._run_in_thread(lambda: self._decoder.fetch(message))
                return local.Fetched(request=message.request, bytes=landed)
            case local.OpenPeerConnection():
                channel = await self._run_in_thread(lambda: self._peers.open_channel(message.job, message.node))
                opened = local.PeerConnectionOpened(
                    request=message.request,
                    answer_timeout_s=self._settings.request_timeout_s,
                    io_timeout_s=self._settings.io_timeout_s,
                )
                return AnswerWithSocket(opened, channel)
            case local.PeerConnectionBroken():
                self._peer_loss_detector.report_broken_connection(message.job, message.node, message.reason)
            case local.Protect():
                made = await self._run_in_thread(lambda: self._encoder.encode_group(message))
                return local.Protected(request=message.request, parity=made.letter, members_digest=made.members_digest)
            case local.Spill():
                spill = partial(self._spiller.spill, message)
                return await self._loop.run_in_executor(self._spiller.executor, spill)
            case local.Inventory():
                return await self._inventory(message)
            case local.ConfigureJob():
                self._peers.close_outdated(self._job_table.configure(message))
            case local.ForgetJob():
                await self._delete_job(message.job)
            case local.Statistics():
                return await self._run_in_thread(lambda: self._statistics(message))
        return local.RequestDone(request=message.request)

    async def _open_segment(self, message: local.OpenSegment) -> local.SegmentOpened:
        key = SegmentKey(message.job, "own", message.local_rank)

        def make() -> SegmentFile:
            with prefer_numa_node(message.numa_node):
                segment = self._store.open(key, message.slot_bytes, message.slots, message.keep)
            self._job_table.require_not_ended(message.job, self._store.delete_job)
            return segment

        segment = await self._run_in_thread(make)
        return local.SegmentOpened(request=message.request, path=str(segment.path))

    async def _handle_slot_sealed(self, message: local.SlotSealed) -> local.Replicated:
        segment, header = self._replicator.find_slot(message)
        # sealed under the previous vault, which did not answer before it ended
        if message.slot in segment.unchecked_slots:
            await self._run_in_thread(lambda: self._adoption.ensure_checked(segment, message.slot, header))
        return await self._replicator.replicate(message)

    async def _delete_job(self, job: str) -> None:
        self._job_table.forget(job)
        for part in (self._replicator, self._receiver, self._encoder, self._peers):
            part.forget_job(job)
        self._spiller.cancel(job)
        await self._run_in_thread(lambda: self._store.delete_job(job))

    async def _inventory(self, message: local.Inventory) -> local.InventoryAnswer:
        here = self._run_in_thread(lambda: self._adoption.inventory(message.job, INVENTORY_TIMEOUT_S))
        others = dict.fromkeys(node for node in message.nodes if node != self._settings.node)
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_INVENTORIES)
        threads = ThreadPoolExecutor(MAX_CONCURRENT_INVENTORIES, "ask")  # starts only as many threads as it needs
        try:
            answers = await asyncio.gather(
                here, *(self._ask_peer_inventory(message, node, semaphore, threads) for node in others)
            )
        finally:
            threads.shutdown(wait=False)
        return local.InventoryAnswer(
            request=message.request,
            slots=tuple(slot for slots, _ in answers for slot in slots),
            unchecked=sum(unchecked for _, unchecked in answers),
        )

    async def _ask_peer_inventory(
        self, message: local.Inventory, node: str, semaphore: asyncio.Semaphore, threads: Executor
    ) -> tuple[tuple[local.SlotInfo, ...], int]:
        """Return a peer's slots and its number of unchecked slots; none if it does not answer in time."""
        call = partial(self._peers.call, message.job, node, fetch_inventory, message.timeout_s)
        try:
            async with semaphore:
                answer = await asyncio.wait_for(self._loop.run_in_executor(threads, call), message.timeout_s)
        except (EverstepError, TimeoutError) as error:
            log.info("the inventory omits %s: %s", node, error, extra={"node": self._settings.node, "job": message.job})
            return (), 0
        return answer.slots, answer.unchecked

    def _statistics(self, message: local.Statistics) -> local.StatisticsAnswer:
        counters, refused = self._counters.read_all()
        levels = {
            "segment_bytes": self._store.budget.used_bytes(),
            "free_bytes": self._store.budget.free_bytes(),
            "sealed_slots": sum(len(segment.sealed()) for segment in self._store.segments()),
            "peer_connections": len(self._peers) + len(self.peer_server),
        }
        return local.StatisticsAnswer(request=message.request, counters=counters, refused=refused, gauges=levels)

    def _report(self, message: local.VaultFinding | PeerConnectionLost) -> None:
        """Send the message to the supervisor; callable from any thread."""
        self._loop.call_soon_threadsafe(self._send_to_supervisors, message)

    def _send_to_supervisors(self, message: local.VaultFinding | PeerConnectionLost) -> None:
        supervisors = [client for client in self._local.clients if client.is_supervisor]
        if not supervisors and isinstance(message, local.VaultFinding):
            self._unsent_findings.append(message)
        for client in supervisors:
            client.send(message)
