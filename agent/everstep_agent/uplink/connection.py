"""One session's connection, in the agent's event loop: TCP or TLS, an HTTP upgrade, then frames.

Implemented over asyncio, because a node daemon has little memory to spend: an HTTP client package costs 10 to 25 MiB,
the standard library's 3.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from everstep import __version__
from everstep.errors import BY_CODE, DECODE_ERRORS, EverstepError, ProtocolError, RateLimited, Unavailable
from everstep.wire.v1.agent import MAX_AGENT_FRAME_BYTES, PREFIX_BYTES, UPGRADE, FrameKind, FrameRefused, encode_frame

# Refusals: convert an HTTP answer or a frame to an error.

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
MAX_MESSAGE_LENGTH = 1000

MAX_RETRY_AFTER_S = 5.0
MAX_RETRY_AFTER_BUSY_S = 1.0
"""Maximum pauses in seconds that a controller may ask for: on a node with a job, ranks wait for directives."""


class AnswerTimeout(Unavailable):
    """A controller accepted a connection, or did not even refuse it, and then sent nothing in time."""


class _ErrorBody(msgspec.Struct):
    """RFC 9457 problem details with our ``code``."""

    code: str = ""
    detail: str = ""
    retry_after_s: float | None = None


_BY_STATUS = {401: "unauthenticated", 403: "forbidden", 404: "not_found", 409: "stale", 413: "malformed",
              422: "malformed", 426: "protocol_version", 429: "rate_limited"}  # fmt: skip


def error_from_response(status: int, body: bytes, retry_after: str, url: str) -> EverstepError:
    """Return the error for an HTTP answer; a foreign answer is classified by its status. ``retry_after``: the header of
    that name, as received; a date counts as none."""
    try:
        problem = msgspec.json.decode(body, type=_ErrorBody)
    except DECODE_ERRORS:
        problem = _ErrorBody()
    reason = problem.detail[:MAX_MESSAGE_LENGTH] or _PHRASES.get(status, "no reason given")
    message = f"{url}: {reason} ({status})"
    after_s = problem.retry_after_s
    if after_s is None and retry_after.isascii() and retry_after.isdigit():
        after_s = float(retry_after)
    kind = BY_CODE.get(problem.code) or BY_CODE.get(_BY_STATUS.get(status, ""), ProtocolError)
    return _error(Unavailable if status >= 500 else kind, message, after_s)


def error_from_frame(refused: FrameRefused, url: str) -> EverstepError:
    """Return the error for a refusal frame."""
    message = f"{url}: {refused.message[:MAX_MESSAGE_LENGTH]} ({refused.code})"
    return _error(BY_CODE.get(refused.code, ProtocolError), message, refused.retry_after_s)


def retry_after_s(error: EverstepError, *, is_busy: bool) -> float:
    """Return the limited seconds that the controller asked this node to stay away; 0 if it did not ask."""
    if not isinstance(error, Unavailable | RateLimited) or not math.isfinite(error.retry_after_s):
        return 0.0
    return min(max(error.retry_after_s, 0.0), MAX_RETRY_AFTER_BUSY_S if is_busy else MAX_RETRY_AFTER_S)


def _error(kind: type[EverstepError], message: str, after_s: float | None) -> EverstepError:
    if issubclass(kind, Unavailable | RateLimited):
        return kind(message, after_s or 0.0)
    return kind(message)


MAX_HEAD_BYTES = 16 << 10
MAX_REFUSAL_BYTES = 64 << 10
"""Limits on the HTTP answer that opens a session, or refuses it."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Keepalive detects a vanished controller machine after 11 s without traffic; frequent beats detect it sooner."""

FrameHandler = Callable[[int, bytes], None]


class ControllerConnection(asyncio.Protocol):
    """A connection made by ``open_session`` to the controller at ``url``."""

    def __init__(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[EverstepError | None] = loop.create_future()
        """The answer to the request: the refusal, or None."""
        self.ended: asyncio.Future[EverstepError] = loop.create_future()
        """The reason why the connection is over."""
        self._url = url
        self._buffer = bytearray()
        self._handle_frame: FrameHandler | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, kind: FrameKind, body: bytes) -> None:
        """Write a frame, directly into the socket if possible. After the end it is dropped."""
        assert self._transport is not None
        self._transport.write(encode_frame(kind, body))

    def set_frame_handler(self, handle_frame: FrameHandler) -> None:
        """Call ``handle_frame`` with each frame from now on; an exception from it ends the connection."""
        self._handle_frame = handle_frame
        self._split_frames()

    def fail(self, error: EverstepError) -> None:
        """End the connection now, with that reason; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(error)
        if not self.opened.done():
            self.opened.set_result(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection once all sent data is on its way."""
        if not self.ended.done():
            self.ended.set_result(Unavailable(f"{self._url}: closed by the agent", 0.0))
            assert self._transport is not None
            self._transport.close()

    def request_session(self, path: str, host: str, token: str) -> None:
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: Upgrade", f"Upgrade: {UPGRADE}"]
        lines += [f"User-Agent: everstep-agent/{__version__}"]
        lines += [f"Authorization: Bearer {token}"] if token else []
        assert self._transport is not None
        self._transport.write("\r\n".join([*lines, "", ""]).encode())

    # asyncio protocol callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = _describe_error(exc) if exc else "the controller closed the connection"
        self.fail(Unavailable(f"{self._url}: {reason}", 0.0))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if not self.opened.done():
                self._read_answer()
            self._split_frames()
        except EverstepError as error:
            self.fail(error)

    def eof_received(self) -> None:
        """Return None: the transport then closes a half-closed connection."""

    # Reading

    def _read_answer(self) -> None:
        """Read the HTTP answer once it is complete. Raises its refusal."""
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise ProtocolError(f"{self._url} answered with a head of more than {MAX_HEAD_BYTES} bytes")
        if not end:
            return
        status, headers = _parsed(bytes(head), self._url)
        if status == 101 and headers.get("upgrade") == UPGRADE:
            self._buffer = body
            self.opened.set_result(None)
            return
        length = headers.get("content-length", "")
        expected = min(int(length), MAX_REFUSAL_BYTES) if length.isascii() and length.isdigit() else 0
        if len(body) >= expected:
            raise error_from_response(status, bytes(body[:expected]), headers.get("retry-after", ""), self._url)

    def _split_frames(self) -> None:
        while self._handle_frame is not None and len(self._buffer) >= PREFIX_BYTES and not self.ended.done():
            length = int.from_bytes(self._buffer[:PREFIX_BYTES], "big")
            if not 1 <= length <= MAX_AGENT_FRAME_BYTES:
                raise ProtocolError(f"{self._url} sent a frame of {length} bytes; the limit is {MAX_AGENT_FRAME_BYTES}")
            end = PREFIX_BYTES + length
            if len(self._buffer) < end:
                return
            kind, body = self._buffer[PREFIX_BYTES], bytes(self._buffer[PREFIX_BYTES + 1 : end])
            del self._buffer[:end]
            self._handle_frame(kind, body)


def _parsed(head: bytes, url: str) -> tuple[int, dict[str, str]]:
    """Return status and headers, names in lower case. Raises ProtocolError for another protocol."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isascii() or not rest[:3].isdigit():
        raise ProtocolError(f"{url} does not speak HTTP/1.1")
    fields = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}


def _describe_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


async def open_session(
    url: str, node: str, token: str, tls: ssl.SSLContext | None, timeout_s: float
) -> ControllerConnection:
    """Open a connection that may send, and receive after ``set_frame_handler``.

    ``token`` is empty if a client certificate in ``tls`` identifies the node; ``timeout_s`` is for TCP, TLS and the
    controller's answer together. Raises AnswerTimeout, Unavailable if no controller is there, or its refusal.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    connection = ControllerConnection(url)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                parts.hostname,
                port,
                ssl=tls if secure else None,
                ssl_handshake_timeout=timeout_s if secure else None,
                ssl_shutdown_timeout=1.0 if secure else None,
            )
            connection.request_session(f"/v1/agents/{node}/session", parts.netloc, token)
            refusal = await connection.opened
    except TimeoutError as error:
        timed_out = AnswerTimeout(f"{url}: no session within {timeout_s:g} s", 0.0)
        connection.fail(timed_out)
        raise timed_out from error
    except OSError as error:
        raise Unavailable(f"{url}: {_describe_error(error)}", 0.0) from error
    except asyncio.CancelledError:
        connection.fail(Unavailable(f"{url}: the agent is ending", 0.0))
        raise
    if refusal is not None:
        raise refusal
    return connection
