"""Listen on the controller's port, and serve bounded HTTP on it."""

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
from everstep_controller.auth.peers import UNKNOWN_PEER, ConnectionPeer
from everstep_controller.config import ControllerSettings
from everstep_controller.server import connections, responses
from everstep_controller.server.agent_service import Defer, SerialQueue
from everstep_controller.server.session import ConnectionRouter, ControllerApp

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application


# ---- HTTP protocol
# uvicorn's HTTP protocol, with limits on the memory and time that a client may use.

MAX_HEAD_BYTES = 16 << 10
"""Maximum bytes of request line, headers and trailers together; ours are under 1 KiB. uvicorn has no limit."""
MAX_HEADER_LINES = 100
"""Maximum lines of headers and trailers together. Each costs about 150 bytes of memory besides its text."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a request on the wire. Bodies end at 1 MiB; the rest leaves room for tiny chunks."""
MAX_PIPELINED = 8
"""Maximum pipelined requests per connection. Our clients send none; uvicorn queues all that arrive in one piece."""
HEAD_DEADLINE_S = 30.0
"""Seconds for a request's head once begun, and for a connection's first byte."""
BODY_DEADLINE_S = 60.0
"""Seconds for a request's body: 1 MiB over a line of 140 kbit/s."""
MAX_READ_PAUSE_S = 5.0
"""Maximum seconds without reading a connection. A disconnect in this time is noticed only at its end."""
SLOW_READER_S = 30.0
MIN_READ_BYTES = 16 << 10
"""Minimum bytes of a response that a client must read per interval; a slower client holds memory for nothing."""


_TOO_LARGE = "This request is too large."
_AROUND_HEADER = len(": \r\n")

_log = logging.getLogger("everstep_controller.http")
_log.setLevel(logging.ERROR)
"""Malformed input is answered, not logged: uvicorn would write a line or two for each."""


async def _answered(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a request. A cancellation, because the server stops, is not an error for uvicorn to log."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        cycle.disconnected = True
        cycle.transport.abort()


class _Stage(Enum):
    """The part of a request that the next bytes belong to."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    """The body with its framing, and the trailers."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits: it answers 400 to excessive requests, and closes slow connections.

    Trailers are counted like headers, and dropped. The parser hands over complete headers, which are counted exactly.
    Data that it still holds (an unfinished line, a chunk's header) is counted by reads that complete nothing. A
    connection therefore holds at most one read more than MAX_HEAD_BYTES.

    ``soon`` runs callbacks one by one in turns of the event loop, so that paused connections do not all resume at once.
    """

    _peer = UNKNOWN_PEER
    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _stage = _Stage.HEAD
    _head_bytes = 0
    _head_lines = 0
    _unparsed_bytes = 0
    """Bytes received since the parser last handed over anything but a header."""
    _handed_over = False
    _message_bytes = 0
    _refusal_reason = ""
    _read_pause_s = 0.0
    _answering: tuple[RequestResponseCycle, ...] = ()
    _read_pause_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, soon: Defer = lambda work: work(), **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _log
        self._soon = soon

    def send_400_response(self, msg: str) -> None:
        """Send a problem detail like every other refusal, unless the request has its response already."""
        self._disarm()
        if self._stage is not _Stage.BODY or not self.cycle.response_started:
            body = responses.problem(400, "http", self._refusal_reason or msg)
            self.transport.write(responses.last_response(400, body, []))
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = ConnectionPeer.from_transport(transport)
        super().connection_made(transport)
        self._arm(HEAD_DEADLINE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._cancel_reader_check()
        if self._read_pause_timer is not None:
            self._read_pause_timer.cancel()
        super().connection_lost(exc)
        for cycle in (*self._answering, *(waiting for waiting, _ in self.pipeline)):
            cycle.disconnected = True  # uvicorn notifies only the newest cycle; the one being answered would never end
            cycle.message_event.set()
        self.pipeline.clear()
        connections.process_descriptors().open -= 1

    def abort(self) -> None:
        """Abort the connection and discard unsent data."""
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = (cycle,)
        super()._start_asgi_task(cycle, cast("ASGI3Application", functools.partial(_answered, cycle, app)))

    # --- input

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # TLS may still deliver decrypted data
        self._handed_over = False
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._handed_over:
            self._unparsed_bytes += len(data)
        if self._stage is _Stage.HEAD or (self._stage is _Stage.IDLE and not self._handed_over):
            self._arm(HEAD_DEADLINE_S)
        if self._unparsed_bytes > MAX_HEAD_BYTES or self._message_bytes > MAX_MESSAGE_BYTES:
            self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope[connections.SCOPE_KEY] = self._peer
        scope[connections.CLOSE_CONNECTION_KEY] = self.transport.abort
        scope[connections.READ_PAUSE_KEY] = self.pause_reading_for
        self._stage = _Stage.HEAD
        self._head_bytes = self._head_lines = self._message_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _AROUND_HEADER)
        self._head_lines += 1
        if self._head_lines > MAX_HEADER_LINES:
            self._refuse(f"This request has more than {MAX_HEADER_LINES} header lines.")
        if self._stage is _Stage.HEAD:  # trailers are not read, and must not be taken for headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse("Too many pipelined requests.")
        super().on_headers_complete()
        self._stage = _Stage.BODY
        self._progress()
        self._disarm()
        self._arm(BODY_DEADLINE_S)

    def on_body(self, body: bytes) -> None:
        self._progress()
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Note progress; the parser calls this after each chunk."""
        self._progress()

    def on_message_complete(self) -> None:
        self._stage = _Stage.IDLE
        self._progress()
        self._disarm()
        super().on_message_complete()

    def pause_reading_for(self, seconds: float) -> None:
        """Pause reading for ``seconds`` (at most MAX_READ_PAUSE_S), so that ignoring Retry-After is free."""
        self._read_pause_s = min(seconds, MAX_READ_PAUSE_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._read_pause_s and not self.transport.is_closing():
            self.flow.pause_reading()
            self._read_pause_timer = self.loop.call_later(self._read_pause_s, lambda: self._soon(self._wake))
            self._read_pause_s = 0.0

    def _wake(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _progress(self) -> None:
        self._handed_over, self._unparsed_bytes = True, 0

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _refuse(self, reason: str) -> None:
        """Abort the parser from inside one of its calls; the received data is then answered by 400."""
        self._refusal_reason = reason
        raise OverflowError(reason)

    def _arm(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._schedule_reader_check()

    def resume_writing(self) -> None:
        self._cancel_reader_check()
        super().resume_writing()

    def _schedule_reader_check(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(SLOW_READER_S, lambda: self._check_reader(unread))

    def _check_reader(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._schedule_reader_check()

    def _cancel_reader_check(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


log = logging.getLogger("everstep_controller")

BACKLOG = 65_535
"""Connections that may wait to be accepted: after a failover the whole fleet connects at once, and a refused client
waits a second. The kernel's limit (net.core.somaxconn, by default 4096) applies too."""
ACCEPTED_AT_ONCE = 16
"""Duplicates of the listening descriptor, and so connections accepted per turn of the event loop, because libuv (since
1.45) accepts one per descriptor. A fleet that closes sessions between heartbeats opens 6,000 per second, and a turn
that serves 100 of them lasts milliseconds."""
GC_THRESHOLDS = (2_000, 5, 1_000)
"""Thresholds of the garbage collector. A collection takes 0.2 us per object: the young and middle generations take at
most two milliseconds, and a full collection runs only after ten million new objects."""
SWITCH_INTERVAL_S = 0.00005
CONNECTION_CLOSED_POLL_S = 0.01
CUT_OFF_S = 1.0
"""Maximum seconds to wait for aborted connections to end; usually one turn of the event loop."""
TRIM_EVERY_S = 10
TICKS_PER_S = 10
"""uvicorn's count of ticks per second; it does something once in so many."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A node that loses power closes no connection: after two minutes without a sign the kernel does."""


def listen(listen_address: tuple[str, int], setting_name: str = "listen") -> socket.socket:
    """Return a listener at a host and port. Raises ConfigurationError, which names ``setting_name``."""
    host, port = listen_address
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        for option, value in _KEEPALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited by accepted connections
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or change {setting_name}"
        ) from error
    listener.setblocking(False)
    return listener


def duplicate_listeners(listener: socket.socket) -> list[socket.socket]:
    """Return the listener and its duplicates: see ``ACCEPTED_AT_ONCE``."""
    return [listener, *(listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]


def address_of(listener: socket.socket) -> str:
    """Return the served ``host:port``."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ControllerServer(uvicorn.Server):
    """uvicorn's server, which can end held requests, and whose signals do not kill the process after an orderly end."""

    def __init__(self, config: uvicorn.Config, close_connections: Callable[[], None], grace_s: float = 0.5) -> None:
        super().__init__(config)
        self._release = close_connections
        self._grace_s = grace_s
        self._stop_requested = asyncio.Event()
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def request_stop(self) -> None:
        """Ask for an orderly end; from the event loop's thread."""
        self._release()
        self.should_exit = True
        self._stop_requested.set()

    async def main_loop(self) -> None:
        """Tick once per second until a stop is requested. uvicorn's own loop wakes up ten times per second."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + TICKS_PER_S) % (86400 * TICKS_PER_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), 1.0)

    async def on_tick(self, counter: int) -> bool:
        """Return unused malloc memory to the system now and then, some 20 MiB."""
        if counter % (TICKS_PER_S * TRIM_EVERY_S) == 0 and self._malloc_trim is not None:
            self._malloc_trim(0)
        return await super().on_tick(counter)

    def close_all(self) -> None:
        """Close every connection after its current response."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections in order, and abort those with requests over stop_grace_s or an unfinished TLS shutdown."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        self.close_all()
        await _until_gone(state, self._grace_s)
        if state.connections or state.tasks:
            text = (
                "%d connections did not end within stop_grace_s and are aborted, %d of them with a request in progress"
            )
            log.info(text, len(state.connections), len(state.tasks))
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
    """Wait up to ``seconds`` until nothing is open or running."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while state.connections or state.tasks:
                await asyncio.sleep(CONNECTION_CLOSED_POLL_S)


def server_config(settings: ControllerSettings, replica: ControllerApp) -> uvicorn.Config:
    """Return uvicorn's configuration for this controller."""
    soon = SerialQueue()

    def route_connection(server_state: ServerState, **named: Any) -> ConnectionRouter:
        http = functools.partial(BoundedHttp, server_state=server_state, soon=soon, **named)
        return ConnectionRouter(replica, connections.process_descriptors(), server_state.connections, http)

    return uvicorn.Config(
        replica,
        http=cast("Any", route_connection),
        ws="none",
        proxy_headers=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,  # otherwise uvicorn listens again, with its own backlog
        timeout_keep_alive=75,  # longer than a heartbeat interval, so that agents on plain HTTP keep their connection
        ssl_certfile=settings.tls.tls_certificate or None,
        ssl_keyfile=settings.tls.tls_key or None,
        ssl_ca_certs=settings.tls.tls_client_ca or None,
        ssl_cert_reqs=ssl.CERT_OPTIONAL if settings.tls.tls_client_ca else ssl.CERT_NONE,
    )


def check_certificate(settings: ControllerSettings) -> None:
    """Raise ConfigurationError for a certificate or key that cannot be used."""
    tls = settings.tls
    if not tls.tls_certificate:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.tls_certificate, tls.tls_key)
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"the certificate {tls.tls_certificate} with the key {tls.tls_key} cannot be used: {error}"
        ) from error
    if authorities := tls.tls_client_ca:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise ConfigurationError(f"the client CA certificates in {authorities} cannot be read: {error}") from error


def tune_process() -> None:
    """Tune Python and the limit of open files for a large, long-lived fleet.

    The fleet's objects live long and have no cycles, so the garbage collector need not scan them while agents wait.
    With the defaults, a fleet of 12,500 nodes got no answers for 0.2 s at a time. The threads of the event loop and the
    database switch every 0.05 ms instead of 5 ms, because each heartbeat during a database write waits for a switch.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Every agent holds a connection, and the usual soft limit of 1024 is too low.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
