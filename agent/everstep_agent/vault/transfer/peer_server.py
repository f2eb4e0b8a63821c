"""The TCP server of a vault: other nodes' vaults send copies, read slots, and request inventories."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass

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
from everstep.log_lines import LogThrottle
from everstep.wire.framing import VaultChannel
from everstep.wire.v1 import transfer as wire
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.reading import SlotFinder
from everstep_agent.vault.reporting import VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerLossDetector, server_handshake
from everstep_agent.vault.transfer.receiving import SlotReceiver

log = logging.getLogger(__name__)

PEER_INVENTORY_TIMEOUT_S = 0.25
"""Seconds that the answer to another vault waits for unchecked slots; some peers allow half a second."""

ACCEPT_RETRY_S = 0.05  # seconds to wait after a failed accept, usually for lack of file descriptors
MAX_UNAUTHENTICATED = 256
"""Maximum number of unauthenticated connections; a further one closes the oldest, since strangers may stay silent."""

_CONNECTION_ERRORS = (Unavailable, MalformedMessage, AuthenticationError)
"""Errors that end a connection: further bytes are unwanted, or indistinguishable from bulk data."""


@dataclass(eq=False)
class PeerServer:
    """Listen for other vaults, with one thread per connection."""

    settings: VaultSettings
    adoption: SegmentAdoption
    job_table: JobTable
    slot_finder: SlotFinder
    receiver: SlotReceiver
    counters: VaultCounters
    _peer_loss_detector: PeerLossDetector
    _clock: Clock

    def __post_init__(self) -> None:
        self._log = LogThrottle(log, self._clock.monotonic)  # any client can cause these lines
        self._context = {"node": self.settings.node}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: dict[VaultChannel, threading.Thread] = {}
        self._unauthenticated: dict[VaultChannel, None] = {}
        self._listener = _listen(*self.settings.listen_address)
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
            self._accepting.join(self.settings.io_timeout_s)
        with self._lock:
            connections = dict(self._connections)
        for channel in connections:
            channel.shutdown()
        for thread in connections.values():
            thread.join(self.settings.io_timeout_s)

    def __len__(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
                channel = VaultChannel(sock, f"{address[0]}:{address[1]}", self.settings.io_timeout_s)
            except OSError as error:
                if not self._stopping.wait(ACCEPT_RETRY_S):
                    self._log(logging.WARNING, "cannot accept a connection: %s", error, extra=self._context)
                continue
            try:
                self._start_thread(channel)
            except RuntimeError as error:  # no more threads; existing connections go on
                self._close_connection(channel)
                if not self._stopping.wait(ACCEPT_RETRY_S):
                    self._log(logging.WARNING, "cannot serve a connection: %s", error, extra=self._context)

    def _start_thread(self, channel: VaultChannel) -> None:
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
        if others >= self.settings.max_connections:
            raise Unavailable(f"the limit of {self.settings.max_connections} connections is reached; try again later")

    def _close_connection(self, channel: VaultChannel) -> None:
        channel.close()
        with self._lock:
            self._unauthenticated.pop(channel, None)
            self._connections.pop(channel, None)

    def _serve(self, channel: VaultChannel) -> None:
        session = None
        try:
            job_config, greeting = server_handshake(channel, self.job_table, self.settings.node)
            self._mark_authenticated(channel)
            channel.peer = greeting.node
            session = PeerSession(self, greeting, channel)
            while True:
                channel.set_receive_timeout(session.next_request_timeout_s)
                request = channel.receive_request()
                channel.set_receive_timeout(self.settings.io_timeout_s)
                if self.job_table.get_config(job_config.job).secret != job_config.secret:
                    raise AuthenticationError(
                        f"the secret of job {job_config.job} has changed; reconnect with the new secret"
                    )
                self._handle_request(session, request)
        except EverstepError as error:
            self._send_error(channel, error, session)
        except Exception as error:  # answer the peer, which would otherwise report this vault as lost
            log.exception("a request from %s failed", channel.peer, extra=self._context)
            self._send_error(channel, EverstepError(f"{type(error).__name__}: {error}"), session)
        finally:
            if session is not None:
                session.detach_transfers()
            self._close_connection(channel)

    def _handle_request(self, session: PeerSession, request: wire.TransferRequest) -> None:
        try:
            session.handle_request(request)
        except EverstepError as error:
            if isinstance(error, _CONNECTION_ERRORS):
                raise
            self.counters.count_refusal(error.code)
            session.channel.send(wire.refused_from_error(error))

    def _send_error(self, channel: VaultChannel, error: EverstepError, session: PeerSession | None) -> None:
        """Send the error if the peer may still listen. A departed authenticated peer is not a refusal."""
        if session is not None and isinstance(error, Unavailable):
            self._peer_loss_detector.report_broken_connection(session.job, session.node, str(error))
            return
        self.counters.count_refusal(error.code)
        self._log(logging.INFO, "refused a request from %s: %s", channel.peer, error, extra=self._context)
        try:
            channel.send(wire.refused_from_error(error))
        except Unavailable:
            pass  # the peer no longer listens


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; use another --vault-listen") from error


class PeerSession:
    """One authenticated connection. Its unfinished transfers end with it."""

    def __init__(self, server: PeerServer, greeting: wire.Greeting, channel: VaultChannel) -> None:
        self.job = greeting.job
        self.node = greeting.node
        self.channel, self._server = channel, server
        self._read_only = greeting.read_only
        self._open_transfers: set[bytes] = set()

    @property
    def next_request_timeout_s(self) -> float:
        """Seconds to wait for the next request: short in the middle of a transfer, which holds a slot."""
        settings = self._server.settings
        return settings.request_timeout_s if self._open_transfers else settings.idle_timeout_s

    def handle_request(self, request: wire.TransferRequest) -> None:
        """Serve one request. Raises EverstepError for a refusal."""
        if self._read_only and not isinstance(request, wire.Get | wire.DigestsRequest | wire.InventoryRequest):
            raise AuthenticationError(f"{self.node} opened this connection for reading only")
        channel, receiver = self.channel, self._server.receiver
        match request:
            case wire.Put():
                self._put(request)
            case wire.Part():
                receiver.receive_part(self.job, self.node, request, channel)
                channel.send(wire.PartDone())
            case wire.ManifestPart():
                receiver.receive_manifest(self.job, self.node, request, channel)
                channel.send(wire.PartDone())
            case wire.PutDone():
                receiver.finish(self.job, self.node, request.transfer)
                self._open_transfers.discard(request.transfer)
                channel.send(wire.Ack())
            case wire.Get():
                sent = self._send_ranges(request) if request.ranges else self._send_manifest(request)
                self._server.counters.add("served_bytes", sent)
            case wire.DigestsRequest():
                channel.send(self._read_digests(request))
            case wire.InventoryRequest():
                slots, unchecked = self._server.adoption.inventory(self.job, PEER_INVENTORY_TIMEOUT_S)
                channel.send(wire.InventoryList(slots=slots, unchecked=unchecked))

    def _put(self, put: wire.Put) -> None:
        incoming = self._server.receiver.begin(self.job, self.node, put)
        if incoming is None:
            self.channel.send(wire.Ack())
            return
        self._open_transfers.add(incoming.id)
        present, lacks_manifest = wire.chunk_bitmap(incoming.received_chunks), not incoming.has_manifest
        self.channel.send(wire.Ready(transfer=incoming.id, present_chunks=present, needs_manifest=lacks_manifest))

    def detach_transfers(self) -> None:
        for transfer in self._open_transfers:
            self._server.receiver.detach(transfer)

    def _read_digests(self, request: wire.DigestsRequest) -> wire.Digests:
        reading = self._server.slot_finder.open(self.job, request.rank, request.version, (), parity=request.parity)
        if request.group is not None:
            self._server.job_table.add_parity_group(self.job, request.version, request.group)
        return wire.Digests(payload_bytes=len(reading.payload), digests=b"".join(reading.digests))

    def _send_manifest(self, get: wire.Get) -> int:
        reader = self._server.slot_finder.open(self.job, get.rank, get.version, (), parity=get.parity)
        manifest = memoryview(reader.manifest)
        self.channel.send(wire.Data(bytes=len(manifest)))
        for start in range(0, len(manifest), CHUNK_BYTES):
            self.channel.send_bulk([manifest[start : start + CHUNK_BYTES]])
            self.channel.send_piece_status(True)
        self.channel.send(wire.DataEnd(digests=reader.digests[0]))
        return len(manifest)

    def _send_ranges(self, get: wire.Get) -> int:
        """Send the ranges, hashing each piece while the previous one is sent; each status says if another follows."""
        channel = self.channel
        lengths = [length for _, length in get.ranges]
        pieces = self._server.slot_finder.read_pieces(
            self.job, get.rank, get.version, get.ranges, parity=get.parity, skip_own_chunks=get.skip_hash
        )
        piece = next(pieces, None)
        channel.send(wire.Data(bytes=sum(lengths)))
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
        channel.send(wire.DataEnd(digests=hasher.digests()))
        return sum(lengths)
