"""Nodes that are kept out of service by maintenance, a foreign cordon or an operator's hold."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.errors import Conflict, NotFound
from everstep.vocabulary import Action, JobState, Mode, NodeState
from everstep.wire.v1.agent import Domain
from everstep_controller.core.effects import Effect, PutVerdict, RemediationKind, RequestRemediation
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction, SchedulerStateChanged
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import xid

EVERYONE = [f"n{i}" for i in range(1, 6)]


def _fleet(**knobs: Any) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(**knobs))
    fleet.start(4, 1)
    fleet.seal(10)
    return fleet


def _observe(fleet: CoreFleet, node: str, by: str = "", reason: str = "") -> list[Effect]:
    return fleet.feed(SchedulerStateChanged(node=node, cordoned_by=by, reason=reason, trace=fleet.trace()))


def _kinds(effects: list[Effect]) -> list[RemediationKind]:
    return [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]


def _maintain(fleet: CoreFleet, seconds: float = 60.0, **subject: Any) -> list[Effect]:
    return fleet.order(OperatorAction.MAINTENANCE, until=fleet.now + seconds, **subject)


@pytest.mark.promise("holds-respected")
def test_foreign_cordon_is_never_lifted_and_ends_in_probation() -> None:
    fleet = _fleet()
    _observe(fleet, "n2", "maria")
    with pytest.raises(Conflict, match="cordoned by maria"):
        fleet.order(OperatorAction.READMIT, node="n2")
    effects = _observe(fleet, "n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    for node in next(iter(fleet.state.diagnostics.probes.values())).nodes:
        fleet.probe_result(node)
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert _kinds([*effects, *fleet.effects]) == []


@pytest.mark.promise("holds-respected")
def test_remediation_skips_node_with_foreign_cordon() -> None:
    fleet = _fleet(remediation={"mode": Mode.ENFORCE})
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


@pytest.mark.promise("holds-respected")
def test_maintenance_ignores_absence_and_findings() -> None:
    fleet = _fleet()
    _maintain(fleet, node="n2")
    others = ["n1", "n3", "n4", "n5"]
    fleet.raise_finding("n2", xid())
    maintained = decisions(fleet.advance(40.0, *others))
    assert not [decision for _, decision in maintained if decision in ("evict", "quarantine", "repair")]
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
    sentences = [e.verdict.sentence for e in fleet.effects if isinstance(e, PutVerdict)]
    assert sentences[0].endswith("no automatic action, because ada ordered to hold n2: because")
    assert sentences[1].endswith(
        "no automatic action, because n3 is cordoned by maria and stays out until that cordon is lifted"
    )
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]


def test_remediation_waits_for_maintenance_end() -> None:
    fleet = _fleet(remediation={"mode": Mode.ENFORCE})
    fleet.raise_finding("n2", xid(119, Action.RESET_GPU))
    _maintain(fleet, 30.0, node="n2")
    fleet.resume(step=40)
    before = len(fleet.effects)
    fleet.advance(20.0, *EVERYONE)
    assert _kinds(fleet.effects[before:]) == []
    assert "in maintenance" in fleet.state.nodes["n2"].quarantine.plan.blocked_reason  # type: ignore[union-attr]
    fleet.advance(15.0, *EVERYONE)
    assert RemediationKind.RESET_GPU in _kinds(fleet.effects[before:])


def _planned(fleet: CoreFleet, starts_in_s: float, lasts_s: float, **subject: str) -> None:
    starts_at = fleet.now + starts_in_s
    fleet.order(OperatorAction.MAINTENANCE, starts_at=starts_at, until=starts_at + lasts_s, **subject)


def _advance_all(fleet: CoreFleet, seconds: float) -> None:
    fleet.advance(seconds, *fleet.state.nodes)


def test_maintenance_cancel_affects_only_the_named_rack() -> None:
    fleet = CoreFleet()
    fleet.register("n1", domain=Domain(rack="A"))
    fleet.register("n2", domain=Domain(rack="B"))
    for rack in ("A", "B"):
        _planned(fleet, 30.0, 60.0, rack=rack)
    fleet.order(OperatorAction.CANCEL_MAINTENANCE, rack="A")
    _advance_all(fleet, 31.0)
    assert (fleet.node_state("n1"), fleet.node_state("n2")) == (NodeState.HEALTHY, NodeState.HELD)


def test_maintenance_missed_by_controller_starts_late_or_never() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    _planned(fleet, 10.0, 100.0, node="n2")
    _planned(fleet, 10.0, 20.0, node="n3")
    fleet.now += 60.0
    fleet.restart()
    _advance_all(fleet, 1.0)
    assert (fleet.node_state("n2"), fleet.node_state("n3")) == (NodeState.HELD, NodeState.HEALTHY)
    assert [window.node for window in fleet.state.fleet.maintenance_windows] == ["n2"]


def test_planned_maintenance_waits_for_database() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    _planned(fleet, 10.0, 100.0, node="n2")
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    _advance_all(fleet, 20.0)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    _advance_all(fleet, 2.0)
    assert fleet.node_state("n2") is NodeState.HELD


def _sick() -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(probes={"required": False}))
    fleet.start(4, 1)
    fleet.seal(10)
    fleet.raise_finding("n2", xid())
    fleet.resume(step=40)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    return fleet


def _cordons(fleet: CoreFleet) -> list[tuple[str, RemediationKind]]:
    asked = (effect.remediation for effect in fleet.effects if isinstance(effect, RequestRemediation))
    return [
        (request.node, request.kind)
        for request in asked
        if request.kind in (RemediationKind.CORDON, RemediationKind.UNCORDON)
    ]


def _look(fleet: CoreFleet, cordon_id: str, by: str = "") -> list[str]:
    event = SchedulerStateChanged(node="n2", cordoned_by=by, lifted_cordon_id=cordon_id, trace=fleet.trace())
    return logged_sentences(fleet.feed(event), "node.uncordoned")


def test_lost_cordon_is_reported_once_and_not_renewed() -> None:
    fleet = _sick()
    cordon_id = fleet.state.nodes["n2"].scheduling.cordon_id
    (report,) = _look(fleet, cordon_id)
    assert "run `everstep node hold` to cordon it again" in report
    assert _look(fleet, cordon_id) == []
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert _cordons(fleet) == [("n2", RemediationKind.CORDON)]


def test_hold_renews_lost_cordon_once() -> None:
    fleet = _sick()
    _look(fleet, fleet.state.nodes["n2"].scheduling.cordon_id)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.HOLD, node="n2")
    assert _cordons(fleet) == [("n2", RemediationKind.CORDON)] * 2


def test_readmission_lifts_no_missing_cordon() -> None:
    fleet = _sick()
    _look(fleet, fleet.state.nodes["n2"].scheduling.cordon_id)
    fleet.order(OperatorAction.READMIT, node="n2")
    fleet.advance(20.0, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert _cordons(fleet) == [("n2", RemediationKind.CORDON)]
