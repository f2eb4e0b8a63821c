from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import uvicorn
from uvicorn.server import ServerState

from everstep_controller.server import listener, responses
from everstep_controller.server.listener import (
    MAX_HEAD_BYTES,
    MAX_HEADER_LINES,
    MAX_PIPELINED,
    MAX_READ_PAUSE_S,
    MIN_READ_BYTES,
    BoundedHttp,
)
from everstep_controller.server.responses import Problem

DEADLINE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 16 << 20
"""Bytes that exceed the socket buffers while the peer does not read."""
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer at once, before the request body has arrived."""
    await responses.send_answer(send, b"{}" if scope["path"] != "/large" else bytes(LARGE))


@asynccontextmanager
async def served(app: Any = application) -> AsyncIterator[int]:
    """Serve an application behind `BoundedHttp`; yield its port."""
    config = uvicorn.Config(app, log_config=None, access_log=False)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*state.tasks)


def play(talk: Talk) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE_S), served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await talk(reader, writer)
            finally:
                writer.close()

    asyncio.run(scenario())


async def status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    await reader.readexactly(length)
    return int(head.split()[1])


def test_http_closes_on_too_many_pipelined_requests() -> None:
    """A waiting request holds fifty times its own bytes, so the queue of pipelined requests must be bounded."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST * (MAX_PIPELINED + 2))
        answers = await reader.read()  # ends when the other side closes
        assert answers.count(b"HTTP/1.1 400 ") == 1
        assert answers.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED

    play(talk)


@pytest.mark.parametrize("piece", [b"X-Many: one\r\n", b"endless"])
def test_http_refuses_endless_head(piece: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun = b"GET / HTTP/1.1\r\nX: "
        pieces = MAX_HEADER_LINES if piece.endswith(b"\n") else (MAX_HEAD_BYTES - len(begun)) // len(piece)
        writer.write(begun)
        for _ in range(pieces):
            writer.write(piece)
        await writer.drain()
        writer.write(2 * piece)  # exceeds the limit, while the server has read all earlier bytes
        assert await status(reader) == 400
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)

    play(talk)


@pytest.mark.parametrize(
    "request_bytes", [b"\x16\x03\x01\x00\xa5", b"BREW /pot HTCPCP/1.0\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n"]
)
def test_http_answers_malformed_request_with_problem_unlogged(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request_bytes)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"application/problem+json" in head
        assert msgspec.json.decode(body, type=Problem).code == "http"

    play(talk)
    assert not caplog.records


async def ended(reader: asyncio.StreamReader) -> None:
    """Check that the server closed the connection without another answer; the request had its answer already."""
    with suppress(ConnectionResetError):  # the server left part of the request unread
        assert await reader.read() == b""


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"1\r\n{\r\n0\r\n"


@pytest.mark.parametrize("trailer", [b"a:b\r\n", b"X-Long: " + b"y" * 1000 + b"\r\n"])
def test_http_refuses_oversized_trailers(trailer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + LAST_CHUNK)
        assert await status(reader) == 200
        writer.write(trailer * (2 * MAX_HEAD_BYTES // len(trailer)))
        await ended(reader)

    play(talk)


@pytest.mark.parametrize("extension", [b"1;" + b"x" * MAX_HEAD_BYTES, b"1" + b";a=b" * (MAX_HEAD_BYTES // 4)])
def test_http_refuses_endless_chunk_headers(extension: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        assert await status(reader) == 200
        writer.write(extension)
        await ended(reader)

    play(talk)


def test_http_closes_when_body_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_DEADLINE_S", 0.05)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await reader.read()  # ends when the other side closes

    play(talk)


@pytest.mark.parametrize("begun", [b"", b"GET / HT", REQUEST + b"GET / HT"])
def test_http_closes_when_head_does_not_arrive(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(listener, "HEAD_DEADLINE_S", 0.05)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await reader.read()  # ends when the other side closes

    play(talk)


def test_http_closes_when_response_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SLOW_READER_S", 0.05)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        while not writer.transport.is_closing():  # the end arrives behind unread bytes
            writer.write(b"x")
            await asyncio.sleep(0.01)

    play(talk)


def test_http_keeps_connection_with_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []
    transport = MagicMock()

    async def scenario() -> None:
        http = BoundedHttp(uvicorn.Config(application, log_config=None), ServerState(), {})

        def call_later(_delay: float, look: Callable[[], None]) -> MagicMock:
            looks.append(look)
            return MagicMock()

        monkeypatch.setattr(http.loop, "call_later", call_later)
        http.connection_made(transport)
        looks.clear()
        for unread in range(10, 5, -1):
            transport.get_write_buffer_size.return_value = unread * MIN_READ_BYTES
            looks.pop()() if looks else http.pause_writing()
            assert not transport.abort.called
        looks.pop()()
        assert transport.abort.called

    asyncio.run(scenario())


def test_http_pauses_reading_until_rest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    waiting: list[Callable[[], None]] = []
    transport = MagicMock(is_closing=lambda: False)

    async def scenario() -> None:
        config = uvicorn.Config(application, log_config=None, timeout_keep_alive=75)
        http = BoundedHttp(config, ServerState(), {}, soon=waiting.append)

        def call_later(delay: float, call: Callable[[], None]) -> MagicMock:
            timers.append((delay, call))
            return MagicMock()

        monkeypatch.setattr(http.loop, "call_later", call_later)
        http.connection_made(transport)
        http.pause_reading_for(60.0)
        http.data_received(REQUEST)
        await asyncio.gather(*http.tasks)

    asyncio.run(scenario())
    (wake,) = [call for seconds, call in timers if seconds == MAX_READ_PAUSE_S]
    wake()
    assert (transport.pause_reading.call_count, transport.resume_reading.call_count) == (1, 0)
    (resume,) = waiting
    resume()
    assert transport.resume_reading.call_count == 1
