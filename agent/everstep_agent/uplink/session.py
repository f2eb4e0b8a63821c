"""One session with a controller: frames in, frames out, and when to speak next. No sockets, no clock of its own.

Beats go out when they are due, whatever else waits. Reports go out at once where they are urgent, one frame at a time,
which begins with the oldest that is not acknowledged; what came meanwhile goes into the next. Beats that tell of no
findings are answered every few seconds only.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec

from everstep.clock import Clock
from everstep.errors import UNREADABLE, EverstepError, ProtocolError, RateLimited
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import (
    ANSWER_EVERY_S,
    MAX_TO_AGENT_BYTES,
    NUMBER_BYTES,
    Acknowledge,
    DirectivesAnswer,
    Frame,
    Heartbeat,
    HeartbeatAnswer,
    Numbered,
    Refused,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
    Succession,
)
from everstep.wire.v1.directives import AnyDirective, Directive
from everstep.wire.v1.training import RankProgress
from everstep_agent.uplink.connection import NoAnswer, error_in, retry_after_s
from everstep_agent.uplink.heartbeat import Conversation, Inbox, NodeFacts, Refusal, meaning_of
from everstep_agent.uplink.spool import MOST_IN_A_REQUEST, Spool

log = logging.getLogger(__name__)

MOST_REFUSED_BEATS = 3
"""In a row, after which a controller is left where there are others: it is not in charge, or can do no more."""

LINES = ("session", "register", "heartbeat", "reports")
"""What is asked of controllers; their answers are counted from 0 on."""

SHORTEST_RETRY_S = 0.1
"""Before a refused beat or frame of reports is said again, where the controller names no time. Urgent news waits no
longer than this: a controller whose database is away refuses what it cannot promise, and decides all the same."""

_ASKED: dict[int, type] = {Frame.REGISTER: Register, Frame.HEARTBEAT: Heartbeat, Frame.REPORTS: tuple}
_KINDS: dict[int, Any] = {
    Frame.REGISTERED: msgspec.json.Decoder(Registered),
    Frame.HEARTBEAT_ANSWER: msgspec.json.Decoder(HeartbeatAnswer),
    Frame.REPORTS_ANSWER: msgspec.json.Decoder(ReportsAnswer),
    Frame.PUSH: msgspec.json.Decoder(DirectivesAnswer),
    Frame.REFUSED: msgspec.json.Decoder(Refused),
}
_DIRECTIVE: msgspec.json.Decoder[AnyDirective] = msgspec.json.Decoder(AnyDirective)


class Node(Protocol):
    """What a session asks of the agent, and tells it."""

    def facts(self) -> NodeFacts: ...
    def findings(self) -> tuple[Finding, ...]: ...
    def progress(self) -> tuple[RankProgress, ...]: ...
    def is_busy(self) -> bool:
        """Whether a job is on the node, so that an absent controller is worth asking often."""

    def on_known(self, shown: Collection[str]) -> None:
        """The controller has come to know this life: offers of live launchers are to be said again, but for those of
        jobs ``shown`` to it, by their ranks' progress."""

    def on_directives(self, directives: list[Directive]) -> None: ...
    def on_clock(self, server_at: float, received_at: float, round_trip_s: float) -> None: ...


class Words(msgspec.Struct, kw_only=True):
    """What an agent has to say and has been told, over all its sessions. ``outcomes``: by line and outcome."""

    conversation: Conversation
    spool: Spool
    inbox: Inbox = msgspec.field(default_factory=Inbox)
    outcomes: Counter[tuple[str, str]] = msgspec.field(
        default_factory=lambda: Counter({(line, "ok"): 0 for line in LINES})
    )
    batch_limit: int = MOST_IN_A_REQUEST


class _Sent(msgspec.Struct):
    """A frame that waits for its answer. ``registrations``: how many there had been when it went out."""

    message: Any
    at: float
    registrations: int


class Session:
    """``pump`` says what is due, ``heard`` takes what comes; after either, ask ``pump`` again when it said.

    Both raise EverstepError where this session is of no more use: NoAnswer where the controller owes an answer for too
    long, and what it refused us for.

    Args:
        url: for messages and logs.
        send: takes each frame, in order.
        uniform: draws from [0, 1), for jitter.
        spread: whether the second beat comes at a random moment, for a fleet that connected in the same instant.
        answer_within_s: how long an answer to a beat or a registration may take.
        elsewhere: whether there are other controllers, so that one that is unavailable is worth leaving.
    """

    def __init__(
        self,
        words: Words,
        node: Node,
        clock: Clock,
        send: Callable[[Frame, bytes], None],
        *,
        url: str,
        uniform: Callable[[], float],
        spread: bool,
        answer_within_s: float,
        elsewhere: bool,
    ) -> None:
        self.answered_at: float | None = None
        self.hold = True
        """Whether the controller wants the session to stay open between beats."""
        self.hurry = False
        """Whether reports go out that could wait for company."""
        self.beat_at = clock.monotonic()
        self.unsure_of = 0
        """The epoch of a controller that asks whether another one leads; 0 where it is sure. See ``succession``."""
        self.succession: Succession | None = None
        """What the next beat tells it of that."""
        self._words = words
        self._node = node
        self._clock = clock
        self._send = send
        self._url = url
        self._uniform = uniform
        self._spread = spread
        self._answer_within_s = answer_within_s
        self._elsewhere = elsewhere
        self._facts = node.facts()
        self._unanswered: deque[_Sent] = deque()
        self._reports: deque[_Sent] = deque()
        self._reports_from = 0.0
        self._news_from = 0.0
        self._refused_beats = 0
        self._ask_at = -math.inf

    @property
    def may_end(self) -> bool:
        """Whether the controller asked not to hold the session, and no answer is awaited by either side."""
        return not self.hold and not self._unanswered and not self._reports and not self.unsure_of

    def pump(self) -> float:
        """Says what is due; returns when something will be (monotonic seconds)."""
        now = self._clock.monotonic()
        if self._unanswered and now >= self._unanswered[0].at + self._answer_within_s:
            self._words.outcomes[_line(self._unanswered[0].message), NoAnswer.code] += 1
            raise NoAnswer(f"{self._url}: no answer within {self._answer_within_s:g} s", 0.0)
        if now >= self.beat_at and not self._registering:
            self._beat(now)
        deadline = self._unanswered[0].at + self._answer_within_s if self._unanswered else math.inf
        return min(self._report(now), deadline, math.inf if self._registering else self.beat_at)

    # --- speaking ------------------------------------------------------------------------------------------------

    @property
    def _registering(self) -> bool:
        return bool(self._unanswered) and isinstance(self._unanswered[-1].message, Register)

    def _beat(self, now: float) -> None:
        words = self._words
        self._facts = self._node.facts()
        message = words.conversation.next_message(
            self._facts,
            self._node.findings(),
            self._node.progress(),
            words.spool.sent_through,
            self._clock.wall(),
            words.inbox.through,
        )
        if self.succession is not None and isinstance(message, Heartbeat):
            message, self.succession = msgspec.structs.replace(message, succession=self.succession), None
        kind = self._kind_of(message, now)
        if kind is Frame.QUIET_BEAT:
            words.outcomes["heartbeat", "quiet"] += 1
        else:
            self._unanswered.append(self._sent(message, now))
        if kind is Frame.HEARTBEAT:
            first = self._ask_at == -math.inf
            self._ask_at = now + ANSWER_EVERY_S * (self._uniform() if first else 1.0)
        self.beat_at = now + words.conversation.interval_s * (self._uniform() if self._spread else 1.0)
        self._spread = False
        self._send(kind, msgspec.json.encode(message))

    def _kind_of(self, message: Register | Heartbeat, now: float) -> Frame:
        """A beat is quiet where nothing hangs on its answer, and the last one that was asked for is young."""
        if isinstance(message, Register):
            return Frame.REGISTER
        asked = self.unsure_of or not self.hold
        awaits = self._unanswered or self._reports or message.findings is not None or asked
        due = now + 0.5 * self._words.conversation.interval_s >= self._ask_at
        return Frame.HEARTBEAT if awaits or due else Frame.QUIET_BEAT

    def _report(self, now: float) -> float:
        """Sends what is due; returns when more will be."""
        spool = self._words.spool
        if self._registering or not self._words.conversation.registered:
            return math.inf
        wait_s, is_news = spool.wait_s(now), spool.newest_urgent > spool.sent_through
        if wait_s is None or len(self._reports) > (1 if is_news else 0):  # a controller lets what is mild rest
            return math.inf
        due = max(now if self.hurry else now + wait_s, self._news_from if is_news else self._reports_from)
        if due > now:
            return due
        batch = spool.batch(self._words.batch_limit)
        self._reports.append(self._sent(batch, now))
        body = Reports(incarnation=self._words.conversation.incarnation, reports=batch)
        self._send(Frame.REPORTS, msgspec.json.encode(body))
        return math.inf

    def _sent(self, message: Any, now: float) -> _Sent:
        return _Sent(message, now, self._words.conversation.registrations)

    # --- hearing -------------------------------------------------------------------------------------------------

    def heard(self, kind: int, body: bytes) -> None:
        """Takes a frame."""
        if kind == Frame.LET_GO:
            self.hold = False
            return
        message = self._decoded(kind, body)
        match message:
            case HeartbeatAnswer():
                self._beat_answered(self._answered(Frame.HEARTBEAT), message)
            case Registered():
                self._registered(self._answered(Frame.REGISTER), message)
            case ReportsAnswer():
                self._reports_answered(self._answered(Frame.REPORTS), message)
            case Refused():
                self._refused(message)
            case _:
                self._take(message.directives)

    def _decoded(self, kind: int, body: bytes) -> Any:
        try:
            if kind == Frame.DEFLATED_PUSH:
                return DirectivesAnswer(directives=(_inflated(body),))
            if kind in _KINDS:
                return _KINDS[kind].decode(body)
        except (*UNREADABLE, zlib.error) as error:
            raise self._not_understood(f"{Frame(kind).name}: {error}") from error
        raise self._not_understood(f"a frame of kind {kind}")

    def _not_understood(self, what: str) -> ProtocolError:
        self._words.outcomes["session", "not_understood"] += 1
        return ProtocolError(f"{self._url} said what is not understood: {what}")

    def _answered(self, kind: Frame) -> _Sent:
        sent = self._answer_to(kind)
        self._words.outcomes[_line(sent.message), "ok"] += 1
        self.answered_at = self._clock.monotonic()
        return sent

    def _beat_answered(self, sent: _Sent, answer: HeartbeatAnswer) -> None:
        self._refused_beats = 0
        self._node.on_clock(answer.server_at, self._clock.wall(), self._clock.monotonic() - sent.at)
        self.hold, self.unsure_of = answer.hold, answer.unsure_of
        self._take(answer.directives)
        if sent.registrations != self._words.conversation.registrations or self._registering:
            return
        known = answer.resend or self._words.conversation.returning
        self._words.conversation.beat_answered(sent.message, answer)
        if answer.resend:
            self.beat_at = self._clock.monotonic()
        if known:
            self._node.on_known({progress.job for progress in sent.message.ranks})

    def _registered(self, sent: _Sent, answer: Registered) -> None:
        words = self._words
        words.conversation.registration_answered(sent.message, self._facts, answer)
        words.inbox.start_at(answer.next_directive)
        self.hold = answer.hold
        self.beat_at = self._clock.monotonic() + words.conversation.interval_s * self._uniform()
        log.info("registered with controller %s at %s", answer.controller, self._url, extra={"node": sent.message.node})
        self._node.on_known(())

    def _reports_answered(self, sent: _Sent, answer: ReportsAnswer) -> None:
        first = sent.message[0].number
        if answer.through < first:
            raise self._not_understood(f"reports from {first} on answered with {answer.through}")
        self._words.conversation.reports_answered(sent.message, self._node.findings())
        self._words.spool.acknowledged(answer.through)
        self._words.batch_limit = min(MOST_IN_A_REQUEST, self._words.batch_limit * 2)

    def _take(self, directives: tuple[Directive, ...]) -> None:
        """Hands on what is new, and only then says so: an agent that dies in between is told again."""
        if not directives:
            return
        if news := self._words.inbox.take(directives):
            self._node.on_directives(news)
        self._send(Frame.ACKNOWLEDGE, msgspec.json.encode(Acknowledge(through=self._words.inbox.through)))

    # --- refusals ------------------------------------------------------------------------------------------------

    def _refused(self, refused: Refused) -> None:
        error = error_in(refused, self._url)
        if refused.of not in _ASKED:
            self._refused_unasked(refused.of, error)
            return
        sent = self._answer_to(refused.of)
        self._words.outcomes[_line(sent.message), error.code] += 1
        match meaning_of(error, registering=isinstance(sent.message, Register)):
            case Refusal.REGISTER:
                self._register_again(sent.registrations)
            case Refusal.RETRY if not isinstance(sent.message, Register):
                self._retry(sent, error)
            case Refusal.MESSAGE if isinstance(sent.message, tuple):
                self._narrow_down(sent.message, error)
            case _:
                raise error

    def _refused_unasked(self, kind: int, error: EverstepError) -> None:
        """An acknowledgement is said again by the next beat, and after a quiet beat the next one asks; anything else is
        the controller's last word."""
        meaning = meaning_of(error, registering=False)
        if kind not in (Frame.ACKNOWLEDGE, Frame.QUIET_BEAT) or meaning not in (Refusal.REGISTER, Refusal.RETRY):
            raise error
        if kind == Frame.QUIET_BEAT:
            self._words.outcomes["heartbeat", error.code] += 1
            if meaning is Refusal.RETRY:
                self._beat_later(error)
        if meaning is Refusal.REGISTER:
            self._register_again(self._words.conversation.registrations)

    def _answer_to(self, kind: int) -> _Sent:
        """The frame that an answer is for: the oldest one, which must be of that kind."""
        if kind == Frame.REPORTS and self._reports:
            return self._reports.popleft()
        if not self._unanswered or not isinstance(self._unanswered[0].message, _ASKED[kind]):
            raise self._not_understood(f"an answer to no frame of kind {kind}")
        return self._unanswered.popleft()

    def _register_again(self, registrations: int) -> None:
        """It does not know this life; unless it has come to know it since that was said."""
        if self._registering or registrations != self._words.conversation.registrations:
            return
        self._words.conversation.forget_registration()
        self.beat_at = self._clock.monotonic()

    def _retry(self, sent: _Sent, error: EverstepError) -> None:
        if isinstance(sent.message, Heartbeat):
            self._beat_later(error)
            return
        self._words.conversation.reports_answered(sent.message, self._node.findings())  # it decides, durable or not
        now = self._clock.monotonic()
        self._reports_from = now + self._pause_s(error)
        self._news_from = self._reports_from if isinstance(error, RateLimited) else now + SHORTEST_RETRY_S

    def _pause_s(self, error: EverstepError) -> float:
        return max(retry_after_s(error, busy=self._node.is_busy()), SHORTEST_RETRY_S * (1.0 + self._uniform()))

    def _beat_later(self, error: EverstepError) -> None:
        """Puts off the next beat, which asks. Raises ``error`` where another controller may be in charge."""
        self._ask_at = -math.inf
        self.beat_at = self._clock.monotonic() + self._pause_s(error)
        self._refused_beats += 1
        if self._elsewhere and self._refused_beats >= MOST_REFUSED_BEATS:
            raise error

    def _narrow_down(self, batch: tuple[Numbered, ...], error: EverstepError) -> None:
        """A frame was refused for its content: halve until the one report is found, and leave that one out."""
        if len(batch) > 1:
            self._words.batch_limit = max(1, len(batch) // 2)
            return
        self._words.spool.refuse(batch[0].number)
        log.error("report %d (%s) is left out: %s", batch[0].number, type(batch[0].body).__name__, error)


def _line(message: Any) -> str:
    if isinstance(message, Register):
        return "register"
    return "heartbeat" if isinstance(message, Heartbeat) else "reports"


def _inflated(body: bytes) -> Directive:
    """Raises zlib.error for what is not deflated, or is longer than a frame may be, and what msgspec raises."""
    inflater = zlib.decompressobj()
    content = inflater.decompress(body[NUMBER_BYTES:], MAX_TO_AGENT_BYTES)
    if not inflater.eof:
        raise zlib.error(f"more than {MAX_TO_AGENT_BYTES} bytes, or cut off")
    return Directive(seq=int.from_bytes(body[:NUMBER_BYTES], "big"), body=_DIRECTIVE.decode(content))
