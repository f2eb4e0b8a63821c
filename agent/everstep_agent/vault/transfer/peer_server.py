"""The TCP side of a vault: other nodes' vaults bring copies, read slots, and ask what is here."""

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
from everstep.wire.framing import Channel
from everstep.wire.v1.transfer import (
    Ack,
    Data,
    DataEnd,
    Digests,
    DigestsAsk,
    Get,
    Greeting,
    InventoryAsk,
    InventoryList,
    ManifestPart,
    Part,
    PartDone,
    Put,
    PutDone,
    Ready,
    Request,
    chunk_bits,
    refusal,
)
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.adoption import Adoption
from everstep_agent.vault.memory.reading import Library, Reading
from everstep_agent.vault.reporting import Tally
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import Witness, admit
from everstep_agent.vault.transfer.receiving import Receiver

log = logging.getLogger(__name__)

CHECKED_WITHIN_S = 0.25
"""How long the answer to another vault waits for slots that are yet to be checked; some give it half a second."""

ACCEPT_AGAIN_S = 0.05
"""After a connection that could not be taken, for want of file descriptors as a rule."""

MOST_UNPROVED = 256
"""Connections that have not proved themselves yet. Where one more comes the oldest of them gives way: a peer proves
itself within milliseconds, and a stranger may be silent for as long as it likes."""

_OUT_OF_STEP = (Unavailable, MalformedMessage, AuthenticationError)
"""After these, what the peer sends next cannot be told apart from bulk bytes, or is not wanted."""


class TransferServer:
    """Listens for other vaults, one thread for each connection."""

    def __init__(
        self,
        settings: VaultSettings,
        adoption: Adoption,
        book: JobBook,
        library: Library,
        receiver: Receiver,
        tally: Tally,
        witness: Witness,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._say = LogThrottle(log, clock.monotonic)  # whoever connects can cause these lines
        self._context = {"node": settings.node}
        self._book = book
        self._tally = tally
        self._witness = witness
        self._answers = Answers(adoption, book, library, receiver, tally)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: dict[Channel, threading.Thread] = {}
        self._unproved: dict[Channel, None] = {}
        self._listener = _listen(*settings.listen_address)
        self._accepting = threading.Thread(target=self._accept, name="transfer-accept", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._accepting.start()

    def stop(self) -> None:
        """Ends the listener and all connections, and waits for their threads."""
        self._stopping.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # nobody ever connected
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
                channel = Channel(sock, f"{address[0]}:{address[1]}", self._settings.io_timeout_s)
            except OSError as error:
                if not self._stopping.wait(ACCEPT_AGAIN_S):
                    self._say(logging.WARNING, "cannot take a connection: %s", error, extra=self._context)
                continue
            try:
                self._begin(channel)
            except RuntimeError as error:  # no more threads; those that there are go on
                self._forget(channel)
                if not self._stopping.wait(ACCEPT_AGAIN_S):
                    self._say(logging.WARNING, "cannot serve a connection: %s", error, extra=self._context)

    def _begin(self, channel: Channel) -> None:
        """Raises RuntimeError where no thread can be started."""
        thread = threading.Thread(target=self._serve, args=(channel,), name="transfer", daemon=True)
        with self._lock:
            self._connections[channel] = thread
            self._unproved[channel] = None
            oldest = next(iter(self._unproved)) if len(self._unproved) > MOST_UNPROVED else None
            if oldest is not None:
                del self._unproved[oldest]
                oldest.shutdown()
        thread.start()

    def _proved(self, channel: Channel) -> None:
        """Raises Unavailable where there are as many already as may be."""
        with self._lock:
            self._unproved.pop(channel, None)
            others = len(self._connections) - len(self._unproved) - 1
        if others >= self._settings.max_connections:
            raise Unavailable(f"{others} connections are open here, and no more are taken; try again")

    def _forget(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            self._unproved.pop(channel, None)
            self._connections.pop(channel, None)

    def _serve(self, channel: Channel) -> None:
        conversation = None
        try:
            facts, greeting = admit(channel, self._book, self._settings.node)
            self._proved(channel)
            channel.peer = greeting.node
            conversation = Conversation(greeting, channel, self._settings, self._answers)
            while True:
                channel.patience(conversation.patience_s)
                request = channel.request()
                channel.patience(self._settings.io_timeout_s)
                if self._book.facts(facts.job).secret != facts.secret:
                    raise AuthenticationError(f"the secret of job {facts.job} has changed; prove the new one")
                self._answer(conversation, request)
        except EverstepError as error:
            self._part_with(channel, error, conversation)
        except Exception as error:  # whoever asked should know, and not take this vault for one that is gone
            log.exception("a request of %s failed", channel.peer, extra=self._context)
            self._part_with(channel, EverstepError(f"{type(error).__name__}: {error}"), conversation)
        finally:
            if conversation is not None:
                conversation.end()
            self._forget(channel)

    def _answer(self, conversation: Conversation, request: Request) -> None:
        try:
            conversation.answer(request)
        except EverstepError as error:
            if isinstance(error, _OUT_OF_STEP):
                raise
            self._tally.refuse(error.code)
            conversation.channel.send(refusal(error))

    def _part_with(self, channel: Channel, error: EverstepError, proved: Conversation | None) -> None:
        """Says why, where the peer may still listen. A proved peer that went away is no refusal."""
        if proved is not None and isinstance(error, Unavailable):
            self._witness.broke(proved.job, proved.node, str(error))
            return
        self._tally.refuse(error.code)
        self._say(logging.INFO, "%s is refused: %s", channel.peer, error, extra=self._context)
        try:
            channel.send(refusal(error))
        except Unavailable:
            pass  # it does not listen


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; give another --listen") from error


class Conversation:
    """One proved connection. What it began and did not finish ends with it."""

    def __init__(self, greeting: Greeting, channel: Channel, settings: VaultSettings, answers: Answers) -> None:
        self.job = greeting.job
        self.node = greeting.node
        self._read_only = greeting.read_only
        self.channel = channel
        self._settings = settings
        self._answers = answers
        self._begun: set[bytes] = set()

    @property
    def patience_s(self) -> float:
        """For the next request: short in the middle of a transfer, which holds a slot."""
        return self._settings.settle_timeout_s if self._begun else self._settings.idle_timeout_s

    def answer(self, request: Request) -> None:
        """Serves one request. Raises EverstepError for a refusal."""
        if self._read_only and not isinstance(request, Get | DigestsAsk | InventoryAsk):
            raise AuthenticationError(f"{self.node} has said that it only reads over this connection")
        if isinstance(request, Put):
            self._put(request)
        elif isinstance(request, Part):
            self._answers.receiver.part(self.job, self.node, request, self.channel)
            self.channel.send(PartDone())
        elif isinstance(request, ManifestPart):
            self._answers.receiver.manifest(self.job, self.node, request, self.channel)
            self.channel.send(PartDone())
        elif isinstance(request, PutDone):
            self._answers.receiver.finish(self.job, self.node, request.transfer)
            self._begun.discard(request.transfer)
            self.channel.send(Ack())
        elif isinstance(request, Get):
            self._answers.get(self.job, request, self.channel)
        elif isinstance(request, DigestsAsk):
            self.channel.send(self._answers.digests(self.job, request))
        else:
            assert isinstance(request, InventoryAsk)
            slots, unchecked = self._answers.adoption.inventory(self.job, CHECKED_WITHIN_S)
            self.channel.send(InventoryList(slots=slots, unchecked=unchecked))

    def _put(self, put: Put) -> None:
        incoming = self._answers.receiver.begin(self.job, self.node, put)
        if incoming is None:
            self.channel.send(Ack(already=True))
            return
        self._begun.add(incoming.id)
        lacks = not incoming.has_manifest
        self.channel.send(Ready(transfer=incoming.id, here=chunk_bits(incoming.done), manifest=lacks))

    def end(self) -> None:
        for transfer in self._begun:
            self._answers.receiver.leave(transfer)


class Answers:
    """What conversations draw on."""

    def __init__(self, adoption: Adoption, book: JobBook, library: Library, receiver: Receiver, tally: Tally) -> None:
        self.adoption = adoption
        self._book = book
        self.receiver = receiver
        self._library = library
        self._tally = tally

    def get(self, job: str, get: Get, channel: Channel) -> None:
        """Sends ranges (or the manifest) of a slot that hashes right.

        Raises NotFound where there is none, or it was filled anew on the way; DigestMismatch; MalformedMessage.
        """
        if get.ranges:
            sent = self._send_ranges(job, get, channel)
        else:
            sent = _send_manifest(self._library.open(job, get.rank, get.version, (), parity=get.parity), channel)
        self._tally.add("served_bytes", sent)

    def digests(self, job: str, ask: DigestsAsk) -> Digests:
        """What is sealed. Raises NotFound, DigestMismatch."""
        reading = self._library.open(job, ask.rank, ask.version, (), parity=ask.parity)
        if ask.group is not None:
            self._book.protects(job, ask.version, ask.group)
        return Digests(payload_bytes=len(reading.payload), digests=b"".join(reading.digests))

    def _send_ranges(self, job: str, get: Get, channel: Channel) -> int:
        """Hashes each piece while the one before is under way: the word on that one says whether another follows."""
        lengths = [length for _, length in get.ranges]
        pieces = self._library.pieces(job, get.rank, get.version, get.ranges, parity=get.parity, unhashed=get.unhashed)
        piece = next(pieces, None)
        channel.send(Data(bytes=sum(lengths)))
        hasher = RangeHasher(lengths, [] if piece is None else [piece[0].sealed(each) for each in get.ranges])
        while piece is not None:
            reading, views = piece
            for view in views:
                hasher.update(view)
            channel.send_bulk(views)
            try:
                if not reading.still():
                    raise NotFound(f"rank {get.rank}'s version {get.version} was overwritten while it was read")
                piece = next(pieces, None)
            except EverstepError:
                channel.send_status(False)
                raise
            channel.send_status(True)
        channel.send(DataEnd(digests=hasher.digests()))
        return sum(lengths)


def _send_manifest(reading: Reading, channel: Channel) -> int:
    manifest = memoryview(reading.manifest)
    channel.send(Data(bytes=len(manifest)))
    for start in range(0, len(manifest), CHUNK_BYTES):
        channel.send_bulk([manifest[start : start + CHUNK_BYTES]])
        channel.send_status(True)
    channel.send(DataEnd(digests=reading.digests[0]))
    return len(manifest)
