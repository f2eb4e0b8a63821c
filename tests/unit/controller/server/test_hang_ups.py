"""Clients that leave early, and a controller that stops while clients stay: neither is an error for its log."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from everstep.bearer_tokens import TokenRole
from tests.support.certificates import Authority
from tests.support.controllers import OPERATOR, VIEWER, ControllerProcess, bearer, controller_process
from tests.support.forked import ForkPool
from tests.support.sessions import upgrade
from tests.support.waiting import until

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


def test_abandoned_requests_log_no_error(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller_process(tmp_path, program_forks) as process:
        for number in range(50):
            with closing(connected(process)) as line:
                line.sendall(PAGE * (1 + number % 5) + (HALF_A_BODY if number % 2 else b""))
        until(lambda: streams(process) == 0, "an answer")
        assert process.terminate() == 0
        assert complaints(process) == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_stop_with_open_tls_connections_is_clean(program_forks: ForkPool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.server()
    arguments = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    tls = authority.trust()
    with controller_process(tmp_path, program_forks, arguments=arguments) as process, ExitStack() as stack:

        def opened(said: bytes, answer: bytes) -> ssl.SSLSocket:
            line = stack.enter_context(tls.wrap_socket(connected(process), server_hostname="127.0.0.1"))
            line.sendall(said)
            assert line.recv(len(answer)) == answer
            return line

        session = upgrade("n1", bearer(TokenRole.AGENT, "n1"))
        for said, answer in ((STREAM, b"HTTP/1.1 200"), (PAGE, b"HTTP/1.1 200"), (session, b"HTTP/1.1 101")):
            opened(said, answer)
        opened(HALF_A_BODY, b"")
        stack.enter_context(tls.wrap_socket(connected(process), server_hostname="127.0.0.1"))
        stack.enter_context(closing(connected(process)))  # no handshake
        assert process.terminate() == 0
        assert complaints(process) == []
