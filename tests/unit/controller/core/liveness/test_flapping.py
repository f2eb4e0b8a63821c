"""A node that is lost again and again is named; one that is lost with others, or by somebody's word, is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.liveness.node_liveness import FLAPPING_KEY
from everstep_controller.core.policy import CorePolicy, Rulebook

from everstep.vocabulary import Action, FindingKind, Mode, NodeState
from tests.support.core_fleet import CoreFleet, audits, decisions, with_rules
from tests.support.findings import xid

LAB = msgspec.structs.replace(CorePolicy.lab_preset(), probe_required=False)
COUNT, WINDOW_S = LAB.node_flap_count, LAB.node_flap_window_s
TOGETHER_S = 120.0
"""Losses within it belong together (the rule's ``correlated_s``)."""


def _fleet(mode: Mode = Mode.RECOMMEND, nodes: int = 8, **knobs: Any) -> CoreFleet:
    policy = with_rules(msgspec.structs.replace(LAB, node_flap_window_s=24 * WINDOW_S, **knobs))
    rule = msgspec.structs.replace(policy.rules.default_rule(FindingKind.NODE_FLAPPING), mode=mode)
    rules = Rulebook(rules_by_kind={**policy.rules.rules_by_kind, FindingKind.NODE_FLAPPING: (rule,)})
    fleet = CoreFleet(msgspec.structs.replace(policy, rules=rules))
    fleet.start(nodes, min_nodes=2)
    fleet.seal(5)
    return fleet


def _others(fleet: CoreFleet, *nodes: str) -> list[str]:
    return [node for node in fleet.state.nodes if node not in nodes and node in fleet.state.reachable_nodes]


def _lose(fleet: CoreFleet, node: str) -> None:
    """Its connection closes, and it does not come back in its time."""
    fleet.disconnect(node)
    fleet.advance(2.5, *_others(fleet, node))
    assert node not in fleet.state.reachable_nodes


def _come_back(fleet: CoreFleet, node: str) -> None:
    fleet.hear(node)
    fleet.advance(6.0, *_others(fleet))


def _flap(fleet: CoreFleet, node: str, times: int) -> None:
    """Lost and back, often, and so far apart that these losses have nothing to do with others."""
    for _ in range(times):
        _lose(fleet, node)
        _come_back(fleet, node)
        fleet.advance(TOGETHER_S, *_others(fleet))


def _is_named(fleet: CoreFleet, node: str) -> bool:
    return FLAPPING_KEY in fleet.state.nodes[node].health.controller_findings


@pytest.mark.promise("flapping-nodes")
def test_flapping_node_is_reported_once_and_keeps_serving() -> None:
    fleet = _fleet()
    _flap(fleet, "n1", COUNT - 1)
    assert not _is_named(fleet, "n1")
    fleet.restart()
    fleet.advance(4.0, *fleet.state.nodes)
    before = len(fleet.effects)
    _flap(fleet, "n1", 2)
    said = [one for one in decisions(fleet.effects[before:]) if one[1] == "recommend"]
    assert said == [("n1", "recommend")]
    (sentence,) = audits(fleet.effects[before:], "verdict.recommend")
    assert f"n1 was lost {COUNT} times within 4 h" in sentence
    assert fleet.state.nodes["n1"].health.controller_findings[FLAPPING_KEY].value == COUNT + 1
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_old_losses_expire_and_the_finding_clears() -> None:
    fleet = _fleet()
    _flap(fleet, "n1", COUNT)
    assert _is_named(fleet, "n1")
    fleet.now += 24 * WINDOW_S
    fleet.stop_controller(1.0)
    fleet.advance(2.0, *_others(fleet))
    assert not _is_named(fleet, "n1")
    _flap(fleet, "n1", COUNT - 1)
    assert not _is_named(fleet, "n1")


@pytest.mark.promise("flapping-nodes")
def test_losses_shared_by_many_nodes_do_not_count() -> None:
    fleet = _fleet()
    for _ in range(COUNT + 1):
        for node in ("n1", "n2", "n3"):
            _lose(fleet, node)
        for node in ("n1", "n2", "n3"):
            _come_back(fleet, node)
        fleet.advance(TOGETHER_S, *_others(fleet))
    assert [fleet.state.nodes[node].liveness.loss_times for node in ("n1", "n2", "n3")] == [[], [], []]
    assert not any(_is_named(fleet, node) for node in fleet.state.nodes)


def test_shared_losses_are_recognized_across_restart() -> None:
    fleet = _fleet()
    _lose(fleet, "n1")
    _lose(fleet, "n2")
    assert len(fleet.state.nodes["n1"].liveness.loss_times) == len(fleet.state.nodes["n2"].liveness.loss_times) == 1
    fleet.restart()
    fleet.advance(4.0, *_others(fleet))
    _lose(fleet, "n3")
    assert [fleet.state.nodes[node].liveness.loss_times for node in ("n1", "n2", "n3")] == [[], [], []]


def test_flapping_finding_is_revoked_when_losses_are_shared() -> None:
    fleet = _fleet()
    _flap(fleet, "n1", COUNT - 1)
    _lose(fleet, "n1")
    assert _is_named(fleet, "n1")
    _lose(fleet, "n2")
    assert _is_named(fleet, "n1")
    _lose(fleet, "n3")
    assert not _is_named(fleet, "n1")
    assert "is withdrawn: 3 of 8 nodes were lost at once" in audits(fleet.effects, "finding.cleared")[-1]


def test_correlated_silence_does_not_count_as_loss() -> None:
    fleet = _fleet()
    for node in ("n1", "n2", "n3", "n4"):
        fleet.disconnect(node)
    fleet.advance(LAB.correlated_silence_max_s + 5.0, "n5", "n6", "n7", "n8")
    assert fleet.node_state("n1") is NodeState.LOST
    assert [fleet.state.nodes[node].liveness.loss_times for node in ("n1", "n2", "n3", "n4")] == [[], [], [], []]


@pytest.mark.promise("flapping-nodes")
def test_ordered_absences_do_not_count() -> None:
    fleet, hung = _fleet(remediation_mode=Mode.ENFORCE), xid(119, Action.RESET_GPU)
    fleet.order(OperatorAction.MAINTENANCE, node="n1", until=fleet.now + 60.0)
    _lose(fleet, "n1")
    fleet.order(OperatorAction.HOLD, node="n2")
    _lose(fleet, "n2")
    fleet.raise_finding("n3", hung)
    fleet.resume(step=40)
    fleet.advance(1.5, *_others(fleet))
    assert fleet.state.nodes["n3"].quarantine.plan is not None
    assert fleet.state.nodes["n3"].quarantine.plan.pending_remediation_id
    fleet.clear_finding("n3", hung.key)
    fleet.advance(3.0, *_others(fleet))
    assert fleet.node_state("n3") is NodeState.PROBATION
    _lose(fleet, "n3")
    assert [fleet.state.nodes[node].liveness.loss_times for node in ("n1", "n2", "n3")] == [[], [], []]


def test_flapping_node_in_enforce_mode_is_quarantined_on_return() -> None:
    fleet = _fleet(Mode.ENFORCE)
    _flap(fleet, "n1", COUNT)
    assert fleet.node_state("n1") is NodeState.QUARANTINED
    assert fleet.state.fleet.recent_evictions == []
    assert "n1" not in fleet.seats()
    fleet.now += 24 * WINDOW_S
    fleet.stop_controller(1.0)
    _come_back(fleet, "n1")
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_readmission_clears_the_losses() -> None:
    fleet = _fleet(Mode.ENFORCE)
    _flap(fleet, "n1", COUNT)
    fleet.order(OperatorAction.READMIT, node="n1")
    fleet.advance(6.0, *_others(fleet))
    assert fleet.node_state("n1") is NodeState.HEALTHY
    _flap(fleet, "n1", COUNT - 1)
    assert fleet.node_state("n1") is NodeState.HEALTHY
