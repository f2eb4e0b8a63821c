from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everstep.errors import NotFound, Unavailable
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.state import FleetState
from everstep_controller.runtime import loop as loop_module
from everstep_controller.runtime.intake import Urgency
from tests.support.agents.uplinks import lost
from tests.unit.controller.runtime.running_loop import Running, scenario, settle


@pytest.mark.promise("acknowledged-is-durable")
def test_loop_answers_only_after_durable_transaction() -> None:
    async def body(running: Running) -> None:
        running.disk.open.clear()
        registering = running.register("n1")
        await settle()
        assert not registering.done()
        assert running.events == []
        running.disk.open.set()
        assert await registering == "n1"
        assert [row.kind for row in running.events] == ["node.registered"]

    scenario(body)


def test_loop_groups_waiting_requests_in_one_transaction() -> None:
    async def body(running: Running) -> None:
        before = len(running.disk.written)
        assert await asyncio.gather(*(running.register(f"n{i}") for i in range(50))) == [f"n{i}" for i in range(50)]
        batches = running.disk.written[before:]
        assert len(batches) <= 2
        assert sum(len(batch.nodes) for batch in batches) == 50
        numbers = [row.id for batch in batches for row in batch.event_log]
        assert numbers == list(range(numbers[0], numbers[0] + 50))

    scenario(body)


def test_loop_isolates_a_refused_request() -> None:
    async def body(running: Running) -> None:
        beat = ev.HeartbeatChanged(node="unknown", incarnation=1)
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
        assert running.events == []

    scenario(body)


@pytest.mark.parametrize("where", ["in the core", "in a decision", "in a later step"])
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
        return [fx.RecordFindingRaised(node="n1", finding=broken, at=now)] if where == "in a decision" else []

    async def body(running: Running) -> None:
        report = ev.ReportArrived(node="n1", incarnation=1, number=7, body=lost(), entropy="", trace="t")
        running.loop.enqueue(lambda tx, now: tx.handle(report, now))
        running.loop.enqueue(lambda tx, now: Broken().key)
        with pytest.raises(OSError, match="of our own"):
            await running.task
        poisoned = [row.number for batch in running.disk.written for row in batch.poisoned]
        assert poisoned == ([] if where == "in a later step" else [7])

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


def test_loop_module_imports_no_database() -> None:
    assert not [name for name in vars(loop_module) if "sqlalchemy" in name.lower()]


async def note(running: Running, line: str, **options: Any) -> str:
    """Write an event log entry, and wait until it is durable; return its line."""
    entry = fx.EventLogEntry(at=0.0, kind="test", sentence=line)
    await running.loop.enqueue(lambda tx, now: tx.add_event_log_entry(entry), **options)
    return line


def lines(running: Running) -> list[str]:
    return [row.sentence for batch in running.disk.written for row in batch.event_log if row.kind == "test"]


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
