"""Somebody's word keeps a node out: maintenance, other people's cordons, an operator's hold. All are respected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.effects import Effect, PutGeneration, PutVerdict, RemediationKind, RequestRemediation
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction, SchedulerStateChanged
from everstep_controller.core.policy import CorePolicy

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import Action, JobState, Mode, NodeState
from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet, audits, decisions, generations
from tests.support.findings import xid

EVERYONE = [f"n{i}" for i in range(1, 6)]


def _fleet(**knobs: Any) -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), **knobs))
    fleet.start(4, 1)
    fleet.seal(10)
    return fleet


def _observe(fleet: CoreFleet, node: str, by: str = "", reason: str = "") -> list[Effect]:
    return fleet.feed(SchedulerStateChanged(node=node, cordoned_by=by, reason=reason, trace=fleet.trace()))


def _kinds(effects: list[Effect]) -> list[RemediationKind]:
    return [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]


def _maintain(fleet: CoreFleet, seconds: float = 60.0, **subject: Any) -> list[Effect]:
    return fleet.order(OperatorAction.MAINTENANCE, until=fleet.now + seconds, **subject)


# --- other people's cordons --------------------------------------------------------------------------------------


@pytest.mark.promise("holds-respected")
def test_foreign_cordon_is_never_lifted_and_ends_in_probation() -> None:
    fleet = _fleet()
    _observe(fleet, "n2", "maria")
    with pytest.raises(Conflict, match="cordoned by maria"):
        fleet.order(OperatorAction.READMIT, node="n2")
    effects = _observe(fleet, "n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    for node in next(iter(fleet.state.probes.values())).nodes:
        fleet.probe_result(node)
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert _kinds([*effects, *fleet.effects]) == []


@pytest.mark.promise("holds-respected")
def test_remediation_skips_node_with_foreign_cordon() -> None:
    fleet = _fleet(remediation_mode=Mode.ENFORCE)
    fleet.raise_finding("n2", xid(119, Action.RESET_GPU))
    _observe(fleet, "n2", "maria")
    fleet.resume(step=40)
    before = len(fleet.effects)
    fleet.advance(30.0, *EVERYONE)
    assert _kinds(fleet.effects[before:]) == []
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.clear_finding("n2", xid(119, Action.RESET_GPU).key)
    fleet.advance(10.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD


def test_node_cordoned_while_lost_returns_held() -> None:
    fleet = _fleet()
    fleet.disconnect("n2")
    fleet.advance(3.0, "n1", "n3", "n4", "n5")
    _observe(fleet, "n2", "maria")
    fleet.hear("n2")
    assert fleet.node_state("n2") is NodeState.HELD


def test_unchanged_scheduler_state_is_ignored() -> None:
    fleet = _fleet()
    assert _observe(fleet, "n2") == []
    assert _observe(fleet, "stranger", "maria") == []


# --- an operator's hold ------------------------------------------------------------------------------------------


@pytest.mark.promise("holds-respected")
def test_hold_outlasts_findings_cordons_and_maintenance() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.HOLD, node="n2")
    assert ("n2", "evict") not in decisions(fleet.raise_finding("n2", xid()))
    _observe(fleet, "n2", "maria")
    _observe(fleet, "n2")
    _maintain(fleet, 5.0, node="n2")
    fleet.advance(10.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_node_held_on_probation_resumes_probation() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION


# --- maintenance -------------------------------------------------------------------------------------------------


@pytest.mark.promise("holds-respected")
def test_maintenance_ignores_absence_and_findings() -> None:
    fleet = _fleet()
    _maintain(fleet, node="n2")
    others = ["n1", "n3", "n4", "n5"]
    fleet.raise_finding("n2", xid())
    said = decisions(fleet.advance(40.0, *others))
    assert not [decision for _, decision in said if decision in ("evict", "quarantine", "repair")]
    fleet.register("n2", boot_id="boot-2")
    fleet.advance(25.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert fleet.state.nodes["n2"].history.offence_score == 0.0


@pytest.mark.promise("probation")
def test_finding_standing_at_maintenance_end_quarantines_node() -> None:
    fleet = _fleet()
    _maintain(fleet, 5.0, node="n2")
    fleet.raise_finding("n2", xid())
    fleet.advance(6.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED


def test_node_absent_at_maintenance_end_returns_on_heartbeat() -> None:
    fleet = _fleet()
    _maintain(fleet, 30.0, node="n2")
    fleet.advance(31.0, "n1", "n3", "n4", "n5")
    assert fleet.node_state("n2") is NodeState.LOST
    fleet.hear("n2")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_seated_held_node_counts_towards_job_minimum() -> None:
    fleet = CoreFleet()
    fleet.start(4, min_nodes=3)
    fleet.order(OperatorAction.HOLD, node="n1")
    _maintain(fleet, node="n2")
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, ["n1", "n3", "n4"])
    with pytest.raises(Conflict, match="job job needs 3 nodes"):
        _maintain(fleet, node="n3")


def test_rack_maintenance_covers_present_and_new_nodes() -> None:
    fleet = CoreFleet()
    for node, rack in (("a1", "A"), ("a2", "A"), ("b1", "B")):
        fleet.register(node, domain=Domain(rack=rack))
    _maintain(fleet, rack="A")
    fleet.register("a3", domain=Domain(rack="A"))
    held = [node for node in fleet.state.nodes if fleet.node_state(node) is NodeState.HELD]
    assert held == ["a1", "a2", "a3"]
    fleet.advance(61.0, "a1", "a2", "a3", "b1")
    assert {fleet.node_state(node) for node in held} <= {NodeState.PROBATION, NodeState.HEALTHY}
    assert fleet.state.fleet.maintenance_windows == []


def test_maintenance_survives_controller_restart() -> None:
    fleet = _fleet()
    _maintain(fleet, node="n2")
    fleet.restart()
    fleet.advance(59.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.advance(2.0, *EVERYONE)
    assert fleet.node_state("n2") is not NodeState.HELD


def test_readmit_ends_maintenance_early() -> None:
    fleet = _fleet()
    _maintain(fleet, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    fleet.advance(70.0, *EVERYONE)
    assert fleet.node_state("n2") is not NodeState.HELD


def test_readmitted_node_is_exempt_from_rack_maintenance() -> None:
    fleet = CoreFleet()
    for node in ("a1", "a2"):
        fleet.register(node, domain=Domain(rack="A"))
    _maintain(fleet, rack="A")
    fleet.order(OperatorAction.READMIT, node="a1")
    fleet.register("a1", domain=Domain(rack="A"))
    fleet.register("a2", domain=Domain(rack="A"))
    assert fleet.node_state("a1") is not NodeState.HELD
    assert fleet.node_state("a2") is NodeState.HELD


def test_invalid_maintenance_is_refused_without_effect() -> None:
    fleet = CoreFleet()
    fleet.start(3, min_nodes=3)
    before = len(fleet.effects)
    with pytest.raises(Conflict, match="needs an end in the future"):
        _maintain(fleet, -1.0, node="n2")
    with pytest.raises(NotFound, match="no node in rack R9"):
        _maintain(fleet, rack="R9")
    with pytest.raises(Conflict, match="needs 3 nodes"):
        _maintain(fleet, node="n2")
    with pytest.raises(NotFound):
        _maintain(fleet, node="n9")
    assert len(fleet.effects) == before


def test_held_node_with_finding_gets_only_a_recommendation() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.HOLD, node="n2")
    _observe(fleet, "n3", "maria")
    assert decisions(fleet.raise_finding("n2", xid(79))) == [("n2", "recommend")]
    assert decisions(fleet.raise_finding("n3", xid(79))) == [("n3", "recommend")]
    said = [e.verdict.sentence for e in fleet.effects if isinstance(e, PutVerdict)]
    assert said[0].endswith("no automatic action, because ada ordered to hold n2: because")
    assert said[1].endswith(
        "no automatic action, because n3 is cordoned by maria and stays out until that cordon is lifted"
    )
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]


@pytest.mark.parametrize("order", [OperatorAction.MAINTENANCE, OperatorAction.REPAIR])
def test_order_during_boundary_drain_does_not_force_regroup(order: OperatorAction) -> None:
    fleet = _fleet()
    fleet.progress(20)
    fleet.raise_finding("n2", xid(79))
    assert fleet.job().outgoing_generation is not None
    assert generations(fleet.order(order, node="n2", until=fleet.now + 60)) == []
    assert fleet.job().outgoing_generation is not None


def test_order_event_names_subject_and_duration() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1)
    assert audits(fleet.order(OperatorAction.HOLD, node="n1"), "operator.hold") == ["ada ordered to hold n1: because"]
    window = fleet.order(OperatorAction.MAINTENANCE, node="n2", until=fleet.now + 90)
    assert audits(window, "operator.maintenance") == ["ada ordered maintenance of n2 for 90 s: because"]
    resized = fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=1)
    assert audits(resized, "operator.resize_job") == ["ada ordered to limit job job to 1 node: because"]
    stopped = fleet.order(OperatorAction.STOP_JOB, job="job")
    assert audits(stopped, "operator.stop_job") == ["ada ordered to stop job job: because"]


def test_remediation_waits_for_maintenance_end() -> None:
    fleet = _fleet(remediation_mode=Mode.ENFORCE)
    fleet.raise_finding("n2", xid(119, Action.RESET_GPU))
    _maintain(fleet, 30.0, node="n2")
    fleet.resume(step=40)
    before = len(fleet.effects)
    fleet.advance(20.0, *EVERYONE)
    assert _kinds(fleet.effects[before:]) == []
    assert "in maintenance" in fleet.state.nodes["n2"].quarantine.plan.blocked_reason  # type: ignore[union-attr]
    fleet.advance(15.0, *EVERYONE)
    assert RemediationKind.RESET_GPU in _kinds(fleet.effects[before:])


# --- planned ahead -----------------------------------------------------------------------------------------------


def _planned(fleet: CoreFleet, starts_in_s: float, lasts_s: float, **subject: str) -> None:
    starts_at = fleet.now + starts_in_s
    fleet.order(OperatorAction.MAINTENANCE, starts_at=starts_at, until=starts_at + lasts_s, **subject)


def _everybody(fleet: CoreFleet, seconds: float) -> None:
    fleet.advance(seconds, *fleet.state.nodes)


def test_adjacent_maintenance_windows_are_one_absence() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.order(OperatorAction.MAINTENANCE, node="n2", until=fleet.now + 20.0)
    _planned(fleet, 20.0, 20.0, node="n2")
    _planned(fleet, 35.0, 20.0, node="n2")
    before = len(fleet.effects)
    _everybody(fleet, 54.0)
    assert fleet.node_state("n2") is NodeState.HELD
    assert audits(fleet.effects[before:], "node.probation") == []
    _everybody(fleet, 2.0)
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert fleet.state.fleet.maintenance_windows == []


def test_planned_rack_maintenance_covers_nodes_added_later() -> None:
    fleet = CoreFleet()
    fleet.register("n1", domain=Domain(rack="A"))
    _planned(fleet, 30.0, 60.0, rack="A")
    fleet.register("n2", domain=Domain(rack="A"))
    _everybody(fleet, 31.0)
    fleet.register("n3", domain=Domain(rack="A"))
    assert {fleet.node_state(node) for node in ("n1", "n2", "n3")} == {NodeState.HELD}


def test_maintenance_cancel_affects_only_the_named_rack() -> None:
    fleet = CoreFleet()
    fleet.register("n1", domain=Domain(rack="A"))
    fleet.register("n2", domain=Domain(rack="B"))
    for rack in ("A", "B"):
        _planned(fleet, 30.0, 60.0, rack=rack)
    fleet.order(OperatorAction.CANCEL_MAINTENANCE, rack="A")
    _everybody(fleet, 31.0)
    assert (fleet.node_state("n1"), fleet.node_state("n2")) == (NodeState.HEALTHY, NodeState.HELD)


def test_maintenance_missed_by_controller_starts_late_or_never() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    _planned(fleet, 10.0, 100.0, node="n2")
    _planned(fleet, 10.0, 20.0, node="n3")
    fleet.now += 60.0
    fleet.restart()
    _everybody(fleet, 1.0)
    assert (fleet.node_state("n2"), fleet.node_state("n3")) == (NodeState.HELD, NodeState.HEALTHY)
    assert [window.node for window in fleet.state.fleet.maintenance_windows] == ["n2"]


def test_planned_maintenance_waits_for_database() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    _planned(fleet, 10.0, 100.0, node="n2")
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    _everybody(fleet, 20.0)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    _everybody(fleet, 2.0)
    assert fleet.node_state("n2") is NodeState.HELD


def test_early_readmission_keeps_later_maintenance() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.order(OperatorAction.MAINTENANCE, node="n2", until=fleet.now + 20.0)
    _planned(fleet, 60.0, 20.0, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    _everybody(fleet, 61.0)
    assert fleet.node_state("n2") is NodeState.HELD


def test_planned_maintenance_pauses_job_at_minimum() -> None:
    fleet = CoreFleet()
    fleet.start(3, min_nodes=3)
    _planned(fleet, 10.0, 20.0, node="n2")
    _everybody(fleet, 11.0)
    assert fleet.job_state() is JobState.PAUSED


def test_simultaneous_maintenance_seats_no_affected_spare() -> None:
    fleet = CoreFleet()
    fleet.start(3, spares=2)
    (spare, other) = sorted(fleet.state.nodes.keys() - set(fleet.seats()))
    _planned(fleet, 10.0, 60.0, node="n2")
    _planned(fleet, 10.0, 60.0, node=spare)
    before = len(fleet.effects)
    _everybody(fleet, 11.0)
    rosters = [set(one.spec.seats) for one in fleet.effects[before:] if isinstance(one, PutGeneration)]
    assert rosters == [{"n1", "n3", other}]


@pytest.mark.parametrize("again", ["restarts", "wakes"])
def test_overdue_maintenance_precedes_remediation(again: str) -> None:
    fleet = _fleet(remediation_mode=Mode.ENFORCE)
    fleet.raise_finding("n2", xid(119, Action.RESET_GPU))
    fleet.resume(step=40)
    _planned(fleet, 0.5, 60.0, node="n2")
    before = len(fleet.effects)
    if again == "wakes":
        fleet.stop_controller(10.0)
    else:
        fleet.now += 10.0
        fleet.restart()
    _everybody(fleet, 30.0)
    assert audits(fleet.effects[before:], "maintenance.started")
    assert not {RemediationKind.RESET_GPU, RemediationKind.REBOOT} & set(_kinds(fleet.effects[before:]))
