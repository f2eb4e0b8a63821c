from __future__ import annotations

import asyncio
from typing import Any

import pytest
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.state import FleetState
from everstep_controller.runtime import loop as loop_module
from everstep_controller.runtime.clock import LagMeter, SteadyTime
from everstep_controller.runtime.intake import Urgency

from everstep.clock import ManualClock
from everstep.errors import NotFound, Unavailable
from tests.support.running_loop import Running, scenario, settle
from tests.support.uplinks import lost


@pytest.mark.promise("acknowledged-is-durable")
def test_loop_answers_only_after_durable_transaction() -> None:
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


def test_loop_groups_waiting_requests_in_one_transaction() -> None:
    async def body(running: Running) -> None:
        before = len(running.disk.written)
        assert await asyncio.gather(*(running.register(f"n{i}") for i in range(50))) == [f"n{i}" for i in range(50)]
        batches = running.disk.written[before:]
        assert len(batches) <= 2
        assert sum(len(batch.nodes) for batch in batches) == 50
        numbers = [row.id for batch in batches for row in batch.audit]
        assert numbers == list(range(numbers[0], numbers[0] + 50))

    scenario(body)


def test_loop_isolates_a_refused_request() -> None:
    async def body(running: Running) -> None:
        beat = ev.HeartbeatChanged(node="nobody", incarnation=1)
        refused = asyncio.create_task(running.loop.submit(lambda tx, now: tx.handle(beat, now)))
        registered = running.register("n1")
        with pytest.raises(NotFound, match="register first"):
            await refused
        assert await registered == "n1"

    scenario(body)


def test_loop_ends_without_answers_on_failed_transaction() -> None:
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
        assert running.outbox.total_pending() == 0
        assert running.audit == []

    scenario(body)


@pytest.mark.parametrize("where", ["in the core", "in what it decided", "in what came after it"])
def test_loop_records_the_report_causing_a_core_error(where: str) -> None:
    class Broken:
        @property
        def key(self) -> str:
            raise OSError("an error of our own")

    def decide(state: FleetState, event: ev.Event, now: float) -> list[fx.Effect]:
        if not isinstance(event, ev.ReportArrived):
            return engine.handle(state, event, now)
        if where == "in the core":
            raise OSError("an error of our own")
        broken: Any = Broken()
        return [fx.RecordFindingRaised(node="n1", finding=broken, at=now)] if where == "in what it decided" else []

    async def body(running: Running) -> None:
        report = ev.ReportArrived(node="n1", incarnation=1, number=7, body=lost(), entropy="", trace="t")
        running.loop.enqueue(lambda tx, now: tx.handle(report, now))
        running.loop.enqueue(lambda tx, now: Broken().key)
        with pytest.raises(OSError, match="of our own"):
            await running.task
        poisoned = [row.number for batch in running.disk.written for row in batch.poisoned]
        assert poisoned == ([] if where == "in what came after it" else [7])

    scenario(body, decide=decide)


def test_loop_ignores_a_cancelled_client() -> None:
    async def body(running: Running) -> None:
        running.disk.open.clear()
        gone, stays = running.register("n1"), running.register("n2")
        await settle()
        gone.cancel()
        running.disk.open.set()
        assert await stays == "n2"
        assert set(running.loop.state.nodes) == {"n1", "n2"}

    scenario(body)


def test_loop_refuses_with_retry_after_when_queue_is_full() -> None:
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


def test_loop_timer_suspects_a_silent_node() -> None:
    ticks: list[ev.Tick] = []

    def noting(state: Any, event: ev.Event, now: float) -> Any:
        if isinstance(event, ev.Tick):
            ticks.append(event)
        return engine.handle(state, event, now)

    clock = ManualClock()

    async def body(running: Running) -> None:
        await running.register("n1")
        while not any(row.kind == "node.suspect" for row in running.audit):
            clock.advance(0.2)
            running.loop._work.set()  # the real timer would fire
            await asyncio.sleep(0)

    scenario(body, clock=clock, decide=noting)
    assert ticks
    assert all(tick.trace for tick in ticks)


def test_tick_carries_the_loop_lag() -> None:
    lags: list[float] = []

    def noting(state: Any, event: ev.Event, now: float) -> Any:
        if isinstance(event, ev.Tick):
            lags.append(event.lag_s)
        return engine.handle(state, event, now)

    clock = ManualClock()

    async def body(running: Running) -> None:
        await running.register("n1")
        await settle()
        lags.clear()
        clock.advance(10.0)  # the process stood still for ten seconds
        running.loop._work.set()
        while not lags:
            await asyncio.sleep(0)

    scenario(body, clock=clock, decide=noting)
    assert max(lags) > 5.0


def test_steady_time_starts_after_recorded_time() -> None:
    assert SteadyTime(ManualClock(wall=1000.0), not_before=1500.0).now() == 1500.0
    assert SteadyTime(ManualClock(wall=1000.0), not_before=500.0).now() == 1000.0


def test_lag_meter_measures_a_blocked_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        offset = 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + offset)
        meter = LagMeter()
        meter.start()
        calm = meter.recent_s()
        offset = 4.0
        late = meter.recent_s()
        sampled = asyncio.Event()
        begin = meter.start
        monkeypatch.setattr(meter, "start", sampled.set)  # after the sample that was overdue
        await sampled.wait()
        sampled.clear()
        begin()
        meter.stop()
        offset = 8.0
        for _ in range(3):
            await asyncio.sleep(0)  # what is due by now is run
        assert not sampled.is_set()
        offset = 0.0
        return calm, late, meter.recent_s()

    calm, late, remembered = asyncio.run(measure())
    assert calm < 1.0
    assert late > 3.0
    assert remembered > 3.0


def test_loop_module_imports_no_database() -> None:
    assert not [name for name in vars(loop_module) if "sqlalchemy" in name.lower()]


# --- what is routine ---------------------------------------------------------------------------------------------


async def note(running: Running, line: str, **how: Any) -> str:
    """Writes a line of audit log; returns it when it is durable."""
    entry = fx.AuditEntry(at=0.0, kind="test", sentence=line)
    await running.loop.enqueue(lambda tx, now: tx.add_audit_entry(entry), **how)
    return line


def lines(running: Running) -> list[str]:
    return [row.sentence for batch in running.disk.written for row in batch.audit if row.kind == "test"]


def test_loop_groups_frequent_routine_work() -> None:
    async def body(running: Running) -> None:
        before = len(running.disk.written)
        noted = []
        for number in range(60):
            noted.append(asyncio.create_task(note(running, f"{number}", source="n1", urgency=Urgency.ROUTINE)))
            await settle()
        assert await asyncio.gather(*noted) == [str(number) for number in range(60)]
        assert lines(running) == [str(number) for number in range(60)]
        assert len(running.disk.written) - before < 30

    scenario(body)


@pytest.mark.promise("report-order")
def test_loop_runs_urgent_work_after_deferred_work_of_same_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("everstep_controller.runtime.intake.MAX_PAUSE_S", 1e9)
    monkeypatch.setattr("everstep_controller.runtime.intake.PAUSE_FACTOR", 1e15)

    async def body(running: Running) -> None:
        await note(running, "warning 1", source="n1", urgency=Urgency.ROUTINE)
        resting = asyncio.create_task(note(running, "warning 2", source="n1", urgency=Urgency.ROUTINE))
        await note(running, "of another", source="n2")
        assert not resting.done()
        await note(running, "loss", source="n1")
        await resting
        assert lines(running) == ["warning 1", "of another", "warning 2", "loss"]

    scenario(body)


def test_loop_refuses_deferred_work_when_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.runtime.intake.MAX_PAUSE_S", 1e9)
    monkeypatch.setattr("everstep_controller.runtime.intake.PAUSE_FACTOR", 1e15)

    async def body(running: Running) -> None:
        await note(running, "warning 1", source="n1", urgency=Urgency.ROUTINE)
        resting = asyncio.create_task(note(running, "warning 2", source="n1", urgency=Urgency.ROUTINE))
        await settle()
        running.task.cancel()
        with pytest.raises(Unavailable, match="stopping"):
            await resting

    scenario(body)
