"""What the vault answers to the node's ranks and supervisor, and the parts it is put together from."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from agent.vault.adoption import Adoption
from agent.vault.fetch import Fetcher
from agent.vault.findings import Findings
from agent.vault.jobs import JobBook
from agent.vault.local import Client, Handover, LocalServer
from agent.vault.pages import near
from agent.vault.parity.decode import Decoder
from agent.vault.parity.encode import Encoder
from agent.vault.parity.shards import Shards
from agent.vault.peers import Peers
from agent.vault.reading import Library
from agent.vault.receive import Receiver
from agent.vault.repair import Repairer
from agent.vault.replicate import Replicator
from agent.vault.room import check_room
from agent.vault.scrub import Scrubber
from agent.vault.segments import Segment as OwnedSegment
from agent.vault.segments import SegmentKey, SegmentStore
from agent.vault.send import Sender
from agent.vault.serve import TransferServer
from agent.vault.settings import VaultSettings
from agent.vault.spills import Spiller
from agent.vault.statistics import Tally
from agent.vault.witness import Witness
from everstep.channel import Channel
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.wire.v1.local import (
    CheckRoom,
    Connect,
    Connected,
    ConnectionBroke,
    Done,
    Fetch,
    Fetched,
    FromVault,
    Inventory,
    InventoryAnswer,
    OpenSegment,
    Replicated,
    Segment,
    SlotInfo,
    SlotSealed,
    ToVault,
)
from everstep.wire.v1.supervision import (
    Configure,
    Forget,
    Protect,
    Protected,
    Spill,
    Spilled,
    Statistics,
    StatisticsAnswer,
    VaultFinding,
)
from everstep.wire.v1.training import FindingRaised, PeerLost
from everstep.wire.v1.transfer import InventoryAsk, InventoryList

log = logging.getLogger(__name__)
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
