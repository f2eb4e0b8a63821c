"""The writes of a transaction: repeatable directives are not stored, and removed records are not written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine

from everstep.vocabulary import Finding, Severity
from everstep.wire.v1.agent import GpuGauges
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.records import NodeHealth, NodeIdentity, NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.runtime.transaction import DecideFunction, FindingDelta
from everstep_controller.store import threads
from everstep_controller.store.rows import Batch
from everstep_controller.store.threads import DatabaseStore, DatabaseThread
from tests.support.fleet.controllers import joined
from tests.support.fleet.findings import xid
from tests.unit.controller.runtime.running_loop import Running, scenario


def deciding(change: Callable[[list[fx.Effect]], list[fx.Effect]]) -> DecideFunction:
    """A core with changed effects of agents' messages."""

    def decide(state: FleetState, event: ev.Event, now: float) -> list[fx.Effect]:
        effects = engine.handle(state, event, now)
        return change(effects) if isinstance(event, ev.AgentRegistered | ev.ReportArrived) else effects

    return decide


async def of_one_report(running: Running) -> Batch:
    """Register a node whose launcher joins a job ``j``, and return the writes."""
    before = len(running.disk.written)
    await running.register("n1")
    report = ev.ReportArrived(node="n1", incarnation=1, number=1, body=joined("j", 1.0), entropy="0" * 64, trace="t")
    await running.loop.enqueue(lambda tx, now: tx.handle(report, now))
    whole = Batch()
    for batch in running.disk.written[before:]:
        whole.merge(batch)
    return whole


@pytest.mark.parametrize("kind", ["node", "job"])
def test_forgotten_record_is_not_written_in_same_transaction(kind: str) -> None:
    drop: Any = fx.DeleteNode("n1") if kind == "node" else fx.DeleteJob("j")

    async def body(running: Running) -> None:
        gauges = running.loop.read_models.gpu_gauges
        gauges.record("n1", (GpuGauges(index=0),), 1.0)
        batch = await of_one_report(running)
        assert bool(gauges._newest) is (kind == "job")
        if kind == "node":
            assert (batch.nodes, list(batch.forgotten_nodes)) == ({}, ["n1"])
            assert batch.outbox == []
            assert running.outbox.pending_count("n1") == 0
        else:
            assert (batch.jobs, list(batch.forgotten_jobs)) == ({}, ["j"])
            assert batch.generations == []

    scenario(body, decide=deciding(lambda effects: [*effects, drop]))


LONG_S = 5.0


def ended(lane: DatabaseThread, until: threading.Event) -> list[str]:
    """Close the lane during a call that waits for ``until``, and return the order of the last call and the end."""
    came: list[str] = []

    async def story() -> None:
        calling = asyncio.create_task(lane.call(lambda: until.wait(LONG_S), 10 * LONG_S))
        await asyncio.sleep(0)  # it is under way
        await asyncio.to_thread(lane.close, lambda: came.append("last"))
        came.append("closed")
        until.set()
        await calling

    asyncio.run(story())
    return came


def test_lane_aborts_hanging_call_and_runs_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(threads, "ABORT_TIMEOUT_S", LONG_S)
    cut = threading.Event()
    assert ended(DatabaseThread("test", cut.set), cut) == ["last", "closed"]


def test_lane_closes_despite_call_without_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(threads, "ABORT_TIMEOUT_S", 0.01)
    assert ended(DatabaseThread("test", lambda: None), threading.Event()) == ["closed"]


def test_store_can_be_closed_twice(engine: Engine) -> None:
    store = DatabaseStore(engine)
    asyncio.run(store.query(lambda connection: None))
    for _ in range(2):
        store.close()


Findings = dict[str, Finding]


def mild(number: int) -> Finding:
    return msgspec.structs.replace(xid(number), subject=f"GPU-{number}", severity=Severity.WARNING)


def _record(**findings: Finding) -> NodeRecord:
    return NodeRecord(
        node="n1", identity=NodeIdentity(incarnation=1, vault=""), health=NodeHealth(agent_findings=findings)
    )


def test_standing_findings_write_only_changes() -> None:
    first, second = mild(31), mild(43)
    record = _record(a=first, b=second)
    standing = FindingDelta([])
    assert dict(standing.changes(record)) == {"a": first, "b": second}
    assert dict(standing.changes(record)) == {}
    again = msgspec.structs.replace(second, since=5.0)
    record.health.agent_findings = {"b": again}
    assert dict(standing.changes(record)) == {"a": None, "b": again}
    record.health.agent_findings = {}
    assert dict(standing.changes(record)) == {"b": None}
