"""What is asked of the outside: cordons that follow, cures one after the other and under caps, repair with evidence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.effects import Effect, Remediation, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.health.offences import collect_evidence
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, ProbeKind, Severity
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from tests.support.core_fleet import CoreFleet, audits, decisions, sent
from tests.support.findings import port_down, xid

EVERYONE = [f"n{i}" for i in range(1, 6)]
HEALTHY = {"n1", "n3", "n4", "n5"}
RESERVE_S = 121.0
"""In which an eviction may still be taken back, so that nobody is given to people."""


def _fleet(**knobs: Any) -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), **({"remediation_mode": Mode.ENFORCE} | knobs)))
    fleet.start(4, 1)
    fleet.seal(10)
    return fleet


def _asked(effects: list[Effect]) -> list[Remediation]:
    return [effect.remediation for effect in effects if isinstance(effect, RequestRemediation)]


def _kinds(effects: list[Effect]) -> list[str]:
    return [str(remedy.kind) for remedy in _asked(effects)]


def _leave_jobs(fleet: CoreFleet) -> list[Effect]:
    """The boundary is crossed and every rank of the next generation steps; a moment passes."""
    before = len(fleet.effects)
    fleet.resume(step=40)
    fleet.advance(1.5, *EVERYONE)
    return fleet.effects[before:]


def _report(fleet: CoreFleet, kind: RemediationKind, *, ok: bool = True, detail: str = "") -> list[Effect]:
    """The newest remedy of the kind has ended."""
    before = len(fleet.effects)
    remedy = next(one for one in reversed(_asked(fleet.effects)) if one.kind is kind)
    fleet.feed(
        RemediationFinished(
            remediation_id=remedy.id, node=remedy.node, succeeded=ok, detail=detail, trace=fleet.trace()
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


def _hung(cure: Action = Action.RESET_GPU) -> Finding:
    return xid(119, cure)


def _reset_due() -> CoreFleet:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung())
    assert _kinds(_leave_jobs(fleet)) == ["reset_gpu"]
    return fleet


# --- cordons -----------------------------------------------------------------------------------------------------


def test_evicted_node_is_cordoned_then_uncordoned_when_healthy() -> None:
    fleet = _fleet(remediation_mode=Mode.RECOMMEND)
    cordon = _asked(fleet.raise_finding("n2", xid()))
    assert [(one.kind, one.node, one.verdict_id) for one in cordon] == [(RemediationKind.CORDON, "n2", "n2-1")]
    fleet.clear_finding("n2", xid().key)
    assert _kinds(_through_probation(fleet)) == ["uncordon"]
    ids = [one.id for one in _asked(fleet.effects)]
    assert len(set(ids)) == len(ids)


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
    assert "the scheduler is away" in audits(fleet.effects, "remediation.failed")[-1]
    assert _kinds(fleet.order(OperatorAction.REPAIR, node="n2")) == ["cordon", "repair"]
    _report(fleet, RemediationKind.CORDON, ok=False, detail="the scheduler is away")
    assert _kinds(_readmitted(fleet)) == ["uncordon"]


def test_repaired_node_is_uncordoned_after_failed_cordon() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.REPAIR, node="n2")
    _report(fleet, RemediationKind.CORDON, ok=False, detail="the scheduler does not answer")
    _report(fleet, RemediationKind.REPAIR)
    assert _kinds(_readmitted(fleet)) == ["uncordon"]


def test_remediation_ids_contain_the_controller_epoch() -> None:
    fleet = _fleet()
    fleet.state.epoch = 7
    assert _asked(fleet.order(OperatorAction.HOLD, node="n2"))[0].id.startswith("remediation-7-")


# --- the ladder --------------------------------------------------------------------------------------------------


@pytest.mark.promise("remediation-caps")
def test_remediation_starts_after_node_has_left_its_jobs() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung())
    fleet.advance(0.2, *EVERYONE)
    assert "reset_gpu" not in _kinds(fleet.effects)
    reset = _asked(_leave_jobs(fleet))
    assert [one.kind for one in reset] == [RemediationKind.RESET_GPU]
    assert reset[0].gpu_uuids == ("GPU-n2",)
    assert reset[0].verdict_id == "n2-1"


def test_successful_remediation_leads_to_diagnostics() -> None:
    fleet = _reset_due()
    fleet.solos = False
    _report(fleet, RemediationKind.RESET_GPU)
    before = len(fleet.effects)
    fleet.clear_finding("n2", _hung().key)
    fleet.advance(2.5, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert sent(fleet.effects[before:], RunProbe)["n2"].kind is ProbeKind.MEMORY


def test_recovered_node_waits_for_pending_remediation() -> None:
    fleet = _reset_due()
    fleet.clear_finding("n2", _hung().key)
    fleet.advance(2.5, *EVERYONE)
    for node in next(iter(fleet.state.probes.values())).nodes:
        fleet.probe_result(node)
    fleet.advance(CorePolicy.lab_preset().remediation_timeout_s + 5.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    _report(fleet, RemediationKind.RESET_GPU)
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_remediation_request_carries_its_deadline() -> None:
    fleet = _reset_due()
    (reset,) = (remedy for remedy in _asked(fleet.effects) if remedy.kind is RemediationKind.RESET_GPU)
    course = fleet.state.nodes["n2"].quarantine.plan
    assert course is not None
    assert reset.deadline == course.remediation_deadline == reset.at + fleet.policy.remediation_timeout_s


def test_remediation_refers_to_the_evicting_verdict() -> None:
    """The node that has to leave at the boundary is in a tie of digests before it does."""
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), remediation_mode=Mode.ENFORCE))
    fleet.solos = False
    fleet.start(2, 1)
    fleet.seal(10)
    assert decisions(fleet.raise_finding("n2", _hung())) == [("n2", "evict")]
    tie = fleet.seal(20, digests={0: "a", 1: "b"})
    assert ("n2", "no_action") in decisions(tie)
    assert not any("n2 is suspected and stays in service" in sentence for sentence in audits(tie, "verdict.no_action"))
    fleet.resume(step=40)
    fleet.advance(2.5, *EVERYONE[:3])
    (reset,) = (remedy for remedy in _asked(fleet.effects) if remedy.kind is RemediationKind.RESET_GPU)
    assert reset.verdict_id == "n2-1"


def test_unreported_remediation_leads_to_next_step() -> None:
    fleet = _reset_due()
    assert _kinds(fleet.advance(31.0, *EVERYONE)) == ["reboot"]


@pytest.mark.promise("remediation-caps")
def test_last_ladder_step_is_repair_with_evidence() -> None:
    fleet = _reset_due()
    _report(fleet, RemediationKind.RESET_GPU, ok=False, detail="busy")
    assert _asked(_report(fleet, RemediationKind.REBOOT, ok=False, detail="no power")) == []
    repair = _asked(fleet.advance(RESERVE_S, *EVERYONE))
    assert fleet.node_state("n2") is NodeState.REPAIR
    assert ("n2", "repair") in decisions(fleet.effects)
    assert [one.kind for one in repair] == [RemediationKind.REPAIR]
    evidence = repair[0].evidence
    assert evidence is not None
    assert [finding.xid for finding in evidence.findings] == [119]
    assert [note.kind for note in evidence.history].count("action") >= 4


def test_recurring_fault_takes_next_step() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung())
    _leave_jobs(fleet)
    _report(fleet, RemediationKind.RESET_GPU)
    fleet.clear_finding("n2", _hung().key)
    fleet.order(OperatorAction.READMIT, node="n2")
    fleet.probe_result("n1")
    fleet.probe_result("n2")
    fleet.advance(61.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    before = len(fleet.effects)
    fleet.raise_finding("n2", _hung())
    fleet.advance(1.5, *EVERYONE)
    assert "reboot" in _kinds(fleet.effects[before:])


def test_strongest_action_of_several_causes_is_taken() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung())
    fleet.raise_finding("n2", msgspec.structs.replace(xid(79, Action.DRAIN), subject="GPU-1"))
    assert _kinds(_leave_jobs(fleet)) == ["reboot"]


def test_ladder_continues_after_controller_restart() -> None:
    fleet = _reset_due()
    fleet.restart()
    assert _kinds(_report(fleet, RemediationKind.RESET_GPU, ok=False, detail="busy")) == ["reboot"]


def test_wrong_memory_probe_leads_to_reset_and_retry() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.resume(step=40)
    fleet.state.nodes["n2"].quarantine.plan.required_diagnostics = (ProbeKind.MEMORY,)  # type: ignore[union-attr]
    fleet.solos = False
    fleet.order(OperatorAction.READMIT, node="n2")
    name = next(iter(fleet.state.probes))
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
    fleet.clear_finding("n2", _hung().key)
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is not NodeState.PROBATION
    assert fleet.state.nodes["n2"].quarantine.needs_operator


def test_remediation_skips_node_evicted_by_operator() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n2")
    fleet.raise_finding("n2", _hung())
    fleet.resume(step=40)
    fleet.advance(5.0, *EVERYONE)
    assert _kinds(fleet.effects) == ["cordon"]
    assert "an operator took n2 out" in audits(fleet.effects, "remediation.blocked")[-1]


# --- caps --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("remediation-caps")
def test_remediation_limit_per_node_leads_to_repair() -> None:
    fleet = _fleet(remediations_per_node=1)
    fleet.raise_finding("n2", _hung())
    _leave_jobs(fleet)
    _report(fleet, RemediationKind.RESET_GPU, ok=False, detail="busy")
    assert _kinds(fleet.advance(RESERVE_S, *EVERYONE)) == ["repair"]
    assert "it was reset or rebooted 1 times within 7 days" in fleet.state.nodes["n2"].sentence


@pytest.mark.promise("remediation-caps")
def test_remediation_limit_of_fleet_delays_and_is_reported_once() -> None:
    fleet = _fleet(remediations_per_fleet=1, remediation_fleet_window_s=60.0)
    fleet.raise_finding("n2", _hung())
    _leave_jobs(fleet)
    fleet.raise_finding("n3", _hung())
    fleet.resume(step=60)
    before = len(fleet.effects)
    fleet.advance(20.0, *EVERYONE)
    assert _kinds(fleet.effects[before:]) == []
    assert len(audits(fleet.effects, "remediation.blocked")) == 1
    fleet.advance(45.0, *EVERYONE)
    assert next((one.kind, one.node) for one in _asked(fleet.effects[before:])) == (RemediationKind.RESET_GPU, "n3")


def test_remediation_waits_for_database() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", _hung())
    fleet.state.database_outage = "no route"
    assert _kinds(_leave_jobs(fleet)) == []
    fleet.state.database_outage = ""
    fleet.advance(5.0, *EVERYONE)


# --- diagnostics -------------------------------------------------------------------------------------------------


def _on_probation(finding: Finding) -> CoreFleet:
    fleet = _fleet(remediation_mode=Mode.RECOMMEND)
    fleet.raise_finding("n2", finding)
    fleet.resume(step=40)
    fleet.solos = False
    fleet.clear_finding("n2", finding.key)
    fleet.advance(2.5, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    return fleet


def _pass(fleet: CoreFleet) -> ProbeKind:
    """The node passes the diagnostic that it is at."""
    name, probe = next(iter(fleet.state.probes.items()))
    for node in probe.nodes:
        fleet.report(node, ProbeFinished(probe=name, ok=True))
    return probe.kind


@pytest.mark.promise("probation")
def test_probation_runs_the_required_diagnostics_repeatedly() -> None:
    ecc = msgspec.structs.replace(_hung(), kind=FindingKind.GPU_ECC_UNCORRECTABLE, xid=None)
    fleet = _on_probation(ecc)
    fleet.advance(4.0, *EVERYONE)
    passed = []
    while fleet.state.probes:
        assert fleet.node_state("n2") is NodeState.PROBATION
        passed.append(_pass(fleet))
    assert passed == [ProbeKind.MEMORY, ProbeKind.COMPUTE, ProbeKind.ALL_REDUCE] * 2
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_wrong_compute_probe_keeps_node_out_until_gpu_replaced() -> None:
    fleet = _on_probation(_hung())
    _pass(fleet)
    name = next(iter(fleet.state.probes))
    said = decisions(fleet.report("n2", ProbeFinished(probe=name, ok=False, wrong_result=True, detail="1 place")))
    assert said == [("n2", "quarantine")]
    fleet.advance(300.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    new = Gpu(index=0, uuid="GPU-new", name="virtual", pci_bus_id="0", memory_bytes=1)
    fleet.register("n2", gpus=(new,))
    fleet.advance(1.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_failed_diagnostic_without_result_is_retried() -> None:
    fleet = _on_probation(_hung())
    name = next(iter(fleet.state.probes))
    said = decisions(fleet.report("n2", ProbeFinished(probe=name, ok=False, started=True, detail="out of memory")))
    assert said == [("n2", "quarantine")]
    fleet.advance(2.5, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert next(iter(fleet.state.probes.values())).kind is ProbeKind.MEMORY


def test_quarantine_requires_cause_clear_for_rule_time() -> None:
    fleet = _fleet(remediation_mode=Mode.RECOMMEND)
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


def test_many_returning_nodes_take_turns_with_partners() -> None:
    fleet = CoreFleet()
    fleet.register(*[f"m{i}" for i in range(8)])
    for i in range(1, 8):
        fleet.disconnect(f"m{i}")
    fleet.advance(40.0, "m0")
    for i in range(1, 8):
        fleet.hear(f"m{i}")
    for _ in range(200):
        pairs = [probe for probe in fleet.state.probes.values() if len(probe.nodes) == 2]
        members = [node for probe in pairs for node in probe.nodes]
        assert len(members) == len(set(members))
        if not pairs and all(fleet.node_state(f"m{i}") is NodeState.HEALTHY for i in range(8)):
            return
        if pairs:
            _pass(fleet)
        fleet.advance(1.0, *[f"m{i}" for i in range(8)])
    raise AssertionError("not all came back")


# --- dry runs ----------------------------------------------------------------------------------------------------


def _dry_run(fleet: CoreFleet, kind: RemediationKind) -> list[Effect]:
    """The newest remedy of the kind was only written to the log."""
    before = len(fleet.effects)
    remedy = next(one for one in reversed(_asked(fleet.effects)) if one.kind is kind)
    fleet.feed(
        RemediationFinished(
            remediation_id=remedy.id, node=remedy.node, succeeded=True, dry_run=True, trace=fleet.trace()
        )
    )
    fleet.advance(0.01, *EVERYONE)
    return fleet.effects[before:]


def test_evidence_marks_a_dry_run() -> None:
    fleet = _reset_due()
    effects = _dry_run(fleet, RemediationKind.RESET_GPU)
    (said,) = audits(effects, "remediation.confirmed")
    assert said == "reset gpu of n2 would have been carried out (dry run: nothing was done)"
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
    effects = fleet.advance(fleet.policy.remediation_settle_s + 1.0, *EVERYONE)
    (said,) = audits(effects, "remediation.failed")
    assert said == "reset gpu of n2 was only a dry run, but the finding is still active"
