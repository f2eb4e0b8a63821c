"""Node states and remediation: cordons, a ladder of actions under limits, and repair with evidence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, ProbeKind, Severity
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.effects import Effect, Remediation, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.health.offences import collect_evidence
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import port_down, xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
HEALTHY = {"n1", "n3", "n4", "n5"}
RESERVE_S = 121.0
"""Seconds during which an outbreak may still roll back an eviction, so that no remediation starts."""


def _fleet(**knobs: Any) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE}).with_values(**knobs))
    fleet.start(4, 1)
    fleet.seal(10)
    return fleet


def _remediations(effects: list[Effect]) -> list[Remediation]:
    return [effect.remediation for effect in effects if isinstance(effect, RequestRemediation)]


def _kinds(effects: list[Effect]) -> list[str]:
    return [str(remediation.kind) for remediation in _remediations(effects)]


def _leave_jobs(fleet: CoreFleet) -> list[Effect]:
    """Cross the boundary, step with every rank of the next generation, and let a moment pass."""
    before = len(fleet.effects)
    fleet.resume(step=40)
    fleet.advance(1.5, *EVERYONE)
    return fleet.effects[before:]


def _report(fleet: CoreFleet, kind: RemediationKind, *, ok: bool = True, detail: str = "") -> list[Effect]:
    """Report the end of the newest remediation of the kind."""
    before = len(fleet.effects)
    remediation = next(request for request in reversed(_remediations(fleet.effects)) if request.kind is kind)
    fleet.feed(
        RemediationFinished(
            remediation_id=remediation.id, node=remediation.node, succeeded=ok, detail=detail, trace=fleet.trace()
        )
    )
    fleet.advance(0.01, *EVERYONE)
    return fleet.effects[before:]


def _through_probation(fleet: CoreFleet) -> list[Effect]:
    before = len(fleet.effects)
    fleet.advance(2.5, *EVERYONE)
    fleet.probe_result("n1")
    fleet.probe_result("n2")
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    return fleet.effects[before:]


def _readmitted(fleet: CoreFleet) -> list[Effect]:
    return [*fleet.order(OperatorAction.READMIT, node="n2"), *_through_probation(fleet)]


def _hung_gpu(action: Action = Action.RESET_GPU) -> Finding:
    return xid(119, action)


def _reset_due() -> CoreFleet:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung_gpu())
    assert _kinds(_leave_jobs(fleet)) == ["reset_gpu"]
    return fleet


def test_every_removal_cordons_except_a_lost_node() -> None:
    for order in (OperatorAction.HOLD, OperatorAction.DRAIN, OperatorAction.EVICT, OperatorAction.REPAIR):
        fleet = _fleet()
        assert _kinds(fleet.order(order, node="n2"))[0] == "cordon"
    fleet = _fleet()
    fleet.disconnect("n2")
    assert _kinds(fleet.advance(3.0, *HEALTHY)) == []
    assert fleet.node_state("n2") is NodeState.LOST


def test_failed_cordon_is_retried_and_later_undone() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.HOLD, node="n2")
    _report(fleet, RemediationKind.CORDON, ok=False, detail="the scheduler is away")
    assert "the scheduler is away" in logged_sentences(fleet.effects, "remediation.failed")[-1]
    assert _kinds(fleet.order(OperatorAction.REPAIR, node="n2")) == ["cordon", "repair"]
    _report(fleet, RemediationKind.CORDON, ok=False, detail="the scheduler is away")
    assert _kinds(_readmitted(fleet)) == ["uncordon"]


@pytest.mark.promise("remediation-caps")
def test_remediation_starts_after_node_has_left_its_jobs() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung_gpu())
    fleet.advance(0.2, *EVERYONE)
    assert "reset_gpu" not in _kinds(fleet.effects)
    reset = _remediations(_leave_jobs(fleet))
    assert [request.kind for request in reset] == [RemediationKind.RESET_GPU]
    assert reset[0].gpu_uuids == ("GPU-n2",)
    assert reset[0].verdict_id == "n2-1"


def test_recovered_node_waits_for_pending_remediation() -> None:
    fleet = _reset_due()
    fleet.clear_finding("n2", _hung_gpu().key)
    fleet.advance(2.5, *EVERYONE)
    for node in next(iter(fleet.state.diagnostics.probes.values())).nodes:
        fleet.probe_result(node)
    fleet.advance(CorePolicy.lab_preset().remediation.timeout_s + 5.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    _report(fleet, RemediationKind.RESET_GPU)
    assert fleet.node_state("n2") is NodeState.HEALTHY


@pytest.mark.promise("remediation-caps")
def test_last_ladder_step_is_repair_with_evidence() -> None:
    fleet = _reset_due()
    _report(fleet, RemediationKind.RESET_GPU, ok=False, detail="busy")
    assert _remediations(_report(fleet, RemediationKind.REBOOT, ok=False, detail="no power")) == []
    repair = _remediations(fleet.advance(RESERVE_S, *EVERYONE))
    assert fleet.node_state("n2") is NodeState.REPAIR
    assert ("n2", "repair") in decisions(fleet.effects)
    assert [request.kind for request in repair] == [RemediationKind.REPAIR]
    evidence = repair[0].evidence
    assert evidence is not None
    assert [finding.xid for finding in evidence.findings] == [119]
    assert [note.kind for note in evidence.history].count("action") >= 4


def test_strongest_action_of_several_causes_is_taken() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung_gpu())
    fleet.raise_finding("n2", msgspec.structs.replace(xid(79, Action.DRAIN), subject="GPU-1"))
    assert _kinds(_leave_jobs(fleet)) == ["reboot"]


def test_wrong_memory_probe_leads_to_reset_and_retry() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.resume(step=40)
    fleet.state.nodes["n2"].quarantine.plan.required_diagnostics = (ProbeKind.MEMORY,)  # type: ignore[union-attr]
    fleet.pass_solo_diagnostics = False
    fleet.order(OperatorAction.READMIT, node="n2")
    name = next(iter(fleet.state.diagnostics.probes))
    fleet.report("n2", ProbeFinished(probe=name, ok=False, wrong_result=True, detail="3 words"))
    fleet.advance(1.5, *EVERYONE)
    assert _kinds(fleet.effects)[-1] == "reset_gpu"
    _report(fleet, RemediationKind.RESET_GPU)
    fleet.advance(10.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_reset_does_not_readmit_divergent_node() -> None:
    fleet = _reset_due()
    finding = Finding(
        kind=FindingKind.DIGEST_MISMATCH, subject="parameters", severity=Severity.CRITICAL, message="differs"
    )
    record = fleet.state.nodes["n2"]
    record.health.controller_findings[finding.key], record.quarantine.needs_operator, record.health.defective_gpus = (
        finding,
        True,
        ["GPU-n2"],
    )
    record.quarantine.causes.append(finding.key)
    _report(fleet, RemediationKind.RESET_GPU)
    fleet.clear_finding("n2", _hung_gpu().key)
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is not NodeState.PROBATION
    assert fleet.state.nodes["n2"].quarantine.needs_operator


def test_remediation_skips_node_evicted_by_operator() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.raise_finding("n2", _hung_gpu())
    fleet.resume(step=40)
    fleet.advance(5.0, *EVERYONE)
    assert _kinds(fleet.effects) == ["cordon"]
    assert "an operator took n2 out" in logged_sentences(fleet.effects, "remediation.blocked")[-1]


@pytest.mark.promise("remediation-caps")
def test_remediation_limit_per_node_leads_to_repair() -> None:
    fleet = _fleet(remediation={"per_node": 1})
    fleet.raise_finding("n2", _hung_gpu())
    _leave_jobs(fleet)
    _report(fleet, RemediationKind.RESET_GPU, ok=False, detail="busy")
    assert _kinds(fleet.advance(RESERVE_S, *EVERYONE)) == ["repair"]
    assert "it was reset or rebooted 1 times within 7 days" in fleet.state.nodes["n2"].sentence


@pytest.mark.promise("remediation-caps")
def test_remediation_limit_of_fleet_delays_and_is_reported_once() -> None:
    fleet = _fleet(remediation={"per_fleet": 1, "fleet_window_s": 60.0})
    fleet.raise_finding("n2", _hung_gpu())
    _leave_jobs(fleet)
    fleet.raise_finding("n3", _hung_gpu())
    fleet.resume(step=60)
    before = len(fleet.effects)
    fleet.advance(20.0, *EVERYONE)
    assert _kinds(fleet.effects[before:]) == []
    assert len(logged_sentences(fleet.effects, "remediation.blocked")) == 1
    fleet.advance(45.0, *EVERYONE)
    assert next((request.kind, request.node) for request in _remediations(fleet.effects[before:])) == (
        RemediationKind.RESET_GPU,
        "n3",
    )


def test_remediation_waits_for_database() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung_gpu())
    fleet.state.database.outage = "no route"
    assert _kinds(_leave_jobs(fleet)) == []
    fleet.state.database.outage = ""
    fleet.advance(5.0, *EVERYONE)


def _on_probation(finding: Finding) -> CoreFleet:
    fleet = _fleet(remediation={"mode": Mode.RECOMMEND})
    fleet.raise_finding("n2", finding)
    fleet.resume(step=40)
    fleet.pass_solo_diagnostics = False
    fleet.clear_finding("n2", finding.key)
    fleet.advance(2.5, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    return fleet


def _pass(fleet: CoreFleet) -> ProbeKind:
    """The node passes its current diagnostic."""
    name, probe = next(iter(fleet.state.diagnostics.probes.items()))
    for node in probe.nodes:
        fleet.report(node, ProbeFinished(probe=name, ok=True))
    return probe.kind


@pytest.mark.promise("probation")
def test_probation_runs_the_required_diagnostics_repeatedly() -> None:
    ecc = msgspec.structs.replace(_hung_gpu(), kind=FindingKind.GPU_ECC_UNCORRECTABLE, xid=None)
    fleet = _on_probation(ecc)
    fleet.advance(4.0, *EVERYONE)
    passed = []
    while fleet.state.diagnostics.probes:
        assert fleet.node_state("n2") is NodeState.PROBATION
        passed.append(_pass(fleet))
    assert passed == [ProbeKind.MEMORY, ProbeKind.COMPUTE, ProbeKind.ALL_REDUCE] * 2
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_quarantine_requires_cause_clear_for_rule_time() -> None:
    fleet = _fleet(remediation={"mode": Mode.RECOMMEND})
    fleet.advance(301.0, *EVERYONE)
    port = port_down()
    fleet.raise_finding("n2", port)
    fleet.clear_finding("n2", port.key)
    fleet.advance(30.0, *EVERYONE)
    fleet.raise_finding("n2", port)
    fleet.clear_finding("n2", port.key)
    fleet.advance(55.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.advance(6.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION


def _dry_run(fleet: CoreFleet, kind: RemediationKind) -> list[Effect]:
    """Report that the newest remediation of the kind was only logged."""
    before = len(fleet.effects)
    remediation = next(request for request in reversed(_remediations(fleet.effects)) if request.kind is kind)
    fleet.feed(
        RemediationFinished(
            remediation_id=remediation.id, node=remediation.node, succeeded=True, dry_run=True, trace=fleet.trace()
        )
    )
    fleet.advance(0.01, *EVERYONE)
    return fleet.effects[before:]


def test_evidence_marks_a_dry_run() -> None:
    fleet = _reset_due()
    effects = _dry_run(fleet, RemediationKind.RESET_GPU)
    (sentence,) = logged_sentences(effects, "remediation.confirmed")
    assert sentence == "reset gpu of n2 would have been carried out (dry run: nothing was done)"
    evidence = collect_evidence(fleet.state, "n2", fleet.now)
    actions = [note.sentence for note in evidence.history if note.kind == "action"]
    assert actions[-1].endswith("would have been carried out (dry run: nothing was done)")
    assert evidence.remediation_times == ()


def test_evidence_lists_performed_resets() -> None:
    fleet = _reset_due()
    _report(fleet, RemediationKind.RESET_GPU)
    evidence = collect_evidence(fleet.state, "n2", fleet.now)
    assert len(evidence.remediation_times) == 1
    assert "was carried out" in evidence.history[-1].sentence


def test_ineffective_dry_run_is_reported_failed() -> None:
    fleet = _reset_due()
    _dry_run(fleet, RemediationKind.RESET_GPU)
    effects = fleet.advance(fleet.policy.remediation.settle_s + 1.0, *EVERYONE)
    (sentence,) = logged_sentences(effects, "remediation.failed")
    assert sentence == "reset gpu of n2 was only a dry run, but the finding is still active"
