"""The agent's line to the controller: one session at a time with one of them, in the agent's event loop.

Training never waits for any of it. What is said, and when, is ``everstep_agent.uplink.session``'s; whom to call next is
``everstep_agent.uplink.client``'s; here both meet sockets and timers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from everstep.clock import Backoff, Clock
from everstep.errors import UNREADABLE, AuthenticationError, EverstepError, Unavailable
from everstep.ids import Whole
from everstep.wire.v1.agent import Succession
from everstep.wire.v1.base import ShortText
from everstep.wire.v1.training import AnyReport
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.connection import Connection, NoAnswer, open_session, retry_after_s
from everstep_agent.uplink.credentials import Credentials
from everstep_agent.uplink.heartbeat import Conversation, Refusal, advice_for, meaning_of
from everstep_agent.uplink.session import Node, Session, Words
from everstep_agent.uplink.spool import Spool, is_urgent

# ---- addresses
# Which controller to try next, and from when on. No sockets, no clocks.

SETTLED_AFTER_S = 1.0
"""A session that lasted so long and ended is sought again at once; a shorter one counts as a failure."""

HUNG_PAUSE_S = 2.0
"""Before an address that took a connection and said nothing costs its time-out again, where there are others."""


class _Address(msgspec.Struct):
    url: str
    not_before: float = 0.0
    failures: int = 0
    hung: int = 0


class Controllers:
    """The controllers' addresses. Times are monotonic seconds.

    After an end the others are tried at once, one after another; each address that fails has a back-off of its own.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("no controller address")
        self._addresses = [_Address(url.rstrip("/")) for url in urls]
        self._first = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def next(self, now: float) -> tuple[str, float]:
        """The address to try next, and from when on: of those that may be tried now the one whose turn it is."""
        turn = self._addresses[self._first :] + self._addresses[: self._first]
        chosen = min(turn, key=lambda address: max(address.not_before, now))  # the first of equals
        return chosen.url, chosen.not_before

    def patience_s(self, url: str, floor_s: float, ceiling_s: float) -> float:
        """How long to wait for a session with ``url``: twice as long after each time that it hung.

        A controller that a whole fleet calls at once must come to answer somebody.
        """
        return max(floor_s, Backoff(floor_s, ceiling_s).limit_s(self._at(url)[1].hung))

    def left(self, url: str) -> None:
        """We hung up, and come back."""
        self._first, address = self._at(url)
        address.failures = address.hung = 0

    def ended(self, url: str, now: float, lasted_s: float, backoff: Backoff, uniform: float) -> None:
        """A session ended: the others come first."""
        address = self._at(url)[1]
        address.hung = 0
        if lasted_s >= SETTLED_AFTER_S:
            address.failures = 0
            self._pass_over(url, now)
        else:
            self.failed(url, now, backoff, uniform)

    def failed(self, url: str, now: float, backoff: Backoff, uniform: float, at_least_s: float = 0.0) -> None:
        """No session came of it: not again before the back-off, nor before ``at_least_s``."""
        address = self._at(url)[1]
        pause_s = max(backoff.delay_s(address.failures, uniform), at_least_s)
        address.failures += 1
        self._pass_over(url, now + pause_s)

    def hung(self, url: str, now: float, backoff: Backoff, uniform: float) -> None:
        """It did not answer in time, and may do so again: the others come first for a while."""
        self._at(url)[1].hung += 1
        self.failed(url, now, backoff, uniform, HUNG_PAUSE_S if len(self) > 1 else 0.0)

    def _pass_over(self, url: str, not_before: float) -> None:
        index, address = self._at(url)
        address.not_before = not_before
        self._first = (index + 1) % len(self)

    def _at(self, url: str) -> tuple[int, _Address]:
        return next((i, address) for i, address in enumerate(self._addresses) if address.url == url)


# ---- elsewhere
# Asking all controllers by which epoch they lead, for one that cannot reach the database and so cannot know.
#
# One of them may have taken over meanwhile, and the one that asks not reach it. What is found is carried back
# (``Heartbeat.succession``); whether it is true is for that controller to see.

MOST_ANSWER_BYTES = 16 << 10


class _Ready(msgspec.Struct):
    """The part of ``/readyz`` that matters here; a controller that stands by shows no epoch."""

    epoch: Whole = 0
    proof: ShortText = ""


_READY = msgspec.json.Decoder(_Ready)


async def newest_succession(urls: Sequence[str], tls: ssl.SSLContext | None, within_s: float) -> Succession | None:
    """The highest epoch by which one of the controllers says it leads; None where none says so in time."""
    found = await asyncio.gather(*(_asked(url, tls, within_s) for url in urls))
    newest = max(found, key=lambda ready: ready.epoch, default=_Ready())
    return Succession(epoch=newest.epoch, proof=newest.proof) if newest.epoch else None


async def _asked(url: str, tls: ssl.SSLContext | None, within_s: float) -> _Ready:
    """What a controller says; of one that does not answer, or says something else, nothing is known."""
    try:
        async with asyncio.timeout(within_s):
            return _READY.decode(await _get(url, tls))
    except (OSError, TimeoutError, *UNREADABLE):
        return _Ready()


async def _get(url: str, tls: ssl.SSLContext | None) -> bytes:
    """The body of its answer to ``GET /readyz``, as far as that is read."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls if secure else None)
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) <= MOST_ANSWER_BYTES and (more := await reader.read(MOST_ANSWER_BYTES)):
            answer += more
        return answer.partition(b"\r\n\r\n")[2]
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


log = logging.getLogger(__name__)

SLOW_RETRY_S = 10.0
"""Between attempts that only a person can make succeed: a token, a version, a second agent."""


class _Crank:
    """Turns a session: when it is due, when it has heard something, and when there is news.

    Args:
        on_answer: called after each answer that the session was waiting for.
    """

    def __init__(self, session: Session, connection: Connection, clock: Clock, on_answer: Callable[[], None]) -> None:
        self.session = session
        self.left = False
        """Whether we hung up because the controller asked us to."""
        self._connection = connection
        self._clock = clock
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle = self._loop.call_soon(self._turn)
        self._soon = True
        connection.listen(self._heard)

    def soon(self) -> None:
        """Turns once more, after whatever else is said in this round of the event loop: one frame for all of it."""
        if not self._soon:
            self._next.cancel()
            self._next = self._loop.call_soon(self._turn)
            self._soon = True

    def stop(self) -> None:
        self._next.cancel()
        self._soon = True

    def _turn(self) -> None:
        self._soon = False
        try:
            at = self.session.pump()
        except EverstepError as error:
            self._connection.fail(error)
            return
        except Exception as error:  # the agent's own: asyncio logs it, and the next session begins anew
            self._connection.fail(Unavailable(f"the session failed: {error!r}", 0.0))
            raise
        if self.session.may_end:
            self.left = True
            self._connection.hang_up()
            return
        self._next = self._loop.call_later(max(0.0, at - self._clock.monotonic()), self._turn)

    def _heard(self, kind: int, body: bytes) -> None:
        before = self.session.answered_at
        self.session.heard(kind, body)
        if self.session.answered_at != before:
            self._on_answer()
        self.soon()


class Uplink:
    """Speaks for one node: ``run`` until cancelled. For the event loop's thread only.

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
        self.answered_at: float | None = None
        self._settings = settings
        self._words = Words(conversation=conversation, spool=spool)
        self._node = node
        self._clock = clock
        self._uniform = uniform
        self._controllers = Controllers(settings.controllers)
        self._credentials = Credentials(settings, clock)
        self._crank: _Crank | None = None
        self._resting = False
        self._now = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._away_since: float | None = None
        self._said: set[str] = set()

    @property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """How often each line (session, register, heartbeat, reports) came to which end: ok, or an error's code."""
        return self._words.outcomes

    def report(self, report: AnyReport) -> None:
        """Keeps a report and sends it: at once where it is urgent, within the seal window otherwise."""
        self._words.spool.add(report, self._clock.monotonic())
        if self._crank is not None:
            self._crank.soon()
        elif self._resting and is_urgent(report):
            self._now.set()

    def nudge(self) -> None:
        """Something the next beat would tell is worth telling now."""
        self._now.set()
        if self._crank is not None:
            self._crank.session.beat_at = self._clock.monotonic()
            self._crank.soon()

    async def flush(self, deadline_s: float) -> bool:
        """Waits until every report is acknowledged, for at most ``deadline_s``; returns whether all are."""
        end = self._clock.monotonic() + deadline_s
        while len(self._words.spool) and self._clock.monotonic() < end:
            self._now.set()
            if self._crank is not None:
                self._crank.session.hurry = True
                self._crank.soon()
            await asyncio.sleep(0.005)
        return not len(self._words.spool)

    async def run(self) -> None:
        """Speaks until cancelled."""
        spread = True
        while True:
            url, at = self._controllers.next(self._clock.monotonic())
            await self._until(at)
            connection = await self._connected(url)
            if connection is not None:
                rested_until = await self._converse(url, connection, spread)
                spread = rested_until is None
                if rested_until is not None:
                    await self._rest(rested_until)

    # --- one session ---------------------------------------------------------------------------------------------

    async def _connected(self, url: str) -> Connection | None:
        patience_s = self._controllers.patience_s(
            url, self._settings.connect_timeout_s, self._settings.answer_timeout_s
        )
        credentials, node = self._credentials, self._settings.node
        try:
            connection = await open_session(url, node, credentials.token(), credentials.tls(), patience_s)
        except EverstepError as error:
            self.outcomes["session", error.code] += 1
            if not isinstance(error, AuthenticationError) or not await credentials.renewed():
                self._failed(url, error)
            return None
        self.outcomes["session", "ok"] += 1
        return connection

    async def _converse(self, url: str, connection: Connection, spread: bool) -> float | None:
        """Speaks until the session ends. Returns when to come back where the controller asked us to hang up."""
        session = Session(
            self._words,
            self._node,
            self._clock,
            connection.send,
            url=url,
            uniform=self._uniform,
            spread=spread,
            answer_within_s=self._settings.answer_timeout_s,
            elsewhere=len(self._controllers) > 1,
        )
        began = self._clock.monotonic()
        self._crank = crank = _Crank(session, connection, self._clock, self._answered)
        try:
            error = await connection.ended
        finally:
            self._crank = None
            crank.stop()
            self._stop_looking()
            if not crank.left:
                connection.fail(Unavailable(f"{url}: the agent is ending", 0.0))
        if crank.left:
            self._controllers.left(url)
            return session.beat_at
        self._ended(url, error, self._clock.monotonic() - began)
        return None

    def _look_elsewhere(self, crank: _Crank) -> None:
        """Once at a time, for a controller that asked whether another one leads."""
        if crank.session.unsure_of and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._looked(crank))

    async def _looked(self, crank: _Crank) -> None:
        settings, session = self._settings, crank.session
        found = await newest_succession(settings.controllers, self._credentials.tls(), settings.connect_timeout_s)
        if found is not None and found.epoch > session.unsure_of > 0:
            session.succession, session.beat_at = found, self._clock.monotonic()
            crank.soon()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _rest(self, until: float) -> None:
        """Between two sessions with a controller that holds none: until the next beat, or urgent news."""
        if self._words.spool.newest_urgent > self._words.spool.sent_through:
            return
        self._resting = True
        try:
            await self._until(until)
        finally:
            self._resting = False

    async def _until(self, at: float) -> None:
        self._now.clear()
        wait_s = at - self._clock.monotonic()
        if wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._now.wait()
        except TimeoutError:
            pass

    # --- how it goes ---------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self.answered_at = self._clock.monotonic()
        self._said.clear()
        if self._away_since is not None:
            log.info("a controller answers again after %.2f s", self.answered_at - self._away_since)
            self._away_since = None
        if self._crank is not None:
            self._look_elsewhere(self._crank)

    def _failed(self, url: str, error: EverstepError) -> None:
        """No session came of it, or it ended by a refusal. Told once."""
        now = self._clock.monotonic()
        if meaning_of(error, registering=True) is not Refusal.RETRY:
            self._say_loudly(error)
            self._controllers.failed(url, now, self._backoff(), self._uniform(), SLOW_RETRY_S)
            return
        self._went_away(error)
        if isinstance(error, NoAnswer):
            self._controllers.hung(url, now, self._backoff(), self._uniform())
        else:
            asked_s = retry_after_s(error, busy=self._node.is_busy())
            self._controllers.failed(url, now, self._backoff(), self._uniform(), asked_s)

    def _ended(self, url: str, error: EverstepError, lasted_s: float) -> None:
        self._words.conversation.session_lost()
        refused = meaning_of(error, registering=True) is not Refusal.RETRY or retry_after_s(error, busy=False) > 0
        if refused or isinstance(error, NoAnswer):
            self._failed(url, error)
        else:
            self._went_away(error)
            self._controllers.ended(url, self._clock.monotonic(), lasted_s, self._backoff(), self._uniform())

    def _backoff(self) -> Backoff:
        ceiling_s = self._settings.retry_busy_s if self._node.is_busy() else self._settings.retry_idle_s
        return Backoff(floor_s=min(0.02, ceiling_s), ceiling_s=ceiling_s)

    def _went_away(self, error: EverstepError) -> None:
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            log.warning("no controller answers, training goes on and reports are kept: %s", error)

    def _say_loudly(self, error: EverstepError) -> None:
        if error.code not in self._said:
            self._said.add(error.code)
            log.error("the controller refuses this agent: %s; %s", error, advice_for(error, self._settings.node))
