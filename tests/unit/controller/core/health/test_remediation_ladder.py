"""Repeats escalate: what came back takes the step after the last that was taken, whoever or whatever chose that one."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.effects import Effect, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, Severity
from tests.support.core_fleet import CoreFleet

EVERYONE = [f"n{i}" for i in range(1, 6)]
CURES = (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
RESET_ME = Finding(
    kind=FindingKind.GPU_RECOVERY_ACTION,
    subject="GPU-0",
    severity=Severity.CRITICAL,
    message="the driver wants a reset",
    action=Action.RESET_GPU,
)


def _falls_ill(fleet: CoreFleet, *cured: bool) -> list[RemediationKind]:
    """n2 shows the finding until a cure is of use, in the order of ``cured``; what was asked for. Then time passes."""
    before = len(fleet.effects)
    fleet.raise_finding("n2", RESET_ME)
    fleet.resume(step=60)
    for ok in cured:
        fleet.advance(5.0, *EVERYONE)
        (*_, cure) = (
            one.remediation
            for one in fleet.effects[before:]
            if isinstance(one, RequestRemediation) and one.remediation.deadline
        )
        fleet.feed(
            RemediationFinished(remediation_id=cure.id, node="n2", succeeded=ok, detail="it hangs", trace=fleet.trace())
        )
    fleet.advance(5.0, *EVERYONE)
    fleet.clear_finding("n2", RESET_ME.key)
    fleet.advance(200.0, *EVERYONE)
    return _cures(fleet.effects[before:])


def _cures(effects: list[Effect]) -> list[RemediationKind]:
    kinds = [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]
    return [kind for kind in kinds if kind in CURES]


@pytest.mark.promise("remediation-caps")
def test_recurring_fault_goes_to_repair_after_reset_and_reboot() -> None:
    fleet = CoreFleet(
        msgspec.structs.replace(CorePolicy.lab_preset(), remediation_mode=Mode.ENFORCE, probe_required=False)
    )
    fleet.start(4, 1)
    fleet.seal(10)
    assert _falls_ill(fleet, False, True) == [RemediationKind.RESET_GPU, RemediationKind.REBOOT]
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.restart()
    before = len(fleet.effects)
    fleet.raise_finding("n2", RESET_ME)
    fleet.advance(130.0, *EVERYONE)
    assert _cures(fleet.effects[before:]) == [RemediationKind.REPAIR]
    assert fleet.node_state("n2") is NodeState.REPAIR


def test_remediation_waits_until_node_has_no_seat() -> None:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), remediation_mode=Mode.ENFORCE))
    fleet.start(4, 1)
    fleet.progress(5)
    fleet.raise_finding("n2", RESET_ME)
    assert fleet.job().outgoing_generation is not None
    still_seated = fleet.advance(
        fleet.state.job_runtime["job"].regroup.boundary_fallback_at - fleet.now - 0.01, *EVERYONE
    )
    assert _cures(still_seated) == []
    fleet.resume(step=60)
    assert _cures(fleet.advance(2.0, *EVERYONE)) == [RemediationKind.RESET_GPU]


def test_finished_remediation_does_not_undo_operator_eviction() -> None:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), remediation_mode=Mode.ENFORCE))
    fleet.start(4, 1)
    fleet.raise_finding("n2", RESET_ME)
    fleet.resume(step=60)
    fleet.advance(5.0, *EVERYONE)
    (cure,) = (
        e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.kind in CURES
    )
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.feed(RemediationFinished(remediation_id=cure.id, node="n2", succeeded=True, trace=fleet.trace()))
    assert fleet.state.nodes["n2"].quarantine.needs_operator
    fleet.clear_finding("n2", RESET_ME.key)
    fleet.advance(100.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
