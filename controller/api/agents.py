"""What agents ask: register, beat, report, wait for directives. Plain ASGI, in front of everything else.

A fleet of 12,500 nodes beats 12,500 times a second; a beat that says nothing new costs one decode, one ``touch`` and
one encode, and no transaction.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.api import asgi
from controller.api.auth import Gate
from controller.api.polls import Polls
from controller.core import events as ev
from controller.core import fleet
from controller.loop import FleetLoop
from controller.metrics import Metrics
from controller.push import Encoded
from controller.transaction import Transaction, new_trace
from everstep.clock import Clock
from everstep.errors import EverstepError, MalformedMessage, NotFound, StaleGeneration
from everstep.wire.v1.agent import MAX_BODY_BYTES, Heartbeat, Register, Registered, Reports, ReportsAnswer
from everstep.wire.v1.training import AnyReport
from everstep.wire.version import SPOKEN, negotiate

log = logging.getLogger(__name__)

PREFIX = "/v1/agents/"
_REGISTER = msgspec.json.Decoder(Register)
_HEARTBEAT = msgspec.json.Decoder(Heartbeat)
_REPORTS = msgspec.json.Decoder(Reports)

Handler = Callable[[str, Scope, Receive, Send], Awaitable[None]]


class _Offer(msgspec.Struct):
    """What every protocol version's Register has in common."""

    protocols: tuple[int, ...]


_OFFER = msgspec.json.Decoder(_Offer)


class _BeatAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``HeartbeatAnswer`` over encoded directives."""

    server_at: float
    resend: bool = False
    directives: tuple[Encoded, ...] = ()


class _Directives(msgspec.Struct, frozen=True):
    """``DirectivesAnswer`` over encoded directives."""

    directives: tuple[Encoded, ...]


class AgentRoutes:
    """Answers agents' requests; whatever is not one goes to ``app``.

    Args:
        name: how this controller calls itself to agents.
        heartbeat_interval_s: how often agents are told to beat.
        long_poll_max_s: longest wait for directives; a client may ask for less.
        marks: (node, incarnation) to the newest report number that was taken, as stored.
        poisoned: (node, incarnation, number) of reports that an earlier life of the controller did not survive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        loop: FleetLoop,
        gate: Gate,
        metrics: Metrics,
        clock: Clock,
        name: str,
        heartbeat_interval_s: float,
        long_poll_max_s: float,
        marks: dict[tuple[str, int], int],
        poisoned: frozenset[tuple[str, int, int]],
    ) -> None:
        self._app = app
        self._loop = loop
        self._outbox = loop.outbox
        self.polls = Polls(loop)
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._name = name
        self._heartbeat_interval_s = heartbeat_interval_s
        self._long_poll_max_s = long_poll_max_s
        self._marks = marks
        self._poisoned = poisoned
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "register"): self._register,
            ("POST", "heartbeat"): self._heartbeat,
            ("POST", "reports"): self._reports,
            ("GET", "directives"): self._directives,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        node, _, verb = scope["path"][len(PREFIX) :].partition("/")
        handler = self._handlers.get((scope["method"], verb))
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            self._gate.agent(scope["headers"], node)
            await handler(node, scope, receive, send)
        except EverstepError as error:
            self._metrics.refused(f"agents/{verb}", error.code)
            body = asgi.error_body(error.code, str(error))
            await asgi.answer(send, body, error.status, asgi.error_headers(error))
        except asgi.ClientGone:
            self._metrics.refused(f"agents/{verb}", "client_gone")

    def _check_life(self, node: str, incarnation: int) -> None:
        """Raises NotFound where the node (or this life of it) must register first, StaleGeneration where it is over."""
        record = self._loop.state.nodes.get(node)
        if record is None:
            raise NotFound(f"node {node} is not known here: register first")
        if incarnation < record.incarnation:
            raise StaleGeneration(
                f"incarnation {incarnation} of node {node} is over: {record.incarnation} registered since"
            )
        if incarnation > record.incarnation:
            raise NotFound(f"incarnation {incarnation} of node {node} is not known here: register first")

    # --- register ------------------------------------------------------------------------------------------------

    async def _register(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        register = _decode_register(await asgi.read_body(scope, receive, MAX_BODY_BYTES))
        if register.node != node:
            raise MalformedMessage(f"the body speaks of node {register.node}, the path of {node}")
        protocol = negotiate(register.protocols)
        next_directive = await self._loop.submit(lambda tx, now: self._begin_life(register, tx, now))
        log.info(
            "node %s registered: incarnation %d, agent %s, %d GPUs",
            node,
            register.incarnation,
            register.agent_version,
            len(register.gpus),
            extra={"node": node},
        )
        registered = Registered(
            protocol=protocol,
            heartbeat_interval_s=self._heartbeat_interval_s,
            next_directive=next_directive,
            controller=self._name,
            server_at=self._clock.wall(),
        )
        await asgi.answer(send, asgi.encode(registered))

    def _begin_life(self, register: Register, tx: Transaction, now: float) -> int:
        """The number of the first directive of this life. In a new life older ones are void."""
        node, outbox = register.node, self._outbox
        known = self._loop.state.nodes.get(node)
        fresh = known is None or known.incarnation != register.incarnation
        first = outbox.next_number(node) if fresh else outbox.oldest(node)
        tx.handle(ev.AgentRegistered(register=register, trace=new_trace()), now)
        if fresh:
            outbox.acknowledge(node, first - 1)
            outbox.wake(node)  # a poll of the life before ends now
        return first

    # --- heartbeat -----------------------------------------------------------------------------------------------

    async def _heartbeat(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        beat = asgi.decode(_HEARTBEAT, await asgi.read_body(scope, receive, MAX_BODY_BYTES))
        resend = False
        heard = fleet.Heard.NEWS
        if beat.findings is None:
            heard = fleet.touch(self._loop.state, node, beat.incarnation, self._loop.now(), beat.ranks)
        if heard is not fleet.Heard.QUIET:
            self._check_life(node, beat.incarnation)
            resend = heard is fleet.Heard.UNKNOWN
        if heard is fleet.Heard.NEWS:
            await self._loop.submit(lambda tx, now: self._changed(node, beat, tx, now))
        self._metrics.heartbeats.inc()
        directives = () if self._outbox.waiting(node) else self._outbox.pending(node)
        await asgi.answer(send, asgi.encode(_BeatAnswer(self._clock.wall(), resend, directives)))

    @staticmethod
    def _changed(node: str, beat: Heartbeat, tx: Transaction, now: float) -> None:
        event = ev.HeartbeatChanged(
            node=node, incarnation=beat.incarnation, findings=beat.findings, ranks=beat.ranks, trace=new_trace()
        )
        tx.handle(event, now)

    # --- reports -------------------------------------------------------------------------------------------------

    async def _reports(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        reports = asgi.decode(_REPORTS, await asgi.read_body(scope, receive, MAX_BODY_BYTES))
        through = await self._loop.submit(lambda tx, now: self._take_reports(node, reports, tx, now))
        await asgi.answer(send, asgi.encode(ReportsAnswer(through=through)))

    def _take_reports(self, node: str, reports: Reports, tx: Transaction, now: float) -> int:
        """Runs every report that was not taken before; returns the newest number taken."""
        self._check_life(node, reports.incarnation)
        key = (node, reports.incarnation)
        before = through = self._marks.get(key, 0)
        taken = 0
        for report in reports.reports:
            if report.number > through:
                through = report.number
                if (node, reports.incarnation, report.number) in self._poisoned:
                    continue
                taken += 1
                self._take_report(node, reports.incarnation, report.number, report.body, tx, now)
        self._metrics.reports_taken(taken, len(reports.reports) - taken)
        if through > before:
            tx.mark(node, reports.incarnation, through)
            for older in [life for life in self._marks if life[0] == node]:
                del self._marks[older]
            self._marks[key] = through
        return through

    def _take_report(
        self, node: str, incarnation: int, number: int, body: AnyReport, tx: Transaction, now: float
    ) -> None:
        event = ev.ReportArrived(
            node=node,
            incarnation=incarnation,
            number=number,
            body=body,
            entropy=secrets.token_hex(32),
            trace=new_trace(),
        )
        try:
            tx.handle(event, now)
        except EverstepError as error:  # about a job that is gone, say: taken, so that the others are not held up
            self._metrics.refused("agents/reports/one", error.code)
            log.warning("report %d (%s) refused: %s", number, type(body).__name__, error, extra={"node": node})

    # --- directives ----------------------------------------------------------------------------------------------

    async def _directives(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        asked = asgi.query(scope)
        incarnation, after = asgi.integer(asked, "incarnation"), asgi.integer(asked, "after", 0)
        wait_s = asgi.seconds(asked, "wait_s", self._long_poll_max_s, self._long_poll_max_s)
        self._check_life(node, incarnation)
        if await self.polls.hold(node, incarnation, after, wait_s, scope.get("client"), receive):
            self._check_life(node, incarnation)
            await asgi.answer(send, asgi.encode(_Directives(self._outbox.pending(node, after))))


def _decode_register(body: bytes) -> Register:
    """Raises VersionMismatch for a message of a protocol that is not spoken here, else MalformedMessage."""
    try:
        return asgi.decode(_REGISTER, body)
    except MalformedMessage:
        try:
            offer = _OFFER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            offer = _Offer(protocols=SPOKEN)
        negotiate(offer.protocols)
        raise
