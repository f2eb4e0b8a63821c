"""What agents ask by HTTP: register, beat, report. Plain ASGI, in front of everything else.

Everstep's own agents hold a session (``everstep_controller.server.session``) and use none of this; the routes are for
people with
curl, for tests, and for whoever writes an agent of their own. Directives come with the answers to beats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from everstep.errors import EverstepError, VersionMismatch
from everstep.wire.v1.agent import MAX_BODY_BYTES, UPGRADE, Heartbeat, Reports, ReportsAnswer
from everstep_controller.api.auth import Gate
from everstep_controller.server import responses
from everstep_controller.server.agent_service import AgentDesk, BeatAnswer, decode_register
from everstep_controller.server.connections import SCOPE_KEY

PREFIX = "/v1/agents/"
_HEARTBEAT = msgspec.json.Decoder(Heartbeat)
_REPORTS = msgspec.json.Decoder(Reports)

Handler = Callable[[str, Scope, Receive, Send], Awaitable[None]]


class AgentRoutes:
    """Answers agents' requests; whatever is not one goes to ``app``."""

    def __init__(self, app: ASGIApp, *, desk: AgentDesk, gate: Gate) -> None:
        self._app = app
        self._desk = desk
        self._gate = gate
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "register"): self._register,
            ("POST", "heartbeat"): self._heartbeat,
            ("POST", "reports"): self._reports,
            ("GET", "session"): self._session,
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
            self._gate.agent(scope["headers"], node, scope.get(SCOPE_KEY))
            await handler(node, scope, receive, send)
        except EverstepError as error:
            self._desk.metrics.refused(f"agents/{verb}", error.code)
            await responses.refuse(send, error)
        except responses.ClientGone:
            self._desk.metrics.refused(f"agents/{verb}", "client_gone")

    async def _register(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        register = decode_register(await responses.read_body(scope, receive, MAX_BODY_BYTES))
        await responses.answer(send, responses.encode(await self._desk.register(node, register)))

    async def _heartbeat(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        desk = self._desk
        beat = responses.decode(_HEARTBEAT, await responses.read_body(scope, receive, MAX_BODY_BYTES))
        outcome = desk.beat(node, beat)
        resend = outcome if isinstance(outcome, bool) else await outcome
        desk.metrics.beats += 1
        pending = () if desk.outbox.has_receiver(node) else desk.outbox.pending(node)
        answer = BeatAnswer(desk.wall(), resend, tuple(one.encoded() for one in pending))
        await responses.answer(send, responses.encode(answer))

    async def _reports(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        reports = responses.decode(_REPORTS, await responses.read_body(scope, receive, MAX_BODY_BYTES))
        through = await self._desk.reports(node, reports)
        await responses.answer(send, responses.encode(ReportsAnswer(through=through)))

    async def _session(self, node: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Upgrades never come so far (``everstep_controller.server.connection_router``)."""
        raise VersionMismatch(f"a session is asked for with `Connection: Upgrade` and `Upgrade: {UPGRADE}`")
