from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from controller import loop as loop_module
from controller.boards import Boards
from controller.core import events as ev
from controller.core import fleet
from controller.core.policy import CorePolicy
from controller.lag import LagMeter
from controller.loop import FleetLoop
from controller.metrics import Metrics
from controller.push import Outbox
from controller.steady_time import SteadyTime
from controller.store.records import AuditRow, Batch
from controller.transaction import AuditNumbers, Transaction
from everstep.clock import Clock, ManualClock
from everstep.errors import NotFound, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from tests.support.controllers import registration


class Disk:
    """Commits that the test lets through, or fails."""

    def __init__(self) -> None:
        self.written: list[Batch] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None

    async def commit(self, batch: Batch) -> None:
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        self.written.append(batch)


class Running:
    """A loop over an empty fleet, started; ended by the ``async with``."""

    def __init__(self, *, queue_limit: int = 100, clock: Clock = SYSTEM_CLOCK) -> None:
        self.disk = Disk()
        self.audit: list[AuditRow] = []
        self.outbox = Outbox(1)
        self.loop = FleetLoop(
            state=fleet.restore(CorePolicy.lab(), None, [], [], []),
            outbox=self.outbox,
            commit=self.disk.commit,
            steady=SteadyTime(clock),
            metrics=Metrics(),
            numbers=AuditNumbers(0),
            boards=Boards(),
            on_audit=self.audit.extend,
            on_verdicts=lambda _verdicts: None,
            queue_limit=queue_limit,
        )

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(self.loop.run())
        await self.loop.started.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await self.task

    def register(self, node: str) -> asyncio.Task[str]:
        """A registration under way; its result is the node's name."""
        event = ev.AgentRegistered(register=registration(node), trace=f"t-{node}")

        def stimulus(tx: Transaction, now: float) -> str:
            tx.handle(event, now)
            return node

        return asyncio.create_task(self.loop.submit(stimulus))


def scenario(body: Callable[[Running], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with Running(**options) as running:
            return await body(running)

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_nobody_is_answered_before_the_transaction_is_durable() -> None:
    async def body(running: Running) -> None:
        running.disk.open.clear()
        registering = running.register("n1")
        await settle()
        assert not registering.done()
        assert running.audit == []
        running.disk.open.set()
        assert await registering == "n1"
        assert [row.kind for row in running.audit] == ["node.registered"]

    scenario(body)


def test_what_waits_together_shares_a_transaction() -> None:
    async def body(running: Running) -> None:
        before = len(running.disk.written)
        assert await asyncio.gather(*(running.register(f"n{i}") for i in range(50))) == [f"n{i}" for i in range(50)]
        batches = running.disk.written[before:]
        assert len(batches) <= 2
        assert sum(len(batch.nodes) for batch in batches) == 50
        numbers = [row.id for batch in batches for row in batch.audit]
        assert numbers == list(range(numbers[0], numbers[0] + 50))

    scenario(body)


def test_one_refusal_does_not_touch_the_others_of_its_transaction() -> None:
    async def body(running: Running) -> None:
        beat = ev.HeartbeatChanged(node="nobody", incarnation=1)
        refused = asyncio.create_task(running.loop.submit(lambda tx, now: tx.handle(beat, now)))
        registered = running.register("n1")
        with pytest.raises(NotFound, match="register first"):
            await refused
        assert await registered == "n1"

    scenario(body)


def test_when_a_transaction_fails_nobody_is_answered_and_the_loop_ends_with_the_cause() -> None:
    async def body(running: Running) -> None:
        running.disk.failure = OSError("the disk is gone")
        running.disk.open.clear()
        in_flight = running.register("n1")
        await settle()
        queued = running.register("n2")
        await settle()
        running.disk.open.set()
        for waiting in (in_flight, queued):
            with pytest.raises(Unavailable, match="stopping"):
                await waiting
        with pytest.raises(OSError, match="the disk is gone"):
            await running.task
        with pytest.raises(Unavailable):
            await running.register("n3")
        assert running.outbox.total() == 0
        assert running.audit == []

    scenario(body)


def test_a_client_that_leaves_meanwhile_changes_nothing_for_the_others() -> None:
    async def body(running: Running) -> None:
        running.disk.open.clear()
        gone, stays = running.register("n1"), running.register("n2")
        await settle()
        gone.cancel()
        running.disk.open.set()
        assert await stays == "n2"
        assert set(running.loop.state.nodes) == {"n1", "n2"}

    scenario(body)


def test_a_full_queue_refuses_with_a_time_to_come_again() -> None:
    async def body(running: Running) -> None:
        running.disk.open.clear()
        first = running.register("n0")
        await settle()
        waiting = [running.register(f"n{i}") for i in range(1, 4)]
        await settle()
        with pytest.raises(Unavailable, match="3 requests wait already") as refused:
            await running.register("n9")
        assert refused.value.retry_after_s > 0
        running.disk.open.set()
        await asyncio.gather(first, *waiting)

    scenario(body, queue_limit=3)


def test_the_timer_looks_at_a_silent_node_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[ev.Tick] = []
    handle = fleet.handle

    def noting(state: Any, event: ev.Event, now: float) -> Any:
        if isinstance(event, ev.Tick):
            ticks.append(event)
        return handle(state, event, now)

    monkeypatch.setattr("controller.transaction.fleet.handle", noting)
    clock = ManualClock()

    async def body(running: Running) -> None:
        await running.register("n1")
        clock.advance(3.0)
        running.loop.touched()
        running.loop._work.set()  # the real timer would fire three seconds from now
        while not any(row.kind == "node.suspect" for row in running.audit):
            await asyncio.sleep(0)

    scenario(body, clock=clock)
    assert ticks
    assert all(tick.trace for tick in ticks)


def test_the_loops_own_lateness_goes_into_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    lags: list[float] = []
    handle = fleet.handle

    def noting(state: Any, event: ev.Event, now: float) -> Any:
        if isinstance(event, ev.Tick):
            lags.append(event.lag_s)
        return handle(state, event, now)

    monkeypatch.setattr("controller.transaction.fleet.handle", noting)
    clock = ManualClock()

    async def body(running: Running) -> None:
        await running.register("n1")
        await settle()
        lags.clear()
        clock.advance(10.0)  # the process stood still for ten seconds
        running.loop._work.set()
        while not lags:
            await asyncio.sleep(0)

    scenario(body, clock=clock)
    assert max(lags) > 5.0


def test_time_neither_jumps_nor_goes_back_with_the_wall_clock() -> None:
    clock = ManualClock(wall=1000.0)
    steady = SteadyTime(clock)
    clock.jump_wall(-500.0)
    clock.advance(1.0)
    assert steady.now() == 1001.0
    clock.jump_wall(5000.0)
    assert steady.now() == 1001.0


def test_time_begins_after_everything_that_was_recorded() -> None:
    assert SteadyTime(ManualClock(wall=1000.0), not_before=1500.0).now() == 1500.0
    assert SteadyTime(ManualClock(wall=1000.0), not_before=500.0).now() == 1000.0


def test_a_blocked_event_loop_is_seen_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        offset = 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + offset)
        meter = LagMeter()
        meter.start()
        calm = meter.recent_s()
        offset = 4.0
        late = meter.recent_s()
        meter.stop()
        return calm, late

    calm, late = asyncio.run(measure())
    assert calm < 1.0
    assert late > 3.0


def test_the_loop_module_names_no_database() -> None:
    assert not [name for name in vars(loop_module) if "sqlalchemy" in name.lower()]
