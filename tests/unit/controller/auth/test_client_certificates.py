from __future__ import annotations

import http.client
import json
import shutil
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from everstep.bearer_tokens import Identity, TokenRole, mint
from everstep.cli.main import app
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError
from everstep.wire.v1.agent import UPGRADE, FrameKind, FrameRefused, Heartbeat
from everstep_controller.auth.authenticator import Authenticator
from everstep_controller.auth.credentials import CredentialStore, Keyring
from everstep_controller.auth.peers import ConnectionPeer, identity_of
from everstep_controller.config import ControllerSettings
from tests.support.fleet.controllers import (
    SECRET,
    ControllerProcess,
    InProcess,
    bearer,
    controller_process,
)
from tests.support.fleet.session_client import AgentSession, ServedController, served
from tests.support.processes.fork_pool import ForkPool
from tests.support.services.certificates import Authority, Pair

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def shown(*uris: str, not_after: str = "Nov 15 00:00:00 2033 GMT") -> dict[str, Any]:
    """A certificate as ``getpeercert`` shows it."""
    return {"subjectAltName": tuple(("URI", uri) for uri in uris), "notAfter": not_after}


@pytest.mark.parametrize(
    ("uri", "role", "subject"),
    [
        ("everstep://agent/n1", TokenRole.AGENT, "n1"),
        ("everstep://operator/olga", TokenRole.OPERATOR, "olga"),
        ("everstep://viewer/wall%20display", TokenRole.VIEWER, "wall display"),
    ],
)
def test_certificate_uri_gives_role_and_subject(uri: str, role: TokenRole, subject: str) -> None:
    end = ssl.cert_time_to_seconds("Nov 15 00:00:00 2033 GMT")
    assert identity_of(shown(uri, "https://example.org/")) == Identity(role, subject, "certificate", end)


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("https://agent/n1",),
        ("everstep://agent/",),
        ("everstep://agent/n1/n2",),
        ("everstep://king/n1",),
        ("everstep://join/n1",),
        ("everstep://agent@operator/olga",),
        ("everstep://[agent/n1",),
        ("everstep://agent/n1", "everstep://agent/n2"),
        ("everstep://agent/n1", "everstep://operator/olga"),
    ],
)
def test_certificate_needs_exactly_one_valid_name(uris: tuple[str, ...]) -> None:
    assert identity_of(shown(*uris)) is None


def test_certificate_counts_until_expiry_and_token_overrides() -> None:
    clock = ManualClock(wall=ssl.cert_time_to_seconds("Nov 15 00:00:00 2023 GMT"))
    gate = Authenticator(ControllerSettings(), Keyring((SECRET,)), CredentialStore(), {}, clock, clock.wall)
    peer = ConnectionPeer("127.0.0.1", shown("everstep://agent/n1", not_after="Nov 15 00:00:10 2023 GMT"))
    assert gate.authorize_agent([], "n1", peer).credential == "certificate"
    token = [(b"authorization", f"Bearer {mint(SECRET, TokenRole.AGENT, 'n2')}".encode())]
    assert gate.authorize_agent(token, "n2", peer).subject == "n2"
    with pytest.raises(AuthenticationError):
        gate.authorize_agent([(b"authorization", b"Bearer wrong")], "n1", peer)
    clock.advance(11.0)
    with pytest.raises(AuthenticationError):
        gate.authorize_agent([], "n1", peer)


def _ends_in(clock: ManualClock, seconds: float) -> str:
    """Return the end date of a certificate that expires in this number of seconds."""
    return time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime(clock.wall() + seconds))


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServedController, ManualClock]]:
    """A controller, and its clock. Every connection shows a certificate of n1 that ends in a second."""
    clock = ManualClock(wall=1_700_000_000.0)
    peer = ConnectionPeer("127.0.0.1", shown("everstep://agent/n1", not_after=_ends_in(clock, 1.0)))
    monkeypatch.setattr(ConnectionPeer, "from_transport", lambda transport: peer)
    with served(InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock)) as server:
        yield server, clock


def test_session_ends_when_certificate_expires(ending: tuple[ServedController, ManualClock]) -> None:
    server, clock = ending
    with closing(AgentSession(server.address, "n1", headers={})) as session:
        session.register()
        session.beat(findings=())
        clock.advance(1.5)
        session.send_frame(FrameKind.HEARTBEAT, Heartbeat(incarnation=1, seq=9, sent_at=0.0))
        refused = session.answer(FrameRefused)
        assert (refused.frame_kind, refused.code) == (FrameKind.HEARTBEAT, "unauthenticated")
        assert "certificate has expired" in refused.message
        assert session.ended()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def process(
    program_forks: ForkPool, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControllerProcess]:
    server = authority.server()
    own = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    arguments = (*own, "--tls-client-ca", str(authority.pair.certificate))
    with controller_process(tmp_path_factory.mktemp("controller"), program_forks, arguments=arguments) as process:
        yield process


def ask(
    process: ControllerProcess, tls: ssl.SSLContext, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    host, _, port = process.listen.rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=120, context=tls)
    try:
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@needs_openssl
def test_agent_certificate_covers_only_its_node(process: ControllerProcess, authority: Authority) -> None:
    tls = authority.trust(authority.client("everstep://agent/n1"))
    wanted = {"Connection": "Upgrade", "Upgrade": UPGRADE}
    host, _, port = process.listen.rpartition(":")
    for node, status in (("n1", 101), ("n2", 403)):
        connection = http.client.HTTPSConnection(host, int(port), timeout=120, context=tls)
        with closing(connection):
            connection.request("GET", f"/v1/agents/{node}/session", None, wanted)
            assert connection.getresponse().status == status
    assert ask(process, tls, "GET", "/v1/status")[0] == 403


@needs_openssl
def test_request_without_certificate_needs_token(process: ControllerProcess, authority: Authority) -> None:
    assert ask(process, authority.trust(), "GET", "/v1/status")[0] == 401
    assert ask(process, authority.trust(authority.client()), "GET", "/v1/status")[0] == 401
    assert ask(process, authority.trust(), "GET", "/v1/status", **bearer(TokenRole.VIEWER, "vera"))[0] == 200


@needs_openssl
def test_certificate_of_unknown_authority_fails_handshake(
    process: ControllerProcess, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").client("everstep://operator/olga")
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(process, authority.trust(stranger), "GET", "/v1/status")


def command(process: ControllerProcess, authority: Authority, client: Pair, *words: str) -> Any:
    options = ["--controller", f"https://{process.listen}", "--ca-file", str(authority.pair.certificate)]
    options += ["--client-certificate", str(client.certificate), "--client-key", str(client.key)]
    return CliRunner().invoke(app, [*options, *words])


@needs_openssl
def test_operator_certificate_authorizes_and_names_the_actor(process: ControllerProcess, authority: Authority) -> None:
    olga = authority.client("everstep://operator/olga")
    done = command(process, authority, olga, "token", "issue", "--role", "viewer", "--subject", "wall", "-r", "for all")
    assert done.exit_code == 0, done.output
    token = done.stdout.strip()
    assert ask(process, authority.trust(), "GET", "/v1/status", Authorization=f"Bearer {token}")[0] == 200
    events = command(process, authority, olga, "events", "--json").stdout
    assert "olga issued viewer credential" in events
    assert token not in events
