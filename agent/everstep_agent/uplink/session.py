"""One session with a controller: frames in, frames out, and the time of the next send. No sockets, no own clock.

Beats go out when they are due, whatever else waits. Urgent reports go out at once, one frame at a time, starting with
the oldest that is not acknowledged; later ones go into the next frame. Beats without findings are answered only every
few seconds.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from everstep.clock import Clock
from everstep.errors import DECODE_ERRORS, EverstepError, ProtocolError, RateLimited
from everstep.vocabulary import Finding
from everstep.wire.v1 import agent as wire
from everstep.wire.v1.directives import AnyDirective, Directive
from everstep.wire.v1.training import RankProgress
from everstep_agent.uplink.connection import AnswerTimeout, error_from_frame, retry_after_s
from everstep_agent.uplink.gauge_pacing import GaugePacer
from everstep_agent.uplink.heartbeat import (
    DirectiveInbox,
    HeartbeatProtocol,
    NodeDescription,
    RefusalAction,
    refusal_action,
)
from everstep_agent.uplink.spool import MAX_REPORTS_PER_REQUEST, Spool

log = logging.getLogger(__name__)

MAX_REFUSED_BEATS = 3
"""Consecutive refusals after which a controller is left, if there are others: it does not lead, or is overloaded."""

REQUEST_KINDS = ("session", "register", "heartbeat", "reports")
"""Request kinds whose answers are counted; each count starts at 0."""

MIN_RETRY_S = 0.1
"""Seconds before a refused beat or report frame is sent again, if the controller names no time. Urgent news waits no
longer than this: a controller without its database refuses reports that it cannot store, and still decides by them."""

_REQUEST_TYPES: dict[int, type] = {
    wire.FrameKind.REGISTER: wire.Register,
    wire.FrameKind.HEARTBEAT: wire.Heartbeat,
    wire.FrameKind.REPORTS: tuple,
}
_DECODERS: dict[int, Any] = {
    wire.FrameKind.REGISTERED: msgspec.json.Decoder(wire.Registered),
    wire.FrameKind.HEARTBEAT_ANSWER: msgspec.json.Decoder(wire.HeartbeatAnswer),
    wire.FrameKind.REPORTS_ANSWER: msgspec.json.Decoder(wire.ReportsAnswer),
    wire.FrameKind.PUSH: msgspec.json.Decoder(wire.DirectivesAnswer),
    wire.FrameKind.REFUSED: msgspec.json.Decoder(wire.FrameRefused),
}
_DIRECTIVE: msgspec.json.Decoder[AnyDirective] = msgspec.json.Decoder(AnyDirective)


class AgentCallbacks(Protocol):
    """The agent's side of a session."""

    def describe_node(self) -> NodeDescription: ...
    def findings(self) -> tuple[Finding, ...]: ...
    def rank_progress(self) -> tuple[RankProgress, ...]: ...
    def gpu_gauges(self) -> tuple[wire.GpuGauges, ...]: ...
    def is_busy(self) -> bool:
        """Return whether a job is on the node, so that an absent controller is worth asking often."""

    def on_new_controller(self, known_jobs: Collection[str]) -> None:
        """Send live launchers' offers again to a controller new to this agent, except those of ``known_jobs``."""

    def on_directives(self, directives: list[Directive]) -> None: ...
    def on_server_time(self, server_at: float, received_at: float, round_trip_s: float) -> None: ...


class UplinkState(msgspec.Struct, kw_only=True):
    """State of the uplink over all sessions. ``outcomes`` counts by request kind and outcome."""

    heartbeat_protocol: HeartbeatProtocol
    spool: Spool
    inbox: DirectiveInbox = msgspec.field(default_factory=DirectiveInbox)
    gauge_pacer: GaugePacer = msgspec.field(default_factory=GaugePacer)
    outcomes: Counter[tuple[str, str]] = msgspec.field(
        default_factory=lambda: Counter({(line, "ok"): 0 for line in REQUEST_KINDS})
    )
    max_batch_reports: int = MAX_REPORTS_PER_REQUEST


class _PendingFrame(msgspec.Struct):
    """A frame that waits for its answer. ``registration_count`` is the number of registrations when it was sent."""

    message: Any
    sent_at: float
    registration_count: int


@dataclass(eq=False)
class ControllerSession:
    """One session: ``send_due`` sends due frames and returns the time to call it again; ``handle_frame`` takes a frame.

    Both raise EverstepError if this session is of no more use: AnswerTimeout if an answer is overdue, or the refusal.
    """

    state: UplinkState
    agent: AgentCallbacks
    clock: Clock
    send: Callable[[wire.FrameKind, bytes], None]  # takes each frame, in order
    url: str  # for messages and logs
    uniform: Callable[[], float]  # draws from [0, 1), for jitter
    spread_beat: bool  # the second beat comes at a random moment, for a fleet that connected in the same instant
    answer_timeout_s: float  # for a beat or a registration
    has_other_controllers: bool  # an unavailable controller is worth leaving

    answered_at: float | None = None
    is_kept_open: bool = True  # the controller wants the session to stay open between beats
    is_flushing: bool = False  # reports are sent without waiting for others
    next_beat_at: float = field(init=False)
    unsure_epoch: int = 0  # of a controller that asks whether another one leads; 0 if it does not ask
    succession: wire.LeadershipProof | None = None  # of another controller, sent with the next beat
    _pending_beats: deque[_PendingFrame] = field(default_factory=deque)
    _pending_reports: deque[_PendingFrame] = field(default_factory=deque)
    _reports_not_before: float = 0.0
    _urgent_not_before: float = 0.0
    _refused_beats: int = 0
    _answer_due_at: float = -math.inf

    def __post_init__(self) -> None:
        self.next_beat_at = self.clock.monotonic()
        self._node_description = self.agent.describe_node()

    @property
    def can_end(self) -> bool:
        """Whether the controller asked not to hold the session, and no answer is awaited by either side."""
        return not self.is_kept_open and not self._pending_beats and not self._pending_reports and not self.unsure_epoch

    def send_due(self) -> float:
        """Send all due frames; return when the next will be due (monotonic seconds)."""
        now = self.clock.monotonic()
        if self._pending_beats and now >= self._pending_beats[0].sent_at + self.answer_timeout_s:
            self.state.outcomes[_message_kind(self._pending_beats[0].message), AnswerTimeout.code] += 1
            raise AnswerTimeout(f"{self.url}: no answer within {self.answer_timeout_s:g} s", 0.0)
        if now >= self.next_beat_at and not self._is_registering:
            self._send_beat(now)
        deadline = self._pending_beats[0].sent_at + self.answer_timeout_s if self._pending_beats else math.inf
        return min(self._send_reports(now), deadline, math.inf if self._is_registering else self.next_beat_at)

    # Sending

    @property
    def _is_registering(self) -> bool:
        return bool(self._pending_beats) and isinstance(self._pending_beats[-1].message, wire.Register)

    def _send_beat(self, now: float) -> None:
        state = self.state
        self._node_description = self.agent.describe_node()
        message = state.heartbeat_protocol.next_message(
            self._node_description,
            self.agent.findings(),
            self.agent.rank_progress(),
            self.clock.wall(),
            state.inbox.received_through,
        )
        if self.succession is not None and isinstance(message, wire.Heartbeat):
            message, self.succession = msgspec.structs.replace(message, leadership_proof=self.succession), None
        if isinstance(message, wire.Heartbeat) and message.findings is None:
            gauges = state.gauge_pacer.take_due(self.agent.gpu_gauges, now, self.uniform)
            message = msgspec.structs.replace(message, gpu_gauges=gauges) if gauges else message
        kind = self._choose_heartbeat_kind(message, now)
        if kind is wire.FrameKind.ONE_WAY_HEARTBEAT:
            state.outcomes["heartbeat", "quiet"] += 1
        else:
            self._pending_beats.append(self._make_pending(message, now))
        if kind is wire.FrameKind.HEARTBEAT:
            first = self._answer_due_at == -math.inf
            self._answer_due_at = now + wire.ANSWER_INTERVAL_S * (self.uniform() if first else 1.0)
        self.next_beat_at = now + state.heartbeat_protocol.interval_s * (self.uniform() if self.spread_beat else 1.0)
        self.spread_beat = False
        self.send(kind, msgspec.json.encode(message))

    def _choose_heartbeat_kind(self, message: wire.Register | wire.Heartbeat, now: float) -> wire.FrameKind:
        """Choose a one-way beat if nothing depends on its answer, and the last requested answer is recent."""
        if isinstance(message, wire.Register):
            return wire.FrameKind.REGISTER
        needs_answer = self.unsure_epoch or not self.is_kept_open
        awaits = self._pending_beats or self._pending_reports or message.findings is not None or needs_answer
        due = now + 0.5 * self.state.heartbeat_protocol.interval_s >= self._answer_due_at
        return wire.FrameKind.HEARTBEAT if awaits or due else wire.FrameKind.ONE_WAY_HEARTBEAT

    def _send_reports(self, now: float) -> float:
        """Send due reports; return when more will be due."""
        spool = self.state.spool
        if self._is_registering or not self.state.heartbeat_protocol.is_registered:
            return math.inf
        wait_s, is_news = spool.wait_s(now), spool.newest_urgent_number > spool.sent_through
        # a controller may delay its answer to mild reports
        if wait_s is None or len(self._pending_reports) > (1 if is_news else 0):
            return math.inf
        due = max(
            now if self.is_flushing else now + wait_s, self._urgent_not_before if is_news else self._reports_not_before
        )
        if due > now:
            return due
        batch = spool.next_batch(self.state.max_batch_reports)
        self._pending_reports.append(self._make_pending(batch, now))
        body = wire.Reports(incarnation=self.state.heartbeat_protocol.incarnation, reports=batch)
        self.send(wire.FrameKind.REPORTS, msgspec.json.encode(body))
        return math.inf

    def _make_pending(self, message: Any, now: float) -> _PendingFrame:
        return _PendingFrame(message, now, self.state.heartbeat_protocol.registrations)

    # Receiving

    def handle_frame(self, kind: int, body: bytes) -> None:
        if kind == wire.FrameKind.GO_AWAY:
            self.is_kept_open = False
            return
        message = self._decode(kind, body)
        match message:
            case wire.HeartbeatAnswer():
                self._handle_heartbeat_answer(self._take_answered(wire.FrameKind.HEARTBEAT), message)
            case wire.Registered():
                self._handle_registered(self._take_answered(wire.FrameKind.REGISTER), message)
            case wire.ReportsAnswer():
                self._handle_reports_answer(self._take_answered(wire.FrameKind.REPORTS), message)
            case wire.FrameRefused():
                self._handle_refused(message)
            case _:
                self._handle_directives(message.directives)

    def _decode(self, kind: int, body: bytes) -> Any:
        try:
            if kind == wire.FrameKind.DEFLATED_PUSH:
                return wire.DirectivesAnswer(directives=(_decode_deflated(body),))
            if kind in _DECODERS:
                return _DECODERS[kind].decode(body)
        except (*DECODE_ERRORS, zlib.error) as error:
            raise self._protocol_error(f"{wire.FrameKind(kind).name}: {error}") from error
        raise self._protocol_error(f"a frame of kind {kind}")

    def _protocol_error(self, detail: str) -> ProtocolError:
        self.state.outcomes["session", "protocol_error"] += 1
        return ProtocolError(f"{self.url} sent an unexpected message: {detail}")

    def _take_answered(self, kind: wire.FrameKind) -> _PendingFrame:
        sent = self._pop_pending(kind)
        self.state.outcomes[_message_kind(sent.message), "ok"] += 1
        self.answered_at = self.clock.monotonic()
        return sent

    def _handle_heartbeat_answer(self, sent: _PendingFrame, answer: wire.HeartbeatAnswer) -> None:
        self._refused_beats = 0
        self.agent.on_server_time(answer.server_at, self.clock.wall(), self.clock.monotonic() - sent.sent_at)
        self.is_kept_open, self.unsure_epoch = answer.keep_open, answer.unconfirmed_epoch
        self._handle_directives(answer.directives)
        if sent.registration_count != self.state.heartbeat_protocol.registrations or self._is_registering:
            return
        known = answer.resend or self.state.heartbeat_protocol.is_reconnecting
        self.state.heartbeat_protocol.handle_heartbeat_answer(sent.message, answer)
        if answer.resend:
            self.next_beat_at = self.clock.monotonic()
        if known:
            self.state.gauge_pacer.handle_new_controller()
            self.agent.on_new_controller({progress.job for progress in sent.message.ranks})

    def _handle_registered(self, sent: _PendingFrame, answer: wire.Registered) -> None:
        state = self.state
        state.heartbeat_protocol.handle_registered(sent.message, self._node_description, answer)
        state.inbox.start_at(answer.next_directive)
        self.is_kept_open = answer.keep_open
        self.next_beat_at = self.clock.monotonic() + state.heartbeat_protocol.interval_s * self.uniform()
        state.gauge_pacer.handle_new_controller()
        log.info("registered with controller %s at %s", answer.controller, self.url, extra={"node": sent.message.node})
        self.agent.on_new_controller(())

    def _handle_reports_answer(self, sent: _PendingFrame, answer: wire.ReportsAnswer) -> None:
        first = sent.message[0].number
        if answer.through < first:
            raise self._protocol_error(f"reports from {first} on answered with {answer.through}")
        self.state.heartbeat_protocol.handle_reports_answer(sent.message, self.agent.findings())
        self.state.spool.acknowledge(answer.through)
        self.state.max_batch_reports = min(MAX_REPORTS_PER_REQUEST, self.state.max_batch_reports * 2)

    def _handle_directives(self, directives: tuple[Directive, ...]) -> None:
        """Pass on new directives, then acknowledge: if the agent dies in between, the controller sends them again."""
        if not directives:
            return
        if news := self.state.inbox.filter_new(directives):
            self.agent.on_directives(news)
        accepted = wire.Acknowledge(through=self.state.inbox.received_through)
        self.send(wire.FrameKind.ACKNOWLEDGE, msgspec.json.encode(accepted))

    # Refusals

    def _handle_refused(self, refused: wire.FrameRefused) -> None:
        error = error_from_frame(refused, self.url)
        if refused.frame_kind not in _REQUEST_TYPES:
            self._handle_unrequested_refusal(refused.frame_kind, error)
            return
        sent = self._pop_pending(refused.frame_kind)
        self.state.outcomes[_message_kind(sent.message), error.code] += 1
        match refusal_action(error, is_registering=isinstance(sent.message, wire.Register)):
            case RefusalAction.REGISTER:
                self._register_again(sent.registration_count)
            case RefusalAction.RETRY if not isinstance(sent.message, wire.Register):
                self._retry_later(sent, error)
            case RefusalAction.DROP_MESSAGE if isinstance(sent.message, tuple):
                self._halve_batch(sent.message, error)
            case _:
                raise error

    def _handle_unrequested_refusal(self, kind: int, error: EverstepError) -> None:
        """Handle a refusal of a frame that expects no answer; raises ``error`` if the refusal is final. The next beat
        repeats an acknowledgement, and the beat after a one-way beat asks for an answer."""
        meaning = refusal_action(error, is_registering=False)
        expected = kind in (wire.FrameKind.ACKNOWLEDGE, wire.FrameKind.ONE_WAY_HEARTBEAT)
        if not expected or meaning not in (RefusalAction.REGISTER, RefusalAction.RETRY):
            raise error
        if kind == wire.FrameKind.ONE_WAY_HEARTBEAT:
            self.state.outcomes["heartbeat", error.code] += 1
            if meaning is RefusalAction.RETRY:
                self._delay_beat(error)
        if meaning is RefusalAction.REGISTER:
            self._register_again(self.state.heartbeat_protocol.registrations)

    def _pop_pending(self, kind: int) -> _PendingFrame:
        """Return the frame that an answer is for: the oldest one, which must be of that kind."""
        if kind == wire.FrameKind.REPORTS and self._pending_reports:
            return self._pending_reports.popleft()
        if not self._pending_beats or not isinstance(self._pending_beats[0].message, _REQUEST_TYPES[kind]):
            raise self._protocol_error(f"an answer to no frame of kind {kind}")
        return self._pending_beats.popleft()

    def _register_again(self, registrations: int) -> None:
        """Register again if the controller does not know this agent, unless it has registered since."""
        if self._is_registering or registrations != self.state.heartbeat_protocol.registrations:
            return
        self.state.heartbeat_protocol.forget_registration()
        self.next_beat_at = self.clock.monotonic()

    def _retry_later(self, sent: _PendingFrame, error: EverstepError) -> None:
        if isinstance(sent.message, wire.Heartbeat):
            self._delay_beat(error)
            return
        # The controller decides by the reports, durable or not.
        self.state.heartbeat_protocol.handle_reports_answer(sent.message, self.agent.findings())
        now = self.clock.monotonic()
        self._reports_not_before = now + self._pause_s(error)
        self._urgent_not_before = self._reports_not_before if isinstance(error, RateLimited) else now + MIN_RETRY_S

    def _pause_s(self, error: EverstepError) -> float:
        return max(retry_after_s(error, is_busy=self.agent.is_busy()), MIN_RETRY_S * (1.0 + self.uniform()))

    def _delay_beat(self, error: EverstepError) -> None:
        """Delay the next beat, which asks for an answer. Raises ``error`` if another controller may lead."""
        self._answer_due_at = -math.inf
        self.next_beat_at = self.clock.monotonic() + self._pause_s(error)
        self._refused_beats += 1
        if self.has_other_controllers and self._refused_beats >= MAX_REFUSED_BEATS:
            raise error

    def _halve_batch(self, batch: tuple[wire.NumberedReport, ...], error: EverstepError) -> None:
        """Halve a frame refused for its content until the one bad report is found, then drop that one."""
        if len(batch) > 1:
            self.state.max_batch_reports = max(1, len(batch) // 2)
            return
        self.state.spool.drop_refused(batch[0].number)
        log.error("dropped refused report %d (%s): %s", batch[0].number, type(batch[0].body).__name__, error)


def _message_kind(message: wire.Register | wire.Heartbeat | tuple[wire.NumberedReport, ...]) -> str:
    return "reports" if isinstance(message, tuple) else type(message).__name__.lower()


def _decode_deflated(body: bytes) -> Directive:
    """Inflate a directive. Raises zlib.error if the data is not deflated or too long, and msgspec's errors."""
    inflater = zlib.decompressobj()
    content = inflater.decompress(body[wire.DIRECTIVE_NUMBER_BYTES :], wire.MAX_AGENT_FRAME_BYTES)
    if not inflater.eof:
        raise zlib.error(f"more than {wire.MAX_AGENT_FRAME_BYTES} bytes, or cut off")
    return Directive(seq=int.from_bytes(body[: wire.DIRECTIVE_NUMBER_BYTES], "big"), body=_DIRECTIVE.decode(content))
