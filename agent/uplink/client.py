"""The agent's three lines to the controller: beats, reports, and directives.

Each line has a connection and a thread of its own, so that none waits for another; everything else runs in the event
loop. Training never waits for any of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from agent.config import AgentSettings, read_token, tls_context
from agent.enrolment import renew_token
from agent.uplink.connection import Connection, Controllers
from agent.uplink.heartbeat import Conversation, Inbox, NodeFacts, Refusal, advice_for, meaning_of
from agent.uplink.spool import MOST_IN_A_REQUEST, Spool
from everstep.backoff import Backoff
from everstep.clock import Clock
from everstep.errors import AuthenticationError, EverstepError, ProtocolError
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import (
    DirectivesAnswer,
    HeartbeatAnswer,
    Numbered,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
)
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import AnyReport, RankProgress

log = logging.getLogger(__name__)
T = TypeVar("T")

SLOW_RETRY_S = 10.0
"""Between attempts that only a person can make succeed: a token, a version, a second agent."""

LONGEST_WAIT_FOR_BEATS_S = 1.0
"""How long the other lines leave an absent controller to the beats before they try for themselves."""


class Node(Protocol):
    """What the uplink asks of the agent, and tells it."""

    def facts(self) -> NodeFacts: ...
    def findings(self) -> tuple[Finding, ...]: ...
    def progress(self) -> tuple[RankProgress, ...]: ...
    def is_busy(self) -> bool:
        """Whether a job is on the node, so that an absent controller is worth asking often."""

    def on_registered(self) -> None:
        """The controller knows this life now: offers of live launchers are to be said again."""

    def on_directives(self, directives: list[Directive]) -> None: ...
    def on_clock(self, server_at: float, received_at: float, round_trip_s: float) -> None: ...


class _Line:
    """One connection and the one thread that uses it."""

    def __init__(self, name: str, connection: Connection, outcomes: Counter[tuple[str, str]]) -> None:
        self.name = name
        self.connection = connection
        self.failures = 0
        self._outcomes = outcomes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"uplink-{name}")

    async def ask(self, method: str, path: str, body: bytes | None, timeout_s: float, kind: type[T]) -> T:
        """The decoded answer. Raises EverstepError."""
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._thread, self.connection.request, method, path, body, timeout_s)
            decoded = msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._outcomes[self.name, "not_understood"] += 1
            raise ProtocolError(f"the answer to {path} is not understood: {error}") from error
        except EverstepError as error:
            self._outcomes[self.name, error.code] += 1
            raise
        self._outcomes[self.name, "ok"] += 1
        self.failures = 0
        return decoded

    def close(self) -> None:
        """Ends the request under way, the connection and the thread; at most a connection's time-out later."""
        self.connection.close()
        self._thread.submit(self.connection.release)
        self._thread.shutdown()


class Uplink:
    """Speaks for one node: ``run`` until cancelled, then ``close``. For the event loop's thread only.

    Args:
        node: the agent behind it.
        uniform: draws from [0, 1), for jitter.
    """

    def __init__(
        self,
        settings: AgentSettings,
        conversation: Conversation,
        spool: Spool,
        node: Node,
        clock: Clock,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.answered_at: float | None = None
        self.inbox = Inbox()
        self._settings = settings
        self._conversation = conversation
        self._spool = spool
        self._node = node
        self._clock = clock
        self._uniform = uniform
        self._token = read_token(settings.token_file, "agent token")
        self._renewal: asyncio.Task[None] | None = None
        self._batch_limit = MOST_IN_A_REQUEST
        self._away_since: float | None = None
        self._said: set[str] = set()
        self._known = asyncio.Event()
        self._reachable = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._report_now = asyncio.Event()
        self._controllers = Controllers(settings.controllers)
        tls = tls_context(settings)
        self._beats, self._reports, self._polls = (
            _Line(
                name,
                Connection(self._controllers, lambda: self._token, tls, settings.connect_timeout_s),
                self.outcomes,
            )
            for name in ("heartbeat", "reports", "directives")
        )
        for line in (self._beats, self._reports, self._polls):
            self._controllers.on_move(line.connection.interrupt_unless)

    def report(self, report: AnyReport) -> None:
        """Keeps a report and sends it: at once where it is urgent, within the seal window otherwise."""
        self._spool.add(report, self._clock.monotonic())
        self._report_now.set()

    def nudge(self) -> None:
        """Something the next beat would tell is worth telling now."""
        self._beat_now.set()

    async def run(self) -> None:
        """Speaks until cancelled. May be run again, until ``close``."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat_forever())
            group.create_task(self._report_forever())
            group.create_task(self._poll_forever())

    def close(self) -> None:
        """Ends the connections, and the requests that wait on them."""
        for line in (self._beats, self._reports, self._polls):
            line.close()

    async def flush(self, deadline_s: float) -> bool:
        """Waits until every report is acknowledged, for at most ``deadline_s``; returns whether all are."""
        end = self._clock.monotonic() + deadline_s
        while len(self._spool) and self._clock.monotonic() < end:
            self._report_now.set()
            await asyncio.sleep(0.005)
        return not len(self._spool)

    # --- beats ---------------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            self._beat_now.clear()
            started = self._clock.monotonic()
            try:
                again_s = await self._beat()
            except EverstepError as error:
                again_s = self._refused(self._beats, error, registering=not self._conversation.registered)
            else:
                again_s -= self._clock.monotonic() - started
            await _wait(self._beat_now, again_s)

    async def _beat(self) -> float:
        """Registers or beats; returns after how many seconds to do so again."""
        facts = self._node.facts()
        message = self._conversation.next_message(
            facts, self._node.findings(), self._node.progress(), self._spool.sent_through, self._clock.wall()
        )
        if isinstance(message, Register):
            return await self._register(message, facts)
        body = msgspec.json.encode(message)
        started = time.perf_counter()
        answer = await self._beats.ask("POST", self._path("heartbeat"), body, self._timeout_s, HeartbeatAnswer)
        self._node.on_clock(answer.server_at, self._clock.wall(), time.perf_counter() - started)
        self._conversation.beat_answered(message, answer)
        self._came_back()
        if news := self.inbox.take(answer.directives):
            self._node.on_directives(news)
        return 0.0 if answer.resend else self._conversation.interval_s

    async def _register(self, message: Register, facts: NodeFacts) -> float:
        body = msgspec.json.encode(message)
        answer = await self._beats.ask("POST", self._path("register"), body, self._timeout_s, Registered)
        self._conversation.registration_answered(message, facts, answer)
        self.inbox.start_at(answer.next_directive)
        self._said.clear()
        self._came_back()
        self._known.set()
        log.info("registered with controller %s at %s", answer.controller, self._controllers.current)
        self._node.on_registered()
        return self._conversation.interval_s

    # --- reports -------------------------------------------------------------------------------------------------

    async def _report_forever(self) -> None:
        while True:
            await self._known.wait()
            self._report_now.clear()
            wait_s = self._spool.wait_s(self._clock.monotonic())
            if wait_s is None or wait_s > 0:
                await _wait(self._report_now, wait_s)
                continue
            batch = self._spool.batch(self._batch_limit)
            await self._guarded(self._reports, lambda b=batch: self._send(b))  # type: ignore[misc]

    async def _send(self, batch: tuple[Numbered, ...]) -> None:
        body = msgspec.json.encode(Reports(incarnation=self._conversation.incarnation, reports=batch))
        try:
            answer = await self._reports.ask("POST", self._path("reports"), body, self._timeout_s, ReportsAnswer)
        except EverstepError as error:
            if meaning_of(error, registering=False) is not Refusal.MESSAGE:
                raise
            self._narrow_down(batch, error)
            return
        if answer.through < batch[0].number:
            raise ProtocolError(f"the controller answered reports from {batch[0].number} on with {answer.through}")
        self._spool.acknowledged(answer.through)
        self._batch_limit = min(MOST_IN_A_REQUEST, self._batch_limit * 2)

    def _narrow_down(self, batch: tuple[Numbered, ...], error: EverstepError) -> None:
        """A request was refused for its content: halve until the one report is found, and leave that one out."""
        if len(batch) > 1:
            self._batch_limit = len(batch) // 2
            return
        self._spool.refuse(batch[0].number)
        log.error("report %d (%s) is left out: %s", batch[0].number, type(batch[0].body).__name__, error)

    # --- directives ----------------------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while True:
            await self._known.wait()
            await self._guarded(self._polls, self._poll)

    async def _poll(self) -> None:
        wait_s = self._settings.poll_wait_s
        query = f"?incarnation={self._conversation.incarnation}&after={self.inbox.after}&wait_s={wait_s}"
        started = time.perf_counter()
        answer = await self._polls.ask(
            "GET", self._path("directives") + query, None, wait_s + self._timeout_s, DirectivesAnswer
        )
        if news := self.inbox.polled(answer.directives):
            self._node.on_directives(news)
        elif time.perf_counter() - started < min(0.05, wait_s / 2):
            await asyncio.sleep(0.05)  # a controller that does not hold the poll must not make us spin

    # --- when it does not go well --------------------------------------------------------------------------------

    async def _guarded(self, line: _Line, step: Callable[[], Awaitable[None]]) -> None:
        """One step of a line other than the beats. While a controller is away, the beats look for it."""
        registrations = self._conversation.registrations
        try:
            await step()
        except EverstepError as error:
            known_again = self._conversation.registrations != registrations
            if known_again and meaning_of(error, registering=False) is Refusal.REGISTER:
                return  # it was refused before we were known again: ask once more
            pause_s = self._refused(line, error, registering=False)
            self._beat_now.set()
            await asyncio.sleep(pause_s)
            await _wait(self._reachable, LONGEST_WAIT_FOR_BEATS_S)

    def _refused(self, line: _Line, error: EverstepError, *, registering: bool) -> float:
        """Seconds to wait after a failure, which is told once."""
        meaning = meaning_of(error, registering=registering)
        line.failures += 1
        if meaning is Refusal.REGISTER:
            self._known.clear()
            self._conversation.forget_registration()
            self._beat_now.set()
        elif meaning is Refusal.RETRY:
            self._went_away(error)
        else:
            self._say_loudly(error)
            return SLOW_RETRY_S
        return self._backoff().delay_s(line.failures - 1, self._uniform())

    def _backoff(self) -> Backoff:
        ceiling_s = self._settings.retry_busy_s if self._node.is_busy() else self._settings.retry_idle_s
        return Backoff(floor_s=min(0.02, ceiling_s), ceiling_s=ceiling_s)

    def _went_away(self, error: EverstepError) -> None:
        self._reachable.clear()
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            log.warning("no controller answers, training goes on and reports are kept: %s", error)

    def _came_back(self) -> None:
        self.answered_at = self._clock.monotonic()
        self._reachable.set()
        if self._away_since is not None:
            log.info("a controller answers again after %.2f s", self.answered_at - self._away_since)
            self._away_since = None

    def _say_loudly(self, error: EverstepError) -> None:
        if isinstance(error, AuthenticationError) and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.get_running_loop().create_task(self._renew_token())
        if error.code not in self._said:
            self._said.add(error.code)
            log.error("the controller refuses this agent: %s; %s", error, advice_for(error, self._settings.node))

    async def _renew_token(self) -> None:
        """Tokens are renewed in place, or by enrolling anew; where neither can be, we are left with the old one."""
        try:
            token = await renew_token(self._settings, self._token)
        except EverstepError as error:
            log.error("no other token: %s", error)
            return
        if token != self._token:
            self._token = token
            self._beat_now.set()

    @property
    def _timeout_s(self) -> float:
        return self._settings.request_timeout_s

    def _path(self, what: str) -> str:
        return f"/v1/agents/{self._settings.node}/{what}"


async def _wait(event: asyncio.Event, at_most_s: float | None) -> None:
    """Until ``event`` is set, or the time is over (None: never)."""
    if at_most_s is not None and at_most_s <= 0:
        await asyncio.sleep(0)
        return
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        pass
