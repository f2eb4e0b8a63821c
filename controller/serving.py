"""The port: its listener, its limits, and the HTTP server on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controller.app import Controller
from controller.config import ControllerSettings
from everstep.errors import ConfigurationError

log = logging.getLogger("controller")


def listen(settings: ControllerSettings) -> socket.socket:
    """A listener where the settings say. Raises ConfigurationError."""
    host, port = settings.address
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.listen}: {error.strerror}; stop what listens there, or give another --listen"
        ) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """``host:port`` as served."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, told how to end held requests, and whose signals do not kill the process after an orderly end."""

    def __init__(self, config: uvicorn.Config, release: Callable[[], None]) -> None:
        super().__init__(config)
        self._release = release

    def end(self) -> None:
        """Asks for an orderly end."""
        self._release()
        self.should_exit = True

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


def _protocol(controller: Controller) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which tells the controller of every connection's end."""

    class Watching(HttpToolsProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            controller.app.polls.connection_lost(self.client)

    return Watching


def server_config(settings: ControllerSettings, controller: Controller) -> uvicorn.Config:
    """How uvicorn serves this controller."""
    return uvicorn.Config(
        controller.app,
        http=_protocol(controller),
        ws="none",
        proxy_headers=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,  # longer than a beat or a poll, so that agents keep their connections
        timeout_graceful_shutdown=max(1, round(settings.stop_grace_s)),
        ssl_certfile=settings.tls_certificate or None,
        ssl_keyfile=settings.tls_key or None,
    )


def check_certificate(settings: ControllerSettings) -> None:
    """Raises ConfigurationError for a certificate or key that cannot be used."""
    if not settings.tls_certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigurationError(
            f"the certificate {settings.tls_certificate} with the key {settings.tls_key} cannot be used: {error}"
        ) from error


def raise_file_limit() -> None:
    """Every agent holds three connections: a fleet of thousands is over the usual soft limit of 1024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_of_plain_text(settings: ControllerSettings, address: str) -> None:
    """Says so where tokens can be read on the way."""
    local = address.startswith(("127.", "[::1]"))
    if not local and not settings.tls_certificate:
        log.warning("tokens cross the network in plain text on %s: give --tls-certificate and --tls-key", address)
