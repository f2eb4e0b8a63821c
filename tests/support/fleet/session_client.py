"""A blocking client of an agent's session, which sends real frames, and a controller served in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from everstep.bearer_tokens import TokenRole
from everstep.errors import BY_CODE
from everstep.wire.v1.agent import (
    DIRECTIVE_NUMBER_BYTES,
    PREFIX_BYTES,
    UPGRADE,
    Acknowledge,
    DirectivesAnswer,
    FrameKind,
    FrameRefused,
    Heartbeat,
    HeartbeatAnswer,
    NumberedReport,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
    encode_frame,
)
from everstep.wire.v1.directives import AnyDirective, Directive
from everstep.wire.v1.training import AnyReport
from everstep_controller.app.controller import Controller
from everstep_controller.auth.authenticator import Headers
from everstep_controller.auth.peers import ConnectionPeer
from everstep_controller.leadership.lease import NotLeadingError
from everstep_controller.leadership.takeover_gate import TakeoverGate
from everstep_controller.server.connections import DescriptorBudget
from everstep_controller.server.session import ConnectionRouter
from tests.support.fleet.controllers import InProcess, bearer, registration

T = TypeVar("T")

ANSWERS: dict[FrameKind, type[Any]] = {
    FrameKind.REGISTERED: Registered,
    FrameKind.HEARTBEAT_ANSWER: HeartbeatAnswer,
    FrameKind.REPORTS_ANSWER: ReportsAnswer,
    FrameKind.PUSH: DirectivesAnswer,
    FrameKind.REFUSED: FrameRefused,
}


def upgrade(node: str, headers: dict[str, str], wanted: str = UPGRADE) -> bytes:
    """Return the request that opens a session."""
    lines = [f"GET /v1/agents/{node}/session HTTP/1.1", "Host: test", "Connection: Upgrade", f"Upgrade: {wanted}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode()


class Connection:
    """A connection to a controller."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout_s)
        self._read = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def head(self) -> tuple[int, bytes]:
        """Return status and head of an HTTP answer. The bytes after the head stay in the buffer."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head

    def take(self, count: int) -> bytes:
        while len(self._read) < count:
            self._more()
        data, self._read = self._read[:count], self._read[count:]
        return data

    def ended(self) -> bool:
        """Return whether the other end closed without unread bytes."""
        try:
            return self._read == b"" and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        data = self.sock.recv(1 << 20)
        if not data:
            raise EOFError
        self._read += data

    def close(self) -> None:
        self.sock.close()


class AgentSession(Connection):
    """One node's session, open from the start. Answers are decoded, in the order in which they were sent.

    ``headers``: headers of the upgrade request; by default with a token of the node.
    """

    def __init__(
        self,
        address: str,
        node: str,
        incarnation: int = 1,
        headers: dict[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        super().__init__(address, timeout_s)
        self.address = address
        self.node = node
        self.incarnation = incarnation
        self.pushed: list[Directive] = []
        self._seq = 0
        self._number = 0
        try:
            self.send(upgrade(node, bearer(TokenRole.AGENT, node) if headers is None else headers))
            status, head = self.head()
        except BaseException:  # the controller was killed meanwhile
            self.close()
            raise
        if status != 101:
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            problem = msgspec.json.decode(self.take(length))
            self.close()
            raise NotUpgraded(status, problem)

    def broken(self) -> bool:
        """Read the available bytes, and return whether the other end closed."""
        self.sock.settimeout(0.0)
        try:
            while data := self.sock.recv(1 << 20):
                self._read += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send_frame(self, kind: FrameKind, message: Any) -> None:
        self.send(encode_frame(kind, msgspec.json.encode(message)))

    def next_frame(self) -> tuple[FrameKind, Any]:
        """Return the next frame of any kind, decoded. Pushed directives are also added to ``pushed``."""
        length = int.from_bytes(self.take(PREFIX_BYTES), "big")
        kind, body = FrameKind(self.take(1)[0]), self.take(length - 1)
        if kind is FrameKind.DEFLATED_PUSH:
            seq, text = (
                int.from_bytes(body[:DIRECTIVE_NUMBER_BYTES], "big"),
                zlib.decompress(body[DIRECTIVE_NUMBER_BYTES:]),
            )
            message = DirectivesAnswer(
                directives=(Directive(seq=seq, body=msgspec.json.decode(text, type=AnyDirective)),)
            )
        elif kind is FrameKind.GO_AWAY:
            message = None
        else:
            message = msgspec.json.decode(body, type=ANSWERS[kind])
        if isinstance(message, DirectivesAnswer):
            self.pushed += message.directives
        return kind, message

    def answer(self, kind: type[T]) -> T:
        """Return the next frame that is no push. Raises AssertionError if it is of another type."""
        message = self.any_answer()
        assert isinstance(message, kind), message
        return message

    def any_answer(self) -> Any:
        """Return the next frame that is no push."""
        while True:
            _, message = self.next_frame()
            if not isinstance(message, DirectivesAnswer):
                return message

    def directive(self, kind: type[T]) -> T:
        """Return the body of the next directive of this kind, pushed now or before."""
        while not any(isinstance(directive.body, kind) for directive in self.pushed):
            self.next_frame()
        found = next(directive for directive in self.pushed if isinstance(directive.body, kind))
        self.pushed.remove(found)
        assert isinstance(found.body, kind)
        return found.body

    def register(self, **fields: Any) -> Registered:
        self.send_frame(FrameKind.REGISTER, registration(self.node, self.incarnation, **fields))
        return self.answer(Registered)

    def beat(self, **fields: Any) -> HeartbeatAnswer:
        self._seq += 1
        self.send_frame(
            FrameKind.HEARTBEAT, Heartbeat(incarnation=self.incarnation, seq=self._seq, sent_at=0.0, **fields)
        )
        answer = self.answer(HeartbeatAnswer)
        self.pushed += answer.directives
        return answer

    def one_way_beat(self, **fields: Any) -> None:
        self._seq += 1
        self.send_frame(
            FrameKind.ONE_WAY_HEARTBEAT, Heartbeat(incarnation=self.incarnation, seq=self._seq, sent_at=0.0, **fields)
        )

    def report(self, *bodies: AnyReport) -> ReportsAnswer:
        self.send_reports(*bodies)
        return self.answer(ReportsAnswer)

    def send_reports(self, *bodies: AnyReport) -> None:
        numbered = tuple(NumberedReport(number=self._number + 1 + i, body=body) for i, body in enumerate(bodies))
        self._number += len(bodies)
        self.send_frame(FrameKind.REPORTS, Reports(incarnation=self.incarnation, reports=numbered))

    def acknowledge(self, through: int) -> None:
        self.send_frame(FrameKind.ACKNOWLEDGE, Acknowledge(through=through))


class SessionOwner(Protocol):
    """A controller's address, and the open sessions with it by node, such as ``ControllerProcess``."""

    listen: str
    sessions: dict[str, Any]


class SessionPool:
    """Sessions with a controller that another program started. Call ``close`` at the end."""

    def __init__(self, listen: str) -> None:
        self.listen = listen
        self.sessions: dict[str, Any] = {}

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()


FRAMES = {Register: FrameKind.REGISTER, Heartbeat: FrameKind.HEARTBEAT, Reports: FrameKind.REPORTS}


def send_message(
    owner: SessionOwner,
    node: str,
    message: Register | Heartbeat | Reports,
    headers: dict[str, str] | None = None,
    timeout_s: float = 35.0,
) -> tuple[int, Any]:
    """Send one message in a node's session with a controller. The session stays open for the next message.

    Returns:
        200 and the answer. For a refusal the status of its code and ``{"code", "detail"}``. For a refused upgrade its
        status and the problem document.

    Raises:
        OSError, EOFError: The connection broke.
    """
    session = owner.sessions.get(node)
    if session is not None and (session.address != owner.listen or session.broken()):
        session.close()
        session = None
    if session is None:
        try:
            session = owner.sessions[node] = AgentSession(owner.listen, node, headers=headers, timeout_s=timeout_s)
        except NotUpgraded as refused:
            owner.sessions.pop(node, None)
            return refused.status, refused.problem
    session.sock.settimeout(timeout_s)
    try:
        session.send_frame(FRAMES[type(message)], message)
        answer = session.any_answer()
    except (OSError, EOFError):
        owner.sessions.pop(node).close()
        raise
    if isinstance(answer, FrameRefused):
        return BY_CODE[answer.code].status, {"code": answer.code, "detail": answer.message}
    return 200, answer


class NotUpgraded(AssertionError):
    """A session was refused, with an HTTP status and a problem document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status} {problem}")
        self.status, self.problem = status, problem


class ServedController:
    """A controller on a real port, on an event loop in a thread of its own."""

    def __init__(self, application: InProcess) -> None:
        self.address = ""
        self.leads = True
        self.leader = ""
        self.takeover_gate = TakeoverGate()
        self.standby = self
        self.controller: Controller
        self.descriptors: DescriptorBudget
        self._application = application
        self._loop = asyncio.new_event_loop()
        self._connections: set[Any] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served controller")

    def start(self) -> None:
        self._thread.start()
        self.run(self._serve())

    async def _serve(self) -> None:
        self.controller = controller = await self._application.start()
        descriptors = self.descriptors = controller.agent_service.descriptors = DescriptorBudget(1000)
        server = await asyncio.get_running_loop().create_server(
            lambda: ConnectionRouter(self, descriptors, self._connections, asyncio.Protocol),
            "127.0.0.1",
            0,
        )
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._server = server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a request that begins no session")

    def leading(self) -> Controller | None:
        return self.controller if self.leads else None

    def not_leading_error(self) -> NotLeadingError:
        return NotLeadingError("this controller is standby", self.leader)

    def record_contact(self, node: str, headers: Headers, peer: ConnectionPeer) -> None:
        """Ignore the contact: only a standby counts it."""

    def run(self, coroutine: Any) -> Any:
        """Run the coroutine on the controller's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def on_loop(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the controller's loop, and return its result."""

        async def inside() -> T:
            return call()

        result: T = self.run(inside())
        return result

    def until(self, condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
        """Wait on the controller's loop for a condition."""

        async def wait() -> None:
            async with asyncio.timeout(deadline_s):
                while not condition():
                    await asyncio.sleep(0.005)

        self.run(wait())

    def hang_up(self) -> None:
        """Close all connections, as a server that stops or no longer leads."""
        self.run(self._hang_up())

    async def _hang_up(self) -> None:
        for connection in list(self._connections):
            connection.shutdown()

    async def _stop(self) -> None:
        self._server.close()
        await self._hang_up()
        await self.controller.stop()

    def stop(self) -> None:
        try:
            self.run(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()


@contextmanager
def served(application: InProcess) -> Iterator[ServedController]:
    """Yield a served controller, and stop it at the end."""
    server = ServedController(application)
    server.start()
    try:
        yield server
    finally:
        server.stop()
