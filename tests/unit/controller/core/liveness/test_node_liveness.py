"""Nodes become suspect before they are lost, and the controller suspects itself before many nodes."""

from __future__ import annotations

import pytest

from everstep.errors import NotFound, StaleGeneration
from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.events import NodeDisconnected
from tests.support.fleet.core_fleet import CoreFleet, generations, logged_sentences


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


def test_late_disconnect_of_earlier_incarnation_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.register("n1")
    fleet.feed(NodeDisconnected(node="n1", incarnation=1))
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_node_dropped_on_witness_returns_without_probation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n2"]
    fleet.mark_seen("n3")
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


def test_launchers_not_rejoining_are_removed() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.register("n2")
    effects = fleet.advance(6.0, "n1", "n2", "n3")
    assert "did not rejoin" in logged_sentences(effects, "launcher.left")[0]
    assert fleet.seats() == ["n1", "n3"]


def test_reboot_removes_launchers_at_once() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.register("n2", boot_id="boot-2")
    assert fleet.seats() == ["n1", "n3"]
