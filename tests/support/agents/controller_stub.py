"""A stub of a controller for agents, in a thread, which opens sessions, answers frames, and records them.

The stub keeps the contract that an agent relies on. It takes each report number once. It keeps directives until they
are acknowledged, sends them with a session's first answer, and pushes later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, NotFound, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.agent import (
    DIRECTIVE_NUMBER_BYTES,
    MAX_BODY_BYTES,
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

T = TypeVar("T")
DEADLINE_S = 60.0
DEFLATES_OVER_BYTES = 4096


class ControllerStub:
    """Serve on ``url``. ``start`` and ``stop`` may be called repeatedly: the address stays.

    ``refusals`` maps a kind of request (session, register, heartbeat, reports) to a function that may raise an
    EverstepError for the frame's body, or for the head of the session's request. Kinds in ``unanswered`` get no answer;
    an acknowledge is then lost. ``keep_open``: its value in answers. ``token``: the accepted bearer token.
    ``tls``: context to serve https.
    """

    def __init__(
        self, token: str = "agent:n1:mac", interval_s: float = 0.05, tls: ssl.SSLContext | None = None
    ) -> None:
        self.token = token
        self.interval_s = interval_s
        self.tls = tls
        self.registered: list[Register] = []
        self.heartbeats: list[Heartbeat] = []
        self.taken_reports: list[NumberedReport] = []
        self.requests: list[tuple[str, int]] = []
        self.acknowledged: list[int] = []
        self.refusals: dict[str, Callable[[bytes], None]] = {}
        self.unanswered: set[str] = set()
        self.knows_node = False
        self.resend = False
        self.keep_open = True
        self.first_directive = 1
        self.changed = threading.Condition()
        self._directives: list[Directive] = []
        self._sessions: list[_Session] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def listening(self) -> int:
        """Number of open sessions whose node has registered or sent a heartbeat, to which pushes go at once."""
        return sum(session.introduced for session in self._sessions)

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener, serving)), daemon=True)
        self._thread.start()
        assert serving.wait(DEADLINE_S)

    def stop(self) -> None:
        """Stop as a killed process does: the port closes, and every connection ends."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._loop = self._thread = None

    async def _serve(self, listener: socket.socket, serving: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))
        serving.set()
        await self._ending.wait()
        listener.shutdown(socket.SHUT_RDWR)
        await accepting
        listener.close()
        self.cut()
        while self._sessions:
            await asyncio.sleep(0)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections one by one until the listener ends, since asyncio leaks a cancelled TLS handshake."""
        assert self._loop is not None
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # the client rejects the stub's certificate
                await self._loop.connect_accepted_socket(lambda: _Session(self), sock, ssl=self.tls)

    def cut(self) -> None:
        """End every connection. Call it in the stub's own thread."""
        for session in self._sessions:
            session.transport.abort()

    def drop(self) -> None:
        """End every connection, and go on serving."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.cut)

    def forget(self) -> None:
        """Forget the node and its directives, as a controller that lost its database."""
        with self.changed:
            self.knows_node = False
            self._directives.clear()

    def push(self, body: AnyDirective) -> int:
        """Queue a directive, push it to open sessions, and return its number."""
        with self.changed:
            last = self._directives[-1].seq if self._directives else self.first_directive - 1
            directive = Directive(seq=max(last, *self.acknowledged, 0) + 1, body=body)
            self._directives.append(directive)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._push, directive)
            return directive.seq

    def _push(self, directive: Directive) -> None:
        for session in self._sessions:
            if session.introduced and directive.seq > session.pushed_through:
                session.push((directive,))

    def wait_for(self, condition: Callable[[], T]) -> T:
        """Wait until ``condition`` is true, and return its value. Raises AssertionError after the deadline."""
        with self.changed:
            if not self.changed.wait_for(condition, DEADLINE_S):
                reports = [type(report.body).__name__ for report in self.taken_reports]
                raise AssertionError(f"condition not met; received {len(self.heartbeats)} heartbeats and {reports}")
            return condition()

    def reports(self, kind: type[T]) -> list[T]:
        """Return the reports of one kind that were taken, in order."""
        return [n.body for n in list(self.taken_reports) if isinstance(n.body, kind)]

    def first_report(self, kind: type[T]) -> T:
        """Wait for the first report of a kind, and return it."""
        return self.wait_for(lambda: self.reports(kind))[0]

    def connected(self, session: _Session) -> None:
        self._sessions.append(session)

    def disconnected(self, session: _Session) -> None:
        with self.changed:
            self._sessions.remove(session)
            self.changed.notify_all()

    def admit(self, head: bytes) -> None:
        """Check the request for a session. Raises EverstepError to refuse it."""
        self._check_refusals("session", head)
        lines = head.decode().split("\r\n")
        if f"Authorization: Bearer {self.token}" not in lines and self.token:
            raise AuthenticationError("the token does not verify")
        if lines[0] != "GET /v1/agents/n1/session HTTP/1.1" or f"Upgrade: {UPGRADE}" not in lines:
            raise NotFound(lines[0])

    def _check_refusals(self, kind: str, body: bytes) -> None:
        with self.changed:
            self.requests.append((kind, len(body)))
            self.changed.notify_all()
        if kind in self.refusals:
            self.refusals[kind](body)

    def answer(self, kind: FrameKind, body: bytes) -> Any:
        """Return the answer to a frame. Raises EverstepError for a refusal."""
        name = kind.name.lower()
        self._check_refusals(name, body)
        if len(body) > MAX_BODY_BYTES:
            raise MalformedMessage(f"a body of {len(body)} bytes")
        with self.changed:
            answer = getattr(self, f"_{name}")(body)
            self.changed.notify_all()
            return answer

    def pending(self) -> tuple[Directive, ...]:
        return tuple(self._directives)

    def _register(self, body: bytes) -> Any:
        self.registered.append(msgspec.json.decode(body, type=Register))
        self.knows_node, self.resend = True, False
        return Registered(
            protocol=1,
            heartbeat_interval_s=self.interval_s,
            next_directive=self._directives[0].seq if self._directives else self.first_directive,
            controller="stub",
            server_at=SYSTEM_CLOCK.wall(),
            keep_open=self.keep_open,
        )

    def _require_node(self) -> None:
        if not self.knows_node:
            raise NotFound("no such node")

    def _heartbeat(self, body: bytes) -> HeartbeatAnswer:
        self._require_node()
        heartbeat = msgspec.json.decode(body, type=Heartbeat)
        self.heartbeats.append(heartbeat)
        self._acknowledged(heartbeat.directives_through)
        self.resend &= heartbeat.findings is None
        return HeartbeatAnswer(server_at=SYSTEM_CLOCK.wall(), resend=self.resend, keep_open=self.keep_open)

    def _one_way_heartbeat(self, body: bytes) -> None:
        self._heartbeat(body)
        if self.resend:
            raise NotFound("findings not known")

    def _reports(self, body: bytes) -> ReportsAnswer:
        self._require_node()
        batch = msgspec.json.decode(body, type=Reports)
        last = self.taken_reports[-1].number if self.taken_reports else 0
        self.taken_reports += [n for n in batch.reports if n.number > last]
        return ReportsAnswer(through=batch.reports[-1].number)

    def _acknowledge(self, body: bytes) -> None:
        self._acknowledged(msgspec.json.decode(body, type=Acknowledge).through)

    def _acknowledged(self, through: int) -> None:
        if through > max(self.acknowledged, default=0):
            self.acknowledged.append(through)
        self._directives = [d for d in self._directives if d.seq > through]


_ANSWERS = {
    FrameKind.REGISTER: FrameKind.REGISTERED,
    FrameKind.HEARTBEAT: FrameKind.HEARTBEAT_ANSWER,
    FrameKind.REPORTS: FrameKind.REPORTS_ANSWER,
}


class _Session(asyncio.Protocol):
    """One connection: the request, then frames."""

    transport: asyncio.Transport

    def __init__(self, stub: ControllerStub) -> None:
        self.introduced = False
        self.pushed_through = 0
        self._stub = stub
        self._open = False
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._stub.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stub.disconnected(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._open and b"\r\n\r\n" in self._buffer:
            head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            self._begin(head)
        while self._open and len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end:
                return
            kind, body, self._buffer = FrameKind(self._buffer[4]), self._buffer[5:end], self._buffer[end:]
            self._answer(kind, body)

    def _begin(self, head: bytes) -> None:
        try:
            self._stub.admit(head)
        except EverstepError as error:
            self._refuse(error)
            return
        if "session" not in self._stub.unanswered:
            self._open = True
            self.transport.write(f"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode())

    def _refuse(self, error: EverstepError) -> None:
        problem: Any = {"type": f"urn:everstep:error:{error.code}", "code": error.code, "detail": str(error)}
        content = msgspec.json.encode(problem)
        after = f"Retry-After: {round(error.retry_after_s)}\r\n" if isinstance(error, Unavailable) else ""
        head = f"HTTP/1.1 {error.status} X\r\nContent-Length: {len(content)}\r\n{after}\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()

    def _answer(self, kind: FrameKind, body: bytes) -> None:
        lost = kind.name.lower() in self._stub.unanswered
        if kind in (FrameKind.ACKNOWLEDGE, FrameKind.ONE_WAY_HEARTBEAT) and lost:
            return
        try:
            answer = self._stub.answer(kind, body)
        except EverstepError as error:
            after_s = error.retry_after_s if isinstance(error, Unavailable) else None
            refused = FrameRefused(frame_kind=kind, code=error.code, message=str(error), retry_after_s=after_s)
            self._send(FrameKind.REFUSED, refused)
            return
        if kind in (FrameKind.ACKNOWLEDGE, FrameKind.ONE_WAY_HEARTBEAT) or lost:
            return
        first, self.introduced = not self.introduced, True
        if first and isinstance(answer, HeartbeatAnswer):
            answer = msgspec.structs.replace(answer, directives=self._waiting())
        self._send(_ANSWERS[kind], answer)
        if first and isinstance(answer, Registered) and (waiting := self._waiting()):
            self.push(waiting)

    def _waiting(self) -> tuple[Directive, ...]:
        waiting = self._stub.pending()
        self.pushed_through = waiting[-1].seq if waiting else 0
        return waiting

    def push(self, directives: tuple[Directive, ...]) -> None:
        self.pushed_through = directives[-1].seq
        for directive in directives:
            body = msgspec.json.encode(directive.body)
            if len(body) > DEFLATES_OVER_BYTES:
                number = directive.seq.to_bytes(DIRECTIVE_NUMBER_BYTES, "big")
                self.transport.write(encode_frame(FrameKind.DEFLATED_PUSH, number + zlib.compress(body)))
            else:
                self._send(FrameKind.PUSH, DirectivesAnswer(directives=(directive,)))

    def _send(self, kind: FrameKind, message: Any) -> None:
        self.transport.write(encode_frame(kind, msgspec.json.encode(message)))


@contextlib.contextmanager
def serving(stub: ControllerStub) -> Iterator[ControllerStub]:
    """Let the stub serve inside the block."""
    stub.start()
    try:
        yield stub
    finally:
        stub.stop()
