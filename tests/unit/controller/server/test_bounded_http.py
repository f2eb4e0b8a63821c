from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import uvicorn
from everstep_controller.server import listener, responses
from everstep_controller.server.listener import (
    MAX_HEAD_BYTES,
    MAX_HEADER_LINES,
    MAX_MESSAGE_BYTES,
    MAX_PIPELINED,
    MAX_READ_PAUSE_S,
    MIN_READ_BYTES,
    BoundedHttp,
)
from everstep_controller.server.responses import Problem
from uvicorn.server import ServerState

DEADLINE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 16 << 20
"""More than sockets hold unread."""
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once, whatever is still to come."""
    await responses.send_answer(send, b"{}" if scope["path"] != "/large" else bytes(LARGE))


@asynccontextmanager
async def served(app: Any = application) -> AsyncIterator[int]:
    """The port of an application behind the protocol."""
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


def test_http_accepts_sequential_and_pipelined_requests() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(REQUEST)
            assert await status(reader) == 200
        writer.write(REQUEST * 3)
        assert [await status(reader) for _ in range(3)] == [200, 200, 200]

    play(talk)


def test_http_closes_on_too_many_pipelined_requests() -> None:
    """Each that waits holds fifty times its own bytes, and while some are answered others came: without end."""

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
        writer.write(2 * piece)  # as soon as it is too much, before anything is in flight that nobody reads
        assert await status(reader) == 400
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)

    play(talk)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x00\xa5", b"BREW /pot HTCPCP/1.0\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n"]
)
def test_http_answers_malformed_request_with_problem_unlogged(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"application/problem+json" in head
        assert msgspec.json.decode(body, type=Problem).code == "http"

    play(talk)
    assert not caplog.records


def test_http_closes_on_endless_trailers() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
        with pytest.raises(ConnectionError):
            await pour(writer, 4 * MAX_MESSAGE_BYTES)

    play(talk)


async def ended(reader: asyncio.StreamReader) -> None:
    """The other side hung up and said nothing more: the request had its answer already."""
    with suppress(ConnectionResetError):  # it left some of what was sent unread
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


def test_http_drops_trailers() -> None:
    async def scenario() -> list[tuple[bytes, bytes]]:
        http = BoundedHttp(uvicorn.Config(application, log_config=None), ServerState(), {})
        http.connection_made(MagicMock(is_closing=lambda: False))
        http.data_received(CHUNKED + LAST_CHUNK + b"Authorization: Bearer x\r\n")
        http.data_received(b"a:b\r\n\r\n")
        await asyncio.gather(*http.tasks)
        return list(http.headers)

    names = [name for name, _ in asyncio.run(scenario())]
    assert names == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("extension", [b"1;" + b"x" * MAX_HEAD_BYTES, b"1" + b";a=b" * (MAX_HEAD_BYTES // 4)])
def test_http_refuses_endless_chunk_headers(extension: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        assert await status(reader) == 200
        writer.write(extension)
        await ended(reader)

    play(talk)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * MAX_HEADER_LINES + b"\r\n",
    ],
    ids=["url", "value", "lines"],
)
def test_http_refuses_large_head_in_one_read(head: bytes) -> None:
    """No answer but the refusal: the application is not asked."""
    transport = MagicMock()
    transport.is_closing.side_effect = lambda: transport.close.called

    async def scenario() -> int:
        http = BoundedHttp(uvicorn.Config(application, log_config=None), ServerState(), {})
        http.connection_made(transport)
        http.data_received(head)
        return len(http.tasks)

    assert asyncio.run(scenario()) == 0
    (written,) = [call.args[0] for call in transport.write.call_args_list]
    assert written.startswith(b"HTTP/1.1 400 ")


def test_http_reads_body_in_small_chunks() -> None:
    """Its framing is several times its content, and larger than any head."""

    async def read(scope: Any, receive: Any, send: Any) -> None:
        body = await responses.read_body(scope, receive, 1 << 20)
        await responses.send_answer(send, str(len(body)).encode())

    async def scenario() -> bytes:
        async with asyncio.timeout(DEADLINE_S), served(read) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED + b"1\r\nx\r\n" * (1 << 16) + b"0\r\nX-Sum: 1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            size = await reader.read(64)
            writer.close()
            return size

    assert asyncio.run(scenario()) == b"65536"


async def pour(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size >> 16):
        writer.write(b"y" * (1 << 16))
        await writer.drain()


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
        while not writer.transport.is_closing():  # the other side's word that it is over comes past what is not read
            writer.write(b"x")
            await asyncio.sleep(0.01)

    play(talk)


def test_http_keeps_connection_with_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []
    transport = MagicMock()

    async def scenario() -> None:
        http = BoundedHttp(uvicorn.Config(application, log_config=None), ServerState(), {})
        monkeypatch.setattr(http.loop, "call_later", lambda _, look: (looks.append(look), MagicMock())[1])
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
        monkeypatch.setattr(http.loop, "call_later", lambda *timer: (timers.append(timer), MagicMock())[1])
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
