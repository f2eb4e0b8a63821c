"""Suspect before lost, doubt of oneself before doubt of many."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.engine import HeartbeatResult, apply_heartbeat
from everstep_controller.core.events import NodeDisconnected, OperatorAction, Tick
from everstep_controller.core.policy import CorePolicy

from everstep.errors import NotFound, StaleGeneration
from everstep.vocabulary import JobState, NodeState
from tests.support.core_fleet import CoreFleet, audits, generations


def test_unknown_node_or_incarnation_is_asked_to_resend() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.beat("n1")
    assert apply_heartbeat(fleet.state, "n1", 1, fleet.now) is HeartbeatResult.UNEVENTFUL
    assert apply_heartbeat(fleet.state, "n1", 2, fleet.now) is HeartbeatResult.UNKNOWN
    assert apply_heartbeat(fleet.state, "n9", 1, fleet.now) is HeartbeatResult.UNKNOWN


def test_reports_of_another_incarnation_are_refused() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.register("n1")
    fleet.incarnations["n1"] = 1
    with pytest.raises(StaleGeneration, match="incarnation 1 of n1"):
        fleet.beat("n1")
    fleet.incarnations["n9"] = 1
    with pytest.raises(NotFound, match="register first"):
        fleet.beat("n9")


def test_earlier_incarnation_cannot_register() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.register("n1")
    fleet.incarnations["n1"] = 0
    with pytest.raises(StaleGeneration, match="later incarnation"):
        fleet.register("n1")


def test_late_disconnect_of_earlier_incarnation_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.register("n1")
    fleet.feed(NodeDisconnected(node="n1", incarnation=1))
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_lagging_controller_waits_longer() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.now += 4.0
    fleet.feed(Tick(lag_s=3.5))
    assert {fleet.node_state(n) for n in ("n1", "n2", "n3")} == {NodeState.HEALTHY}


def test_unresumed_generation_counts_as_witness() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert generations(fleet.disconnect("n3")) == []
    assert [spec.number for spec in generations(fleet.advance(0.2, "n1", "n2"))] == [3]


def test_node_dropped_on_witness_returns_without_probation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n2"]
    fleet.hear("n3")
    fleet.resume()
    assert fleet.node_state("n3") is NodeState.HEALTHY
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2", "n3"]


def test_silence_of_all_nodes_is_accepted_after_limit() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    assert generations(fleet.advance(8.0)) == []
    fleet.advance(20.0)
    assert {fleet.node_state(f"n{i}") for i in (1, 2, 3, 4)} == {NodeState.LOST}
    assert fleet.job_state() is JobState.PAUSED


def test_node_readmitted_while_disconnected_joins_on_reconnect() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.EVICT, node="n1")
    assert fleet.job_state() is JobState.PAUSED
    fleet.order(OperatorAction.READMIT, node="n1")
    for node in next(iter(fleet.state.probes.values())).nodes if fleet.state.probes else ():
        fleet.probe_result(node)
    fleet.advance(4.0, "n1", "n2")
    fleet.disconnect("n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert (fleet.node_state("n2"), fleet.job_state()) == (NodeState.SUSPECT, JobState.PAUSED)
    fleet.hear("n2")
    fleet.advance(0.3, "n1", "n2")
    assert fleet.job_state() is JobState.RUNNING


def test_node_readmitted_while_silent_waits_for_heartbeat() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.lose_rank(1, replacement=False)
    assert fleet.seats() == ["n1"]
    fleet.resume()
    fleet.advance(4.0, "n1")
    fleet.order(OperatorAction.READMIT, node="n2")
    fleet.advance(1.0, "n1")
    assert (fleet.node_state("n2"), fleet.seats()) == (NodeState.SUSPECT, ["n1"])
    fleet.hear("n2")
    fleet.advance(1.0, "n1", "n2")
    assert (fleet.node_state("n2"), fleet.seats()) == (NodeState.HEALTHY, ["n1", "n2"])


def test_agent_restart_with_launchers_changes_nothing() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n2")
    fleet.register("n2")
    fleet.join("n2", again=True, generation=1)
    fleet.advance(10.0, "n1", "n2", "n3")
    assert fleet.spec().number == 1


def test_launchers_not_rejoining_are_removed() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.register("n2")
    effects = fleet.advance(6.0, "n1", "n2", "n3")
    assert "did not rejoin" in audits(effects, "launcher.left")[0]
    assert fleet.seats() == ["n1", "n3"]


def test_reboot_removes_launchers_at_once() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.register("n2", boot_id="boot-2")
    assert fleet.seats() == ["n1", "n3"]


def test_production_policy_waits_longer_than_lab_policy() -> None:
    lab, production = CorePolicy.lab_preset(), CorePolicy()
    assert lab.lost_after_s < production.lost_after_s
    assert msgspec.json.decode(msgspec.json.encode(lab), type=CorePolicy) == lab
