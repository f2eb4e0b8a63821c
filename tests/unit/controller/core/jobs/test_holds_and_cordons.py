"""A hold or a foreign cordon keeps new work away from a node; a job that needs the node keeps it."""

from __future__ import annotations

import pytest

from everstep.errors import Conflict
from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.events import OperatorAction, SchedulerStateChanged
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid

FOUR = ["n1", "n2", "n3", "n4"]


def _fleet(nodes: int = 4, spares: int = 0, **shape: int) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset())
    fleet.start(nodes, spares, **({"min_nodes": 4} | shape))
    fleet.seal(10)
    return fleet


def _held(fleet: CoreFleet, by: str, *names: str) -> None:
    for node in names:
        if by == "hold":
            fleet.order(OperatorAction.HOLD, node=node)
        else:
            fleet.feed(SchedulerStateChanged(node=node, cordoned_by="maria", trace=fleet.trace()))


@pytest.mark.promise("held-nodes-keep-jobs")
@pytest.mark.parametrize("by", ["hold", "cordon"])
def test_required_held_node_keeps_its_seat_in_regroup(by: str) -> None:
    fleet = _fleet()
    _held(fleet, by, "n2")
    fleet.lose_rank(0)
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, FOUR)
    assert fleet.job().status.sentence.endswith("keeps all 4 nodes; it keeps n2, because the job needs 4 nodes")
    fleet.restart()
    fleet.mark_seen("n1", "n2", "n3", "n4")
    fleet.lose_rank(3)
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, FOUR)


@pytest.mark.promise("held-nodes-keep-jobs")
def test_dispensable_held_node_is_replaced_in_regroup() -> None:
    fleet = _fleet(spares=1)
    _held(fleet, "hold", "n2")
    fleet.lose_rank(0)
    assert sorted(fleet.seats()) == ["n1", "n3", "n4", "n5"]
    assert "because the job needs" not in fleet.job().status.sentence


@pytest.mark.promise("held-nodes-keep-jobs")
def test_released_node_keeps_its_seat_on_probation() -> None:
    fleet = _fleet()
    _held(fleet, "hold", *FOUR)
    for node in FOUR:
        fleet.order(OperatorAction.RELEASE, node=node)
    assert {fleet.node_state(node) for node in FOUR} == {NodeState.PROBATION}
    fleet.lose_rank(0)
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, FOUR)


@pytest.mark.promise("held-nodes-keep-jobs")
def test_held_node_with_evicting_finding_loses_its_seat() -> None:
    fleet = _fleet()
    _held(fleet, "hold", "n2")
    fleet.raise_finding("n2", xid())
    fleet.lose_rank(0)
    assert fleet.job_state() is JobState.PAUSED


@pytest.mark.promise("held-nodes-keep-jobs")
def test_held_node_leaves_for_maintenance() -> None:
    fleet = _fleet(min_nodes=3)
    _held(fleet, "hold", "n2")
    fleet.order(OperatorAction.MAINTENANCE, node="n2", until=fleet.now + 60.0)
    fleet.resume(step=40)
    assert fleet.seats() == ["n1", "n3", "n4"]
    with pytest.raises(Conflict, match="job job needs 3 nodes and 2 would be left"):
        fleet.order(OperatorAction.DRAIN, node="n1")
