"""One kept-alive HTTP connection to whichever controller answers, in blocking calls, over the standard library.

The standard library, because a node daemon has little memory to spend: an HTTP client package costs 10 to 25 MiB.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from everstep import __version__
from everstep.errors import EverstepError, ProtocolError, Unavailable

LARGEST_ANSWER_BYTES = 16 << 20
"""A generation of 100,000 ranks is some 10 MiB of JSON; nothing else comes near."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A controller's machine that vanished without a word is noticed 11 s into a quiet long poll."""

_TRANSPORT_ERRORS = (OSError, http.client.HTTPException)


class _ErrorBody(msgspec.Struct):
    code: str = ""
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


class Controllers:
    """The controllers' addresses, and the one in use: shared by all connections of an agent, from any thread."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("no controller address")
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._current = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []

    @property
    def current(self) -> str:
        return self._urls[self._current]

    def on_move(self, listener: Callable[[str], None]) -> None:
        """Calls ``listener`` with the new address, in the thread that noticed, whenever it changes."""
        self._listeners.append(listener)

    def failed(self, url: str) -> None:
        """``url`` did not answer: use the next, unless somebody has moved on already."""
        with self._lock:
            if url != self.current or len(self._urls) == 1:
                return
            self._current = (self._current + 1) % len(self._urls)
        for listener in self._listeners:
            listener(self.current)


class Connection:
    """Requests one after another over one connection. Belongs to one thread, but for the interrupts and ``close``.

    Args:
        controllers: where to connect; told when the current one does not answer.
        token: called for each new connection and after a refusal; an empty token sends none.
        tls: verification of https controllers.
        connect_timeout_s: for the TCP and TLS handshakes together.
    """

    def __init__(
        self,
        controllers: Controllers,
        token: Callable[[], str],
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
    ) -> None:
        self._controllers = controllers
        self._token = token
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._url = ""
        self._http: http.client.HTTPConnection | None = None
        self._closed = False

    def request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """The body of a 200 answer.

        Raises Unavailable where no controller answers in time, and the error of ``everstep.errors`` that a controller
        answered with. A kept connection that turns out to be closed is replaced once without a word.
        """
        if self._http is not None and self._url == self._controllers.current:
            try:
                return self._exchange(self._http, method, path, body, timeout_s)
            except TimeoutError as error:
                raise self._gone(error) from error
            except _TRANSPORT_ERRORS as error:
                if self._closed:
                    raise self._gone(error) from error
        self._drop()
        try:
            return self._exchange(self._connect(), method, path, body, timeout_s)
        except _TRANSPORT_ERRORS as error:
            raise self._gone(error) from error

    def interrupt(self) -> None:
        """From any thread: makes a request that is under way fail now."""
        connection = self._http
        plain = connection.sock if connection is not None else None
        if plain is not None:
            try:
                # not the TLS socket's own shutdown, which takes its state away under the reading thread
                socket.socket.shutdown(plain, socket.SHUT_RDWR)
            except OSError:
                pass

    def interrupt_unless(self, url: str) -> None:
        """The same, where the connection leads elsewhere than to ``url``."""
        if self._url != url:
            self.interrupt()

    def close(self) -> None:
        """From any thread: no more requests, and the one under way fails now. Its thread then calls ``release``."""
        self._closed = True
        self.interrupt()

    def release(self) -> None:
        """Closes what is open."""
        self._drop()

    def _connect(self) -> http.client.HTTPConnection:
        if self._closed:
            raise ConnectionAbortedError("the agent is ending")
        self._url = self._controllers.current
        parts = urlsplit(self._url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self._connect_timeout_s, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._connect_timeout_s)
        self._http = connection
        connection.connect()  # sets TCP_NODELAY
        if self._closed:
            raise ConnectionAbortedError("the agent is ending")
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return connection

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> bytes:
        connection.sock.settimeout(timeout_s)
        connection.request(method, path, body, self._headers())
        answer = connection.getresponse()
        content = answer.read(LARGEST_ANSWER_BYTES + 1)
        if len(content) > LARGEST_ANSWER_BYTES:
            raise http.client.HTTPException(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
        if answer.will_close:
            self._drop()
        if answer.status == http.client.OK:
            return content
        error = error_of(answer.status, content, self._url)
        if isinstance(error, Unavailable):
            self._controllers.failed(self._url)
        raise error

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": f"everstep-agent/{__version__}"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _gone(self, error: Exception) -> Unavailable:
        self._drop()
        self._controllers.failed(self._url)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Unavailable(f"{self._url}: {reason or type(error).__name__}")

    def _drop(self) -> None:
        connection, self._http = self._http, None
        if connection is not None:
            connection.close()


def _by_code(kind: type[EverstepError]) -> dict[str, type[EverstepError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(EverstepError)
_BY_STATUS = {401: "unauthenticated", 403: "forbidden", 404: "not_found", 409: "stale", 413: "malformed",
              422: "malformed", 426: "protocol_version"}  # fmt: skip


def error_of(status: int, body: bytes, url: str) -> EverstepError:
    """The error that an answer other than 200 stands for; what is no answer of ours is told by its status."""
    try:
        said = msgspec.json.decode(body, type=_ErrorAnswer).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = _ErrorBody()
    message = f"{url}: {said.message[:1000] or http.client.responses.get(status, 'no reason given')} ({status})"
    if status >= 500 or status == 429:
        return Unavailable(message)
    kind = _ERRORS.get(said.code) or _ERRORS.get(_BY_STATUS.get(status, ""), ProtocolError)
    return Unavailable(message) if kind is Unavailable else kind(message)
