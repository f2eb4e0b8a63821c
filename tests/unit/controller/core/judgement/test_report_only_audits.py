"""Jobs whose audits only report: a finding and an event, and no eviction."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.ids import Version
from everstep.vocabulary import AuditKind, Mode, NodeState, Severity
from everstep.wire.v1.training import JobSpec
from everstep_controller.core.effects import Effect
from everstep_controller.core.judgement.audit_reports import REPORT_KEY
from everstep_controller.core.needs import list_needs
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences

BAD = ("bad", "bad", "good", "good")
SUSPICION: dict[str, Any] = {"audit": AuditKind.GRADIENT_NORM, "unit": "gradients", "expects_arbiter": False}
OWN: dict[str, Any] = {"audit": AuditKind.MATMUL, "unit": "layers.3", "expects_arbiter": False}


def _fleet(nodes: int = 4) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, 1, sdc="standard", sdc_mode="report")
    fleet.progress(2)
    fleet.seal(2)
    return fleet


def _severity(fleet: CoreFleet, node: str) -> Severity | None:
    finding = fleet.state.nodes[node].health.controller_findings.get(REPORT_KEY)
    return None if finding is None else finding.severity


def _is_left_alone(fleet: CoreFleet, effects: list[Effect]) -> bool:
    strikes = any(record.audits.strikes for record in fleet.state.nodes.values())
    return not (decisions(effects) or generations(effects) or strikes or fleet.job().failures.recomputed_steps)


def test_refuted_owner_is_reported_and_stays() -> None:
    fleet = _fleet()
    effects = fleet.audit(2, 40, *BAD)
    assert _is_left_alone(fleet, effects)
    assert fleet.node_state("n3") is NodeState.HEALTHY
    (sentence,) = logged_sentences(effects, "audit.reported")
    assert "n4 and n1 agree on another result" in sentence
    assert "--sdc-mode enforce" in sentence
    finding = fleet.state.nodes["n3"].health.controller_findings[REPORT_KEY]
    assert (finding.severity, finding.mode) == (Severity.CRITICAL, Mode.OBSERVE)
    assert [need.node for need in list_needs(fleet.state, fleet.now)] == ["n3"], "a person should look at it"


def test_one_contradiction_is_a_warning_and_the_second_critical() -> None:
    fleet = _fleet()
    effects = fleet.audit(2, 40, "a", "b", **OWN)
    assert _is_left_alone(fleet, effects)
    assert _severity(fleet, "n3") is Severity.WARNING
    effects = fleet.audit(2, 48, "a", "b", **OWN)
    assert _is_left_alone(fleet, effects)
    assert _severity(fleet, "n3") is Severity.CRITICAL


def test_frequent_differences_are_one_event() -> None:
    fleet = _fleet()
    for step in range(40, 120, 8):
        fleet.audit(2, step, *BAD)
        fleet.audit(1, step, "", "", **SUSPICION)
    assert len(logged_sentences(fleet.effects, "audit.reported")) <= 3
    assert _is_left_alone(fleet, fleet.effects[-1:])


def test_open_case_holds_no_commit_and_undoes_no_step() -> None:
    fleet = _fleet()
    live = fleet.state.job_runtime["job"]
    step = live.commits.candidate_step or 0
    fleet.state_result(2, 2, step, original="bad", digest="bad", expects_arbiter=True)
    fleet.progress(step)
    fleet.seal(step)
    assert live.commits.committed_version == Version(1, step)
    fleet.lose_rank(2)
    assert not logged_sentences(fleet.effects, "corruption.unresolved_audit")
    assert fleet.spec().restore.floor == Version(1, step)


def test_programs_fault_switches_the_audit_off_in_report_mode() -> None:
    fleet = _fleet()
    for rank in range(4):
        fleet.audit(rank, 40, "a", "b", settle=False, **OWN)
    assert AuditKind.MATMUL in fleet.job().audits.off
    assert _severity(fleet, "n1") is None


@pytest.mark.parametrize(("mode", "slots"), [("report", 0), ("enforce", 2)])
def test_only_enforcing_audits_keep_versions(mode: str, slots: int) -> None:
    assert JobSpec(job="j", sdc="standard", sdc_mode=mode).pinned_slots == slots  # type: ignore[arg-type]


def test_older_launchers_enforce() -> None:
    assert JobSpec(job="j", sdc="standard").sdc_mode == "enforce"


def test_same_gradients_on_another_node_clear_the_suspect() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1, sdc="standard")
    fleet.progress(2)
    fleet.seal(2)
    fleet.audit(2, 3, "", "", **SUSPICION)
    assert fleet.seats() == ["n1", "n2", "n4", "n3"], "n3 computes other samples now"
    fleet.resume(restored=Version(1, 2), step=3)
    words = "another node got the same gradients from the samples of rank 2"
    effects = fleet.audit(3, 3, "7.5", "7.5", difference=words, **SUSPICION)
    sentence = f"a suspicion against n3 was withdrawn: {words} in gradients of step 3"
    assert logged_sentences(effects, "audit.suspicion_withdrawn") == [sentence]
    assert fleet.job().audits.withdrawn == [sentence]
    assert not generations(effects)
    assert not decisions(effects)
