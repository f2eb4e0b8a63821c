"""What the vault answers to the node's ranks and supervisor, and the parts it is put together from."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.clock import Clock
from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, OutOfSlotMemory, Unavailable
from everstep.layout.segments import PAGE, SlotState, segment_bytes
from everstep.layout.slots import SLOTS
from everstep.wire.framing import Channel, FrameDecoder, encode_frame
from everstep.wire.v1.local import (
    MAX_FRAME_BYTES,
    CheckRoom,
    Configure,
    Connect,
    Connected,
    ConnectionBroke,
    Done,
    Failed,
    Fetch,
    Fetched,
    Forget,
    FromVault,
    Inventory,
    InventoryAnswer,
    OpenSegment,
    Protect,
    Protected,
    Replicated,
    Segment,
    SegmentNeed,
    SlotInfo,
    SlotSealed,
    Spill,
    Spilled,
    Statistics,
    StatisticsAnswer,
    ToVault,
    VaultFinding,
)
from everstep.wire.v1.training import FindingRaised, PeerLost
from everstep.wire.v1.transfer import InventoryAsk, InventoryList
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.adoption import Adoption
from everstep_agent.vault.memory.reading import Library
from everstep_agent.vault.memory.segments import Segment as OwnedSegment
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import FEWER_COPIES, FEWER_SLOTS, Scratch, near
from everstep_agent.vault.parity.coding import Decoder, Encoder
from everstep_agent.vault.parity.shards import Place, Shards
from everstep_agent.vault.repair import Repairer, Scrubber
from everstep_agent.vault.reporting import Findings, Tally
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.spill_jobs import Spiller
from everstep_agent.vault.transfer.peer_server import TransferServer
from everstep_agent.vault.transfer.peers import Peers, Witness
from everstep_agent.vault.transfer.receiving import Receiver
from everstep_agent.vault.transfer.sending import Replicator, Sender

# ---- local
# The vault's unix socket: frames in, answers out, for processes of the same user.

log = logging.getLogger(__name__)

MOST_UNSENT_BYTES = 64 << 20
"""Answers a client may leave unread before it is given up."""

MOST_REQUESTS = 64
"""Requests of one client that are worked on at once; further ones are read when one of them is answered."""


class Client:
    """One connected process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.supervisor = False
        """Whether findings go to it: it has said what only a supervisor says."""

    def send(self, message: FromVault) -> None:
        """Queues a frame. A client that is gone, or reads nothing, gets none."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            log.warning("a client left %d bytes unread; it is given up", transport.get_write_buffer_size())
            transport.abort()
            return
        self._writer.write(encode_frame(message))

    def hand_over(self, message: FromVault, descriptor: int) -> None:
        """Sends a frame with a descriptor beside it; the other process gets one of its own.

        Raises Unavailable where what was sent before has not been taken yet: then the descriptor would come with
        another frame.
        """
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            raise Unavailable("the client is gone, or behind with its answers")
        frame = encode_frame(message)
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
            try:
                sent = socket.send_fds(own, [frame], [descriptor])
            except OSError as error:
                raise Unavailable(f"the client takes no descriptor: {error}") from error
        self._writer.write(frame[sent:])

    def close(self) -> None:
        self._writer.close()


class Handover(msgspec.Struct, frozen=True):
    """An answer, and the connection that goes with it."""

    answer: FromVault
    channel: Channel


Handler = Callable[[ToVault, Client], Awaitable[FromVault | Handover]]


class LocalServer:
    """Serves ``handle`` on a unix socket; ``refused`` hears the code of each refusal."""

    def __init__(self, path: Path, handle: Handler, refused: Callable[[str], None]) -> None:
        self._path = path
        self._handle = handle
        self._refused = refused
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: set[Client] = set()

    async def start(self) -> None:
        """Takes the place of a dead vault's socket; the caller holds the run directory's lock."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, str(self._path))
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """Ends all connections and removes the socket."""
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(writer)
        self.clients.add(client)
        try:
            _check_peer(writer)
            await self._converse(reader, client)
        except (AuthenticationError, MalformedMessage) as error:
            self._refuse(client, 0, error)
        except ConnectionError:
            pass  # the process is gone
        finally:
            self.clients.discard(client)
            client.close()

    async def _converse(self, reader: asyncio.StreamReader, client: Client) -> None:
        frames: FrameDecoder[ToVault] = FrameDecoder(ToVault, MAX_FRAME_BYTES)
        room = asyncio.Semaphore(MOST_REQUESTS)
        while data := await reader.read(1 << 18):
            for message in frames.feed(data):
                await room.acquire()
                task = asyncio.create_task(self._answer(message, client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: room.release())
        if frames.pending_bytes:
            raise MalformedMessage(f"the connection ended {frames.pending_bytes} bytes into a frame")

    async def _answer(self, message: ToVault, client: Client) -> None:
        try:
            answer = await self._handle(message, client)
            if isinstance(answer, Handover):
                with answer.channel.detach() as sock:
                    client.hand_over(answer.answer, sock.fileno())
            else:
                client.send(answer)
        except EverstepError as error:
            self._refuse(client, message.request, error)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            self._refuse(client, message.request, EverstepError(f"{type(error).__name__}: {error}"))

    def _refuse(self, client: Client, request: int, error: EverstepError) -> None:
        self._refused(error.code)
        client.send(Failed(request=request, code=error.code, message=str(error)[:4096]))


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Raises AuthenticationError where the other process is neither this user's nor root's."""
    sock = writer.get_extra_info("socket")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (0, os.geteuid()):
        raise AuthenticationError(
            f"process {pid} belongs to user {uid}; this vault serves user {os.geteuid()} and root"
        )


# ---- fetch
# Bringing a slot's manifest, from any node, to where a rank wants it. Bytes of slots it reads itself (``Connect``).


class Fetcher:
    """Answers Fetch. Runs in worker threads."""

    def __init__(self, store: SegmentStore, shards: Shards, tally: Tally) -> None:
        self._store = store
        self._shards = shards
        self._tally = tally

    def fetch(self, ask: Fetch) -> int:
        """Bytes landed in ``ask.into``.

        Raises NotFound where the node does not hold the version, Unavailable where it does not answer, DigestMismatch
        where the manifest there or on arrival is not what was sealed, MalformedMessage where ranges are asked for,
        PermissionDenied and OutOfSlotMemory for where it should land.
        """
        if ask.ranges:
            raise MalformedMessage(
                f"a vault brings no ranges of slots that are there: read rank {ask.rank}'s version {ask.version} over "
                f"a connection to {ask.node} (Connect)"
            )
        manifest = self._shards.facts(Place(ask.job, ask.node, ask.rank, ask.version)).manifest
        scratch = Scratch(self._store.directory, ask.into, ask.into_offset, len(manifest), self._store.budget)
        try:
            scratch.write([memoryview(manifest)], 0)
        finally:
            scratch.close()
        self._tally.add("fetched_bytes", len(manifest))
        return len(manifest)


# ---- room
# Before a job has made its slots: whether all that it will need on this node could be made.

LEFT_TO_TRAINING = 0.25
"""Of the memory that is free when slots are planned, where a job could do with fewer of them: the training may not have
taken all of its own yet (activations, gradients, the loader's workers), and what it lacks the kernel kills for."""


def check_room(store: SegmentStore, findings: Findings, asked: CheckRoom) -> None:
    """Raises OutOfSlotMemory, with the arithmetic, for want of room; a lack that nothing helps is a finding."""
    keyed = [(SegmentKey(asked.job, "replica" if need.replica else "own", need.number), need) for need in asked.needs]
    wanted = [store.foresee(key, need.slot_bytes, need.slots + need.pinned, asked.keep) for key, need in keyed]
    missing = [file for file in wanted if file is not None]
    margin = LEFT_TO_TRAINING if asked.tentative else 0.0
    foresee = partial(store.budget.foresee, missing, _words(asked.job, asked.needs), _otherwise(asked), margin)
    try:
        try:
            foresee()
        except OutOfSlotMemory:
            if not _give_back(store, asked, {key for key, _ in keyed}):
                raise
            foresee()
    except OutOfSlotMemory as error:
        if not asked.tentative:
            findings.memory_short(asked.job, str(error))
        raise


def _give_back(store: SegmentStore, asked: CheckRoom, needed: Collection[SegmentKey]) -> bool:
    """Frees what copies hold that were made for another roster, but for what the job may still go back to."""
    given = False
    for segment in store.segments(asked.job):
        if segment.key.kind == "replica" and segment.key.number < asked.below and segment.key not in needed:
            for slot in range(segment.view.slots):
                header = segment.view.header(slot)
                if header is None or header.state is not SlotState.SEALED or header.version not in asked.keep:
                    segment.give_back(slot)
                    given = True
    return given


def _otherwise(asked: CheckRoom) -> str:
    """Fewer slots are no advice where they are what is asked for next, or there are no fewer."""
    fewer = not asked.tentative and any(need.slots >= SLOTS for need in asked.needs)
    return f"{FEWER_SLOTS}; or {FEWER_COPIES}" if fewer else FEWER_COPIES


def _words(job: str, needs: Sequence[SegmentNeed]) -> str:
    own, copies = ([need for need in needs if need.replica is replica] for replica in (False, True))
    pinned = sum(need.pinned * (need.slot_bytes + PAGE) for need in needs)
    slots = "/".join(str(count) for count in sorted({need.slots for need in needs}))
    said = f"{slots} slots of {len(own)} ranks here: {_bytes(own)} bytes"
    said += f", copies of {len(copies)} ranks of other nodes: {_bytes(copies)} bytes" if copies else ""
    said += f", {pinned} of these for versions on their way to storage or parity" if pinned else ""
    return f"job {job} ({said}; what is made already apart)"


def _bytes(needs: Sequence[SegmentNeed]) -> int:
    return sum(segment_bytes(need.slots + need.pinned, need.slot_bytes) for need in needs)


T = TypeVar("T")

CHECKED_WITHIN_S = 5.0
"""How long the answer to a rank waits for slots that are yet to be checked; half of the time that it waits itself."""
MOST_ASKED_AT_ONCE = 128
"""Other vaults that are asked at once what they hold. Of a rack that lost its power each takes its whole time-out, and
who answers must not wait for its turn behind them."""
MOST_UNTOLD_FINDINGS = 256
"""Findings kept while no supervisor is connected; the oldest give way."""


class Vault:
    """One running vault. Made and used on the event loop; everything that moves bytes runs in threads."""

    def __init__(self, settings: VaultSettings, store: SegmentStore, adoption: Adoption, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._adoption = adoption
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(settings.workers, "vault")
        self._streams = ThreadPoolExecutor(settings.workers, "stream")
        self._untold: deque[FindingRaised] = deque(maxlen=MOST_UNTOLD_FINDINGS)
        self._tally = Tally()
        self._book = JobBook()
        findings = self._findings = Findings(settings.node, clock, self._tally, self._found)
        library = Library(store, findings)
        self._witness = Witness(settings.node, self._book, clock, self._lost)
        self._peers = Peers(settings, self._book, clock, self._witness)
        sender = Sender(settings, self._peers, findings, self._tally, self._streams, clock)
        self._replicator = Replicator(settings.node, store, self._book, sender, self._tally, self._threads)
        shards = Shards(settings, library, self._peers, findings)
        self._fetcher = Fetcher(store, shards, self._tally)
        self._encoder = Encoder(settings.node, store, self._book, shards, self._tally, self._streams)
        self._decoder = Decoder(store, shards, self._tally, self._streams)
        self._spiller = Spiller(settings.node, store, self._book, shards, self._tally, self._streams)
        self._receiver = Receiver(store, self._book, findings, self._tally)
        self.transfers = TransferServer(
            settings, adoption, self._book, library, self._receiver, self._tally, self._witness, clock
        )
        self._local = LocalServer(settings.socket_path, self.handle, self._tally.refuse)
        repairer = Repairer(settings, self._book, store, self._peers, self._decoder)
        self._scrubber = Scrubber(
            store, findings, self._tally, clock, repairer, settings.scrub_interval_s, settings.scrub_bytes_per_s
        )

    @property
    def clients(self) -> Collection[Client]:
        """Who is connected now: supervisors and ranks."""
        return self._local.clients

    @property
    def has_jobs(self) -> bool:
        """Whether anybody may still need what is here."""
        return bool(self._store.jobs()) or len(self._book) > 0

    async def start(self) -> None:
        self._store.listen(self._findings.damage)
        self.transfers.start()
        await self._local.start()
        self._adoption.start()
        if self._settings.scrub_interval_s:
            self._scrubber.start()

    async def stop(self) -> None:
        """Ends all connections and threads; the segments stay."""
        self._witness.close()
        await self._local.stop()
        self._peers.close()
        self._spiller.close()
        await asyncio.to_thread(self.transfers.stop)
        await asyncio.to_thread(self._adoption.stop)
        await asyncio.to_thread(self._scrubber.stop)
        for pool in (self._threads, self._streams):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    # --- requests -------------------------------------------------------------------------------------------------

    async def handle(self, message: ToVault, client: Client) -> FromVault | Handover:
        """The answer to one request. Raises EverstepError for a refusal."""
        if isinstance(message, Configure | Forget | Protect | Spill | Statistics):
            self._meet_supervisor(client)
        match message:
            case OpenSegment():
                return await self._open(message)
            case CheckRoom():
                await self._in_thread(lambda: check_room(self._store, self._findings, message))
                return Done(request=message.request)
            case SlotSealed():
                return await self._sealed(message)
            case Fetch():
                fetcher = self._decoder if message.group else self._fetcher
                landed = await self._in_thread(lambda: fetcher.fetch(message))
                return Fetched(request=message.request, bytes=landed)
            case Connect():
                lent = await self._in_thread(lambda: self._peers.lend(message.job, message.node))
                settings = self._settings
                return Handover(
                    Connected(
                        request=message.request,
                        answer_timeout_s=settings.settle_timeout_s,
                        io_timeout_s=settings.io_timeout_s,
                    ),
                    lent,
                )
            case ConnectionBroke():
                self._peers.broke(message.job, message.node, message.why)
                return Done(request=message.request)
            case Protect():
                made = await self._in_thread(lambda: self._encoder.protect(message))
                return Protected(request=message.request, parity=made.letter, members=made.members_digest)
            case Spill():
                spill = partial(self._spiller.spill, message)
                outcome = await self._loop.run_in_executor(self._spiller.thread, spill)
                return Spilled(
                    request=message.request,
                    folder=outcome.folder,
                    bytes=outcome.bytes,
                    whole=outcome.whole,
                    removed=outcome.removed,
                    left=outcome.left,
                )
            case Inventory():
                return await self._inventory(message)
            case Configure():
                self._peers.configured(self._book.configure(message))
                return Done(request=message.request)
            case Forget():
                return await self._forget(message)
            case Statistics():
                return await self._in_thread(lambda: self._statistics(message))

    async def _open(self, message: OpenSegment) -> Segment:
        key = SegmentKey(message.job, "own", message.local_rank)

        def make() -> OwnedSegment:
            with near(message.numa_node):
                segment = self._store.open(key, message.slot_bytes, message.slots, message.keep)
            self._book.require_not_over(message.job, self._store.forget)
            return segment

        segment = await self._in_thread(make)
        view = segment.view
        return Segment(request=message.request, path=str(segment.path), slot_bytes=view.slot_bytes, slots=view.slots)

    async def _sealed(self, message: SlotSealed) -> Replicated:
        segment, header = self._replicator.find(message)
        if message.slot in segment.unchecked:  # said to the vault before this one, which had no time to answer
            await self._in_thread(lambda: self._adoption.require(segment, message.slot, header))
        return await self._replicator.replicate(message)

    async def _forget(self, message: Forget) -> Done:
        self._book.forget(message.job)
        self._replicator.forget(message.job)
        self._receiver.forget(message.job)
        self._encoder.forget(message.job)
        self._spiller.forget(message.job)
        self._peers.forget(message.job)
        await self._in_thread(lambda: self._store.forget(message.job))
        return Done(request=message.request)

    async def _inventory(self, message: Inventory) -> InventoryAnswer:
        here = self._in_thread(lambda: self._adoption.inventory(message.job, CHECKED_WITHIN_S))
        others = dict.fromkeys(node for node in message.nodes if node != self._settings.node)
        turns = asyncio.Semaphore(MOST_ASKED_AT_ONCE)
        threads = ThreadPoolExecutor(MOST_ASKED_AT_ONCE, "ask")  # which starts no more than it needs
        try:
            answers = await asyncio.gather(here, *(self._ask(message, node, turns, threads) for node in others))
        finally:
            threads.shutdown(wait=False)
        return InventoryAnswer(
            request=message.request,
            slots=tuple(slot for slots, _ in answers for slot in slots),
            unchecked=sum(unchecked for _, unchecked in answers),
        )

    async def _ask(
        self, message: Inventory, node: str, turns: asyncio.Semaphore, threads: Executor
    ) -> tuple[tuple[SlotInfo, ...], int]:
        """A peer's slots, and how many it has yet to check; none where it does not answer in time, from its turn on."""

        def ask(channel: Channel) -> tuple[tuple[SlotInfo, ...], int]:
            channel.send(InventoryAsk())
            answer = channel.answer(InventoryList)
            return answer.slots, answer.unchecked

        call = partial(self._peers.call, message.job, node, ask, message.timeout_s)
        try:
            async with turns:
                return await asyncio.wait_for(self._loop.run_in_executor(threads, call), message.timeout_s)
        except (EverstepError, TimeoutError) as error:
            log.info("%s is left out of the inventory: %s", node, error, extra=self._context(message.job))
            return (), 0

    def _statistics(self, message: Statistics) -> StatisticsAnswer:
        counters, refused = self._tally.read()
        sealed = sum(len(segment.sealed()) for segment in self._store.segments())
        levels = {
            "segment_bytes": self._store.budget.used_bytes(),
            "free_bytes": self._store.budget.free_bytes(),
            "sealed_slots": sealed,
            "peer_connections": len(self._peers) + len(self.transfers),
        }
        return StatisticsAnswer(request=message.request, counters=counters, refused=refused, levels=levels)

    def _context(self, job: str) -> dict[str, str]:
        return {"node": self._settings.node, "job": job}

    # --- findings, and peers that are gone ---------------------------------------------------------------------------

    def _found(self, finding: FindingRaised) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._tell, finding)

    def _tell(self, finding: FindingRaised) -> None:
        supervisors = [client for client in self._local.clients if client.supervisor]
        if not supervisors:
            self._untold.append(finding)
        for client in supervisors:
            client.send(VaultFinding(finding=finding))

    def _lost(self, lost: PeerLost) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._pass_on, lost)

    def _pass_on(self, lost: PeerLost) -> None:
        for client in self._local.clients:
            if client.supervisor:
                client.send(lost)

    def _meet_supervisor(self, client: Client) -> None:
        client.supervisor = True
        while self._untold:
            client.send(VaultFinding(finding=self._untold.popleft()))
