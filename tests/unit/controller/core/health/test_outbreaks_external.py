"""The same fault on many nodes that are out of service: on probation, back from a power loss, or new.

The outbreak evicts no node in the end, pauses no job, and leaves no offence.
"""

from __future__ import annotations

import pytest

from everstep.vocabulary import Action, JobState, NodeState
from everstep_controller.core.events import OperatorAction, SchedulerStateChanged
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import xid

DRIVERS = xid(119, Action.RESET_GPU)


def _fleet(nodes: int, **shape: int) -> tuple[CoreFleet, list[str]]:
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}))
    fleet.start(nodes, **shape)
    fleet.seal(10)
    return fleet, list(fleet.state.nodes)


def _lift_cordons(fleet: CoreFleet, names: list[str]) -> None:
    for by in ("maria", ""):
        for node in names:
            fleet.feed(SchedulerStateChanged(node=node, cordoned_by=by, trace=fleet.trace()))


def _states(fleet: CoreFleet, names: list[str]) -> set[NodeState]:
    return {fleet.node_state(node) for node in names}


def _all_well(fleet: CoreFleet, names: list[str]) -> None:
    assert [fleet.state.nodes[node].history.offence_score for node in names] == [0.0] * len(names)
    assert fleet.state.fleet.recent_evictions == []
    assert len(logged_sentences(fleet.effects, "fleet.correlated_finding")) == 1
    fleet.advance(160.0, *names)
    assert _states(fleet, names) == {NodeState.HEALTHY}
    assert fleet.state.fleet.breaker_reason == ""


@pytest.mark.promise("outbreaks-outside")
def test_outbreak_on_seated_probation_evicts_none() -> None:
    fleet, names = _fleet(10)
    _lift_cordons(fleet, names)
    assert _states(fleet, names) == {NodeState.PROBATION}
    for node in names:
        fleet.raise_finding(node, DRIVERS)
    assert fleet.job_state() is JobState.RUNNING
    assert len(fleet.seats()) >= 8
    _all_well(fleet, names)


@pytest.mark.promise("outbreaks-outside")
def test_outbreak_during_cordons_is_judged_when_cordons_end() -> None:
    fleet, names = _fleet(10)
    for node in names:
        fleet.feed(SchedulerStateChanged(node=node, cordoned_by="maria", trace=fleet.trace()))
        fleet.raise_finding(node, DRIVERS)
    for node in names:
        fleet.feed(SchedulerStateChanged(node=node, trace=fleet.trace()))
    assert fleet.job_state() is JobState.RUNNING
    _all_well(fleet, names)


@pytest.mark.promise("outbreaks-outside")
def test_outbreak_after_power_loss_evicts_none() -> None:
    fleet, names = _fleet(12)
    for node in names:
        fleet.disconnect(node)
    fleet.advance(90.0)
    assert _states(fleet, names) == {NodeState.LOST}
    for node in names:
        fleet.register(node, boot_id="boot-2", driver_version="570", findings=(DRIVERS,))
    assert _states(fleet, names) == {NodeState.PROBATION}
    _all_well(fleet, names)


@pytest.mark.promise("outbreaks-outside")
@pytest.mark.parametrize("count", [2, 5, 20])
def test_outbreak_in_new_fleet_evicts_none(count: int) -> None:
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}))
    names = [f"n{number}" for number in range(count)]
    for node in names:
        fleet.register(node, driver_version="570", findings=(DRIVERS,))
    assert _states(fleet, names) <= {NodeState.HEALTHY, NodeState.PROBATION}
    _all_well(fleet, names)


@pytest.mark.promise("outbreaks-outside")
def test_single_returning_faulty_node_stays_out() -> None:
    fleet, names = _fleet(12)
    fleet.disconnect("n2")
    fleet.advance(90.0, *(node for node in names if node != "n2"))
    fleet.register("n2", boot_id="boot-2", findings=(DRIVERS,))
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.advance(300.0, *names)
    assert (fleet.node_state("n2"), round(fleet.state.nodes["n2"].history.offence_score)) == (NodeState.QUARANTINED, 1)


@pytest.mark.promise("outbreaks-outside")
def test_seated_node_on_probation_waits_for_spare() -> None:
    fleet, names = _fleet(4, min_nodes=4)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.raise_finding("n2", DRIVERS)
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert (fleet.job_state(), fleet.node_state("n2")) == (JobState.RUNNING, NodeState.PROBATION)
    before = len(fleet.effects)
    fleet.advance(60.0, *names)
    assert (fleet.job_state(), fleet.node_state("n2")) == (JobState.RUNNING, NodeState.PROBATION)
    assert decisions(fleet.effects[before:]) == []  # the deferral is decided once
    fleet.register("n5")
    fleet.join("n5")
    fleet.advance(10.0, *names, "n5")
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert fleet.seats() == ["n1", "n5", "n3", "n4"]
