"""The same fault on many nodes, at once or one after the other: nobody is out in the end, and no person is needed."""

from __future__ import annotations

import random

import msgspec
import pytest
from everstep_controller.core.effects import RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.health.eviction import eviction_scopes
from everstep_controller.core.policy import CorePolicy
from everstep_controller.rulebook import with_rules

from everstep.vocabulary import Action, Finding, Mode, NodeState
from tests.support.core_fleet import CoreFleet, audits, decisions
from tests.support.findings import slow_link, uncorrectable_ecc, xid

WINDOW_S = 120.0
IN_SERVICE = (NodeState.HEALTHY, NodeState.PROBATION)


def _fleet(nodes: int, **knobs: object) -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy(), probe_required=False, **knobs))
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


# --- of all nodes ------------------------------------------------------------------------------------------------


@pytest.mark.promise("outbreaks")
@pytest.mark.parametrize("nodes", [*range(2, 65), 300])
def test_simultaneous_fault_of_all_nodes_evicts_none(nodes: int) -> None:
    fleet = _fleet(nodes)
    _hand_out(fleet, _names(nodes), xid())
    assert _out(fleet) == []
    assert (_used(fleet), fleet.state.fleet.breaker_reason, fleet.state.deferred_evictions) == (0, "", {})
    assert len(audits(fleet.effects, "fleet.correlated_finding")) == 1


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


def test_outbreak_rolls_back_eviction_of_recovered_node() -> None:
    fleet = _fleet(12)
    fleet.raise_finding("n1", xid())
    fleet.clear_finding("n1", xid().key)
    fleet.advance(80.0, *_names(12))
    assert fleet.node_state("n1") is NodeState.PROBATION
    _hand_out(fleet, ["n2", "n3"], xid())
    assert (_out(fleet), _used(fleet)) == ([], 0)


# --- of few ------------------------------------------------------------------------------------------------------


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


def test_faulty_pair_in_small_fleet_defers_second_eviction() -> None:
    fleet = _fleet(8)
    _hand_out(fleet, ["n1", "n2"], xid())
    assert _out(fleet) == ["n1"]
    assert fleet.state.nodes["n2"].health.eviction_deferred_by == "shared:gpu.xid/79"
    assert "n1 shows gpu.xid/79 too" in audits(fleet.effects, "verdict.defer_eviction")[0]
    assert fleet.state.fleet.breaker_reason == ""
    fleet.advance(3700.0, *_names(8))
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
    assert audits(fleet.effects, "fleet.correlated_finding") == []


# --- what an acquittal takes back --------------------------------------------------------------------------------


def test_eviction_rollback_keeps_node_out_for_other_causes() -> None:
    fleet = _fleet(12)
    _hand_out(fleet, ["n1"], xid(119))
    _hand_out(fleet, ["n1"], uncorrectable_ecc())
    _hand_out(fleet, ["n2", "n3"], xid(119))
    assert _out(fleet) == ["n1"]
    assert fleet.state.nodes["n1"].quarantine.causes == [uncorrectable_ecc().key]
    assert _used(fleet) == 1


def test_outbreak_keeps_operator_eviction() -> None:
    fleet = _fleet(12)
    fleet.order(OperatorAction.EVICT, node="n1")
    _hand_out(fleet, _names(12), xid())
    assert _out(fleet) == ["n1"]


def test_outbreak_keeps_eviction_before_its_window() -> None:
    fleet = _fleet(12)
    _hand_out(fleet, ["n1"], xid())
    fleet.advance(130.0, *_names(12))
    _hand_out(fleet, _names(12)[1:], xid())
    assert _out(fleet) == ["n1"]


@pytest.mark.promise("remediation-delay")
def test_remediation_and_repair_wait_for_outbreak_window() -> None:
    fleet = _fleet(20, remediation_mode=Mode.ENFORCE)
    _hand_out(fleet, ["n1"], xid(119, Action.RESET_GPU))
    _hand_out(fleet, ["n2"], xid(79))
    fleet.advance(0.9, *_names(20))
    assert [r for r in _remedies(fleet) if r is not RemediationKind.CORDON] == []
    fleet.advance(118.0, *_names(20))
    assert [r for r in _remedies(fleet) if r is not RemediationKind.CORDON] == [RemediationKind.RESET_GPU]
    fleet.advance(3.0, *_names(20))
    assert RemediationKind.REPAIR in _remedies(fleet)


def _remedies(fleet: CoreFleet) -> list[RemediationKind]:
    return [effect.remediation.kind for effect in fleet.effects if isinstance(effect, RequestRemediation)]


def test_eviction_rollback_frees_budget_for_another_fault() -> None:
    fleet = _fleet(24)
    policy = with_rules(fleet.policy)
    assert policy.eviction_share * 24 < 3
    _hand_out(fleet, ["n1", "n2", "n3"], xid())
    assert fleet.state.nodes["n3"].health.eviction_deferred_by.startswith("shared:")
    _hand_out(fleet, ["n4"], xid())
    assert (_used(fleet), fleet.state.deferred_evictions) == (0, {})
    fleet.raise_finding("n9", xid(48))
    assert _out(fleet) == ["n9"]


# --- while it lasts, and afterwards ------------------------------------------------------------------------------


def test_node_on_probation_stays_during_outbreak() -> None:
    fleet = _fleet(12)
    fleet.raise_finding("n1", xid(48))
    fleet.clear_finding("n1", xid(48).key)
    fleet.advance(61.0, *_names(12))
    assert fleet.node_state("n1") is NodeState.PROBATION
    _hand_out(fleet, ["n2", "n3", "n4"], xid())
    fleet.raise_finding("n1", xid())
    assert fleet.node_state("n1") is NodeState.PROBATION


def test_finding_left_after_outbreak_evicts_node() -> None:
    fleet = _fleet(12)
    _hand_out(fleet, ["n1", "n2", "n3"], xid())
    for node in ("n2", "n3"):
        fleet.clear_finding(node, xid().key)
    fleet.advance(250.0, *_names(12))
    assert _out(fleet) == ["n1"]
    assert len(audits(fleet.effects, "fleet.correlated_finding_ended")) == 1


def test_outbreak_is_tracked_per_driver_version() -> None:
    fleet = _fleet(0)
    fleet.register(*[f"old{number}" for number in range(40)], driver_version="550")
    fleet.register(*[f"new{number}" for number in range(4)], driver_version="570")
    _hand_out(fleet, ["new0", "new1", "new2"], uncorrectable_ecc())
    assert _out(fleet) == []
    assert ("old0", "evict") in decisions(fleet.raise_finding("old0", uncorrectable_ecc()))
    assert ("new3", "correlated") in decisions(fleet.raise_finding("new3", uncorrectable_ecc()))
    assert audits(fleet.effects, "fleet.correlated_finding_ended") == []


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


def test_outbreak_rolls_back_eviction_after_previous_outbreak() -> None:
    fleet = _fleet(12)
    _hand_out(fleet, ["n1", "n2", "n3", "n4"], xid())
    for node in ("n2", "n3", "n4"):
        fleet.clear_finding(node, xid().key)
    fleet.advance(WINDOW_S + 10.0, *_names(12))
    assert _out(fleet) == ["n1"]
    fleet.advance(40.0, *_names(12))
    _hand_out(fleet, ["n5", "n6", "n7", "n8"], xid())
    assert (_out(fleet), _used(fleet)) == ([], 0)
