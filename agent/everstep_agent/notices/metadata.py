"""Read a cloud's metadata service by bounded HTTP requests: no redirects, no proxy, 2 s and 64 KiB for each."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from everstep_agent.notices.notice import Notice, NoticeError, parse_time

TIMEOUT_S = 2.0
"""Seconds for a whole request. The services answer from the host itself, within milliseconds."""
MAX_ANSWER_BYTES = 64 << 10
"""Maximum bytes of an answer with its headers."""


class Unreachable(Exception):
    """The service did not answer, so that its other paths need not be tried now."""


class Answer(msgspec.Struct, frozen=True):
    """An answer of the service, of any status."""

    status: int
    body: bytes
    served_at: float | None
    """Time of the service's clock, from the ``Date`` header; None without one."""


async def fetch(base_url: str, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
    """Send one request over a connection of its own. Raises Unreachable or NoticeError."""
    parts = urlsplit(base_url)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", "Content-Length: 0"]
    request = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
    received = bytearray()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _exchange(parts.hostname or "", parts.port or 80, request, received)
    except TimeoutError:
        # A server that keeps the connection open may have answered all the same.
        if not received:
            raise Unreachable(f"no answer within {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise Unreachable(str(error)) from error
    return _parse(bytes(received), method)


async def _exchange(host: str, port: int, request: bytes, received: bytearray) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        await writer.drain()
        while data := await reader.read(1 << 14):
            received += data
            if len(received) > MAX_ANSWER_BYTES:
                raise NoticeError(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
    finally:
        writer.close()


def _parse(received: bytes, method: str) -> Answer:
    # Imported late: only agents that read a metadata service need it.
    from http.client import HTTPException, HTTPResponse

    class Received:
        def makefile(self, _mode: str) -> io.BytesIO:
            return io.BytesIO(received)

    if b"\r\n\r\n" not in received:
        raise NoticeError("no complete HTTP answer")
    try:
        response = HTTPResponse(Received(), method=method)  # type: ignore[arg-type]
        response.begin()
        date = response.getheader("Date")
        return Answer(response.status, response.read(), None if date is None else _parse_date(date))
    except (HTTPException, ValueError) as error:
        raise NoticeError(f"no HTTP answer: {error!r}") from error


def _parse_date(text: str) -> float | None:
    try:
        return parse_time(text)
    except NoticeError:
        return None


Parser = Callable[[bytes], list[Notice]]


class MetadataService:
    """A metadata service: its address, its headers, and a parser for each path with notices."""

    name = ""
    base_url = "http://169.254.169.254"
    headers: Mapping[str, str] = {}
    parsers: Mapping[str, Parser] = {}

    def __init__(self, base_url: str = "") -> None:
        self._base_url = base_url or self.base_url
        self.clock_lead_s = 0.0
        """Seconds that the service's clock is ahead of this node's."""

    async def read(self, path: str, now: float) -> list[Notice]:
        """Return the notices of one path. Raises Unreachable or NoticeError."""
        answer = await self.get(path)
        if answer.served_at is not None:
            self.clock_lead_s = answer.served_at - now
        if answer.status == 404:
            return []
        if answer.status != 200:
            raise NoticeError(f"status {answer.status}")
        return self.parsers[path](answer.body)

    async def get(self, path: str) -> Answer:
        """Send a request with the service's headers."""
        return await fetch(self._base_url, path, self.headers)
