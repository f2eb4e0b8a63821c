"""Route new connections by their first bytes, and serve agents' sessions (rules in ``everstep.wire.v1.agent``).

A session bypasses uvicorn, whose objects would outlive the upgrade. A fleet that closes sessions between heartbeats
opens thousands per second; one that keeps them open holds all of them.

A heartbeat without news is handled and answered inside ``data_received`` (a one-way heartbeat without an answer).
Frames that need a transaction are queued, and answered by their future's callback. Heartbeats and registrations share
one lane, reports have another; each lane handles one frame at a time, in order. A session costs one object and no task.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec
from starlette.types import Receive, Scope, Send

from everstep import errors
from everstep.bearer_tokens import Identity
from everstep.errors import AuthenticationError, EverstepError
from everstep.wire.v1 import agent as wire
from everstep.wire.v1.agent import MAX_BODY_BYTES, PREFIX_BYTES, FrameKind, encode_frame
from everstep_controller.auth.authenticator import Authenticator, Headers
from everstep_controller.auth.peers import ConnectionPeer
from everstep_controller.leadership.lease import NotLeadingError
from everstep_controller.leadership.takeover_gate import WAIT_S, TakeoverGate
from everstep_controller.runtime.push import EncodedDirective, OutgoingDirective
from everstep_controller.server import responses
from everstep_controller.server.agent_service import AgentService, EncodedHeartbeatAnswer, decode_register
from everstep_controller.server.connections import DescriptorBudget


class _Directives(msgspec.Struct, frozen=True):
    """``DirectivesAnswer`` with encoded directives."""

    directives: tuple[EncodedDirective, ...]


def frames_of(directives: Sequence[OutgoingDirective]) -> Iterator[tuple[bytes, ...]]:
    """Yield the parts of each frame, in order. Small directives share a frame, large ones have their own."""
    for is_large, group in itertools.groupby(directives, lambda one: one.body.is_large):
        if not is_large:
            yield (_json_push_frame(list(group)),)
            continue
        for directive in group:
            deflated = directive.body.deflated  # shared by all receivers without copying
            length = (1 + wire.DIRECTIVE_NUMBER_BYTES + len(deflated)).to_bytes(PREFIX_BYTES, "big")
            number = directive.seq.to_bytes(wire.DIRECTIVE_NUMBER_BYTES, "big")
            yield length + bytes((FrameKind.DEFLATED_PUSH,)) + number, deflated


def _json_push_frame(directives: list[OutgoingDirective]) -> bytes:
    if len(directives) == 1:  # mostly a notice to a whole job
        (one,) = directives
        return encode_frame(FrameKind.PUSH, b'{"directives":[{"seq":%d,"body":%b}]}' % (one.seq, one.body.json))
    return encode_frame(
        FrameKind.PUSH, responses.encode(_Directives(tuple(directive.encode() for directive in directives)))
    )


MAX_PARKED = 16
"""Frames of one session that may wait; with more frames or bytes, reading pauses."""
MAX_PARKED_BYTES = 256 << 10
STALLED_S = 20.0
"""Seconds that an agent may leave pushes unread before its session is cut; they are sent again when it returns."""
LOOK_S = 15.0
"""Seconds between two looks at a session that owes a frame: it has begun one, or none was accepted yet."""
OWED_LOOKS = 4
"""Looks without a whole frame in between after which such a session is closed: a minute, as for the body of a request.
Looks are counted instead of seconds, so that a controller that was suspended reads first."""
CLOSE_GRACE_S = 1.0
"""Seconds that a client has to read why its session is closed, and to end TLS."""
MAX_UNREAD_BYTES = 32 << 20
"""Unread bytes of pushes or refusals at which the session is cut at once: two generations of a million GPUs."""

_HEAD = PREFIX_BYTES + 1
_HEARTBEAT = msgspec.json.Decoder(wire.Heartbeat)
_REPORTS = msgspec.json.Decoder(wire.Reports)
_ACKNOWLEDGE = msgspec.json.Decoder(wire.Acknowledge)
_ONE_WAY_HEARTBEAT = int(FrameKind.ONE_WAY_HEARTBEAT)  # an int, because looking up an enumeration's name is slow
_BEATS = (_ONE_WAY_HEARTBEAT, int(FrameKind.HEARTBEAT))
_REPORTS_LANE = (FrameKind.REPORTS,)
_BEATS_LANE = (FrameKind.HEARTBEAT, FrameKind.ONE_WAY_HEARTBEAT, FrameKind.REGISTER)


@dataclass(eq=False, repr=False, slots=True)  # event loops log a failed protocol by its repr
class AgentSession(asyncio.Protocol):
    """One agent's session; ``incarnation`` is the node's incarnation from the first frame, 0 until then."""

    _service: AgentService
    _authenticator: Authenticator
    _identity: Identity
    _transport: asyncio.Transport
    _on_end: Callable[[AgentSession], None]
    incarnation: int = 0
    _before: bytes = b""
    _buffer: bytearray | None = None
    _frames: int = 0
    _look: asyncio.TimerHandle | None = None
    _parked: list[tuple[FrameKind, bytes]] | None = None
    _stalled: asyncio.TimerHandle | None = None
    _attached: bool = False
    _keep_open: bool = True
    _closed: bool = False
    _beats_busy: bool = False
    _reports_busy: bool = False
    _node: str = field(init=False)

    def __post_init__(self) -> None:
        self._node = self._identity.subject

    @property
    def node(self) -> str:
        """The node whose token the session has."""
        return self._node

    # --- connection

    def begin(self, upgrade_answer: bytes, data: bytes) -> None:
        """Handle bytes that followed the upgrade, and send ``upgrade_answer`` in one write with any answer to them."""
        self._before = upgrade_answer
        self._schedule_look(0)
        self.data_received(data)
        if self._before:
            self._transport.write(upgrade_answer)
            self._before = b""

    def data_received(self, data: bytes) -> None:
        if self._buffer is not None:
            self._buffer += data
            if len(self._buffer) < _needed(self._buffer):
                return
            data, self._buffer = bytes(self._buffer), None
        at, end = 0, len(data)
        while end - at >= _HEAD and not self._closed:
            body_at = at + _HEAD
            after = at + PREFIX_BYTES + int.from_bytes(data[at : at + PREFIX_BYTES], "big")
            if not body_at <= after <= body_at + MAX_BODY_BYTES:
                text = f"a frame is longer than {MAX_BODY_BYTES} bytes, or has no kind: closing the session"
                self._close_with_error(0, errors.TooLarge(text))
                return
            if after > end:
                break
            self._frames += 1
            self._frame(data[at + PREFIX_BYTES], data[body_at:after])
            at = after
        if at < end and not self._closed:
            self._buffer = bytearray(data[at:])
            if self._look is None:
                self._schedule_look(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._buffer = self._parked = None
        self._forget_stall()
        if self._look is not None:
            self._look.cancel()
        self._on_end(self)
        attached, self._attached = self._attached, False
        if attached:
            self._service.outbox.detach(self._node, self)
            if self._keep_open:
                self._service.defer(self._report_disconnect)  # after its last reports

    def _report_disconnect(self) -> None:
        outbox = self._service.outbox
        if not outbox.closed and not outbox.has_receiver(self._node):
            self._service.requests.take_disconnect(self._node, self.incarnation)

    def eof_received(self) -> None:
        """Close our end, because the agent has closed its own."""

    def pause_writing(self) -> None:
        self._stalled = asyncio.get_running_loop().call_later(STALLED_S, self._cut)

    def resume_writing(self) -> None:
        self._forget_stall()

    def shutdown(self) -> None:
        """Close the session because the server stops; this implies nothing about the node."""
        self.dismiss()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def dismiss(self) -> None:
        """End the session: another session or incarnation replaced it."""
        if self._attached:
            self._attached = False
            self._service.outbox.detach(self._node, self)
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._transport.close()

    def _cut(self) -> None:
        """Cut the session of an agent that does not read. Its directives wait until it returns."""
        self._service.metrics.sessions_cut.inc()
        line = "node %s does not read its directives: closing its session"
        self._service.log_line(logging.WARNING, self._node, line, self._node)
        self._closed = True
        self._transport.abort()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # --- frames that do not come

    def _schedule_look(self, owed_looks: int) -> None:
        later = asyncio.get_running_loop().call_later
        self._look = later(LOOK_S, self._check_owed_frame, self._frames, owed_looks + 1)

    def _check_owed_frame(self, frames: int, owed_looks: int) -> None:
        """Close the session if a frame is owed since OWED_LOOKS looks; ``frames``: received until the last look."""
        self._look = None
        if self._closed or (self._attached and self._buffer is None):
            return
        is_our_turn = self._beats_busy or self._reports_busy or bool(self._parked)
        if is_our_turn or frames != self._frames:
            self._schedule_look(0)
        elif owed_looks < OWED_LOOKS:
            self._schedule_look(owed_looks)
        else:
            text = f"no whole frame came within {LOOK_S * OWED_LOOKS:g} s: closing the session, open another to go on"
            self._close_unneeded(errors.Unavailable(text))

    def close_surplus(self, count: int) -> bool:
        """Close the session, one of ``count`` of its node, unless a frame was accepted in it."""
        if self._attached or self._closed:
            return False
        text = f"node {self._node} has {count} sessions at once, and its agent needs one: closing the oldest unused one"
        advice = "Look for a second agent of this name, or a stolen token"
        self._service.log_line(logging.WARNING, self._node, "%s. %s", text, advice)
        self._close_unneeded(errors.RateLimited(text))
        return True

    def _close_unneeded(self, error: EverstepError) -> None:
        """Refuse and close. The node is not said to have hung up, since its silence is judged by its deadlines."""
        self._refuse(0, error)
        self._buffer = self._parked = None
        self.dismiss()
        asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.abort)

    def request_close(self) -> bool:
        """Ask the agent to hang up if the session is idle and not needed."""
        busy = self._beats_busy or self._reports_busy or not self._attached
        if self._closed or busy or not self._keep_open or self._service.should_keep_open(self._node):
            return False
        self._keep_open = False
        self._send(FrameKind.GO_AWAY, b"")
        return True

    # --- incoming frames

    def _frame(self, kind: int, body: bytes) -> None:
        try:
            self._authenticator.charge_frame(self._identity)
            if kind in _BEATS and not self._beats_busy:
                self._beat(kind, body)
            elif kind == FrameKind.ACKNOWLEDGE:
                self._acknowledge(body)
            elif kind in _BEATS_LANE or kind == FrameKind.REPORTS:
                self._take_in_order(FrameKind(kind), body)
            else:
                self._close_with_error(0, errors.MalformedMessage(f"frame kind {kind} is unknown: closing the session"))
        except AuthenticationError as error:
            self._close_with_error(kind, error)
        except EverstepError as error:
            self._refuse(kind, error)

    def _take_in_order(self, kind: FrameKind, body: bytes) -> None:
        if self._reports_busy if kind is FrameKind.REPORTS else self._beats_busy:
            self._queue_frame(kind, body)
        elif kind is FrameKind.REPORTS:
            self._reports(body)
        elif kind is FrameKind.REGISTER:
            self._register(body)
        else:
            self._beat(kind, body)

    def _queue_frame(self, kind: FrameKind, body: bytes) -> None:
        if self._parked is None:
            self._parked = []
        self._parked.append((kind, body))
        self._service.loop.expedite(self._node)
        if len(self._parked) >= MAX_PARKED or sum(len(frame) for _, frame in self._parked) > MAX_PARKED_BYTES:
            self._transport.pause_reading()

    def _next(self, lane: tuple[FrameKind, ...]) -> None:
        """Handle waiting frames of a lane, until one of them waits for the loop."""
        while self._parked and not (self._reports_busy if lane is _REPORTS_LANE else self._beats_busy):
            found = next((place for place, (kind, _) in enumerate(self._parked) if kind in lane), None)
            if found is None:
                return
            kind, body = self._parked.pop(found)
            if not self._parked:
                self._parked = None
                self._transport.resume_reading()
            try:
                self._take_in_order(kind, body)
            except EverstepError as error:
                self._refuse(kind, error)

    def _beat(self, kind: int, body: bytes) -> None:
        beat = responses.decode(_HEARTBEAT, body)
        self._check_own(beat.incarnation)
        outcome = self._service.take_heartbeat(self._node, beat)
        if isinstance(outcome, bool):
            self._on_heartbeat_applied(kind, beat.incarnation, resend=outcome)
        else:
            self._beats_busy = True
            outcome.add_done_callback(lambda done: self._on_heartbeat_done(kind, beat.incarnation, done))

    def _on_heartbeat_done(self, kind: int, incarnation: int, done: asyncio.Future[bool]) -> None:
        self._beats_busy = False
        if self._check_result(kind, done):
            self._on_heartbeat_applied(kind, incarnation, resend=done.result())
        self._next(_BEATS_LANE)

    def _on_heartbeat_applied(self, kind: int, incarnation: int, *, resend: bool) -> None:
        service = self._service
        service.metrics.heartbeats += 1
        waited = () if self._attached else self._attach(incarnation)
        if kind == _ONE_WAY_HEARTBEAT:
            self._answer_one_way(waited, resend=resend)
            return
        self._keep_open = service.should_keep_open(self._node)
        answer = EncodedHeartbeatAnswer(
            service.wall(),
            resend,
            tuple(directive.encode() for directive in waited),
            self._keep_open,
            service.unconfirmed_epoch(),
        )
        self._send(FrameKind.HEARTBEAT_ANSWER, responses.encode(answer))

    def _answer_one_way(self, waited: tuple[OutgoingDirective, ...], *, resend: bool) -> None:
        """Send an answer's content to a one-way heartbeat, if there is any."""
        if waited:
            self.push(waited)
        if resend:
            error = errors.NotFound(f"the findings of node {self._node} are unknown to this controller: register again")
            self._refuse(FrameKind.ONE_WAY_HEARTBEAT, error)
        elif self._keep_open and not self._service.should_keep_open(self._node):
            self._keep_open = False
            self._send(FrameKind.GO_AWAY, b"")

    def _register(self, body: bytes) -> None:
        register = decode_register(body)
        self._check_own(register.incarnation)
        done = self._service.register(self._node, register)
        self.incarnation = register.incarnation
        self._beats_busy = True
        done.add_done_callback(lambda done: self._on_registered(register, done))

    def _on_registered(self, register: wire.Register, done: asyncio.Future[int]) -> None:
        self._beats_busy = False
        if self._check_result(FrameKind.REGISTER, done):
            registered = self._service.registered(register, done.result())
            self._keep_open = registered.keep_open
            self._send(FrameKind.REGISTERED, responses.encode(registered))
            if not self._attached:
                self.push(self._attach(self.incarnation))
        elif not self._attached:
            self.incarnation = 0
        self._next(_BEATS_LANE)

    def _reports(self, body: bytes) -> None:
        self._reports_busy = True
        self._service.defer(lambda: self._read_reports(body))

    def _read_reports(self, body: bytes) -> None:
        try:
            done = self._service.take_reports(self._node, responses.decode(_REPORTS, body))
        except EverstepError as error:
            self._reports_busy = False
            self._refuse(FrameKind.REPORTS, error)
            self._next(_REPORTS_LANE)
        else:
            done.add_done_callback(self._reports_done)

    def _reports_done(self, done: asyncio.Future[int]) -> None:
        self._reports_busy = False
        if self._check_result(FrameKind.REPORTS, done):
            self._send(FrameKind.REPORTS_ANSWER, responses.encode(wire.ReportsAnswer(through=done.result())))
        self._next(_REPORTS_LANE)

    def _acknowledge(self, body: bytes) -> None:
        acknowledge = responses.decode(_ACKNOWLEDGE, body)
        if self._attached:  # otherwise the incarnation may be over
            self._service.outbox.acknowledge(self._node, acknowledge.through)

    def _check_own(self, incarnation: int) -> None:
        """Raise StaleGeneration for another incarnation than the session's."""
        if incarnation != self.incarnation and self.incarnation:
            raise errors.StaleGeneration(
                f"this session belongs to incarnation {self.incarnation} of node {self._node}, "
                f"not to {incarnation}: open another"
            )

    def _attach(self, incarnation: int) -> tuple[OutgoingDirective, ...]:
        """Attach to the outbox after the first accepted frame. Return the directives that wait already."""
        if self._closed:
            return ()
        self.incarnation = incarnation
        self._attached = True
        return self._service.outbox.attach(self._node, self)

    # --- outgoing frames

    def push(self, directives: Sequence[OutgoingDirective]) -> None:
        """Send directives, in order, if the credential is still valid. Never raises and never waits."""
        try:
            self._authenticator.check_valid(self._identity)
        except AuthenticationError as error:
            self._close_with_error(0, error)
            return
        for parts in frames_of(directives):
            if not self._closed:
                # Not writelines(): in Python 3.12.0 to 3.12.8 and 3.13.0 to 3.13.1 it fills the buffer without a call
                # of pause_writing() (CVE-2024-12254), so a stalled session would never be cut.
                self._transport.write(b"".join((self._before, *parts)))
                self._before = b""
        self._bound_unread()

    def _send(self, kind: FrameKind, body: bytes) -> None:
        if not self._closed:
            self._transport.write(self._before + encode_frame(kind, body))
            self._before = b""
            self._bound_unread()

    def _bound_unread(self) -> None:
        if not self._closed and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._cut()

    def _check_result(self, kind: int, done: asyncio.Future[Any]) -> bool:
        """Return whether the request succeeded; otherwise send the error."""
        error = done.exception()
        if error is None:
            return True
        if not isinstance(error, EverstepError):
            raise error
        self._refuse(kind, error)
        return False

    def _refuse(self, kind: int, error: EverstepError) -> None:
        self._service.metrics.count_refused("session", error.code)
        retry_after_s = getattr(error, "retry_after_s", None)
        text = str(error)[:4096]
        refused = wire.FrameRefused(frame_kind=kind, code=error.code, message=text, retry_after_s=retry_after_s)
        self._send(FrameKind.REFUSED, responses.encode(refused))

    def _close_with_error(self, kind: int, error: EverstepError) -> None:
        """Refuse and close: the frame's end is unknown (kind 0), or no further frame is allowed."""
        self._refuse(kind, error)
        self._close()


def _needed(buffer: bytearray) -> int:
    """Return the bytes needed for the first frame in ``buffer``, as far as known."""
    if len(buffer) < _HEAD:
        return _HEAD
    return PREFIX_BYTES + min(int.from_bytes(buffer[:PREFIX_BYTES], "big"), 1 + MAX_BODY_BYTES)


# ---- new connections

MAX_HEAD_BYTES = 16 << 10
FIRST_REQUEST_S = 10.0
"""Seconds for the first request of a new connection, which holds a file descriptor meanwhile."""

_BEFORE_NODE, _AFTER_NODE = b"GET /v1/agents/", b"/session"
_UPGRADE_TOKEN = wire.UPGRADE.encode()
_ACCEPTED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: " + _UPGRADE_TOKEN + b"\r\n\r\n"

MakeHttp = Callable[[], asyncio.Protocol]


class Leader(Protocol):
    """The controller of a process that leads."""

    authenticator: Authenticator
    agent_service: AgentService


class Standby(Protocol):
    """The part of a process that answers while another controller leads."""

    def record_contact(self, node: str, headers: Headers, peer: ConnectionPeer) -> None:
        """Record an agent that asks for a session."""

    def not_leading_error(self) -> NotLeadingError:
        """Return the error for requests that need a leader."""


class ControllerApp(Protocol):
    """This process's ASGI application, which leads or stands by, as its connections see it."""

    takeover_gate: TakeoverGate

    @property
    def standby(self) -> Standby: ...

    def leading(self) -> Leader | None:
        """Return the controller while this process is certain to lead, else None."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that begins no session."""


@dataclass(eq=False, repr=False, slots=True)
class ConnectionRouter(asyncio.Protocol):
    """A connection until its purpose is known. ``_make_http`` makes uvicorn's protocol for all but sessions."""

    _process: ControllerApp
    _descriptors: DescriptorBudget
    _connections: set[Any]
    _make_http: MakeHttp
    _head: bytes = b""
    _transport: asyncio.Transport = field(init=False)
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._connections.add(self)
        self._descriptors.open += 1
        self._descriptors.make_room()
        if self._descriptors.open > self._descriptors.limit:
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
        may_be_session = head.startswith(_BEFORE_NODE) or _BEFORE_NODE.startswith(head)
        end = head.find(b"\r\n\r\n")
        if not may_be_session or (end if end >= 0 else len(head)) > MAX_HEAD_BYTES:
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
        peer = ConnectionPeer.from_transport(self._transport)
        leader = self._process.leading()
        if leader is None:
            if is_upgrade:
                self._process.standby.record_contact(node, headers, peer)
            self._wait_for_leader()
            return
        try:
            identity = leader.authenticator.authorize_agent(headers, node, peer)
            if not is_upgrade:
                raise errors.VersionMismatch(
                    f"a session needs the headers `Connection: Upgrade` and `Upgrade: {wire.UPGRADE}`"
                )
        except EverstepError as error:
            leader.agent_service.metrics.count_refused("agents/session", error.code)
            self._refuse(error)
            return
        session = AgentSession(leader.agent_service, leader.authenticator, identity, self._transport, self._ended)
        self._leave()
        self._connections.add(session)
        self._descriptors.add(session)
        self._transport.set_protocol(session)
        session.begin(_ACCEPTED, head[end + 4 :])

    def _wait_for_leader(self) -> None:
        """Hold the connection during a takeover, else refuse it."""
        if not self._process.takeover_gate.hold_back(self):
            self._refuse(self._process.standby.not_leading_error())
            return
        self._leave()
        self._transport.pause_reading()
        self._deadline = asyncio.get_running_loop().call_later(WAIT_S, self._give_up)

    def _give_up(self) -> None:
        self._process.takeover_gate.remove(self)
        self._refuse(self._process.standby.not_leading_error())

    def on_leader_known(self) -> None:
        """Route the held request, now that the leader is known."""
        self._leave()
        self._transport.resume_reading()
        self.data_received(b"")

    def _refuse(self, error: EverstepError) -> None:
        headers = responses.error_headers(error)
        self._transport.write(responses.last_response(error.status, responses.problem_of(error), headers))
        self._transport.close()

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
