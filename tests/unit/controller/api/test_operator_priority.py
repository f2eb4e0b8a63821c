"""Operators' requests are answered before the queue of a fleet that reconnects at once."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from everstep.bearer_tokens import TokenRole
from everstep_controller.config import ControllerSettings
from everstep_controller.server.listener import BACKLOG, ControllerServer, listen, server_config
from tests.support.fleet.controllers import VIEWER, bearer, controller_process
from tests.support.fleet.session_client import upgrade
from tests.support.processes.fork_pool import ForkPool

AGENTS = 500
SO_TIMESTAMPNS = 35
"""Linux attaches the arrival time to received data, so the measured order does not depend on when the test reads it."""
PATHS = ("/healthz", "/v1/nodes?limit=50")


def open_request(address: str, words: bytes) -> socket.socket:
    """Open a connection and send `words` over it."""
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    connection.settimeout(30.0)
    connection.connect((host, int(port)))
    connection.sendall(words)
    return connection


def answer_time(connection: socket.socket, status: bytes) -> float:
    """The arrival time of the answer, in seconds of the wall clock."""
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
        controller.process.send_signal(signal.SIGSTOP)  # every request is queued when the process continues
        agents = [
            stack.enter_context(open_request(controller.listen, upgrade(f"n{i}", bearer(TokenRole.AGENT, f"n{i}"))))
            for i in range(AGENTS)
        ]
        token = VIEWER["Authorization"]
        requests = [f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\n\r\n".encode() for path in PATHS]
        visitors = [stack.enter_context(open_request(own, words)) for words in requests]
        controller.process.send_signal(signal.SIGCONT)
        waited = [answer_time(visitor, b"200") for visitor in visitors]
        came = [answer_time(agent, b"101") for agent in agents]
        later = [sum(at > mine for at in came) for mine in waited]
    assert min(later) > AGENTS / 10, "operators' requests waited in the agents' queue"


def backlog_of(listener: socket.socket) -> int:
    """The number of connections that may wait to be accepted (`tcpi_sacked` of a listener; linux/tcp.h)."""
    fields = struct.unpack("8B6I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32))
    return int(fields[-1])


def test_server_keeps_the_full_listen_backlog() -> None:
    async def unused(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("no request is expected")

    async def served() -> list[int]:
        member: Any = unused
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
