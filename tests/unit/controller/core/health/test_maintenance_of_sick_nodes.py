"""A person holds a node that is out already: nothing is done to it and it does not come back, until they release it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.effects import Effect, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished, SchedulerStateChanged
from everstep_controller.core.health.evidence import add_offence
from everstep_controller.core.policy import CorePolicy, Rulebook
from everstep_controller.core.transition import Transition

from everstep.errors import Conflict
from everstep.vocabulary import Action, Finding, Mode, NodeState
from everstep.wire.v1.directives import RunProbe
from tests.support.core_fleet import CoreFleet, audits, sent
from tests.support.findings import xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
HUNG = xid(119, Action.RESET_GPU)
BOTH = pytest.mark.parametrize("order", [OperatorAction.HOLD, OperatorAction.DRAIN])


def _sick(**knobs: Any) -> CoreFleet:
    """n2 is quarantined, and has left its jobs in a moment."""
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab(), remediation_mode=Mode.ENFORCE, **knobs))
    fleet.start(4, 1)
    fleet.seal(10)
    fleet.raise_finding("n2", HUNG)
    fleet.resume(step=40)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    return fleet


def _cures(effects: list[Effect]) -> list[RemediationKind]:
    kinds = [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]
    return [
        kind for kind in kinds if kind in (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
    ]


def _failed(fleet: CoreFleet) -> None:
    """The newest cure was of no use."""
    cure = next(
        one.remediation
        for one in reversed(fleet.effects)
        if isinstance(one, RequestRemediation) and one.remediation.deadline
    )
    fleet.feed(
        RemediationFinished(remediation_id=cure.id, node="n2", succeeded=False, detail="it hangs", trace=fleet.trace())
    )


@pytest.mark.promise("holds-respected")
@BOTH
def test_a_quarantined_node_that_is_held_is_neither_treated_nor_comes_back_until_it_is_released(
    order: OperatorAction,
) -> None:
    fleet = _sick()
    before = len(fleet.effects)
    said = fleet.order(order, node="n2")
    assert audits(said, f"operator.{order}") == [f"ada ordered to {order} n2: because"]
    record = fleet.state.nodes["n2"]
    assert (record.state, record.hold_reason) == (NodeState.QUARANTINED, f"ada ordered to {order} n2: because")
    fleet.advance(30.0, *EVERYONE)
    assert _cures(fleet.effects[before:]) == []
    fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.advance(2.0, *EVERYONE)
    assert _cures(fleet.effects[before:]) == [RemediationKind.RESET_GPU]


@pytest.mark.promise("holds-respected")
def test_one_that_got_well_is_held_and_tried_when_it_is_released() -> None:
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


def test_a_cure_that_was_asked_for_before_is_told_and_what_would_follow_it_waits() -> None:
    fleet = _sick()
    fleet.advance(2.0, *EVERYONE)
    (asked,) = _cures(fleet.effects)
    said = fleet.order(OperatorAction.HOLD, node="n2")
    (told,) = audits(said, "remediation.in_progress")
    assert told.startswith("reset_gpu of n2 (remediation-")
    assert told.endswith("was asked for before, and may still be done")
    _failed(fleet)
    fleet.advance(30.0, *EVERYONE)
    assert _cures(fleet.effects) == [asked]
    fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.advance(2.0, *EVERYONE)
    assert _cures(fleet.effects) == [asked, RemediationKind.REBOOT]


def test_a_ladder_that_is_used_up_hands_no_held_node_to_repair() -> None:
    rules = CorePolicy.lab().rules
    short = {
        kind: tuple(msgspec.structs.replace(rule, ladder=(Action.RESET_GPU,)) for rule in of)
        for kind, of in rules.rules_by_kind.items()
    }
    fleet = _sick(rules=Rulebook(short))
    fleet.advance(2.0, *EVERYONE)
    fleet.order(OperatorAction.HOLD, node="n2")
    _failed(fleet)
    fleet.advance(30.0, *EVERYONE)
    assert _cures(fleet.effects) == [RemediationKind.RESET_GPU]
    assert fleet.node_state("n2") is NodeState.QUARANTINED


def test_a_held_node_that_offends_again_and_again_goes_to_repair_when_it_is_released() -> None:
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


@BOTH
def test_a_node_in_repair_that_is_held_stays_there_and_only_readmit_brings_it_back(order: OperatorAction) -> None:
    fleet = _sick()
    fleet.order(OperatorAction.REPAIR, node="n2")
    fleet.order(order, node="n2")
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert fleet.node_state("n2") is NodeState.REPAIR
    fleet.order(order, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].hold_reason) == (NodeState.PROBATION, "")


def test_a_release_ends_a_hold_and_nothing_else() -> None:
    fleet = _sick()
    with pytest.raises(Conflict, match="nobody holds n2"):
        fleet.order(OperatorAction.RELEASE, node="n2")
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.feed(SchedulerStateChanged(node="n3", cordoned_by="maria", trace=fleet.trace()))
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.HELD
    fleet.feed(SchedulerStateChanged(node="n3", trace=fleet.trace()))
    assert fleet.node_state("n3") is NodeState.PROBATION


@pytest.mark.promise("probation")
def test_what_stands_when_a_held_node_is_released_keeps_it_out() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.raise_finding("n3", xid())
    before = len(fleet.effects)
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    assert not sent(fleet.effects[before:], RunProbe)


@pytest.mark.promise("probation")
def test_what_stands_when_a_cordon_is_lifted_keeps_the_node_out() -> None:
    fleet = _sick()
    fleet.feed(SchedulerStateChanged(node="n3", cordoned_by="maria", trace=fleet.trace()))
    fleet.raise_finding("n3", xid())
    fleet.feed(SchedulerStateChanged(node="n3", trace=fleet.trace()))
    assert fleet.node_state("n3") is NodeState.QUARANTINED


@pytest.mark.promise("probation")
def test_what_a_reboot_cured_does_not_count_when_the_node_is_heard_again() -> None:
    fleet = _sick()
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.raise_finding("n3", xid())
    fleet.disconnect("n3")
    fleet.advance(30.0, "n1", "n2", "n4", "n5")
    fleet.order(OperatorAction.RELEASE, node="n3")
    assert fleet.node_state("n3") is NodeState.LOST
    fleet.register("n3", boot_id="boot-2")
    assert fleet.node_state("n3") is NodeState.PROBATION
    assert fleet.state.nodes["n3"].probe_status


def _readmitted_with(finding: Finding) -> CoreFleet:
    fleet = _sick()
    fleet.order(OperatorAction.REPAIR, node="n3")
    fleet.raise_finding("n3", finding)
    fleet.order(OperatorAction.READMIT, node="n3")
    return fleet


def _examined(fleet: CoreFleet) -> NodeState:
    """n3 passes its diagnostics, and all beat for as long as probation takes."""
    fleet.probe_result("n3")
    fleet.probe_result(next(reversed(fleet.state.probes.values())).nodes[0])
    fleet.advance(fleet.policy.probation_beats + 1.0, *EVERYONE)
    return fleet.node_state("n3")


@pytest.mark.promise("probation")
def test_who_is_readmitted_with_a_finding_serves_at_the_operators_word_until_it_gets_worse() -> None:
    fleet = _readmitted_with(xid())
    fleet.beat("n3", xid(), xid(31, Action.NONE))
    fleet.restart()
    assert _examined(fleet) is NodeState.HEALTHY
    fleet.raise_finding("n3", xid(79, Action.REBOOT_NODE))
    assert fleet.node_state("n3") is NodeState.QUARANTINED


def test_a_finding_that_comes_again_after_a_readmission_is_nobodys_word() -> None:
    fleet = _readmitted_with(xid())
    fleet.clear_finding("n3", xid().key)
    fleet.raise_finding("n3", xid())
    assert fleet.node_state("n3") is NodeState.QUARANTINED
