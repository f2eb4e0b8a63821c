"""The door of ``/metrics``: one thread, one request at a time, a bearer token, nothing else."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from io import BufferedIOBase
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from everstep.clock import Clock
from everstep.log_throttle import LogThrottle

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""For a scraper's next byte."""
MOST_HEAD_BYTES = 16 << 10
"""Of a scrape's request line and headers. The standard library has bounds for each line and for their number, which
come to 6.5 MB."""
ASKED_WITHIN_S = 4.0
"""For a scraper to say its request and take its answer; another waits meanwhile."""


class MetricsServer:
    """Serves what ``collector`` yields, to whoever shows ``token``.

    ``address`` is where it listens once made, ``refused`` how many came without the token. Raises OSError where it
    cannot listen. ``close`` ends its thread.
    """

    def __init__(self, host: str, port: int, token: Callable[[], str], collector: Collector, clock: Clock) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Undescribed(collector))
        self.refused = 0
        self._server = _Server((host, port), _handler(registry, token, self._count_refused), clock)
        bound = self._server.server_address
        self.address = f"{host}:{bound[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics", daemon=True)
        self._thread.start()

    def _count_refused(self) -> None:
        self.refused += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


class _Undescribed(Collector):
    """Keeps the registry from collecting at registration, when there is nothing yet."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self):  # type: ignore[no-untyped-def]
        return self._inner.collect()

    def describe(self) -> list[object]:
        return []


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler], clock: Clock
    ) -> None:
        self._say = LogThrottle(log, clock.monotonic)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        late = threading.Timer(ASKED_WITHIN_S, _hang_up, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request(request, client_address)
        finally:
            late.cancel()

    def handle_error(self, request: object, client_address: object) -> None:
        self._say(logging.INFO, "a scrape from %s failed: %s", client_address, sys.exception() or "no reason")


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has been answered
        request.shutdown(socket.SHUT_RDWR)


class _Head:
    """Reads a request's head from ``inner``, MOST_HEAD_BYTES at most: a longer one is refused as a line too long is."""

    def __init__(self, inner: BufferedIOBase) -> None:
        self._inner = inner
        self._left = MOST_HEAD_BYTES

    def readline(self, size: int) -> bytes:
        """As a file's. Raises LineTooLong where the head goes on beyond its bound."""
        if self._left < 0:
            raise http.client.LineTooLong("head")
        line = self._inner.readline(min(size, self._left + 1))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._inner.close()


def _handler(
    registry: CollectorRegistry, token: Callable[[], str], count_refused: Callable[[], None]
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = PATIENCE_S
        raw_requestline: bytes

        def setup(self) -> None:
            super().setup()
            self.rfile = _Head(self.rfile)  # type: ignore[assignment]

        def parse_request(self) -> bool:
            if len(self.raw_requestline) <= MOST_HEAD_BYTES:
                return super().parse_request()
            self.command, self.request_version, self.requestline = "GET", self.protocol_version, ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(HTTPStatus.NOT_FOUND, b"only /metrics is here\n", "text/plain")
            elif not self._allowed():
                count_refused()
                self._answer(
                    HTTPStatus.UNAUTHORIZED, b"show the token of --metrics-token-file as Bearer\n", "text/plain"
                )
            else:
                self._show()

        def _show(self) -> None:
            try:
                content = generate_latest(registry)
            except TimeoutError:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the agent's event loop does not answer\n", "text/plain")
            else:
                self._answer(HTTPStatus.OK, content, CONTENT_TYPE_LATEST)

        def _allowed(self) -> bool:
            shown = self.headers.get("Authorization", "").encode()
            expected = token()
            return bool(expected) and hmac.compare_digest(shown, f"Bearer {expected}".encode())

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
