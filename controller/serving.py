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
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from controller.api import descriptors
from controller.api.front import Front
from controller.api.one_by_one import OneByOne
from controller.api.peers import HANG_UP_KEY, NOBODY, REST_KEY, SCOPE_KEY, Peer
from controller.config import ControllerSettings
from controller.http_protocol import BoundedHttp
from controller.member import Member
from everstep.errors import ConfigurationError

log = logging.getLogger("controller")

BACKLOG = 65_535
"""Connections that may wait to be accepted: after a failover the whole fleet comes at once, and who finds no room tries
again a second later. The kernel's own bound (net.core.somaxconn, 4096 unless it was raised) holds too."""
ACCEPTED_AT_ONCE = 16
"""Connections taken in one turn of the event loop. libuv (from 1.45) takes one for each listening descriptor: of a
fleet whose agents hang up between beats 6,000 come each second, and a turn that serves 100 of them lasts milliseconds.
So many duplicates of the descriptor are listened at."""
COLLECT_AFTER = (2_000, 5, 1_000)
"""New objects to a collection of the young, such collections to one of the middle-aged, and those to one of all. A
collection takes 0.2 us an object: the first two at most two milliseconds, and all is looked at only after ten million
objects more."""
SWITCH_S = 0.00005
GONE_POLL_S = 0.01
CUT_OFF_S = 1.0
"""Seconds in which connections that were cut off are gone; a turn of the event loop, as a rule."""
TRIM_EVERY_S = 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A node that lost its power closes nothing: after two minutes without a sign the kernel ends its connection."""


def listen(place: tuple[str, int], setting: str = "listen") -> socket.socket:
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
            f"cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or give another {setting}"
        ) from error
    listener.setblocking(False)
    return listener


def ears(listener: socket.socket) -> list[socket.socket]:
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


class Server(uvicorn.Server):
    """uvicorn, told how to end held requests, and whose signals do not kill the process after an orderly end."""

    def __init__(self, config: uvicorn.Config, release: Callable[[], None], grace_s: float = 0.5) -> None:
        super().__init__(config)
        self._release = release
        self._grace_s = grace_s
        self._give_back = _trimmer()

    def end(self) -> None:
        """Asks for an orderly end."""
        self._release()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % (10 * TRIM_EVERY_S) == 0:
            self._give_back()
        return await super().on_tick(counter)

    def hang_up(self) -> None:
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
        self.hang_up()
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
            loop.add_signal_handler(number, self.end)
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


class Http(BoundedHttp):
    """uvicorn's protocol, which knows the other end of its connection and counts it."""

    _peer = NOBODY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = Peer.of(transport)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self._peer  # type: ignore[literal-required]
        self.scope[HANG_UP_KEY] = self.transport.abort  # type: ignore[literal-required]
        self.scope[REST_KEY] = self.rest  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        descriptors.of_this_process().open -= 1


def _front(member: Member) -> Any:
    """What uvicorn takes for its protocol: makes the front of each connection. None outlives the leadership it was
    made in (``Server.hang_up``)."""

    soon = OneByOne()

    def make(server_state: ServerState, **named: Any) -> Front:
        http = functools.partial(Http, server_state=server_state, soon=soon, **named)
        return Front(member, descriptors.of_this_process(), server_state.connections, http)

    return make


def server_config(settings: ControllerSettings, member: Member) -> uvicorn.Config:
    """How uvicorn serves this controller."""
    return uvicorn.Config(
        member,
        http=_front(member),
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


def settle_interpreter() -> None:
    """Sets Python up for a long-lived fleet.

    What a fleet consists of lives long and has no cycles: the garbage collector need not look for them in it while
    agents wait. By default it passes over everything each time that it has grown by a quarter, and over what is young
    after every 700 new objects; a fleet of 12,500 nodes went unanswered for 0.2 s at a time. The thread that answers
    beats and that of the database let one another in after a twentieth of a millisecond, not five: each beat that comes
    while a transaction is written waits that long for the interpreter, and more would come than are answered.
    """
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_S)


def raise_file_limit() -> None:
    """Every agent holds a connection: a fleet of thousands is over the usual soft limit of 1024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_of_plain_text(settings: ControllerSettings, address: str) -> None:
    """Says so where tokens can be read on the way."""
    local = address.startswith(("127.", "[::1]"))
    if not local and not settings.tls_certificate:
        log.warning("tokens cross the network in plain text on %s: give --tls-certificate and --tls-key", address)
