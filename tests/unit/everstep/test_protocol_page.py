"""Clients written from docs/reference/protocol.md alone, against a real controller and a real vault.

They use sockets and general libraries for JSON and MessagePack, and nothing of this project's own wire code. Where one
of them fails the page has to change with the protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack  # a MessagePack library, as any other

from everstep.bearer_tokens import TokenRole, mint
from tests.support.fleet.controllers import SECRET, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import JOB, Vaults, vaults
from tests.support.vaults.vault_process import SECRET as JOB_SECRET

DEADLINE_S = 60.0
LIFE = 1795178529000


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


class Stream:
    """A socket, read by counts of bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data


class PageAgent(Stream):
    """An agent's session, from the section "A session, byte by byte"."""

    def __init__(self, address: str, node: str, token: str, upgrade: str = "everstep/1") -> None:
        super().__init__(connect(address))
        request = (
            f"GET /v1/agents/{node}/session HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\n"
            f"Upgrade: {upgrade}\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        self.sock.sendall(request.encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.read(1)
        self.status = int(head.split(b" ")[1])
        self.directives: list[dict[str, Any]] = []

    def send(self, kind: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.sock.sendall((len(data) + 1).to_bytes(4, "big") + bytes([kind]) + data)

    def frame(self) -> tuple[int, bytes]:
        length = int.from_bytes(self.read(4), "big")
        data = self.read(length)
        return data[0], data[1:]

    def expect(self, kind: int) -> dict[str, Any]:
        """The next frame of that kind; directives on the way are taken over."""
        while True:
            got, body = self.frame()
            if got == 20:
                self.directives += json.loads(body)["directives"]
            elif got == 22:
                seq = int.from_bytes(body[:8], "big")
                self.directives.append({"seq": seq, "body": json.loads(zlib.decompress(body[8:]))})
            if got == kind:
                return json.loads(body) if kind != 22 else {}
            assert got in (20, 22), (got, body)

    def directive(self) -> dict[str, Any]:
        while not self.directives:
            self.expect(20)
        return self.directives.pop(0)

    def register(self) -> dict[str, Any]:
        facts = {"protocols": [1], "node": "n1", "incarnation": LIFE, "agent_version": "0.1.0"}
        self.send(1, {**facts, "vault": "127.0.0.1:7702", "sent_at": LIFE / 1000})
        return self.expect(17)

    def beat(self, seq: int, **more: Any) -> None:
        self.send(2, {"incarnation": LIFE, "seq": seq, "sent_at": LIFE / 1000, **more})


@pytest.fixture
def controller(tmp_path: Path, program_forks: ForkPool) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path, program_forks) as process:
        yield process


@pytest.fixture
def agent(controller: ControllerProcess) -> Iterator[PageAgent]:
    agent = PageAgent(controller.url.removeprefix("http://"), "n1", mint(SECRET, TokenRole.AGENT, "n1"))
    with agent.sock:
        yield agent


def test_page_client_registers_and_receives_directive(agent: PageAgent) -> None:
    assert agent.status == 101
    registered = agent.register()
    assert registered["protocol"] == 1
    assert registered["heartbeat_interval_s"] > 0
    agent.beat(1, findings=[])
    assert not agent.expect(18).get("resend", False)
    agent.send(5, {"incarnation": LIFE, "seq": 2, "sent_at": LIFE / 1000})  # quiet: the next answer is the next beat's
    agent.beat(3)
    agent.expect(18)
    offer = {"type": "LauncherJoined", "job": "llama", "at": LIFE / 1000, "launcher": LIFE}
    offer |= {"store": "127.0.0.1:29500", "spec": {"job": "llama"}}
    agent.send(3, {"incarnation": LIFE, "reports": [{"number": 1, "body": offer}]})
    directive = agent.directive()
    assert directive["seq"] >= registered["next_directive"]
    assert directive["body"]["type"] == "NewGeneration"
    assert directive["body"]["spec"]["job"] == "llama"
    assert re.fullmatch("[0-9a-f]{64}", directive["body"]["spec"]["secret"])
    agent.send(4, {"through": directive["seq"]})
    agent.send(3, {"incarnation": LIFE, "reports": [{"number": 1, "body": offer}]})
    assert agent.expect(19) == {"through": 1}, "a report that is sent again is answered again"


def test_page_client_sends_frame_with_the_upgrade_request(controller: ControllerProcess) -> None:
    """Frames that are sent before the answer to the upgrade is read are processed all the same."""
    address, body = controller.url.removeprefix("http://"), b'{"incarnation": 1, "seq": 1, "sent_at": 0.0}'
    token = mint(SECRET, TokenRole.AGENT, "n1")
    head = f"GET /v1/agents/n1/session HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: everstep/1\r\n"
    with connect(address) as sock:
        frame = (len(body) + 1).to_bytes(4, "big") + b"\x02" + body
        sock.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode() + frame)
        stream, answer = Stream(sock), b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += stream.read(1)
        assert stream.read(5)[4] == 21, "REFUSED: this life has not registered"


@pytest.mark.parametrize(
    ("subject", "upgrade", "status"), [("n2", "everstep/1", 403), ("n1", "everstep/9", 426)], ids=["token", "version"]
)
def test_page_client_is_refused_a_session(
    controller: ControllerProcess, subject: str, upgrade: str, status: int
) -> None:
    address = controller.url.removeprefix("http://")
    refused = PageAgent(address, "n1", mint(SECRET, TokenRole.AGENT, subject), upgrade)
    with refused.sock:
        assert refused.status == status


def test_page_client_session_ends_on_oversized_frame(agent: PageAgent) -> None:
    agent.register()
    agent.sock.sendall((1_048_578).to_bytes(4, "big") + b"\x02")
    assert json.loads(agent.frame()[1])["code"] == "too_large"
    with pytest.raises(EOFError):
        agent.frame()


class PagePeer(Stream):
    """A vault's client, from the section "Between vaults, byte by byte"."""

    def send(self, **message: Any) -> None:
        data = msgpack.encode(message)
        self.sock.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = msgpack.decode(self.read(int.from_bytes(self.read(4), "big")))
        return message

    def prove(self, secret: str, to: str) -> dict[str, Any]:
        """Goes through the challenge; the last answer."""
        nonce = secrets.token_bytes(32)
        self.send(type="Greeting", protocols=[2], job=JOB, node="n1", peer=to, nonce=nonce)
        challenge = self.receive()
        if challenge["type"] != "Challenge":
            return challenge

        def mac(role: str) -> bytes:
            signed = ["everstep/1/vault", role, JOB, "n1", to, challenge["protocol"], nonce, challenge["nonce"]]
            return hmac.new(secret.encode(), msgpack.encode(signed), hashlib.sha256).digest()

        assert challenge["protocol"] == 2
        self.send(type="Proof", mac=mac("client"))
        answer = self.receive()
        if answer["type"] == "Proof":
            assert answer["mac"] == mac("server")
        return answer


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with vaults(program_forks) as running:
        yield running


@pytest.fixture
def peer(fleet: Vaults) -> Iterator[PagePeer]:
    """Connected to the vault of n2, which knows the job."""
    vault = fleet.start("n2")
    fleet.configure()
    peer = PagePeer(connect(vault.address))
    with peer.sock:
        yield peer


def test_page_client_authenticates_to_a_vault(peer: PagePeer) -> None:
    assert peer.prove(JOB_SECRET, "n2")["type"] == "Proof"
    peer.send(type="InventoryRequest")
    assert peer.receive() == {"type": "InventoryList", "slots": []}


@pytest.mark.parametrize(("secret", "to"), [("another secret of tests", "n2"), (JOB_SECRET, "n3")])
def test_vault_refuses_page_client_with_wrong_secret(peer: PagePeer, secret: str, to: str) -> None:
    refused = peer.prove(secret, to)
    assert (refused["type"], refused["code"]) == ("TransferRefused", "unauthenticated")
    with pytest.raises(EOFError):
        peer.receive()
