"""Route new connections by their first bytes: agents' session upgrades are handled here, everything else is HTTP.

A session bypasses uvicorn, whose objects would outlive the upgrade. A fleet that closes sessions between heartbeats
opens thousands per second; one that keeps them open holds all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

from everstep.errors import EverstepError, VersionMismatch
from everstep.wire.v1.agent import UPGRADE
from everstep_controller.api.auth import Authenticator, Headers
from everstep_controller.leadership.takeover_gate import WAIT_S, TakeoverGate
from everstep_controller.server import responses
from everstep_controller.server.agent_service import AgentService
from everstep_controller.server.connections import ConnectionPeer, DescriptorBudget
from everstep_controller.server.responses import MEDIA_TYPE, problem_of
from everstep_controller.server.session import AgentSession

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
FIRST_REQUEST_S = 10.0
"""Seconds for the first request of a new connection, which holds a file descriptor meanwhile."""

_BEFORE_NODE, _AFTER_NODE = b"GET /v1/agents/", b"/session"
_UPGRADE_TOKEN = UPGRADE.encode()
_ACCEPTED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: " + _UPGRADE_TOKEN + b"\r\n\r\n"

MakeHttp = Callable[[], asyncio.Protocol]


class LeadingController(Protocol):
    """The parts of a leading controller that sessions use."""

    @property
    def agent_service(self) -> AgentService: ...
    @property
    def authenticator(self) -> Authenticator: ...


class ControllerProcess(Protocol):
    """The process behind the port."""

    takeover_gate: TakeoverGate

    def leading(self) -> LeadingController | None:
        """Return the controller while this process leads, else None."""

    def not_leading_error(self) -> EverstepError:
        """Return the error for agents while this process does not lead."""

    def record_contact(self, node: str, headers: Headers, peer: ConnectionPeer) -> None:
        """Record an agent that arrives while this process does not lead."""


class ConnectionRouter(asyncio.Protocol):
    """A connection until its purpose is known. ``make_http`` makes uvicorn's protocol for all but sessions."""

    __slots__ = ("_connections", "_deadline", "_descriptors", "_head", "_make_http", "_process", "_transport")

    def __init__(
        self,
        process: ControllerProcess,
        descriptors: DescriptorBudget,
        connections: set[Any],
        make_http: MakeHttp,
    ) -> None:
        self._process = process
        self._descriptors = descriptors
        self._connections = connections
        self._make_http = make_http
        self._head = b""
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._connections.add(self)
        self._descriptors.open += 1
        self._descriptors.make_room()
        if self._descriptors.is_over_limit:
            transport.abort()
            return
        self._deadline = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.takeover_gate.remove(self)
        self._leave()
        self._descriptors.open -= 1

    def shutdown(self) -> None:
        """Close the connection, because the server stops."""
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        head = self._head = self._head + data
        if not head.startswith(_BEFORE_NODE) and not _BEFORE_NODE.startswith(head):
            self._to_http()
            return
        end = head.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(head) > MAX_HEAD_BYTES):
            self._to_http()
            return
        if end < 0:
            return
        lines = head[:end].split(b"\r\n")
        path, headers = _path(lines[0]), [_header(line) for line in lines[1:]]
        if not path.endswith(_AFTER_NODE):
            self._to_http()
            return
        is_upgrade = (b"upgrade", _UPGRADE_TOKEN) in headers
        node = unquote(path[: -len(_AFTER_NODE)].decode("latin-1"))
        leader = self._process.leading()
        if leader is None:
            if is_upgrade:
                self._process.record_contact(node, headers, ConnectionPeer.from_transport(self._transport))
            self._wait_for_leader()
            return
        try:
            identity = leader.authenticator.authorize_agent(
                headers, node, ConnectionPeer.from_transport(self._transport)
            )
            if not is_upgrade:
                raise VersionMismatch(f"a session needs the headers `Connection: Upgrade` and `Upgrade: {UPGRADE}`")
        except EverstepError as error:
            leader.agent_service.metrics.count_refused("agents/session", error.code)
            self._refuse(error)
            return
        self._open(
            AgentSession(leader.agent_service, leader.authenticator, identity, self._transport, self._ended),
            head[end + 4 :],
        )

    def _wait_for_leader(self) -> None:
        """Hold the connection during a takeover, else refuse it."""
        if not self._process.takeover_gate.hold_back(self):
            self._refuse(self._process.not_leading_error())
            return
        self._leave()
        self._transport.pause_reading()
        self._deadline = asyncio.get_running_loop().call_later(WAIT_S, self._give_up)

    def _give_up(self) -> None:
        self._process.takeover_gate.remove(self)
        self._refuse(self._process.not_leading_error())

    def on_leader_known(self) -> None:
        """Route the held request, now that the leader is known."""
        self._leave()
        self._transport.resume_reading()
        self.data_received(b"")

    def _refuse(self, error: EverstepError) -> None:
        self._transport.write(_refusal(error))
        self._transport.close()

    def _open(self, session: AgentSession, first: bytes) -> None:
        """Hand the connection over to a session; ``first`` are bytes that followed the upgrade."""
        self._leave()
        self._connections.add(session)
        self._descriptors.add(session)
        self._transport.set_protocol(session)
        session.begin(_ACCEPTED, first)

    def _ended(self, session: AgentSession) -> None:
        self._connections.discard(session)
        self._descriptors.remove(session)
        self._descriptors.open -= 1

    def _to_http(self) -> None:
        self._leave()
        http = self._make_http()
        self._transport.set_protocol(http)
        http.connection_made(self._transport)
        http.data_received(self._head)

    def _leave(self) -> None:
        self._connections.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _path(request_line: bytes) -> bytes:
    """Return the part after ``GET /v1/agents/``, or b"" for another request line."""
    parts = request_line.split(b" ")
    return parts[1][len(_BEFORE_NODE) - len(b"GET ") :] if len(parts) == 3 and parts[2] == b"HTTP/1.1" else b""


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _refusal(error: EverstepError) -> bytes:
    """Return the HTTP response to a refused upgrade."""
    body = problem_of(error)
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *responses.error_headers(error),
    ]
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), *(b": ".join(h) for h in headers)]
    return b"\r\n".join((*lines, b"", body))
