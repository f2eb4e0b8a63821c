"""Taken out once more before it was back: what is being done to the node, and what it has to pass, is not forgotten."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.effects import Remediation, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import Action, Mode, NodeState, ProbeKind
from everstep.wire.v1.training import ProbeFinished
from tests.support.core_fleet import CoreFleet
from tests.support.findings import port_down, xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
HUNG = xid(119, Action.RESET_GPU)
OF_GPUS = (ProbeKind.MEMORY, ProbeKind.COMPUTE, ProbeKind.ALL_REDUCE)


def _fleet() -> CoreFleet:
    """Resets and reboots are carried out, and may take two hours."""
    policy = msgspec.structs.replace(
        CorePolicy.lab_preset(), remediation_mode=Mode.ENFORCE, remediation_timeout_s=7200.0
    )
    fleet = CoreFleet(policy)
    fleet.start(4, 1)
    fleet.seal(10)
    return fleet


def _back_while_a_reset_is_under_way() -> CoreFleet:
    """n2 was evicted, its reset was asked for, and it got well before that was reported: it is on probation."""
    fleet = _fleet()
    fleet.raise_finding("n2", HUNG)
    fleet.resume(step=40)
    fleet.advance(1.5, *EVERYONE)
    assert [one.kind for one in _cures(fleet)] == [RemediationKind.RESET_GPU]
    fleet.clear_finding("n2", HUNG.key)
    fleet.advance(122.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    return fleet


def _cures(fleet: CoreFleet) -> list[Remediation]:
    asked = (effect.remediation for effect in fleet.effects if isinstance(effect, RequestRemediation))
    return [
        one for one in asked if one.kind in (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
    ]


def _fail_a_probe(fleet: CoreFleet) -> None:
    name, _ = next(iter(fleet.state.probes.items()))
    fleet.report("n2", ProbeFinished(probe=name, ok=False, started=True, detail="out of memory"))


def _fall_ill(fleet: CoreFleet) -> None:
    fleet.raise_finding("n2", HUNG)


def _show_something_else(fleet: CoreFleet) -> None:
    fleet.advance(180.0, *EVERYONE)  # ports have a while after the boot
    fleet.raise_finding("n2", port_down())


def _be_evicted_by_a_person(fleet: CoreFleet) -> None:
    fleet.order(OperatorAction.EVICT, node="n2")


@pytest.mark.promise("remediation-caps")
@pytest.mark.parametrize("again", [_fall_ill, _show_something_else, _be_evicted_by_a_person])
def test_relapse_requests_no_second_remediation(again: object) -> None:
    fleet = _back_while_a_reset_is_under_way()
    assert callable(again)
    again(fleet)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.advance(130.0, *EVERYONE)
    assert [one.kind for one in _cures(fleet)] == [RemediationKind.RESET_GPU]


def test_failed_diagnostic_requests_no_second_remediation() -> None:
    fleet = _fleet()
    fleet.solos = False
    fleet.raise_finding("n2", HUNG)
    fleet.resume(step=40)
    fleet.advance(1.5, *EVERYONE)
    fleet.clear_finding("n2", HUNG.key)
    fleet.advance(2.5, *EVERYONE)
    _fail_a_probe(fleet)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.raise_finding("n2", HUNG)
    fleet.advance(130.0, *EVERYONE)
    assert [one.kind for one in _cures(fleet)] == [RemediationKind.RESET_GPU]


def test_relapse_waits_for_reset_then_takes_next_step() -> None:
    fleet = _back_while_a_reset_is_under_way()
    _fall_ill(fleet)
    (reset,) = _cures(fleet)
    fleet.feed(RemediationFinished(remediation_id=reset.id, node="n2", succeeded=True, trace=fleet.trace()))
    fleet.advance(3.0, *EVERYONE)
    assert [one.kind for one in _cures(fleet)] == [RemediationKind.RESET_GPU]  # its causes have a moment to clear
    fleet.advance(130.0, *EVERYONE)
    assert [one.kind for one in _cures(fleet)] == [RemediationKind.RESET_GPU, RemediationKind.REBOOT]


def test_relapse_during_reset_uses_no_ladder_step() -> None:
    fleet = _back_while_a_reset_is_under_way()
    _fall_ill(fleet)
    (reset,) = _cures(fleet)
    fleet.feed(RemediationFinished(remediation_id=reset.id, node="n2", succeeded=True, trace=fleet.trace()))
    fleet.clear_finding("n2", HUNG.key)
    fleet.order(OperatorAction.READMIT, node="n2")
    fleet.advance(1.0, *EVERYONE)
    for node in next(iter(fleet.state.probes.values())).nodes:
        fleet.probe_result(node)
    fleet.advance(60.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    _fall_ill(fleet)
    fleet.advance(130.0, *EVERYONE)
    assert _cures(fleet)[1].kind is RemediationKind.REBOOT


def test_relapse_keeps_required_diagnostics() -> None:
    fleet = _back_while_a_reset_is_under_way()
    _show_something_else(fleet)
    course = fleet.state.nodes["n2"].quarantine.plan
    assert course is not None
    assert course.required_diagnostics == OF_GPUS


def test_operator_eviction_keeps_causes_and_diagnostics() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", HUNG)
    fleet.order(OperatorAction.EVICT, node="n2")
    record = fleet.state.nodes["n2"]
    assert (record.state, record.quarantine.needs_operator, record.quarantine.causes) == (
        NodeState.QUARANTINED,
        True,
        [HUNG.key],
    )
    fleet.clear_finding("n2", HUNG.key)
    fleet.resume(step=40)
    fleet.advance(300.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert _cures(fleet) == []
    fleet.solos = False
    fleet.order(OperatorAction.READMIT, node="n2")
    assert record.quarantine.plan is not None
    assert tuple(record.quarantine.plan.remaining_diagnostics) == OF_GPUS


def test_outbreak_does_not_undo_operator_eviction() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", HUNG)
    fleet.order(OperatorAction.EVICT, node="n2")
    for node in ("n3", "n4", "n5"):
        fleet.raise_finding(node, HUNG)
    assert fleet.state.outbreaks
    assert fleet.node_state("n2") is NodeState.QUARANTINED
