"""Evictions need evidence and budget, respect a minimum, and can be undone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import Action, Finding, FindingKind, JobState, Mode, NodeState, Severity
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.directives import KillRank, RunProbe
from everstep_controller.core.events import OperatorAction, ProbeRequested
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, sent
from tests.support.fleet.findings import xid


def _running(nodes: int = 3, spares: int = 1, **more: int) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, spares, **more)
    fleet.seal(10)
    return fleet


@pytest.mark.parametrize(
    ("finding", "decision"),
    [
        (xid(), "evict"),
        (xid(13, Action.RESTART_RANK), "recommend"),
        (msgspec.structs.replace(xid(), mode=Mode.RECOMMEND), "recommend"),
        (msgspec.structs.replace(xid(), mode=Mode.OBSERVE), None),
        (msgspec.structs.replace(xid(), severity=Severity.WARNING), None),
        (msgspec.structs.replace(xid(), kind=FindingKind.GPU_LOST, action=Action.NONE), "evict"),
        (msgspec.structs.replace(xid(), kind=FindingKind.SENSOR_HUNG), "recommend"),
        (msgspec.structs.replace(xid(), kind=FindingKind.SLOT_CORRUPT), "no_action"),
    ],
)
def test_finding_kind_determines_decision(finding: Finding, decision: str | None) -> None:
    fleet = _running()
    effects = fleet.raise_finding("n2", finding)
    assert decisions(effects) == ([("n2", decision)] if decision else [])


def test_same_finding_is_judged_once() -> None:
    fleet = _running()
    sensor = msgspec.structs.replace(xid(), kind=FindingKind.SENSOR_HUNG)
    assert decisions(fleet.raise_finding("n2", sensor)) == [("n2", "recommend")]
    assert decisions(fleet.beat("n2", sensor)) == []


def _rotten(step: int, **more: Any) -> Finding:
    words = {"severity": Severity.WARNING, "mode": Mode.OBSERVE, "message": "it is mended from n4"}
    return Finding(kind=FindingKind.SLOT_CORRUPT, subject=f"job/rank1/1:{step}", **(words | more))


def test_corrupt_slot_reported_many_times_counts_once() -> None:
    fleet = _running()
    for since in range(1, 9):
        fleet.raise_finding("n2", _rotten(1, since=float(since)))
    assert ("n2", "recommend") not in decisions(fleet.effects)


def test_worsened_finding_is_judged_again() -> None:
    fleet = _running()
    fleet.beat("n2", msgspec.structs.replace(xid(), severity=Severity.WARNING))
    assert decisions(fleet.beat("n2", xid())) == [("n2", "evict")]


@pytest.mark.promise("eviction-budget")
def test_eviction_below_job_minimum_waits_for_spare() -> None:
    fleet = _running(2, 0, min_nodes=2)
    effects = fleet.raise_finding("n2", xid())
    assert decisions(effects) == [("n2", "defer_eviction")]
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.register("n3")
    fleet.join("n3")
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert fleet.seats() == ["n1", "n3"]


@pytest.mark.promise("eviction-budget")
def test_eviction_window_frees_budget_until_breaker_trips() -> None:
    policy = CorePolicy.lab_preset().with_values(budget={"count": 1, "window_s": 60.0})
    fleet = CoreFleet(policy)
    fleet.start(6)
    fleet.raise_finding("n1", xid())
    fleet.advance(61.0, *[f"n{i}" for i in range(1, 7)])
    assert decisions(fleet.raise_finding("n2", xid())) == [("n2", "evict")]
    assert decisions(fleet.raise_finding("n3", xid(62))) == [("n3", "defer_eviction")]
    fleet.advance(61.0, *[f"n{i}" for i in range(1, 7)])
    assert decisions(fleet.raise_finding("n4", xid(62))) == [("n4", "defer_eviction")]


def _quarantined() -> CoreFleet:
    fleet = _running()
    fleet.raise_finding("n2", xid())
    fleet.resume(step=20)
    return fleet


@pytest.mark.promise("eviction-evidence")
def test_quarantined_node_returns_through_probe_and_heartbeats() -> None:
    fleet = _quarantined()
    fleet.clear_finding("n2", xid().key)
    effects = fleet.advance(2.5, "n1", "n2", "n3", "n4")
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert set(sent(effects, RunProbe)) == {"n1", "n2"}
    fleet.advance(5.0, "n1", "n2", "n3", "n4")
    assert fleet.node_state("n2") is NodeState.PROBATION
    fleet.probe_result("n1")
    assert decisions(fleet.probe_result("n2")) == [("n2", "readmit")]


def test_failed_probe_retries_partner_then_quarantines() -> None:
    fleet = _quarantined()
    fleet.clear_finding("n2", xid().key)
    fleet.advance(2.5, "n1", "n2", "n3", "n4")
    fleet.probe_result("n1", False, "time-out")
    effects = fleet.probe_result("n2", False, "time-out")
    assert decisions(effects) == []
    assert {body.nodes for body in sent(effects, RunProbe).values()} == {("n3", "n2"), ("n4", "n1")}
    fleet.probe_result("n4")
    fleet.probe_result("n1")
    fleet.probe_result("n3", False, "time-out")
    assert decisions(fleet.probe_result("n2", False, "time-out")) == [("n2", "quarantine")]


def test_node_without_probe_partner_returns_after_heartbeats() -> None:
    fleet = CoreFleet()
    fleet.start(1)
    fleet.disconnect("n1")
    fleet.advance(2.0)
    assert fleet.job_state() is JobState.PAUSED
    fleet.register("n1")
    fleet.join("n1", again=True, generation=1)
    fleet.advance(5.0, "n1")
    assert fleet.node_state("n1") is NodeState.HEALTHY
    assert fleet.spec().number == 2


def test_new_node_with_finding_starts_quarantined() -> None:
    fleet = CoreFleet()
    fleet.register("n1", findings=(xid(),))
    assert fleet.node_state("n1") is NodeState.QUARANTINED
    assert fleet.state.fleet.recent_evictions == []


def test_divergent_node_stays_out_until_gpu_is_replaced() -> None:
    fleet = _running(3, 1)
    fleet.seal(11, digests={1: "bad"})
    fleet.register("n2")
    fleet.advance(60.0, "n1", "n2", "n3", "n4")
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    new = Gpu(index=0, uuid="GPU-new", name="virtual", pci_bus_id="0", memory_bytes=1)
    fleet.register("n2", gpus=(new,))
    fleet.advance(3.0, "n1", "n2", "n3", "n4")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_drain_below_job_minimum_is_refused() -> None:
    fleet = _running(2, 0, min_nodes=2)
    with pytest.raises(Conflict, match="needs 2 nodes"):
        fleet.order(OperatorAction.DRAIN, node="n2")
    effects = fleet.order(OperatorAction.EVICT, node="n2")
    assert fleet.job_state() is JobState.PAUSED
    assert set(sent(effects, KillRank)) == {"n2"}


def test_operator_eviction_uses_no_budget() -> None:
    fleet = _running(3, 1)
    fleet.order(OperatorAction.EVICT, node="n1")
    assert fleet.state.fleet.recent_evictions == []
    assert fleet.state.nodes["n1"].quarantine.needs_operator


def test_invalid_orders_are_refused_without_effect() -> None:
    fleet = _running()
    before = len(fleet.effects)
    for kind, subject, error in (
        (OperatorAction.DRAIN, {"node": "n9"}, NotFound),
        (OperatorAction.READMIT, {"node": "n1"}, Conflict),
        (OperatorAction.STOP_JOB, {"job": "none"}, NotFound),
        (OperatorAction.RESIZE_JOB, {"job": "job", "node_limit": 9}, Conflict),
        (OperatorAction.RESET_BREAKER, {}, Conflict),
    ):
        with pytest.raises(error):
            fleet.order(kind, **subject)
    assert len(fleet.effects) == before


def test_operator_probe_judges_no_node() -> None:
    fleet = _running()
    fleet.feed(ProbeRequested(nodes=("n1", "n2"), actor="ada"))
    assert decisions(fleet.probe_result("n1", False, "slow")) == []
    with pytest.raises(Conflict, match="two or more"):
        fleet.feed(ProbeRequested(nodes=("n1", "n1"), actor="ada"))
