"""Everstep's own cordon is gone outside: somebody lifted it, or the scheduler forgot it. That is told, not undone."""

from __future__ import annotations

import msgspec
from everstep_controller.core.effects import RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, SchedulerStateChanged
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import NodeState
from tests.support.core_fleet import CoreFleet, audits
from tests.support.findings import xid


def _sick() -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), probe_required=False))
    fleet.start(4, 1)
    fleet.seal(10)
    fleet.raise_finding("n2", xid())
    fleet.resume(step=40)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    return fleet


def _cordons(fleet: CoreFleet) -> list[tuple[str, RemediationKind]]:
    asked = (effect.remediation for effect in fleet.effects if isinstance(effect, RequestRemediation))
    return [(one.node, one.kind) for one in asked if one.kind in (RemediationKind.CORDON, RemediationKind.UNCORDON)]


def _look(fleet: CoreFleet, remedy: str, by: str = "") -> list[str]:
    event = SchedulerStateChanged(node="n2", cordoned_by=by, lifted_cordon_id=remedy, trace=fleet.trace())
    return audits(fleet.feed(event), "node.uncordoned")


def test_lost_cordon_is_reported_once_and_not_renewed() -> None:
    fleet = _sick()
    remedy = fleet.state.nodes["n2"].scheduling.cordon_id
    (said,) = _look(fleet, remedy)
    assert "run `everstep node hold` to cordon it again" in said
    assert _look(fleet, remedy) == []
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert _cordons(fleet) == [("n2", RemediationKind.CORDON)]


def test_scheduler_state_older_than_cordon_is_ignored() -> None:
    fleet = _sick()
    assert _look(fleet, "remediation-0-0") == _look(fleet, "") == []
    assert fleet.state.nodes["n2"].scheduling.cordon_id


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
