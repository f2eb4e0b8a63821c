"""Send malformed input to every route, to the bare port and into sessions: each is refused and leaves nothing behind.

The inputs follow from a seed. The kernel reports the memory of the controller's process.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from everstep.bearer_tokens import hash_secret
from everstep.wire.v1 import agent
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1.agent import FrameKind, FrameRefused, encode_frame
from everstep.wire.v1.training import RankLost
from everstep_controller.api.routes import ROUTES, Route
from everstep_controller.auth.authenticator import RouteAccess
from everstep_controller.server.responses import MEDIA_TYPE
from tests.support.fleet.controllers import OPERATOR, ControllerProcess, controller_process, joined, registration
from tests.support.fleet.session_client import AgentSession, send_message
from tests.support.processes.fork_pool import ForkPool
from tests.unit.controller.api.malformed_requests import damaged, hostile_requests, undecodable

SEED = 20_240_607
DAMAGED_PER_ROUTE = 30
MOST_GROWTH_BYTES = 96 << 20
"""Allowed memory growth of the process: some requests of 20 MiB are in progress."""
LOST = RankLost(job="j", at=1.0, generation=1, rank=0, local_rank=0, detail="killed\x00by hand")
REPORTS = agent.Reports(
    incarnation=1,
    reports=(agent.NumberedReport(number=1, body=joined("j", 1.0)), agent.NumberedReport(number=2, body=LOST)),
)
BEAT = agent.Heartbeat(incarnation=1, seq=1, sent_at=1.0, findings=())
GOOD: dict[str, Any] = {
    "enrol": wire.Enrol(node="n9", secret_hash=hash_secret("s")),
    "issue_credential": wire.IssueJoin(reason="fuzz", subject="unknown-*"),
}
BODIED = [name for name, route in ROUTES.items() if route.body is not None]


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    limits = tmp_path_factory.mktemp("limits") / "limits.toml"
    limits.write_text("agent_requests_per_s = 1e6\nrequests_per_s = 1e6\nfailed_authentications_per_s = 1e6\n")
    with controller_process(
        tmp_path_factory.mktemp("controller"), program_forks, arguments=("--settings", str(limits))
    ) as process:
        assert send_message(process, "n1", registration("n1"))[0] == 200
        yield process
        assert is_well(process)


@pytest.fixture(scope="module")
def join(process: ControllerProcess) -> dict[str, str]:
    _, body = process.ask("POST", "/v1/credentials", wire.IssueJoin(reason="fuzz", uses=None, replace=True))
    return {"Authorization": f"Bearer {msgspec.json.decode(body, type=wire.Issued).token}"}


def is_well(process: ControllerProcess) -> bool:
    """Tell if the controller answers a request that needs both the loop and the database."""
    beat = agent.Heartbeat(incarnation=1, seq=9, sent_at=1.0, findings=())
    return send_message(process, "n1", beat)[0] in (200, 404)


def resident_bytes(process: ControllerProcess) -> int:
    assert process.process is not None
    with open(f"/proc/{process.process.pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def headers_for(route: Route, join: dict[str, str]) -> dict[str, str]:
    return join if route.access is RouteAccess.JOIN else OPERATOR


def concrete(path: str) -> str:
    names = {"node": "n1", "job": "j", "order": "hold", "id": "0" * 16}
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), path)


class RepeatingClient:
    """Send requests over a kept connection, and again over a new one if it was closed."""

    def __init__(self, process: ControllerProcess, headers: dict[str, str]) -> None:
        self._process, self._headers = process, headers
        self._connection = process.connection()

    def __call__(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
        """Status and media type; 413 if the controller closed the connection during a body of more than 1 MiB."""
        try:
            return self._ask(method, path, body, headers)
        except (ConnectionError, http.client.RemoteDisconnected):
            self._connection.close()  # the controller closed it after its last answer, or during this body
            self._connection = self._process.connection()
        try:
            return self._ask(method, path, body, headers)
        except ConnectionError:
            assert len(body) > agent.MAX_BODY_BYTES
            self._connection.close()
            self._connection = self._process.connection()
            return 413, MEDIA_TYPE

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        self._connection.request(method, path, body, {**self._headers, **headers})
        response = self._connection.getresponse()
        response.read()
        return response.status, response.headers["content-type"]

    def close(self) -> None:
        self._connection.close()


@pytest.mark.promise("robust-port")
@pytest.mark.parametrize("name", BODIED)
def test_routes_refuse_undecodable_body_with_4xx(process: ControllerProcess, join: dict[str, str], name: str) -> None:
    route, rng = ROUTES[name], random.Random(f"{SEED} {name}")
    body = msgspec.json.encode(GOOD.get(name, {"reason": "fuzz"}))
    ask = RepeatingClient(process, headers_for(route, join))
    try:
        for bad in undecodable(body, rng):
            status, media = ask(route.method, concrete(route.path), bad)
            assert 400 <= status < 500, (status, bad[:200])
            assert media == MEDIA_TYPE
        for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x" * 5000):
            assert ask(route.method, concrete(route.path), body, **{"content-type": media})[0] == 415, media
    finally:
        ask.close()


@pytest.mark.parametrize("name", BODIED)
def test_routes_answer_damaged_message_below_500(process: ControllerProcess, join: dict[str, str], name: str) -> None:
    route, rng = ROUTES[name], random.Random(f"{SEED} damaged {name}")
    body = msgspec.json.encode(GOOD.get(name, {"reason": "fuzz"}))
    ask = RepeatingClient(process, headers_for(route, join))
    try:
        for _ in range(DAMAGED_PER_ROUTE):
            bad = damaged(body, rng)
            status, _ = ask(route.method, concrete(route.path), bad)
            assert status < 500, (status, bad)
    finally:
        ask.close()


def test_server_bounds_memory_for_malformed_http(process: ControllerProcess) -> None:
    before = resident_bytes(process)
    for bad in hostile_requests():
        answer = answer_to(process, bad)
        assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer), (bad[:100], answer[:100])
    assert is_well(process)
    assert resident_bytes(process) - before < MOST_GROWTH_BYTES


def answer_to(process: ControllerProcess, sent: bytes) -> bytes:
    """Send `sent`, and return the answer up to the end of the connection."""
    host, _, port = process.listen.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as line:
        try:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            return line.recv(1 << 16)
        except OSError:  # the controller closed the connection
            return b""


def bad_frames(rng: random.Random) -> Iterator[bytes]:
    """Yield invalid frames, each for a session of its own."""
    yield b"\x00\x00\x00\x00"
    yield b"\xff\xff\xff\xff\x02"
    yield (1 << 21).to_bytes(4, "big") + b"\x03"
    for kind in (0, 5, FrameKind.REGISTERED, FrameKind.PUSH, 255):
        yield b"\x00\x00\x00\x03" + bytes((kind,)) + b"{}"
    good = {FrameKind.REGISTER: registration("n1"), FrameKind.HEARTBEAT: BEAT, FrameKind.REPORTS: REPORTS}
    for kind, message in good.items():
        body = msgspec.json.encode(message)
        for bad in undecodable(body, rng):
            if len(bad) <= agent.MAX_BODY_BYTES:
                yield encode_frame(kind, bad)
        for _ in range(DAMAGED_PER_ROUTE):
            yield encode_frame(kind, damaged(body, rng))
            yield damaged(encode_frame(kind, body), rng)
    yield encode_frame(FrameKind.ACKNOWLEDGE, b'{"through":-1}')
    yield encode_frame(FrameKind.ACKNOWLEDGE, b'{"through":99999999999999999999}')


@pytest.mark.promise("robust-port")
def test_session_survives_malformed_frames(process: ControllerProcess) -> None:
    before = resident_bytes(process)
    for bad in bad_frames(random.Random(SEED)):
        session = AgentSession(process.listen, "n1")
        try:
            with contextlib.suppress(OSError):  # the controller may have closed the session already
                session.send(bad)
                session.sock.shutdown(socket.SHUT_WR)
            for kind, message in frames(session):
                assert kind is not FrameKind.REFUSED or is_the_senders_fault(message), message
        finally:
            session.close()
    assert is_well(process)
    assert resident_bytes(process) - before < MOST_GROWTH_BYTES


def frames(session: AgentSession) -> Iterator[tuple[FrameKind, Any]]:
    """Yield frames until the controller closes the session."""
    try:
        while True:
            yield session.next_frame()
    except (EOFError, ConnectionResetError):
        return


def is_the_senders_fault(refused: FrameRefused) -> bool:
    return refused.code not in ("internal", "unavailable")
