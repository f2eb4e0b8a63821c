"""The TCP server of a vault: other nodes' vaults send copies, read slots, and request inventories."""

from __future__ import annotations

import logging
import socket
import threading

from everstep.clock import Clock
from everstep.errors import (
    AuthenticationError,
    ConfigurationError,
    EverstepError,
    MalformedMessage,
    NotFound,
    Unavailable,
)
from everstep.layout.digests import RangeHasher
from everstep.layout.slots import CHUNK_BYTES
from everstep.log_throttle import LogThrottle
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import (
    Ack,
    Data,
    DataEnd,
    Digests,
    DigestsRequest,
    Get,
    Greeting,
    InventoryList,
    InventoryRequest,
    ManifestPart,
    Part,
    PartDone,
    Put,
    PutDone,
    Ready,
    TransferRequest,
    chunk_bitmap,
    refused_from_error,
)
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.reading import SealedSlotReader, SlotFinder
from everstep_agent.vault.reporting import VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerLossDetector, server_handshake
from everstep_agent.vault.transfer.receiving import SlotReceiver

log = logging.getLogger(__name__)

PEER_INVENTORY_TIMEOUT_S = 0.25
"""Seconds that the answer to another vault waits for unchecked slots; some peers allow half a second."""

ACCEPT_RETRY_S = 0.05
"""Seconds to wait after a failed accept, usually for lack of file descriptors."""

MAX_UNAUTHENTICATED = 256
"""Maximum number of unauthenticated connections; a further one closes the oldest.

A peer authenticates within milliseconds, and a stranger may stay silent for as long as it likes.
"""

_CONNECTION_ERRORS = (Unavailable, MalformedMessage, AuthenticationError)
"""Errors that end a connection: further bytes are unwanted, or cannot be told apart from bulk data."""


class PeerServer:
    """Listen for other vaults, with one thread per connection."""

    def __init__(
        self,
        settings: VaultSettings,
        adoption: SegmentAdoption,
        job_table: JobTable,
        slot_finder: SlotFinder,
        receiver: SlotReceiver,
        counters: VaultCounters,
        peer_loss_detector: PeerLossDetector,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._say = LogThrottle(log, clock.monotonic)  # any client can cause these lines
        self._context = {"node": settings.node}
        self._job_table = job_table
        self._counters = counters
        self._peer_loss_detector = peer_loss_detector
        self._handlers = PeerRequestHandlers(adoption, job_table, slot_finder, receiver, counters)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: dict[VaultChannel, threading.Thread] = {}
        self._unauthenticated: dict[VaultChannel, None] = {}
        self._listener = _listen(*settings.listen_address)
        self._accepting = threading.Thread(target=self._accept, name="transfer-accept", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._accepting.start()

    def stop(self) -> None:
        """End the listener and all connections, and wait for their threads."""
        self._stopping.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # no connection was ever made
        self._listener.close()
        if self._accepting.ident is not None:
            self._accepting.join(self._settings.io_timeout_s)
        with self._lock:
            connections = dict(self._connections)
        for channel in connections:
            channel.shutdown()
        for thread in connections.values():
            thread.join(self._settings.io_timeout_s)

    def __len__(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
                channel = VaultChannel(sock, f"{address[0]}:{address[1]}", self._settings.io_timeout_s)
            except OSError as error:
                if not self._stopping.wait(ACCEPT_RETRY_S):
                    self._say(logging.WARNING, "cannot take a connection: %s", error, extra=self._context)
                continue
            try:
                self._start_thread(channel)
            except RuntimeError as error:  # no more threads; existing connections go on
                self._close_connection(channel)
                if not self._stopping.wait(ACCEPT_RETRY_S):
                    self._say(logging.WARNING, "cannot serve a connection: %s", error, extra=self._context)

    def _start_thread(self, channel: VaultChannel) -> None:
        """Start the connection's thread. Raises RuntimeError if no thread can be started."""
        thread = threading.Thread(target=self._serve, args=(channel,), name="transfer", daemon=True)
        with self._lock:
            self._connections[channel] = thread
            self._unauthenticated[channel] = None
            oldest = next(iter(self._unauthenticated)) if len(self._unauthenticated) > MAX_UNAUTHENTICATED else None
            if oldest is not None:
                del self._unauthenticated[oldest]
                oldest.shutdown()
        thread.start()

    def _mark_authenticated(self, channel: VaultChannel) -> None:
        """Mark the connection as authenticated. Raises Unavailable beyond ``max_connections``."""
        with self._lock:
            self._unauthenticated.pop(channel, None)
            others = len(self._connections) - len(self._unauthenticated) - 1
        if others >= self._settings.max_connections:
            raise Unavailable(f"{others} connections are open here, and no more are taken; try again")

    def _close_connection(self, channel: VaultChannel) -> None:
        channel.close()
        with self._lock:
            self._unauthenticated.pop(channel, None)
            self._connections.pop(channel, None)

    def _serve(self, channel: VaultChannel) -> None:
        conversation = None
        try:
            job_config, greeting = server_handshake(channel, self._job_table, self._settings.node)
            self._mark_authenticated(channel)
            channel.peer = greeting.node
            conversation = PeerSession(greeting, channel, self._settings, self._handlers)
            while True:
                channel.set_receive_timeout(conversation.next_request_timeout_s)
                request = channel.receive_request()
                channel.set_receive_timeout(self._settings.io_timeout_s)
                if self._job_table.get_config(job_config.job).secret != job_config.secret:
                    raise AuthenticationError(f"the secret of job {job_config.job} has changed; prove the new one")
                self._handle_request(conversation, request)
        except EverstepError as error:
            self._send_error(channel, error, conversation)
        except Exception as error:  # answer the peer, so that it does not take this vault for gone
            log.exception("a request of %s failed", channel.peer, extra=self._context)
            self._send_error(channel, EverstepError(f"{type(error).__name__}: {error}"), conversation)
        finally:
            if conversation is not None:
                conversation.detach_transfers()
            self._close_connection(channel)

    def _handle_request(self, peer_session: PeerSession, request: TransferRequest) -> None:
        try:
            peer_session.handle_request(request)
        except EverstepError as error:
            if isinstance(error, _CONNECTION_ERRORS):
                raise
            self._counters.count_refusal(error.code)
            peer_session.channel.send(refused_from_error(error))

    def _send_error(self, channel: VaultChannel, error: EverstepError, peer_session: PeerSession | None) -> None:
        """Send the error if the peer may still listen. A departed authenticated peer is not a refusal."""
        if peer_session is not None and isinstance(error, Unavailable):
            self._peer_loss_detector.report_broken_connection(peer_session.job, peer_session.node, str(error))
            return
        self._counters.count_refusal(error.code)
        self._say(logging.INFO, "%s is refused: %s", channel.peer, error, extra=self._context)
        try:
            channel.send(refused_from_error(error))
        except Unavailable:
            pass  # the peer no longer listens


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; give another --listen") from error


class PeerSession:
    """One authenticated connection. Its unfinished transfers end with it."""

    def __init__(
        self, greeting: Greeting, channel: VaultChannel, settings: VaultSettings, handlers: PeerRequestHandlers
    ) -> None:
        self.job = greeting.job
        self.node = greeting.node
        self._read_only = greeting.read_only
        self.channel = channel
        self._settings = settings
        self._handlers = handlers
        self._open_transfers: set[bytes] = set()

    @property
    def next_request_timeout_s(self) -> float:
        """Seconds to wait for the next request: short in the middle of a transfer, which holds a slot."""
        return self._settings.request_timeout_s if self._open_transfers else self._settings.idle_timeout_s

    def handle_request(self, request: TransferRequest) -> None:
        """Serve one request. Raises EverstepError for a refusal."""
        if self._read_only and not isinstance(request, Get | DigestsRequest | InventoryRequest):
            raise AuthenticationError(f"{self.node} has said that it only reads over this connection")
        if isinstance(request, Put):
            self._put(request)
        elif isinstance(request, Part):
            self._handlers.receiver.receive_part(self.job, self.node, request, self.channel)
            self.channel.send(PartDone())
        elif isinstance(request, ManifestPart):
            self._handlers.receiver.receive_manifest(self.job, self.node, request, self.channel)
            self.channel.send(PartDone())
        elif isinstance(request, PutDone):
            self._handlers.receiver.finish(self.job, self.node, request.transfer)
            self._open_transfers.discard(request.transfer)
            self.channel.send(Ack())
        elif isinstance(request, Get):
            self._handlers.send_slot(self.job, request, self.channel)
        elif isinstance(request, DigestsRequest):
            self.channel.send(self._handlers.read_digests(self.job, request))
        else:
            assert isinstance(request, InventoryRequest)
            slots, unchecked = self._handlers.adoption.inventory(self.job, PEER_INVENTORY_TIMEOUT_S)
            self.channel.send(InventoryList(slots=slots, unchecked=unchecked))

    def _put(self, put: Put) -> None:
        incoming = self._handlers.receiver.begin(self.job, self.node, put)
        if incoming is None:
            self.channel.send(Ack(already_sealed=True))
            return
        self._open_transfers.add(incoming.id)
        lacks = not incoming.has_manifest
        self.channel.send(
            Ready(transfer=incoming.id, present_chunks=chunk_bitmap(incoming.received_chunks), needs_manifest=lacks)
        )

    def detach_transfers(self) -> None:
        for transfer in self._open_transfers:
            self._handlers.receiver.detach(transfer)


class PeerRequestHandlers:
    """The components that peer sessions use."""

    def __init__(
        self,
        adoption: SegmentAdoption,
        job_table: JobTable,
        slot_finder: SlotFinder,
        receiver: SlotReceiver,
        counters: VaultCounters,
    ) -> None:
        self.adoption = adoption
        self._job_table = job_table
        self.receiver = receiver
        self._slot_finder = slot_finder
        self._counters = counters

    def send_slot(self, job: str, get: Get, channel: VaultChannel) -> None:
        """Send ranges (or the manifest) of a slot that hashes right.

        Raises:
            NotFound: No slot holds the version, or it was refilled meanwhile.
            DigestMismatch: The slot's bytes are not the sealed ones.
            MalformedMessage: A range lies outside the payload.
        """
        if get.ranges:
            sent = self._send_ranges(job, get, channel)
        else:
            sent = _send_manifest(self._slot_finder.open(job, get.rank, get.version, (), parity=get.parity), channel)
        self._counters.add("served_bytes", sent)

    def read_digests(self, job: str, request: DigestsRequest) -> Digests:
        """Return the sealed digests. Raises NotFound, DigestMismatch."""
        reading = self._slot_finder.open(job, request.rank, request.version, (), parity=request.parity)
        if request.group is not None:
            self._job_table.add_parity_group(job, request.version, request.group)
        return Digests(payload_bytes=len(reading.payload), digests=b"".join(reading.digests))

    def _send_ranges(self, job: str, get: Get, channel: VaultChannel) -> int:
        """Send the ranges, hashing each piece while the previous one is sent.

        Each piece's status says whether another follows.
        """
        lengths = [length for _, length in get.ranges]
        pieces = self._slot_finder.read_pieces(
            job, get.rank, get.version, get.ranges, parity=get.parity, skip_own_chunks=get.skip_hash
        )
        piece = next(pieces, None)
        channel.send(Data(bytes=sum(lengths)))
        hasher = RangeHasher(lengths, [] if piece is None else [piece[0].sealed_digest(each) for each in get.ranges])
        while piece is not None:
            reading, views = piece
            for view in views:
                hasher.update(view)
            channel.send_bulk(views)
            try:
                if not reading.is_unchanged():
                    raise NotFound(f"rank {get.rank}'s version {get.version} was overwritten while it was read")
                piece = next(pieces, None)
            except EverstepError:
                channel.send_piece_status(False)
                raise
            channel.send_piece_status(True)
        channel.send(DataEnd(digests=hasher.digests()))
        return sum(lengths)


def _send_manifest(reader: SealedSlotReader, channel: VaultChannel) -> int:
    manifest = memoryview(reader.manifest)
    channel.send(Data(bytes=len(manifest)))
    for start in range(0, len(manifest), CHUNK_BYTES):
        channel.send_bulk([manifest[start : start + CHUNK_BYTES]])
        channel.send_piece_status(True)
    channel.send(DataEnd(digests=reader.digests[0]))
    return len(manifest)
