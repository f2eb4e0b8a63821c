"""A recurring fault takes the step after the last one taken, whether a rule or an operator chose that one."""

from __future__ import annotations

import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, ProbeKind, Severity
from everstep.wire.v1.directives import PauseNvml
from everstep_controller.core.effects import Effect, Remediation, RemediationKind, RequestRemediation, Send
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.health.node_state import RESET_S
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, sent
from tests.support.fleet.findings import port_down, xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
CURES = (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
RESET_ME = Finding(
    kind=FindingKind.GPU_RECOVERY_ACTION,
    subject="GPU-0",
    severity=Severity.CRITICAL,
    message="the driver wants a reset",
    action=Action.RESET_GPU,
)


def _raise_until_remediated(fleet: CoreFleet, *results: bool) -> list[RemediationKind]:
    """Raise the finding on n2 and finish one remediation per result in `results`; return the requested kinds."""
    before = len(fleet.effects)
    fleet.raise_finding("n2", RESET_ME)
    fleet.resume(step=60)
    for ok in results:
        fleet.advance(5.0, *EVERYONE)
        (*_, request) = (
            effect.remediation
            for effect in fleet.effects[before:]
            if isinstance(effect, RequestRemediation) and effect.remediation.deadline
        )
        fleet.feed(
            RemediationFinished(
                remediation_id=request.id, node="n2", succeeded=ok, detail="it hangs", trace=fleet.trace()
            )
        )
    fleet.advance(5.0, *EVERYONE)
    fleet.clear_finding("n2", RESET_ME.key)
    fleet.advance(200.0, *EVERYONE)
    return _remediation_kinds(fleet.effects[before:])


def _remediation_kinds(effects: list[Effect]) -> list[RemediationKind]:
    kinds = [effect.remediation.kind for effect in effects if isinstance(effect, RequestRemediation)]
    return [kind for kind in kinds if kind in CURES]


@pytest.mark.promise("remediation-caps")
def test_recurring_fault_goes_to_repair_after_reset_and_reboot() -> None:
    fleet = CoreFleet(
        CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE}, probes={"required": False})
    )
    fleet.start(4, 1)
    fleet.seal(10)
    assert _raise_until_remediated(fleet, False, True) == [RemediationKind.RESET_GPU, RemediationKind.REBOOT]
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.restart()
    before = len(fleet.effects)
    fleet.raise_finding("n2", RESET_ME)
    fleet.advance(130.0, *EVERYONE)
    assert _remediation_kinds(fleet.effects[before:]) == [RemediationKind.REPAIR]
    assert fleet.node_state("n2") is NodeState.REPAIR


@pytest.mark.parametrize("ok", [True, False])
def test_agent_lets_go_of_nvml_for_the_reset_alone(ok: bool) -> None:
    policy = CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE, "timeout_s": 7200.0})
    fleet = CoreFleet(policy)
    fleet.start(4, 1)
    fleet.state.nodes["n2"].identity.takes_nvml_pause = True
    _raise_until_remediated(fleet, ok)
    released = [effect for effect in fleet.effects if isinstance(effect, Send) and isinstance(effect.body, PauseNvml)]
    assert [(effect.node, effect.body) for effect in released] == [
        ("n2", PauseNvml(seconds=RESET_S)),
        ("n2", PauseNvml(seconds=0.0)),
    ]


def test_agent_of_an_earlier_release_gets_no_new_directive() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE}))
    fleet.start(4, 1)
    assert RemediationKind.RESET_GPU in _raise_until_remediated(fleet, True)
    assert not sent(fleet.effects, PauseNvml)


def test_finished_remediation_does_not_undo_operator_eviction() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE}))
    fleet.start(4, 1)
    fleet.raise_finding("n2", RESET_ME)
    fleet.resume(step=60)
    fleet.advance(5.0, *EVERYONE)
    (request,) = (
        e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.kind in CURES
    )
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.feed(RemediationFinished(remediation_id=request.id, node="n2", succeeded=True, trace=fleet.trace()))
    assert fleet.state.nodes["n2"].quarantine.needs_operator
    fleet.clear_finding("n2", RESET_ME.key)
    fleet.advance(100.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED


HUNG = xid(119, Action.RESET_GPU)
OF_GPUS = (ProbeKind.MEMORY, ProbeKind.COMPUTE, ProbeKind.ALL_REDUCE)


def _fleet() -> CoreFleet:
    """Resets and reboots are carried out, and may take two hours."""
    policy = CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE, "timeout_s": 7200.0})
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
    assert [remediation.kind for remediation in _remediations(fleet)] == [RemediationKind.RESET_GPU]
    fleet.clear_finding("n2", HUNG.key)
    fleet.advance(122.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    return fleet


def _remediations(fleet: CoreFleet) -> list[Remediation]:
    asked = (effect.remediation for effect in fleet.effects if isinstance(effect, RequestRemediation))
    return [
        remediation
        for remediation in asked
        if remediation.kind in (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR)
    ]


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
    assert [remediation.kind for remediation in _remediations(fleet)] == [RemediationKind.RESET_GPU]


def test_relapse_waits_for_reset_then_takes_next_step() -> None:
    fleet = _back_while_a_reset_is_under_way()
    _fall_ill(fleet)
    (reset,) = _remediations(fleet)
    fleet.feed(RemediationFinished(remediation_id=reset.id, node="n2", succeeded=True, trace=fleet.trace()))
    fleet.advance(3.0, *EVERYONE)
    # the causes of the finding have a moment to clear
    assert [remediation.kind for remediation in _remediations(fleet)] == [RemediationKind.RESET_GPU]
    fleet.advance(130.0, *EVERYONE)
    assert [remediation.kind for remediation in _remediations(fleet)] == [
        RemediationKind.RESET_GPU,
        RemediationKind.REBOOT,
    ]


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
    assert _remediations(fleet) == []
    fleet.pass_solo_diagnostics = False
    fleet.order(OperatorAction.READMIT, node="n2")
    assert record.quarantine.plan is not None
    assert tuple(record.quarantine.plan.remaining_diagnostics) == OF_GPUS
