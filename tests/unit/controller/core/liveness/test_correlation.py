"""Simultaneous silence of many nodes points to the network or the controller before it points to the nodes."""

from __future__ import annotations

import pytest

from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import Domain
from everstep_controller.core.events import Tick
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences

LAB = CorePolicy.lab_preset()


def _racks(racks: int, nodes: int, policy: CorePolicy = LAB) -> CoreFleet:
    """Nodes r1n1, r1n2, ... in racks r1, r2, ..., each with a first heartbeat."""
    fleet = CoreFleet(policy)
    for rack in range(1, racks + 1):
        for node in range(1, nodes + 1):
            fleet.register(f"r{rack}n{node}", domain=Domain(rack=f"r{rack}"))
            fleet.beat(f"r{rack}n{node}")
    return fleet


def _others(fleet: CoreFleet, *prefixes: str) -> list[str]:
    return [node for node in fleet.state.nodes if not node.startswith(prefixes)]


def _states(fleet: CoreFleet, prefix: str) -> set[NodeState]:
    return {record.state for node, record in fleet.state.nodes.items() if node.startswith(prefix)}


@pytest.mark.promise("correlated-silence")
def test_silent_rack_is_reported_once_and_lost_after_limit() -> None:
    fleet = _racks(5, 4)
    effects = fleet.advance(12.0, *_others(fleet, "r1"))
    assert _states(fleet, "r1") == {NodeState.SUSPECT}
    (sentence,) = logged_sentences(effects, "fleet.correlated_silence")
    assert sentence.startswith("4 of 20 nodes are silent at once, and have in common: rack r1 (4 of 4)")
    assert logged_sentences(effects, "node.lost") == []
    fleet.advance(10.0, *_others(fleet, "r1"))
    assert _states(fleet, "r1") == {NodeState.LOST}
    assert _states(fleet, "r2") == {NodeState.HEALTHY}
    assert decisions(fleet.effects) == []


def test_silence_of_half_a_rack_is_judged_per_node() -> None:
    fleet = _racks(5, 6)
    effects = fleet.advance(8.0, *_others(fleet, "r1n1", "r1n2", "r1n3"))
    assert logged_sentences(effects, "fleet.correlated_silence") == []
    assert len(logged_sentences(effects, "node.lost")) == 3


def test_nodes_still_silent_after_correlated_silence_are_lost() -> None:
    fleet = _racks(5, 4)
    fleet.advance(7.0, *_others(fleet, "r1"))
    before = len(fleet.effects)
    fleet.beat("r1n1")
    fleet.beat("r1n2")
    fleet.advance(5.0, *_others(fleet, "r1n3", "r1n4"))
    assert (
        "simultaneous silence of 4 nodes ended after 4 s: 2 still silent"
        in logged_sentences(fleet.effects[before:], "fleet.correlated_silence_ended")[0]
    )
    assert {fleet.node_state(node) for node in ("r1n3", "r1n4")} == {NodeState.SUSPECT}
    fleet.advance(1.5, *_others(fleet, "r1n3", "r1n4"))
    assert {fleet.node_state(node) for node in ("r1n3", "r1n4")} == {NodeState.LOST}
    assert {fleet.node_state(node) for node in ("r1n1", "r1n2")} == {NodeState.HEALTHY}


def test_node_due_for_loss_gets_the_full_rejoin_time() -> None:
    fleet = _racks(5, 4)
    fleet.advance(LAB.liveness.lost_after_s - 0.5, *_others(fleet, "r1"))
    fleet.advance(2.0, *_others(fleet, "r1n4"))
    assert fleet.node_state("r1n4") is NodeState.SUSPECT
    fleet.advance(LAB.liveness.lost_after_s, *_others(fleet, "r1n4"))
    assert fleet.node_state("r1n4") is NodeState.LOST


def test_nodes_returning_one_by_one_are_not_lost() -> None:
    fleet = _racks(10, 4)
    fleet.advance(10.0)
    effects, back = [], []
    for node in list(fleet.state.nodes):
        back.append(node)
        effects += fleet.advance(0.1, *back)
    assert logged_sentences(effects, "node.lost") == []
    assert _states(fleet, "r") == {NodeState.HEALTHY}


@pytest.mark.promise("correlated-silence")
def test_fleet_reboot_evicts_no_node_and_logs_little() -> None:
    fleet = _racks(8, 4)
    before = len(fleet.effects)
    for node in list(fleet.state.nodes):
        fleet.disconnect(node)
    fleet.advance(10.0)
    for node in list(fleet.state.nodes):
        fleet.register(node, boot_id="boot-2", domain=fleet.state.nodes[node].identity.domain)
        fleet.beat(node)
    fleet.advance(5.0, *fleet.state.nodes)
    effects = fleet.effects[before:]
    assert _states(fleet, "r") == {NodeState.HEALTHY}
    assert decisions(effects) == []
    assert (
        len(logged_sentences(effects, "fleet.correlated_silence"))
        == len(logged_sentences(effects, "fleet.correlated_silence_ended"))
        == 1
    )
    assert len(logged_sentences(effects, "node.disconnected")) < 12


@pytest.mark.promise("controller-pause")
def test_controller_pause_counts_no_missed_heartbeats() -> None:
    """Heartbeats wait unread during a pause; no node counts as late, whether a Tick or a heartbeat is handled first."""
    for beat_first in (False, True):
        fleet = _racks(4, 4)
        fleet.advance(3.0, *fleet.state.nodes)
        if beat_first:
            fleet.now += 30.0
            fleet.touch("r1n1")
            fleet.feed(Tick(trace="t"))
        else:
            fleet.stop_controller(30.0)
        effects = fleet.advance(2.0)
        for node in list(fleet.state.nodes):
            fleet.touch(node)
        effects += fleet.advance(8.0, *fleet.state.nodes)
        assert logged_sentences(effects, "node.suspect") == []
        assert _states(fleet, "r") == {NodeState.HEALTHY}
