"""The port: its listener, its limits, and the HTTP server on it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from everstep.errors import ConfigurationError
from everstep_controller.config import ControllerSettings
from everstep_controller.leadership.member import ControllerReplica
from everstep_controller.server import connections, responses
from everstep_controller.server.agent_service import Defer, SerialQueue
from everstep_controller.server.connection_router import ConnectionRouter
from everstep_controller.server.connections import HANG_UP_KEY, REST_KEY, SCOPE_KEY, UNKNOWN_PEER, ConnectionPeer

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application


# ---- http protocol
# uvicorn's HTTP protocol, with bounds on what a stranger may make it hold.

MAX_HEAD_BYTES = 16 << 10
"""Of a request's line, headers and trailers together: ours have under one KiB. Neither uvicorn nor its parser has a
bound of its own."""
MOST_HEADER_LINES = 100
"""Of headers and trailers together. Each costs about 150 bytes of memory beside its own."""
MAX_MESSAGE_BYTES = 16 << 20
"""Of a whole request as it crosses the wire. Bodies end at 1 MiB; the rest leaves room for chunks of a few bytes."""
MAX_PIPELINED = 8
"""Requests of a connection that wait for the answer to the one before. None of ours sends a second one; uvicorn queues
all that came in one piece, and reads another piece after each answer."""
HEAD_DEADLINE_S = 30.0
"""Seconds for a request's head once it has begun, and for the first byte of a connection."""
BODY_DEADLINE_S = 60.0
"""Seconds for its body: 1 MiB over a line of 140 kbit/s."""
LONGEST_REST_S = 5.0
"""For which a connection is not read from. Whoever hangs up meanwhile is noticed only then."""
SLOW_READER_S = 30.0
MIN_READ_BYTES = 16 << 10
"""Of an answer in so many seconds: who takes less holds what was answered, and the connection, for nothing."""


_TOO_LARGE = "This request is larger than any that is understood here."
_AROUND_HEADER = len(": \r\n")

_log = logging.getLogger("everstep_controller.http")
_log.setLevel(logging.ERROR)
"""What a stranger sends is answered, not logged: uvicorn has a line, or two, for each thing that is no request."""


async def _answered(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs a request. One that is cancelled, since the server stops, is no error for uvicorn to log."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        cycle.disconnected = True
        cycle.transport.abort()


class _Stage(Enum):
    """What the next bytes of a connection belong to."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    """The body, with what frames it, and the trailers."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 to a head or message that is too large and to too many at once, hangs up where a head or a body does
    not come. Trailers are counted as headers are, and dropped.

    Args:
        soon: calls what it is given one by one, in turns of the event loop: connections that rested wake so, lest the
            requests of all that were refused together come together again.

    The parser hands headers over one by one, whole; these are counted exactly. What it holds back until then (a line
    that does not end, the header of a chunk) is counted by the reads that bring nothing else, so that a connection
    holds at most one read more than MOST_HEAD_BYTES.
    """

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _stage = _Stage.HEAD
    _head_bytes = 0
    _head_lines = 0
    _held_bytes = 0
    """Received since something was last handed over by the parser that is not a header."""
    _handed_over = False
    _message_bytes = 0
    _why = ""
    _rest_s = 0.0
    _answering: tuple[RequestResponseCycle, ...] = ()
    _resting: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, soon: Defer = lambda work: work(), **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _log
        self._soon = soon

    def send_400_response(self, msg: str) -> None:
        """A problem detail, as every other refusal; nothing where the request has its answer already."""
        self._disarm()
        if self._stage is not _Stage.BODY or not self.cycle.response_started:
            body = responses.problem(400, "http", self._why or msg)
            lines = (
                b"HTTP/1.1 400 Bad Request",
                b"content-type: " + responses.MEDIA_TYPE.encode(),
                b"content-length: %d" % len(body),
                b"connection: close",
            )
            self.transport.write(b"\r\n".join((*lines, b"", body)))
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(HEAD_DEADLINE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._heed_reading()
        if self._resting is not None:
            self._resting.cancel()
        super().connection_lost(exc)
        for cycle in (*self._answering, *(waiting for waiting, _ in self.pipeline)):
            cycle.disconnected = True  # uvicorn tells the newest one only; the one being answered would go on for ever
            cycle.message_event.set()
        self.pipeline.clear()

    def abort(self) -> None:
        """Ends the connection at once, with all that was not taken."""
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = (cycle,)
        super()._start_asgi_task(cycle, cast("ASGI3Application", functools.partial(_answered, cycle, app)))

    # --- what comes in -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # TLS hands over what it has decrypted all the same
        self._handed_over = False
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._handed_over:
            self._held_bytes += len(data)
        if self._stage is _Stage.HEAD or (self._stage is _Stage.IDLE and not self._handed_over):
            self._arm(HEAD_DEADLINE_S)
        if self._held_bytes > MAX_HEAD_BYTES or self._message_bytes > MAX_MESSAGE_BYTES:
            self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = _Stage.HEAD
        self._head_bytes = self._head_lines = self._message_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _AROUND_HEADER)
        self._head_lines += 1
        if self._head_lines > MOST_HEADER_LINES:
            self._refuse(f"This request has more than {MOST_HEADER_LINES} header lines.")
        if self._stage is _Stage.HEAD:  # nothing here reads trailers, and none may be taken for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse("More requests at once than are understood here.")
        super().on_headers_complete()
        self._stage = _Stage.BODY
        self._progress()
        self._disarm()
        self._arm(BODY_DEADLINE_S)

    def on_body(self, body: bytes) -> None:
        self._progress()
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Called by the parser after each chunk."""
        self._progress()

    def on_message_complete(self) -> None:
        self._stage = _Stage.IDLE
        self._progress()
        self._disarm()
        super().on_message_complete()

    def rest(self, seconds: float) -> None:
        """Reads no further request for so long, or LONGEST_REST_S, once the one being answered is: whoever is told to
        come again later and does so at once costs nothing meanwhile."""
        self._rest_s = min(seconds, LONGEST_REST_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._rest_s and not self.transport.is_closing():
            self.flow.pause_reading()
            self._resting = self.loop.call_later(self._rest_s, lambda: self._soon(self._wake))
            self._rest_s = 0.0

    def _wake(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _progress(self) -> None:
        self._handed_over, self._held_bytes = True, 0

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _refuse(self, why: str) -> None:
        """Ends the parser, from inside one of its calls; the data received are then answered by 400."""
        self._why = why
        raise OverflowError(why)

    def _arm(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- answers that are not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._heed_reading()
        super().resume_writing()

    def _look_again(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(SLOW_READER_S, lambda: self._check_reader(unread))

    def _check_reader(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._look_again()

    def _heed_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


log = logging.getLogger("everstep_controller")

BACKLOG = 65_535
"""Connections that may wait to be accepted: after a failover the whole fleet comes at once, and who finds no room tries
again a second later. The kernel's own bound (net.core.somaxconn, 4096 unless it was raised) holds too."""
ACCEPTED_AT_ONCE = 16
"""Connections taken in one turn of the event loop. libuv (from 1.45) takes one for each listening descriptor: of a
fleet whose agents hang up between beats 6,000 come each second, and a turn that serves 100 of them lasts milliseconds.
So many duplicates of the descriptor are listened at."""
GC_THRESHOLDS = (2_000, 5, 1_000)
"""New objects to a collection of the young, such collections to one of the middle-aged, and those to one of all. A
collection takes 0.2 us an object: the first two at most two milliseconds, and all is looked at only after ten million
objects more."""
SWITCH_INTERVAL_S = 0.00005
GONE_POLL_S = 0.01
CUT_OFF_S = 1.0
"""Seconds in which connections that were cut off are gone; a turn of the event loop, as a rule."""
TRIM_EVERY_S = 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A node that lost its power closes nothing: after two minutes without a sign the kernel ends its connection."""


def listen(place: tuple[str, int], setting_name: str = "listen") -> socket.socket:
    """A listener at a host and port; ``setting`` says which it is. Raises ConfigurationError."""
    host, port = place
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        for option, value in _KEEPALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited by what is accepted
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or give another {setting_name}"
        ) from error
    listener.setblocking(False)
    return listener


def duplicate_listeners(listener: socket.socket) -> list[socket.socket]:
    """The listener, and duplicates of it: see ``ACCEPTED_AT_ONCE``."""
    return [listener, *(listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]


def address_of(listener: socket.socket) -> str:
    """``host:port`` as served."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _trimmer() -> Callable[[], object]:
    """Returns to the system what malloc holds and nobody uses: documents of half a megabyte come and go, and leave
    20 MiB behind. Takes 0.1 ms where there is nothing to return; a C library other than glibc does so by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: trim(0)) if trim is not None else (lambda: None)


class ControllerServer(uvicorn.Server):
    """uvicorn, told how to end held requests, and whose signals do not kill the process after an orderly end."""

    def __init__(self, config: uvicorn.Config, close_connections: Callable[[], None], grace_s: float = 0.5) -> None:
        super().__init__(config)
        self._release = close_connections
        self._grace_s = grace_s
        self._give_back = _trimmer()

    def request_stop(self) -> None:
        """Asks for an orderly end."""
        self._release()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % (10 * TRIM_EVERY_S) == 0:
            self._give_back()
        return await super().on_tick(counter)

    def close_all(self) -> None:
        """Ends every connection, once what is being answered on it has been."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends in order what can be, and cuts off the rest: requests that take longer than stop_grace_s, and whoever
        does not close its side of a TLS connection."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        self.close_all()
        await _until_gone(state, self._grace_s)
        if state.connections or state.tasks:
            log.info(
                "%d connections did not end within stop_grace_s and are cut off, %d of them with a request under way",
                len(state.connections),
                len(state.tasks),
            )
        for connection in list(state.connections):
            connection.abort()  # type: ignore[union-attr]
        for task in list(state.tasks):
            task.cancel()
        await _until_gone(state, CUT_OFF_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def _until_gone(state: ServerState, seconds: float) -> None:
    """Waits until nothing is open or under way, for so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while state.connections or state.tasks:
                await asyncio.sleep(GONE_POLL_S)


class CountedHttp(BoundedHttp):
    """uvicorn's protocol, which knows the other end of its connection and counts it."""

    _peer = UNKNOWN_PEER

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = ConnectionPeer.from_transport(transport)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self._peer  # type: ignore[literal-required]
        self.scope[HANG_UP_KEY] = self.transport.abort  # type: ignore[literal-required]
        self.scope[REST_KEY] = self.rest  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        connections.process_descriptors().open -= 1


def _router_factory(member: ControllerReplica) -> Any:
    """What uvicorn takes for its protocol: makes the front of each connection. None outlives the leadership it was
    made in (``Server.hang_up``)."""

    soon = SerialQueue()

    def make(server_state: ServerState, **named: Any) -> ConnectionRouter:
        http = functools.partial(CountedHttp, server_state=server_state, soon=soon, **named)
        return ConnectionRouter(member, connections.process_descriptors(), server_state.connections, http)

    return make


def server_config(settings: ControllerSettings, member: ControllerReplica) -> uvicorn.Config:
    """How uvicorn serves this controller."""
    return uvicorn.Config(
        member,
        http=_router_factory(member),
        ws="none",
        proxy_headers=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,  # uvicorn listens once more, with its own otherwise
        timeout_keep_alive=75,  # longer than a beat, so that whoever beats by HTTP keeps its connection
        ssl_certfile=settings.tls_certificate or None,
        ssl_keyfile=settings.tls_key or None,
        ssl_ca_certs=settings.tls_client_ca or None,
        ssl_cert_reqs=ssl.CERT_OPTIONAL if settings.tls_client_ca else ssl.CERT_NONE,
    )


def check_certificate(settings: ControllerSettings) -> None:
    """Raises ConfigurationError for a certificate or key that cannot be used."""
    if not settings.tls_certificate:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigurationError(
            f"the certificate {settings.tls_certificate} with the key {settings.tls_key} cannot be used: {error}"
        ) from error
    if settings.tls_client_ca:
        _check_authorities(context, settings.tls_client_ca)


def _check_authorities(context: ssl.SSLContext, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise ConfigurationError(f"the authorities of client certificates in {file} cannot be read: {error}") from error


def tune_interpreter() -> None:
    """Sets Python up for a long-lived fleet.

    What a fleet consists of lives long and has no cycles: the garbage collector need not look for them in it while
    agents wait. By default it passes over everything each time that it has grown by a quarter, and over what is young
    after every 700 new objects; a fleet of 12,500 nodes went unanswered for 0.2 s at a time. The thread that answers
    beats and that of the database let one another in after a twentieth of a millisecond, not five: each beat that comes
    while a transaction is written waits that long for the interpreter, and more would come than are answered.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def raise_file_limit() -> None:
    """Every agent holds a connection: a fleet of thousands is over the usual soft limit of 1024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_if_plaintext(settings: ControllerSettings, address: str) -> None:
    """Says so where tokens can be read on the way."""
    local = address.startswith(("127.", "[::1]"))
    if not local and not settings.tls_certificate:
        log.warning("tokens cross the network in plain text on %s: give --tls-certificate and --tls-key", address)
