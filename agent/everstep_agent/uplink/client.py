"""Keep the agent connected to a controller: one session at a time, in the agent's event loop.

Training never waits for the uplink. ``everstep_agent.uplink.session`` decides what is sent and when;
``ControllerAddresses`` decides which controller to call next. This module connects both to sockets and timers.
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
from everstep.errors import DECODE_ERRORS, AuthenticationError, EverstepError, Unavailable
from everstep.wire.v1.agent import LeadershipProof
from everstep.wire.v1.training import AnyReport
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.connection import AnswerTimeout, ControllerConnection, open_session, retry_after_s
from everstep_agent.uplink.credentials import AgentCredentials
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, RefusalAction, operator_advice, refusal_action
from everstep_agent.uplink.session import AgentCallbacks, ControllerSession, UplinkState
from everstep_agent.uplink.spool import Spool, is_urgent

# Controller addresses: which to try next, and when. No sockets, no clocks.

STABLE_SESSION_S = 1.0
"""Seconds after which an ended session is resumed at once; a shorter one counts as a failure."""

HUNG_RETRY_S = 2.0
"""Seconds before an address that accepted a connection and sent nothing is tried again, if there are others."""


class _ControllerAddress(msgspec.Struct):
    url: str
    not_before: float = 0.0
    failures: int = 0
    hang_count: int = 0


class ControllerAddresses:
    """The controllers' addresses. Times are monotonic seconds. After a session ends, the other addresses are tried at
    once, one after another. Each address that fails has its own back-off."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("no controller address")
        self._addresses = [_ControllerAddress(url.rstrip("/")) for url in urls]
        self._first = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def next_address(self, now: float) -> tuple[str, float]:
        """Return the address to try next, and the time to try it at: the next in turn among those that are due."""
        in_order = self._addresses[self._first :] + self._addresses[: self._first]
        chosen = min(in_order, key=lambda address: max(address.not_before, now))  # min takes the first of equals
        return chosen.url, chosen.not_before

    def connect_timeout_s(self, url: str, floor_s: float, ceiling_s: float) -> float:
        """Return the seconds to wait for a session with ``url``: twice as long after each time that it hung. A
        controller that a whole fleet calls at once must be able to complete some answers."""
        return max(floor_s, Backoff(floor_s, ceiling_s).limit_s(self._find(url)[1].hang_count))

    def mark_closed_locally(self, url: str) -> None:
        """Note that this side ended the session and will come back to ``url``."""
        self._first, address = self._find(url)
        address.failures = address.hang_count = 0

    def mark_ended(self, url: str, now: float, lasted_s: float, backoff: Backoff, uniform: float) -> None:
        """Note that a session ended: the other addresses come first."""
        address = self._find(url)[1]
        address.hang_count = 0
        if lasted_s < STABLE_SESSION_S:
            self.mark_failed(url, now, backoff, uniform)
            return
        address.failures = 0
        self._put_last(url, now)

    def mark_failed(self, url: str, now: float, backoff: Backoff, uniform: float, min_pause_s: float = 0.0) -> None:
        """Note that no session was made: wait for the back-off, and at least ``min_pause_s``."""
        address = self._find(url)[1]
        pause_s = max(backoff.delay_s(address.failures, uniform), min_pause_s)
        address.failures += 1
        self._put_last(url, now + pause_s)

    def mark_hung(self, url: str, now: float, backoff: Backoff, uniform: float) -> None:
        """Note that the controller did not answer in time: the other addresses come first for a while."""
        self._find(url)[1].hang_count += 1
        self.mark_failed(url, now, backoff, uniform, HUNG_RETRY_S if len(self) > 1 else 0.0)

    def _put_last(self, url: str, not_before: float) -> None:
        index, address = self._find(url)
        address.not_before = not_before
        self._first = (index + 1) % len(self)

    def _find(self, url: str) -> tuple[int, _ControllerAddress]:
        return next((i, address) for i, address in enumerate(self._addresses) if address.url == url)


# Leadership query: ask all controllers for their epoch, for a controller that cannot reach the database, and that
# another one may have replaced. The next heartbeat carries the answer back, and the asking controller verifies it.

MAX_ANSWER_BYTES = 16 << 10


_NO_LEADER = LeadershipProof(epoch=0, proof="")


async def fetch_newest_succession(
    urls: Sequence[str], tls: ssl.SSLContext | None, timeout_s: float
) -> LeadershipProof | None:
    """Return the highest epoch that a controller claims to lead by; None if none answers in time."""
    found = await asyncio.gather(*(_fetch_epoch(url, tls, timeout_s) for url in urls))
    newest = max(found, key=lambda proof: proof.epoch, default=_NO_LEADER)
    return newest if newest.epoch else None


async def _fetch_epoch(url: str, tls: ssl.SSLContext | None, timeout_s: float) -> LeadershipProof:
    """Return a controller's answer; epoch 0 if it is a standby, or does not answer, or not readably."""
    try:
        async with asyncio.timeout(timeout_s):
            return msgspec.json.decode(await _fetch_ready(url, tls), type=LeadershipProof)
    except (OSError, TimeoutError, *DECODE_ERRORS):
        return _NO_LEADER


async def _fetch_ready(url: str, tls: ssl.SSLContext | None) -> bytes:
    """Return the body of its answer to ``GET /readyz``, up to MAX_ANSWER_BYTES."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls if secure else None)
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) <= MAX_ANSWER_BYTES and (more := await reader.read(MAX_ANSWER_BYTES)):
            answer += more
        return answer.partition(b"\r\n\r\n")[2]
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


log = logging.getLogger(__name__)

SLOW_RETRY_S = 10.0
"""Seconds between attempts that only a person can make succeed: a token, a version, a second agent."""


class _SessionDriver:
    """Run a session: when it is due, when a frame arrived, and when there is news."""

    def __init__(self, session: ControllerSession, connection: ControllerConnection, on_answer: Callable[[], None]):
        self.session = session
        self.has_left = False
        """Whether this side disconnected because the controller asked for it."""
        self._connection = connection
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._next_run: asyncio.Handle = self._loop.call_soon(self._run_once)
        self._is_scheduled = True
        connection.set_frame_handler(self._handle_frame)

    def schedule(self) -> None:
        """Run the session after all reports of this event loop round, so that one frame carries them all."""
        if not self._is_scheduled:
            self._next_run.cancel()
            self._next_run = self._loop.call_soon(self._run_once)
            self._is_scheduled = True

    def stop(self) -> None:
        self._next_run.cancel()
        self._is_scheduled = True

    def _run_once(self) -> None:
        self._is_scheduled = False
        try:
            at = self.session.send_due()
        except EverstepError as error:
            self._connection.fail(error)
            return
        except Exception as error:  # an internal error: asyncio logs it, and another session follows
            self._connection.fail(Unavailable(f"the session failed: {error!r}", 0.0))
            raise
        if self.session.can_end:
            self.has_left = True
            self._connection.close()
            return
        self._next_run = self._loop.call_later(max(0.0, at - self.session.clock.monotonic()), self._run_once)

    def _handle_frame(self, kind: int, body: bytes) -> None:
        before = self.session.answered_at
        self.session.handle_frame(kind, body)
        if self.session.answered_at != before:
            self._on_answer()
        self.schedule()


class Uplink:
    """Keep one node connected: ``run`` until cancelled. For the event loop's thread only."""

    def __init__(
        self,
        settings: AgentSettings,
        heartbeat_protocol: HeartbeatProtocol,
        spool: Spool,
        agent: AgentCallbacks,
        clock: Clock,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.answered_at: float | None = None
        self._settings = settings
        self._state = UplinkState(heartbeat_protocol=heartbeat_protocol, spool=spool)
        self._agent = agent
        self._clock = clock
        self._uniform = uniform
        self._controllers = ControllerAddresses(settings.controllers)
        self._credentials = AgentCredentials(settings, clock)
        self._driver: _SessionDriver | None = None
        self._is_between_sessions = False
        self._wake = asyncio.Event()
        self._succession_task: asyncio.Task[None] | None = None
        self._unreachable_since: float | None = None
        self._logged_codes: set[str] = set()

    @property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """Counts by request kind (session, register, heartbeat, reports) and outcome: ok, or an error's code."""
        return self._state.outcomes

    def report(self, report: AnyReport) -> None:
        """Queue a report and send it: at once if it is urgent, within the batch window otherwise."""
        self._state.spool.add(report, self._clock.monotonic())
        if self._driver is not None:
            self._driver.schedule()
        elif self._is_between_sessions and is_urgent(report):
            self._wake.set()

    def beat_now(self) -> None:
        """Send the next beat at once, because it carries news."""
        self._wake.set()
        if self._driver is not None:
            self._driver.session.next_beat_at = self._clock.monotonic()
            self._driver.schedule()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every report is acknowledged, at most ``timeout_s``; return whether all are."""
        end = self._clock.monotonic() + timeout_s
        while len(self._state.spool) and self._clock.monotonic() < end:
            self._wake.set()
            if self._driver is not None:
                self._driver.session.is_flushing = True
                self._driver.schedule()
            await asyncio.sleep(0.005)
        return not len(self._state.spool)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        spread = True
        while True:
            url, at = self._controllers.next_address(self._clock.monotonic())
            await self._wait_until(at)
            connection = await self._connect(url)
            if connection is not None:
                rested_until = await self._run_session(url, connection, spread)
                spread = rested_until is None
                if rested_until is not None:
                    await self._wait_between_sessions(rested_until)

    # One session

    async def _connect(self, url: str) -> ControllerConnection | None:
        times, credentials = self._settings.connection, self._credentials
        timeout_s = self._controllers.connect_timeout_s(url, times.connect_timeout_s, times.answer_timeout_s)
        try:
            connection = await open_session(url, self._settings.node, credentials.token(), credentials.tls(), timeout_s)
        except EverstepError as error:
            self.outcomes["session", error.code] += 1
            if not isinstance(error, AuthenticationError) or not await credentials.renew():
                self._handle_failure(url, error)
            return None
        self.outcomes["session", "ok"] += 1
        return connection

    async def _run_session(self, url: str, connection: ControllerConnection, spread_beat: bool) -> float | None:
        """Run the session until it ends. Returns when to come back if the controller asked for a disconnect."""
        session = ControllerSession(
            self._state,
            self._agent,
            self._clock,
            connection.send,
            url=url,
            uniform=self._uniform,
            spread_beat=spread_beat,
            answer_timeout_s=self._settings.connection.answer_timeout_s,
            has_other_controllers=len(self._controllers) > 1,
        )
        started_at = self._clock.monotonic()
        self._driver = driver = _SessionDriver(session, connection, self._handle_answer)
        try:
            error = await connection.ended
        finally:
            self._driver = None
            driver.stop()
            if self._succession_task is not None:
                self._succession_task.cancel()
                self._succession_task = None
            if not driver.has_left:
                connection.fail(Unavailable(f"{url}: the agent is ending", 0.0))
        if driver.has_left:
            self._controllers.mark_closed_locally(url)
            return session.next_beat_at
        self._handle_end(url, error, self._clock.monotonic() - started_at)
        return None

    async def _fetch_succession(self, driver: _SessionDriver) -> None:
        settings, session = self._settings, driver.session
        timeout_s = settings.connection.connect_timeout_s
        found = await fetch_newest_succession(settings.controllers, self._credentials.tls(), timeout_s)
        if found is not None and found.epoch > session.unsure_epoch > 0:
            session.succession, session.next_beat_at = found, self._clock.monotonic()
            driver.schedule()

    async def _wait_between_sessions(self, until: float) -> None:
        """Wait between two sessions with a controller that holds none: until the next beat, or urgent news."""
        if self._state.spool.newest_urgent_number <= self._state.spool.sent_through:
            self._is_between_sessions = True
            await self._wait_until(until)
            self._is_between_sessions = False

    async def _wait_until(self, at: float) -> None:
        self._wake.clear()
        wait_s = at - self._clock.monotonic()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):  # asyncio.wait_for may swallow a cancellation
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    # Outcomes

    def _handle_answer(self) -> None:
        self.answered_at = self._clock.monotonic()
        self._logged_codes.clear()
        if self._unreachable_since is not None:
            log.info("a controller is reachable again after %.2f s", self.answered_at - self._unreachable_since)
            self._unreachable_since = None
        driver = self._driver
        is_asking = self._succession_task is not None and not self._succession_task.done()
        if driver is not None and driver.session.unsure_epoch and not is_asking:
            self._succession_task = asyncio.create_task(self._fetch_succession(driver))

    def _handle_failure(self, url: str, error: EverstepError) -> None:
        """Handle a session that was not made or ended by a refusal; log it once."""
        now = self._clock.monotonic()
        if refusal_action(error, is_registering=True) is not RefusalAction.RETRY:
            self._log_refusal(error)
            self._controllers.mark_failed(url, now, self._backoff(), self._uniform(), SLOW_RETRY_S)
            return
        self._mark_unreachable(error)
        if isinstance(error, AnswerTimeout):
            self._controllers.mark_hung(url, now, self._backoff(), self._uniform())
        else:
            asked_s = retry_after_s(error, is_busy=self._agent.is_busy())
            self._controllers.mark_failed(url, now, self._backoff(), self._uniform(), asked_s)

    def _handle_end(self, url: str, error: EverstepError, lasted_s: float) -> None:
        self._state.heartbeat_protocol.handle_session_lost()
        refused = refusal_action(error, is_registering=True) is not RefusalAction.RETRY
        if refused or retry_after_s(error, is_busy=False) > 0 or isinstance(error, AnswerTimeout):
            self._handle_failure(url, error)
        else:
            self._mark_unreachable(error)
            self._controllers.mark_ended(url, self._clock.monotonic(), lasted_s, self._backoff(), self._uniform())

    def _backoff(self) -> Backoff:
        connection = self._settings.connection
        ceiling_s = connection.retry_max_busy_s if self._agent.is_busy() else connection.retry_max_idle_s
        return Backoff(floor_s=min(0.02, ceiling_s), ceiling_s=ceiling_s)

    def _mark_unreachable(self, error: EverstepError) -> None:
        if self._unreachable_since is None:
            self._unreachable_since = self._clock.monotonic()
            log.warning("no controller reachable; training continues, reports are queued: %s", error)

    def _log_refusal(self, error: EverstepError) -> None:
        if error.code not in self._logged_codes:
            self._logged_codes.add(error.code)
            log.error("the controller refused this agent: %s; %s", error, operator_advice(error, self._settings.node))
