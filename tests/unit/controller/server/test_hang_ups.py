"""Clients that leave early, and a controller that stops while clients stay: neither is an error for its log."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import uvloop

from everstep.bearer_tokens import TokenRole
from everstep_controller.server.listener import ACCEPTED_AT_ONCE, duplicate_listeners, listen
from tests.support.fleet.controllers import OPERATOR, VIEWER, ControllerProcess, bearer, controller_process
from tests.support.fleet.session_client import upgrade
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.services.certificates import Authority

DEADLINE_S = 60.0
AUTHORIZED = f"Host: x\r\nAuthorization: {VIEWER['Authorization']}\r\n"
STREAM = f"GET /v1/events/stream HTTP/1.1\r\n{AUTHORIZED}\r\n".encode()
PAGE = f"GET /v1/nodes HTTP/1.1\r\n{AUTHORIZED}\r\n".encode()
HALF_A_BODY = (
    f"POST /v1/policy/check HTTP/1.1\r\n{AUTHORIZED}Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{{"
).encode()


def connected(process: ControllerProcess) -> socket.socket:
    host, _, port = process.listen.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def streams(process: ControllerProcess) -> float:
    _, body = process.ask("GET", "/metrics", None, OPERATOR)
    found = re.search(rb"^everstep_controller_event_streams (\S+)$", body, re.MULTILINE)
    assert found
    return float(found[1])


def complaints(process: ControllerProcess) -> list[str]:
    """Lines of the log about errors."""
    return [line for line in process.log().splitlines() if "Traceback" in line or '"level":"error"' in line]


@pytest.mark.parametrize("behind", [PAGE, PAGE * 3, HALF_A_BODY], ids=["one", "several", "unfinished"])
def test_hang_up_ends_earlier_pipelined_requests(program_forks: ForkPool, tmp_path: Path, behind: bytes) -> None:
    with controller_process(tmp_path, program_forks) as process:
        with closing(connected(process)) as line:
            line.sendall(STREAM + behind)
            assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
            until(lambda: streams(process) == 1, "the stream")
        until(lambda: streams(process) == 0, "the stream to end with its connection")
        assert process.terminate() == 0
        assert complaints(process) == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_stop_with_open_tls_connections_is_clean(program_forks: ForkPool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.server()
    arguments = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    tls = authority.trust()
    with controller_process(tmp_path, program_forks, arguments=arguments) as process, ExitStack() as stack:

        def opened(request: bytes, answer: bytes) -> ssl.SSLSocket:
            line = stack.enter_context(tls.wrap_socket(connected(process), server_hostname="127.0.0.1"))
            line.sendall(request)
            assert line.recv(len(answer)) == answer
            return line

        session = upgrade("n1", bearer(TokenRole.AGENT, "n1"))
        for request_head, answer in ((STREAM, b"HTTP/1.1 200"), (PAGE, b"HTTP/1.1 200"), (session, b"HTTP/1.1 101")):
            opened(request_head, answer)
        opened(HALF_A_BODY, b"")
        stack.enter_context(tls.wrap_socket(connected(process), server_hostname="127.0.0.1"))
        stack.enter_context(closing(connected(process)))  # no handshake
        assert process.terminate() == 0
        assert complaints(process) == []


COMING = 64


async def _turns_until_all_are_taken(listeners: list[socket.socket]) -> int:
    """Turns of the loop from the first connection taken to the last."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    turn, all_taken = 0, loop.create_future()

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            seen.append(turn)
            transport.close()
            if len(seen) == COMING:
                all_taken.set_result(None)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if not all_taken.done():
            loop.call_soon(next_turn)

    with ExitStack() as stack:
        for _ in range(COMING):
            stack.enter_context(socket.create_connection(listeners[0].getsockname()))
        servers = [await loop.create_server(Taken, sock=listener) for listener in listeners]
        loop.call_soon(next_turn)
        await asyncio.wait_for(all_taken, 60)
        for server in servers:
            server.close()
    return seen[-1] - seen[0]


def _turns(listeners: list[socket.socket]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_turns_until_all_are_taken(listeners))


def test_listener_accepts_many_connections_per_loop_turn() -> None:
    assert _turns(duplicate_listeners(listen(("127.0.0.1", 0)))) < COMING // ACCEPTED_AT_ONCE + 2
    assert _turns([listen(("127.0.0.1", 0))]) >= COMING - 1  # what libuv does by itself: else the ears can go
