"""``node.sock`` answers one line of JSON with another, and refuses what it cannot read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.wire.v1.node_status import DescribeNode, LocalAnswer, LocalRefusal, LocalRequest, LogBundleMade
from everstep_agent.local import node_socket
from everstep_agent.local.node_socket import MAX_REQUEST_BYTES, NodeSocketServer


async def handle(request: LocalRequest) -> LocalAnswer:
    if isinstance(request, DescribeNode):
        raise ConfigurationError("not now")
    return LogBundleMade(path="/x", size_bytes=1)


def ask(folder: Path, request: bytes) -> bytes:
    """Return what a server answers."""

    async def exchange() -> bytes:
        server = NodeSocketServer(folder / "node.sock", handle)
        await server.start()
        try:
            reader, writer = await asyncio.open_unix_connection(str(folder / "node.sock"))
            writer.write(request)
            writer.write_eof()
            received = await reader.read()
            writer.close()
            return received
        finally:
            server.close()

    return asyncio.run(exchange())


def refusal(answer: bytes) -> str:
    return msgspec.json.decode(answer, type=LocalRefusal).message


def test_socket_answers_and_passes_refusals_on(short_path: Path) -> None:
    assert msgspec.json.decode(ask(short_path, b'{"type": "MakeLogBundle"}\n'), type=LogBundleMade).path == "/x"
    assert refusal(ask(short_path, b'{"type": "DescribeNode"}\n')) == "not now"
    assert list(short_path.iterdir()) == []


@pytest.mark.parametrize("request_line", [b"{\n", b'{"type": "Reboot"}\n', b'{"type": "DescribeNode", "x": 1}\n'])
def test_socket_refuses_unreadable_requests(short_path: Path, request_line: bytes) -> None:
    assert "cannot be read" in refusal(ask(short_path, request_line))


def test_socket_cuts_endless_requests(short_path: Path) -> None:
    assert ask(short_path, b" " * (MAX_REQUEST_BYTES + 1)) == b""
    assert ask(short_path, b"{") == b""


def test_socket_refuses_other_users(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_socket, "peer_credentials", lambda connected: (7, 54321))
    assert "belongs to user 54321" in refusal(ask(short_path, b'{"type": "MakeLogBundle"}\n'))
