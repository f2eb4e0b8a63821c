"""What a transaction makes of the core's effects: what is stored, what is only said, what a later one takes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.state import FleetState
from everstep_controller.runtime.transaction import DecideFunction
from everstep_controller.store.rows import Batch

from everstep.ids import Version
from everstep.wire.v1.agent import GpuGauges
from everstep.wire.v1.directives import AnyDirective, ProtectVersion, SpillVersion, StopJob, VersionNotice
from tests.support.controllers import joined
from tests.support.running_loop import Running, scenario

AT = Version(1, 5)


def deciding(change: Callable[[list[fx.Effect]], list[fx.Effect]]) -> DecideFunction:
    """The core, whose effects of what agents say are changed so."""

    def decide(state: FleetState, event: ev.Event, now: float) -> list[fx.Effect]:
        effects = engine.handle(state, event, now)
        return change(effects) if isinstance(event, ev.AgentRegistered | ev.ReportArrived) else effects

    return decide


async def of_one_report(running: Running) -> Batch:
    """A node registers, and its launcher joins a job ``j``: what that wrote."""
    before = len(running.disk.written)
    await running.register("n1")
    report = ev.ReportArrived(node="n1", incarnation=1, number=1, body=joined("j", 1.0), entropy="0" * 64, trace="t")
    await running.loop.enqueue(lambda tx, now: tx.handle(report, now))
    whole = Batch()
    for batch in running.disk.written[before:]:
        whole.merge(batch)
    return whole


@pytest.mark.parametrize(
    ("directive", "is_stored"),
    [
        (StopJob(job="j", ok=True, reason="done"), True),
        (VersionNotice(job="j", generation=1, committed=None, candidate=9), False),
        (SpillVersion(job="j", generation=1, version=AT, url="/s", writers={"n1": (0,)}), False),
        (ProtectVersion(job="j", generation=1, version=AT, groups=()), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repeatable_directive_is_not_stored(directive: AnyDirective, is_stored: bool) -> None:
    async def body(running: Running) -> None:
        before = len(running.disk.written)
        await running.register("n1")
        await running.register("n1")
        stored = [row.seq for batch in running.disk.written[before:] for row in batch.outbox]
        waiting = [one.seq for one in running.outbox.pending("n1")]
        assert len(stored) == (2 if is_stored else 0)
        assert len(waiting) == (2 if is_stored else 1), "of what is not, the newest is enough"

    scenario(body, decide=deciding(lambda effects: [*effects, fx.Send("n1", directive)]))


def test_acknowledged_directive_is_deleted_with_next_write() -> None:
    async def body(running: Running) -> None:
        await running.register("n1")
        (sent,) = running.outbox.pending("n1")
        running.outbox.acknowledge("n1", sent.seq)
        before = len(running.disk.written)
        await running.loop.submit(lambda tx, now: None)
        assert len(running.disk.written) == before
        await running.register("n2")
        assert [batch.acknowledged for batch in running.disk.written[before:] if batch.acknowledged] == [
            {"n1": sent.seq}
        ]

    stop = StopJob(job="j", ok=True, reason="done")
    scenario(body, decide=deciding(lambda effects: [*effects, fx.Send("n1", stop)]))


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


def test_record_created_after_forget_is_written() -> None:
    def back(effects: list[fx.Effect]) -> list[fx.Effect]:
        nodes: list[fx.Effect] = [fx.DeleteNode(one.node) for one in effects if isinstance(one, fx.PutNode)]
        return [*nodes, *(fx.DeleteJob(one.job) for one in effects if isinstance(one, fx.PutJob)), *effects]

    async def body(running: Running) -> None:
        batch = await of_one_report(running)
        assert (list(batch.nodes), list(batch.forgotten_nodes)) == (["n1"], ["n1"])
        assert (list(batch.jobs), list(batch.forgotten_jobs)) == (["j"], ["j"])

    scenario(body, decide=deciding(back))
