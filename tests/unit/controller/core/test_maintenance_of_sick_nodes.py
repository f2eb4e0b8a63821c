"""A hold of a node that is out of service: no remediation and no return until the hold is released."""

from __future__ import annotations

import pytest

from everstep.errors import Conflict
from everstep.vocabulary import Action, Finding, Mode, NodeState
from everstep.wire.v1.directives import RunProbe
from everstep_controller.core.effects import Effect, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished, SchedulerStateChanged
from everstep_controller.core.health.offences import add_offence
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.transition import Transition
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences, sent
from tests.support.fleet.findings import xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
HUNG = xid(119, Action.RESET_GPU)
BOTH = pytest.mark.parametrize("order", [OperatorAction.HOLD, OperatorAction.DRAIN])


ENFORCE = CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE})


def _sick(policy: CorePolicy = ENFORCE) -> CoreFleet:
    """n2 is quarantined, and has left its jobs in a moment."""
    fleet = CoreFleet(policy)
    fleet.start(4, 1)
    fleet.seal(10)
    fleet.raise_finding("n2", HUNG)
    fleet.resume(step=40)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    return fleet


def _remediations(effects: list[Effect]) -> list[RemediationKind]:
    kinds = [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]
    return [
        kind for kind in kinds if kind in (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
    ]


def _failed(fleet: CoreFleet) -> None:
    """The newest remediation was of no use."""
    remediation = next(
        effect.remediation
        for effect in reversed(fleet.effects)
        if isinstance(effect, RequestRemediation) and effect.remediation.deadline
    )
    fleet.feed(
        RemediationFinished(
            remediation_id=remediation.id, node="n2", succeeded=False, detail="it hangs", trace=fleet.trace()
        )
    )


@pytest.mark.promise("holds-respected")
@BOTH
def test_held_quarantined_node_is_not_remediated_until_release(
    order: OperatorAction,
) -> None:
    fleet = _sick()
    before = len(fleet.effects)
    effects = fleet.order(order, node="n2")
    assert logged_sentences(effects, f"operator.{order}") == [f"ada ordered to {order} n2: because"]
    record = fleet.state.nodes["n2"]
    assert (record.state, record.scheduling.hold_reason) == (
        NodeState.QUARANTINED,
        f"ada ordered to {order} n2: because",
    )
    fleet.advance(30.0, *EVERYONE)
    assert _remediations(fleet.effects[before:]) == []
    fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.advance(2.0, *EVERYONE)
    assert _remediations(fleet.effects[before:]) == [RemediationKind.RESET_GPU]


@pytest.mark.promise("holds-respected")
def test_recovered_node_stays_held_and_is_probed_on_release() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.clear_finding("n2", HUNG.key)
    fleet.advance(60.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.restart()
    fleet.advance(5.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_hold_reports_remediation_in_progress_and_stops_ladder() -> None:
    fleet = _sick()
    fleet.advance(2.0, *EVERYONE)
    (asked,) = _remediations(fleet.effects)
    effects = fleet.order(OperatorAction.HOLD, node="n2")
    (entry,) = logged_sentences(effects, "remediation.in_progress")
    assert entry.startswith("reset_gpu of n2 (remediation-")
    assert entry.endswith("was requested before and may still be carried out")
    _failed(fleet)
    fleet.advance(30.0, *EVERYONE)
    assert _remediations(fleet.effects) == [asked]
    fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.advance(2.0, *EVERYONE)
    assert _remediations(fleet.effects) == [asked, RemediationKind.REBOOT]


def test_held_repeat_offender_goes_to_repair_on_release() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n2")
    add_offence(Transition(fleet.state, fleet.now, ""), "n2", 100.0)
    fleet.clear_finding("n2", HUNG.key)
    fleet.advance(60.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert fleet.node_state("n2") is NodeState.HELD  # until its eviction cannot be taken back any more
    fleet.advance(120.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.REPAIR


def test_release_ends_only_the_operator_hold() -> None:
    fleet = _sick()
    with pytest.raises(Conflict, match="no operator holds n2"):
        fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.feed(SchedulerStateChanged(node="n3", cordoned_by="maria", trace=fleet.trace()))
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.HELD
    fleet.feed(SchedulerStateChanged(node="n3", trace=fleet.trace()))
    assert fleet.node_state("n3") is NodeState.PROBATION


@pytest.mark.promise("probation")
def test_finding_standing_at_release_quarantines_node() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.raise_finding("n3", xid())
    before = len(fleet.effects)
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    assert not sent(fleet.effects[before:], RunProbe)


@pytest.mark.promise("probation")
def test_finding_standing_at_cordon_removal_quarantines_node() -> None:
    fleet = _sick()
    fleet.feed(SchedulerStateChanged(node="n3", cordoned_by="maria", trace=fleet.trace()))
    fleet.raise_finding("n3", xid())
    fleet.feed(SchedulerStateChanged(node="n3", trace=fleet.trace()))
    assert fleet.node_state("n3") is NodeState.QUARANTINED


@pytest.mark.promise("probation")
def test_finding_from_before_reboot_does_not_count_at_return() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.raise_finding("n3", xid())
    fleet.disconnect("n3")
    fleet.advance(30.0, "n1", "n2", "n4", "n5")
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.LOST
    fleet.register("n3", boot_id="boot-2")
    assert fleet.node_state("n3") is NodeState.PROBATION
    assert fleet.state.nodes["n3"].quarantine.probe_id


def _readmitted_with(finding: Finding) -> CoreFleet:
    fleet = _sick()
    fleet.order(OperatorAction.REPAIR, node="n3")
    fleet.raise_finding("n3", finding)
    fleet.order(OperatorAction.READMIT, node="n3")
    return fleet


def _examined(fleet: CoreFleet) -> NodeState:
    """n3 passes its diagnostics, and all beat for as long as probation takes."""
    fleet.probe_result("n3")
    fleet.probe_result(next(reversed(fleet.state.diagnostics.probes.values())).nodes[0])
    fleet.advance(fleet.policy.readmission.probation_heartbeats + 1.0, *EVERYONE)
    return fleet.node_state("n3")


@pytest.mark.promise("probation")
def test_readmitted_node_serves_until_finding_worsens() -> None:
    fleet = _readmitted_with(xid())
    fleet.beat("n3", xid(), xid(31, Action.NONE))
    fleet.restart()
    assert _examined(fleet) is NodeState.HEALTHY
    fleet.raise_finding("n3", xid(79, Action.REBOOT_NODE))
    assert fleet.node_state("n3") is NodeState.QUARANTINED


def test_finding_raised_again_after_readmission_evicts_node() -> None:
    fleet = _readmitted_with(xid())
    fleet.clear_finding("n3", xid().key)
    fleet.raise_finding("n3", xid())
    assert fleet.node_state("n3") is NodeState.QUARANTINED
