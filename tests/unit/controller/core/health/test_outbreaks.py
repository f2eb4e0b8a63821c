"""The same fault on many nodes, at once or in turn, evicts no node in the end and needs no person."""

from __future__ import annotations

import random
from typing import Any

import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, Severity
from everstep_controller.core.effects import RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.health.eviction import eviction_scopes
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import slow_link, uncorrectable_ecc, xid

IN_SERVICE = (NodeState.HEALTHY, NodeState.PROBATION)


def _fleet(nodes: int, **knobs: Any) -> CoreFleet:
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}).with_values(**knobs))
    fleet.register(*_names(nodes))
    return fleet


def _names(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def _hand_out(fleet: CoreFleet, nodes: list[str], finding: Finding, over_s: float = 0.0) -> None:
    for node in nodes:
        fleet.raise_finding(node, finding)
        if over_s:
            fleet.advance(over_s / len(nodes), *fleet.state.nodes)


def _out(fleet: CoreFleet) -> list[str]:
    return [node for node, record in fleet.state.nodes.items() if record.state not in IN_SERVICE]


def _used(fleet: CoreFleet) -> int:
    return eviction_scopes(fleet.state, fleet.now)[0].used


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("nodes", [*range(2, 65), 300])
def test_simultaneous_fault_of_all_nodes_evicts_none(nodes: int) -> None:
    fleet = _fleet(nodes)
    _hand_out(fleet, _names(nodes), xid())
    assert _out(fleet) == []
    assert (_used(fleet), fleet.state.fleet.breaker_reason, fleet.state.evictions.deferred) == (0, "", {})
    assert len(logged_sentences(fleet.effects, "fleet.correlated_finding")) == 1


@pytest.mark.parametrize("nodes", [2, 3, 8, 16, 24, 40])
def test_driver_fault_with_several_findings_evicts_none(nodes: int) -> None:
    fleet = _fleet(nodes)
    for node in _names(nodes):
        for finding in (xid(119), xid(154), uncorrectable_ecc()):
            fleet.raise_finding(node, finding)
    assert (_out(fleet), _used(fleet), fleet.state.fleet.breaker_reason) == ([], 0, "")


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("seed", range(20))
def test_outbreak_evicts_none_in_any_order_with_restarts(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(4, 40)
    names = rng.sample(_names(nodes), rng.randint(max(4, nodes // 2), nodes))
    fleet = _fleet(nodes)
    restarts = rng.sample(range(len(names)), 2)
    for place, node in enumerate(names):
        fleet.raise_finding(node, xid())
        if rng.random() < 0.5:
            fleet.advance(rng.uniform(0.0, 100.0 / len(names)), *fleet.state.nodes)
        if place in restarts:
            fleet.restart()
    assert (_out(fleet), _used(fleet), fleet.state.fleet.breaker_reason) == ([], 0, "")
    fleet.restart()
    fleet.advance(150.0, *fleet.state.nodes)
    assert (_out(fleet), _used(fleet), fleet.state.fleet.breaker_reason) == ([], 0, "")


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 64, 200])
def test_single_faulty_node_is_evicted(nodes: int) -> None:
    fleet = _fleet(nodes)
    assert decisions(fleet.raise_finding("n1", xid())) == [("n1", "evict")]
    fleet.advance(130.0, *_names(nodes))
    assert _out(fleet) == ["n1"]


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("nodes", [20, 64, 200])
def test_faulty_pair_in_large_fleet_is_evicted(nodes: int) -> None:
    fleet = _fleet(nodes)
    _hand_out(fleet, ["n1", "n2"], xid())
    assert _out(fleet) == ["n1", "n2"]
    fleet.advance(130.0, *_names(nodes))
    assert _out(fleet) == ["n1", "n2"]


def test_other_fault_beyond_budget_trips_breaker() -> None:
    fleet = _fleet(8)
    _hand_out(fleet, ["n1", "n2"], xid())
    fleet.raise_finding("n3", xid(48))
    assert fleet.state.fleet.breaker_reason != ""


def test_slow_link_between_two_nodes_is_no_outbreak() -> None:
    fleet = _fleet(4)
    fleet.advance(301.0, *_names(4))
    fleet.raise_finding("n1", slow_link("n2"))
    assert "blame_isolation.started" in [e.entry.kind for e in fleet.effects if hasattr(e, "entry")]
    fleet.raise_finding("n2", slow_link("n1"))
    assert logged_sentences(fleet.effects, "fleet.correlated_finding") == []


@pytest.mark.promise("remediation-delay")
def test_remediation_and_repair_wait_for_outbreak_window() -> None:
    fleet = _fleet(20, remediation={"mode": Mode.ENFORCE})
    _hand_out(fleet, ["n1"], xid(119, Action.RESET_GPU))
    _hand_out(fleet, ["n2"], xid(79))
    fleet.advance(0.9, *_names(20))
    assert [r for r in _remediations(fleet) if r is not RemediationKind.CORDON] == []
    fleet.advance(118.0, *_names(20))
    assert [r for r in _remediations(fleet) if r is not RemediationKind.CORDON] == [RemediationKind.RESET_GPU]
    fleet.advance(3.0, *_names(20))
    assert RemediationKind.REPAIR in _remediations(fleet)


def _remediations(fleet: CoreFleet) -> list[RemediationKind]:
    return [effect.remediation.kind for effect in fleet.effects if isinstance(effect, RequestRemediation)]


def test_finding_left_after_outbreak_evicts_node() -> None:
    fleet = _fleet(12)
    _hand_out(fleet, ["n1", "n2", "n3"], xid())
    for node in ("n2", "n3"):
        fleet.clear_finding(node, xid().key)
    fleet.advance(250.0, *_names(12))
    assert _out(fleet) == ["n1"]
    assert len(logged_sentences(fleet.effects, "fleet.correlated_finding_ended")) == 1


def test_outbreak_includes_nodes_on_probation() -> None:
    fleet = _fleet(9)
    returning = ["n4", "n5", "n6", "n7", "n8"]
    for node in (*returning, "n9"):
        fleet.order(OperatorAction.HOLD, node=node)
    _hand_out(fleet, ["n1", "n2", "n3"], xid())
    fleet.advance(90.0, *_names(9))
    fleet.raise_finding("n9", xid())
    fleet.advance(10.0, *_names(9))
    for node in returning:
        fleet.order(OperatorAction.RELEASE, node=node)
    _hand_out(fleet, returning, xid())
    for node in ("n1", "n2", "n3"):
        fleet.clear_finding(node, xid().key)
    fleet.advance(25.0, *_names(9))
    fleet.order(OperatorAction.RELEASE, node="n9")
    assert _out(fleet) == []


NODES = [f"n{number}" for number in range(60)]
IN_IT = NODES[:4]
DAY_S = 86400.0


def _is_in_outbreak(fleet: CoreFleet, node: str = "n0") -> bool:
    return bool(fleet.state.shared_findings.outbreaks["gpu.lost"][node])


def _lost(number: int = 0) -> Finding:
    return Finding(
        kind=FindingKind.GPU_LOST,
        subject=f"GPU-{number}",
        severity=Severity.CRITICAL,
        message="the GPU is lost",
        action=Action.REBOOT_NODE,
    )


def _outbreak(eviction_count: int = 9) -> CoreFleet:
    """Four nodes of sixty that have shown it at once, and serve with it."""
    budget = {"count": eviction_count, "share": 1.0, "window_s": 600.0}
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(probes={"required": False}, budget=budget))
    fleet.register(*NODES)
    _wait(fleet, 400.0)
    for node in IN_IT:
        fleet.raise_finding(node, _lost())
    for _ in range(12):
        _wait(fleet, 20.0)
    assert [fleet.node_state(node) for node in IN_IT] == [NodeState.HEALTHY] * 4
    return fleet


def _wait(fleet: CoreFleet, seconds: float, without: tuple[str, ...] = ()) -> None:
    beating = [node for node in fleet.state.nodes if node not in without]
    fleet.stop_controller(seconds)
    for node in beating:
        fleet.touch(node)
    fleet.advance(2.0, *beating)


@pytest.mark.promise("outbreaks")
def test_outbreak_spares_its_nodes_but_not_a_late_one() -> None:
    fleet = _outbreak()
    for _ in range(48):
        _wait(fleet, DAY_S / 24)
    assert decisions(fleet.raise_finding("n50", _lost())) == [("n50", "evict")]
    for _ in range(12):
        _wait(fleet, 20.0)
    assert [fleet.node_state(node) for node in IN_IT] == [NodeState.HEALTHY] * 4
    assert not logged_sentences(fleet.effects, "fleet.correlated_finding_ended")


def test_second_wave_is_spared_and_rolls_back_evictions() -> None:
    fleet = _outbreak()
    _wait(fleet, DAY_S)
    before = len(fleet.effects)
    for node in NODES[50:54]:
        fleet.raise_finding(node, _lost())
    sentence = logged_sentences(fleet.effects[before:], "verdict.correlated")[-1]
    assert "gpu.lost appeared on 4 nodes within 120 s" in sentence
    for _ in range(12):
        _wait(fleet, 20.0)
    assert {fleet.node_state(node) for node in NODES} == {NodeState.HEALTHY}
    assert fleet.state.fleet.recent_evictions == []


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("order", [OperatorAction.EVICT, OperatorAction.REPAIR, OperatorAction.HOLD])
@pytest.mark.parametrize("restarted", [False, True])
def test_outbreak_ends_when_its_nodes_do_not_serve(order: OperatorAction, restarted: bool) -> None:
    fleet = _outbreak()
    for node in IN_IT:
        fleet.order(order, node=node)
        fleet.disconnect(node)
    _wait(fleet, DAY_S, without=tuple(IN_IT))
    if restarted:
        fleet.restart()
        for node in NODES[4:]:
            fleet.beat(node)
    assert decisions(fleet.raise_finding("n50", _lost())) == [("n50", "evict")]
    assert fleet.state.shared_findings.outbreaks == {}


def test_node_leaves_outbreak_when_finding_clears() -> None:
    fleet = _outbreak()
    _wait(fleet, DAY_S)
    fleet.raise_finding("n0", _lost(1))
    fleet.clear_finding("n0", _lost(0).key)
    assert _is_in_outbreak(fleet), "another GPU of it shows the same"
    fleet.clear_finding("n0", _lost(1).key)
    assert not _is_in_outbreak(fleet)
    assert decisions(fleet.raise_finding("n0", _lost(0))) == [("n0", "evict")]


def test_outbreak_end_evicts_within_budget_without_breaker() -> None:
    fleet = _outbreak(eviction_count=1)
    _wait(fleet, DAY_S)
    fleet.clear_finding("n0", _lost().key)
    for _ in range(12):
        _wait(fleet, 20.0)
    assert len(fleet.state.fleet.recent_evictions) == 1
    assert fleet.state.fleet.breaker_reason == ""
    assert (
        len([node for node in IN_IT if fleet.state.nodes[node].health.eviction_deferred_by == "shared:gpu.lost"]) == 2
    )
