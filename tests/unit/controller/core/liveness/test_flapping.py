"""A node that is lost repeatedly gets a finding, unless it was lost with others or by an operator's order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, FindingKind, Mode, NodeState
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.liveness.flapping import FLAPPING_KEY
from everstep_controller.core.policy import CorePolicy, Rulebook
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import xid

LAB = CorePolicy.lab_preset().with_values(probes={"required": False})
COUNT, WINDOW_S = LAB.liveness.flap_count, LAB.liveness.flap_window_s
TOGETHER_S = 120.0
"""Losses within this window count as shared (`correlated_s` of the rule)."""


def _fleet(mode: Mode = Mode.RECOMMEND, nodes: int = 8, **knobs: Any) -> CoreFleet:
    policy = with_rules(LAB.with_values(liveness={"flap_window_s": 24 * WINDOW_S}).with_values(**knobs))
    rule = msgspec.structs.replace(policy.rules.default_rule(FindingKind.NODE_FLAPPING), mode=mode)
    rules = Rulebook(rules_by_kind={**policy.rules.rules_by_kind, FindingKind.NODE_FLAPPING: (rule,)})
    fleet = CoreFleet(msgspec.structs.replace(policy, rules=rules))
    fleet.start(nodes, min_nodes=2)
    fleet.seal(5)
    return fleet


def _others(fleet: CoreFleet, *nodes: str) -> list[str]:
    return [node for node in fleet.state.nodes if node not in nodes and node in fleet.state.liveness.reachable_nodes]


def _lose(fleet: CoreFleet, node: str) -> None:
    """Close the node's connection, and let the time for its return pass."""
    fleet.disconnect(node)
    fleet.advance(2.5, *_others(fleet, node))
    assert node not in fleet.state.liveness.reachable_nodes


def _come_back(fleet: CoreFleet, node: str) -> None:
    fleet.mark_seen(node)
    fleet.advance(6.0, *_others(fleet))


def _flap(fleet: CoreFleet, node: str, times: int) -> None:
    """Lose the node and return it `times` times, too far apart to count as shared losses."""
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
    recommended = [node for node, decision in decisions(fleet.effects[before:]) if decision == "recommend"]
    assert recommended == ["n1"]
    (sentence,) = logged_sentences(fleet.effects[before:], "verdict.recommend")
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


def test_flapping_finding_is_revoked_when_losses_are_shared() -> None:
    fleet = _fleet()
    _flap(fleet, "n1", COUNT - 1)
    _lose(fleet, "n1")
    assert _is_named(fleet, "n1")
    _lose(fleet, "n2")
    assert _is_named(fleet, "n1")
    _lose(fleet, "n3")
    assert not _is_named(fleet, "n1")
    assert "is withdrawn: 3 of 8 nodes were lost at once" in logged_sentences(fleet.effects, "finding.cleared")[-1]


@pytest.mark.promise("flapping-nodes")
def test_ordered_absences_do_not_count() -> None:
    fleet, hung = _fleet(remediation={"mode": Mode.ENFORCE}), xid(119, Action.RESET_GPU)
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
