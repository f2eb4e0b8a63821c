"""Many silent at once: a doubt of the network and of ourselves, before it is a doubt of any node."""

from __future__ import annotations

import pytest
from everstep_controller.core.events import Tick
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import FLEET, SilenceCount
from hypothesis import given
from hypothesis import strategies as st

from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet, audits, decisions, generations

LAB = CorePolicy.lab_preset()


def _racks(racks: int, nodes: int, policy: CorePolicy = LAB) -> CoreFleet:
    """Nodes r1n1, r1n2, ... in racks r1, r2, ..., heard in full."""
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
    (sentence,) = audits(effects, "fleet.correlated_silence")
    assert sentence.startswith("4 of 20 nodes are silent at once, and have in common: rack r1 (4 of 4)")
    assert audits(effects, "node.lost") == []
    fleet.advance(10.0, *_others(fleet, "r1"))
    assert _states(fleet, "r1") == {NodeState.LOST}
    assert _states(fleet, "r2") == {NodeState.HEALTHY}
    assert decisions(fleet.effects) == []


def test_node_outside_the_silent_rack_is_lost_normally() -> None:
    fleet = _racks(5, 4)
    effects = fleet.advance(8.0, *_others(fleet, "r1", "r2n1"))
    assert _states(fleet, "r1") == {NodeState.SUSPECT}
    assert fleet.node_state("r2n1") is NodeState.LOST
    assert len(audits(effects, "node.lost")) == 1


def test_correlated_silence_names_the_common_driver_version() -> None:
    fleet = CoreFleet()
    for node in range(12):
        fleet.register(f"n{node}", driver_version="570" if node < 3 else "560")
        fleet.beat(f"n{node}")
    effects = fleet.advance(8.0, *[f"n{node}" for node in range(3, 12)])
    assert "have in common: driver 570 (3 of 3)" in audits(effects, "fleet.correlated_silence")[0]
    assert fleet.node_state("n0") is NodeState.SUSPECT


def test_silence_of_half_a_rack_is_judged_per_node() -> None:
    fleet = _racks(5, 6)
    effects = fleet.advance(8.0, *_others(fleet, "r1n1", "r1n2", "r1n3"))
    assert audits(effects, "fleet.correlated_silence") == []
    assert len(audits(effects, "node.lost")) == 3


def test_nodes_still_silent_after_correlated_silence_are_lost() -> None:
    fleet = _racks(5, 4)
    fleet.advance(7.0, *_others(fleet, "r1"))
    before = len(fleet.effects)
    fleet.beat("r1n1")
    fleet.beat("r1n2")
    fleet.advance(5.0, *_others(fleet, "r1n3", "r1n4"))
    assert (
        "simultaneous silence of 4 nodes ended after 4 s: 2 still silent"
        in audits(fleet.effects[before:], "fleet.correlated_silence_ended")[0]
    )
    assert {fleet.node_state(node) for node in ("r1n3", "r1n4")} == {NodeState.SUSPECT}
    fleet.advance(1.5, *_others(fleet, "r1n3", "r1n4"))
    assert {fleet.node_state(node) for node in ("r1n3", "r1n4")} == {NodeState.LOST}
    assert {fleet.node_state(node) for node in ("r1n1", "r1n2")} == {NodeState.HEALTHY}


def test_node_due_for_loss_gets_the_full_rejoin_time() -> None:
    fleet = _racks(5, 4)
    fleet.advance(LAB.lost_after_s - 0.5, *_others(fleet, "r1"))
    fleet.advance(2.0, *_others(fleet, "r1n4"))
    assert fleet.node_state("r1n4") is NodeState.SUSPECT
    fleet.advance(LAB.lost_after_s, *_others(fleet, "r1n4"))
    assert fleet.node_state("r1n4") is NodeState.LOST


def test_nodes_returning_one_by_one_are_not_lost() -> None:
    fleet = _racks(10, 4)
    fleet.advance(10.0)
    effects, back = [], []
    for node in list(fleet.state.nodes):
        back.append(node)
        effects += fleet.advance(0.1, *back)
    assert audits(effects, "node.lost") == []
    assert _states(fleet, "r") == {NodeState.HEALTHY}


def test_job_continues_without_nodes_of_silent_rack() -> None:
    fleet = _racks(3, 4)
    nodes = list(fleet.state.nodes)
    fleet.join(*nodes, min_nodes=1, max_nodes=12)
    fleet.resume()
    fleet.advance(4.0, *_others(fleet, "r1"))
    assert fleet.spec().number == 1
    effects = fleet.fail_collective(5)
    assert [len(spec.seats) for spec in generations(effects)] == [8]
    assert _states(fleet, "r1") == {NodeState.SUSPECT}


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
        len(audits(effects, "fleet.correlated_silence")) == len(audits(effects, "fleet.correlated_silence_ended")) == 1
    )
    assert len(audits(effects, "node.disconnected")) < 12


def test_mass_return_after_power_loss_yields_no_verdict() -> None:
    fleet = _racks(4, 4)
    fleet.advance(40.0)
    assert _states(fleet, "r") == {NodeState.LOST}
    for node in list(fleet.state.nodes):
        fleet.register(node, boot_id="boot-2", domain=fleet.state.nodes[node].identity.domain)
        fleet.beat(node)
    fleet.advance(200.0, *fleet.state.nodes)
    assert {what for _, what in decisions(fleet.effects)} <= {"readmit"}
    assert fleet.state.fleet.recent_evictions == []


def test_late_tick_suspects_silent_node_before_loss() -> None:
    """A Tick came too late for the look at which it would have been suspected first."""
    fleet = CoreFleet()
    fleet.start(2, spares=4)
    for node in ("n4", "n5", "n6"):
        fleet.disconnect(node)
    fleet.now += LAB.lost_after_s + 1.0
    fleet.feed(Tick(trace="t"))
    assert _states(fleet, "n") == {NodeState.SUSPECT}
    (spec,) = generations(fleet.fail_collective(0))
    assert spec.seats == ("n1",)


@pytest.mark.promise("controller-pause")
def test_controller_pause_counts_no_missed_heartbeats() -> None:
    """Beats wait unread meanwhile; whichever is handled first, a Tick or the first of them, nobody is called late."""
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
        assert audits(effects, "node.suspect") == []
        assert _states(fleet, "r") == {NodeState.HEALTHY}


acts = st.lists(
    st.tuples(
        st.sampled_from(["register", "disconnect", "beat", "wait", "move"]), st.integers(0, 9), st.integers(0, 2)
    ),
    max_size=60,
)


@given(acts)
def test_silence_tallies_match_a_recount(history: list[tuple[str, int, int]]) -> None:
    """``check_invariants`` recounts after every event; here, also who is over the line."""
    fleet = CoreFleet()
    for what, number, rack in history:
        node = f"n{number}"
        if what in ("register", "move") or node not in fleet.incarnations:
            fleet.register(node, domain=Domain(rack=f"r{rack}"), driver_version=f"5{rack}")
        elif what == "disconnect":
            fleet.disconnect(node)
        elif what == "beat":
            fleet.beat(node)
        else:
            fleet.advance(1.0 + rack, *[f"n{i}" for i in range(number) if f"n{i}" in fleet.incarnations])
        state = fleet.state
        fleet_tally = state.silence_counts.get(FLEET, SilenceCount())
        over = fleet_tally.silent >= max(
            LAB.correlated_silence_min_nodes, LAB.correlated_silence_share * fleet_tally.expected
        )
        everybody = fleet_tally.silent == fleet_tally.expected >= 2
        assert (FLEET in state.silent_groups) == (over or everybody)
