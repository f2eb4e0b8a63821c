"""An outbreak spares those who are in it for as long as it stands on enough that serve, and others only while as many
show it: it does not switch a rule off."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import Action, Finding, FindingKind, NodeState, Severity
from tests.support.core_fleet import CoreFleet, audits, decisions

NODES = [f"n{number}" for number in range(60)]
IN_IT = NODES[:4]
DAY_S = 86400.0


def _lost(number: int = 0) -> Finding:
    return Finding(
        kind=FindingKind.GPU_LOST,
        subject=f"GPU-{number}",
        severity=Severity.CRITICAL,
        message="the GPU is lost",
        action=Action.REBOOT_NODE,
    )


def _outbreak(**policy: object) -> CoreFleet:
    """Four nodes of sixty that have shown it at once, and serve with it."""
    policy = {"probe_required": False, "eviction_count": 9, "eviction_share": 1.0} | policy
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), eviction_window_s=600.0, **policy))
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
    assert not audits(fleet.effects, "fleet.correlated_finding_ended")


def test_second_wave_is_spared_and_rolls_back_evictions() -> None:
    fleet = _outbreak()
    _wait(fleet, DAY_S)
    before = len(fleet.effects)
    for node in NODES[50:54]:
        fleet.raise_finding(node, _lost())
    sentence = audits(fleet.effects[before:], "verdict.correlated")[-1]
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
    assert fleet.state.outbreaks == {}


def test_restart_keeps_outbreak_nodes_spared() -> None:
    fleet = _outbreak()
    _wait(fleet, DAY_S)
    fleet.restart()
    for node in NODES:
        fleet.beat(node, *([_lost()] if node in IN_IT else []))
    assert decisions(fleet.raise_finding("n50", _lost())) == [("n50", "evict")]
    _wait(fleet, 130.0)
    assert [fleet.node_state(node) for node in IN_IT] == [NodeState.HEALTHY] * 4


def test_restart_during_outbreak_keeps_recent_reports() -> None:
    fleet = _fresh()
    for node in IN_IT:
        fleet.raise_finding(node, _lost())
    fleet.restart()
    for node in NODES:
        fleet.beat(node, *([_lost()] if node in IN_IT else []))
    assert decisions(fleet.raise_finding("n50", _lost())) == [("n50", "correlated")]


def _fresh() -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), probe_required=False, eviction_count=9))
    fleet.register(*NODES)
    _wait(fleet, 400.0)
    return fleet


def test_deferred_nodes_over_time_form_no_outbreak() -> None:
    fleet = _fresh()
    fleet.join(*NODES[:6], min_nodes=6, max_nodes=6)
    fleet.resume()
    for node in NODES[:4]:
        fleet.raise_finding(node, _lost())
        assert fleet.state.nodes[node].health.eviction_deferred_by == "needed:job"
        _wait(fleet, 200.0)
    assert fleet.state.outbreaks == {}
    assert not audits(fleet.effects, "fleet.correlated_finding")


def test_node_leaves_outbreak_when_finding_clears() -> None:
    fleet = _outbreak()
    _wait(fleet, DAY_S)
    fleet.raise_finding("n0", _lost(1))
    fleet.clear_finding("n0", _lost(0).key)
    assert fleet.state.outbreaks["gpu.lost"]["n0"], "another GPU of it shows the same"
    fleet.clear_finding("n0", _lost(1).key)
    assert not fleet.state.outbreaks["gpu.lost"]["n0"]
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


def test_eviction_of_outbreak_finding_trips_no_breaker() -> None:
    fleet = _outbreak(eviction_count=1)
    _wait(fleet, DAY_S)
    other = msgspec.structs.replace(_lost(), kind=FindingKind.GPU_NVLINK)
    fleet.raise_finding("n40", other)
    fleet.raise_finding("n50", _lost())
    assert fleet.node_state("n40") is NodeState.QUARANTINED
    assert (fleet.state.nodes["n50"].health.eviction_deferred_by, fleet.state.fleet.breaker_reason) == (
        "shared:gpu.lost",
        "",
    )
