"""The fleet loop during and after a database outage. The core's part has tests of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from everstep.errors import Unavailable
from everstep.wire.v1.directives import AnyDirective, KillRank, StopJob
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.state import FleetState
from everstep_controller.leadership.lease import NotLeadingError
from everstep_controller.runtime import commit_buffer
from everstep_controller.runtime.transaction import DecideFunction
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from tests.unit.controller.runtime.running_loop import Running, scenario, settle

AWAY = DatabaseUnavailable("the disk is full: make room on it")


@pytest.fixture(autouse=True)
def _retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_buffer, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(commit_buffer, "MAX_RETRY_S", 0.0)


def kill(node: str) -> KillRank:
    return KillRank(job="j", generation=1, rank=0, local_rank=0, reason=node)


def end(node: str) -> StopJob:
    return StopJob(job="j", ok=True, reason=node)


def noting(
    news: list[ev.DatabaseAvailabilityChanged], sends: bool = True, directive: Callable[[str], AnyDirective] = kill
) -> DecideFunction:
    """The core with a record of database outages; each registration sends the node a directive."""

    def decide(state: FleetState, event: ev.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ev.DatabaseAvailabilityChanged):
            news.append(event)
            return []
        effects = engine.handle(state, event, now)
        if sends and isinstance(event, ev.AgentRegistered):
            node = event.register.node
            effects.append(fx.Send(node, directive(node)))
        return effects

    return decide


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def goes_away(running: Running) -> None:
    running.disk.failure = AWAY
    with pytest.raises(Unavailable, match=r"may be lost: send it again.*the disk is full"):
        await running.register("n1")


def bodies(running: Running, node: str) -> list[bytes]:
    return [directive.body.json for directive in running.outbox.pending(node)]


def test_requests_are_not_acknowledged_during_outage() -> None:
    news: list[ev.DatabaseAvailabilityChanged] = []

    async def body(running: Running) -> None:
        await goes_away(running)
        with pytest.raises(Unavailable, match="may be lost"):
            await running.register("n2")
        assert set(running.loop.state.nodes) == {"n1", "n2"}
        away = running.loop.database_outage()
        assert away is not None
        assert "the disk is full" in away.reason
        assert [(item.is_unavailable, "disk is full" in item.reason) for item in news] == [(True, True)]
        assert running.events == []

    scenario(body, decide=noting(news))


def test_forgettable_request_is_answered_during_outage() -> None:
    async def body(running: Running) -> None:
        await goes_away(running)
        assert await running.register("n2", forgettable=True) == "n2"

    scenario(body, decide=noting([]))


def test_outage_backlog_is_written_completely_and_in_order() -> None:
    news: list[ev.DatabaseAvailabilityChanged] = []

    async def body(running: Running) -> None:
        written = len(running.disk.written)
        await goes_away(running)
        for node in ("n2", "n3"):
            assert await running.register(node, forgettable=True) == node
        running.disk.failure = None
        await until(lambda: running.loop.database_outage() is None and len(news) == 2)
        assert not news[1].is_unavailable
        batches = running.disk.written[written:]
        assert {node for batch in batches for node in batch.nodes} == {"n1", "n2", "n3"}
        numbers = [row.id for batch in batches for row in batch.event_log]
        assert numbers == sorted(set(numbers)) == [row.id for row in running.events]
        assert await running.register("n4") == "n4"

    scenario(body, decide=noting(news))


def test_outage_directives_are_pushed_but_failed_ones_held() -> None:
    async def body(running: Running) -> None:
        await goes_away(running)
        await running.register("n2", forgettable=True)
        assert bodies(running, "n1") == []
        assert len(bodies(running, "n2")) == 1
        running.disk.failure = None
        await until(lambda: bodies(running, "n1"))
        assert running.loop.database_outage() is None
        kept = [row.node for batch in running.disk.written for row in batch.outbox]
        assert kept.count("n2") == 1

    scenario(body, decide=noting([]))


def test_job_end_is_not_sent_before_durable() -> None:
    """Launchers that have heard it are gone. A controller that follows this one and does not know of the end would have
    the job wait for them for ever."""

    async def body(running: Running) -> None:
        await goes_away(running)
        for node in ("n2", "n3"):
            await running.register(node, forgettable=True)
            assert bodies(running, node) == []
        running.disk.failure = None
        await until(lambda: bodies(running, "n3"))
        assert len(bodies(running, "n2")) == 1

    scenario(body, decide=noting([], directive=end))


def test_outage_backlog_is_bounded_and_loses_nothing() -> None:
    async def body(running: Running) -> None:
        await goes_away(running)
        taken = 0
        refused = None
        while refused is None:
            try:
                await running.register(f"m{taken}", forgettable=True)
                taken += 1
            except Unavailable as error:
                refused = error
        assert "further requests are refused until it is back" in str(refused)
        assert taken > 2
        running.disk.failure = None
        await until(lambda: running.loop.database_outage() is None)
        assert len({node for batch in running.disk.written for node in batch.nodes}) == taken + 1

    scenario(body, decide=noting([]), outage_buffer_bytes=20_000)


@pytest.mark.promise("database-outage")
def test_superseded_controller_discards_its_backlog() -> None:
    async def body(running: Running) -> None:
        await goes_away(running)
        running.disk.failure = LeadershipLost("another controller took the database over")
        with pytest.raises(LeadershipLost):
            await running.task
        assert not [batch for batch in running.disk.written if "n1" in batch.nodes]
        assert running.events == []

    scenario(body, decide=noting([]))


@pytest.mark.promise("old-leader-fenced")
def test_loop_pauses_while_leadership_is_uncertain() -> None:
    leads = True

    def check() -> None:
        if not leads:
            raise NotLeadingError("another one may lead")

    async def body(running: Running) -> None:
        nonlocal leads
        await running.register("n1")
        running.disk.open.clear()
        waiting = running.register("n2")
        await settle()
        queued = running.register("n3")
        await settle()
        leads = False
        with pytest.raises(NotLeadingError):
            await running.register("n4")
        running.disk.open.set()
        assert await waiting == "n2"  # it is durable, behind the fence
        await settle()
        assert not queued.done()
        leads = True
        assert await queued == "n3"

    scenario(body, decide=noting([]), check_leading=check)
