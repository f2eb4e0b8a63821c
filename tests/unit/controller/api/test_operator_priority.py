"""Whoever looks at a controller does not wait behind a whole fleet that comes back at once."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from everstep_controller.config import ControllerSettings
from everstep_controller.server.listener import BACKLOG, ControllerServer, listen, server_config
from starlette.types import Receive, Scope, Send

from everstep.bearer_tokens import TokenRole
from tests.support.controllers import VIEWER, bearer, controller_process
from tests.support.forked import ForkPool
from tests.support.sessions import upgrade

AGENTS = 500
SO_TIMESTAMPNS = 35
"""Linux: with what is read comes when it arrived. The order of answers is the kernel's, however late we look."""
PATHS = ("/healthz", "/v1/nodes?limit=50")


def asked(address: str, words: bytes) -> socket.socket:
    """A connection over which these words were sent."""
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    connection.settimeout(30.0)
    connection.connect((host, int(port)))
    connection.sendall(words)
    return connection


def answered_at(connection: socket.socket, status: bytes) -> float:
    """When the answer came, wall seconds."""
    answer, notes, _, _ = connection.recvmsg(1 << 16, 64)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    ((_, _, note),) = notes
    seconds, nanoseconds = struct.unpack("qq", note)
    return float(seconds + nanoseconds / 1e9)


def test_operator_requests_overtake_a_returning_fleet(program_forks: ForkPool, tmp_path: Path) -> None:
    second = ("--operators-listen", "127.0.0.1:0")
    with controller_process(tmp_path, program_forks, arguments=second) as controller, ExitStack() as stack:
        assert controller.process is not None
        own = json.loads(controller.ready_file.read_text())["operators_address"]
        controller.process.send_signal(signal.SIGSTOP)  # everybody is in line when it wakes
        agents = [
            stack.enter_context(asked(controller.listen, upgrade(f"n{i}", bearer(TokenRole.AGENT, f"n{i}"))))
            for i in range(AGENTS)
        ]
        token = VIEWER["Authorization"]
        requests = [f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\n\r\n".encode() for path in PATHS]
        visitors = [stack.enter_context(asked(own, words)) for words in requests]
        controller.process.send_signal(signal.SIGCONT)
        waited = [answered_at(visitor, b"200") for visitor in visitors]
        came = [answered_at(agent, b"101") for agent in agents]
        later = [sum(at > mine for at in came) for mine in waited]
    assert min(later) > AGENTS / 5, "in line, they would come last"


def backlog_of(listener: socket.socket) -> int:
    """How many connections may wait to be accepted (``tcpi_sacked`` of a listener; linux/tcp.h)."""
    told = struct.unpack("8B6I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32))
    return int(told[-1])


def test_server_keeps_the_full_listen_backlog() -> None:
    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asks")

    async def served() -> list[int]:
        member: Any = nobody
        member.leading = lambda: None
        listeners = [listen(("127.0.0.1", 0)) for _ in range(2)]
        server = ControllerServer(server_config(ControllerSettings(secret_file="unused"), member), lambda: None)
        serving = asyncio.create_task(server.serve(sockets=listeners))
        while not server.started:
            await asyncio.sleep(0.002)
        try:
            return [backlog_of(listener) for listener in listeners]
        finally:
            server.request_stop()
            await serving

    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert asyncio.run(served()) == [min(BACKLOG, somaxconn)] * 2
