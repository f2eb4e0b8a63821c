"""The list of matters that need a person: everything that no automatic action will settle, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, Severity
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.operator import Need
from everstep_controller.core.events import OperatorAction, RemediationFinished
from everstep_controller.core.needs import CLEARING_PATIENCE_S, FAILED_JOB_S, LOST_PATIENCE_S, list_needs
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import StallNotice
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import uncorrectable_ecc, xid

DOUBLE_BIT = msgspec.structs.replace(uncorrectable_ecc(), since=1_699_999_900.0)
OBSERVED = msgspec.structs.replace(DOUBLE_BIT, mode=Mode.OBSERVE)


def _fleet(nodes: int = 40, **knobs: Any) -> CoreFleet:
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}).with_values(**knobs))
    fleet.register(*(f"n{number}" for number in range(1, nodes + 1)))
    return fleet


def _needs(fleet: CoreFleet) -> list[Need]:
    return list_needs(fleet.state, fleet.now)


def _kinds(fleet: CoreFleet) -> list[tuple[str, str]]:
    return [(need.kind, need.subject) for need in _needs(fleet)]


def _finish_remediation(fleet: CoreFleet, node: str, *, dry_run: bool) -> None:
    cordon = fleet.state.nodes[node].scheduling.cordon_id
    fleet.feed(RemediationFinished(remediation_id=cordon, node=node, succeeded=True, detail="", dry_run=dry_run))


def test_fleet_without_faults_has_no_needs() -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", msgspec.structs.replace(uncorrectable_ecc(), severity=Severity.WARNING))
    fleet.join("n1", "n2", min_nodes=2, max_nodes=2)
    assert _needs(fleet) == []


def test_eviction_deferred_for_a_job_names_node_gpu_and_job() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.state.nodes["n1"].identity.gpus = (
        Gpu(index=3, uuid="GPU-0", name="H100", memory_bytes=1, pci_bus_id="0000:1b:00", serial=""),
    )
    fleet.raise_finding("n1", DOUBLE_BIT)
    (need,) = _needs(fleet)
    assert (need.kind, need.subject, need.node) == ("deferred_eviction", "n1", "n1")
    assert (need.gpu, need.finding, need.since) == ("3", "gpu.ecc_uncorrectable", DOUBLE_BIT.since)
    assert need.reason.startswith("n1 serves with gpu.ecc_uncorrectable on GPU 3 (an uncorrectable error); it is not ")
    assert need.reason.endswith("job job needs 2 nodes and 1 would be left")
    assert need.command == "everstep node evict n1 --reason WHY"


def test_breaker_and_the_evictions_it_defers_are_listed() -> None:
    fleet = _fleet(budget={"count": 1})
    for number, node in enumerate(("n1", "n2")):
        fleet.raise_finding(node, xid(100 + number))
    kinds = _kinds(fleet)
    assert ("breaker", "fleet") in kinds
    assert ("deferred_eviction", "n2") in kinds


def test_critical_finding_that_is_only_observed_is_listed() -> None:
    fleet = _fleet()
    fleet.raise_finding("n7", OBSERVED)
    (need,) = _needs(fleet)
    assert (need.kind, need.subject, need.finding) == ("critical_finding", "n7", "gpu.ecc_uncorrectable")
    assert need.reason.endswith("nothing is done about it: rule gpu.ecc_uncorrectable may only observe")
    assert need.command == "everstep node drain n7 --reason WHY"
    fleet.clear_finding("n7", OBSERVED.key)
    assert _needs(fleet) == []


def test_finding_that_an_operator_accepted_is_not_listed() -> None:
    fleet = _fleet()
    fleet.raise_finding("n7", OBSERVED)
    fleet.order(OperatorAction.DRAIN, node="n7")
    assert _needs(fleet) == []
    fleet.order(OperatorAction.READMIT, node="n7")
    assert fleet.node_state("n7") is NodeState.HEALTHY
    assert _needs(fleet) == []


def test_finding_dealt_with_by_a_rank_restart_is_not_listed() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.raise_finding("n1", xid(45, Action.RESTART_RANK))
    assert fleet.node_state("n1") is NodeState.HEALTHY
    assert _needs(fleet) == []


def test_outbreak_is_one_need_and_not_one_per_node() -> None:
    fleet = _fleet()
    for number in range(1, 11):
        fleet.raise_finding(f"n{number}", xid())
    fleet.advance(130.0, *fleet.state.nodes)
    assert _kinds(fleet) == [("outbreak", "gpu.xid/79")]


def test_quarantine_with_a_recommended_reset_needs_a_person() -> None:
    fleet = _fleet(remediation={"mode": Mode.RECOMMEND})
    fleet.raise_finding("n3", DOUBLE_BIT)
    (need,) = _needs(fleet)
    assert (need.kind, need.subject, need.finding) == ("quarantine", "n3", "gpu.ecc_uncorrectable")
    assert "waits for a person: its next step is manual: reset gpu (remediation.mode is recommend)" in need.reason
    assert need.advice == "Take this step by hand. n3 returns by itself once its findings clear."


def test_quarantine_by_an_operator_waits_for_its_readmission() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.EVICT, node="n3")
    (need,) = _needs(fleet)
    assert (need.kind, need.command) == ("quarantine", "everstep node readmit n3 --reason WHY")
    assert need.reason.startswith("n3 waits for a person: only an operator can readmit it")


def test_quarantine_with_automatic_steps_is_no_need() -> None:
    fleet = _fleet(remediation={"mode": Mode.ENFORCE})
    fleet.raise_finding("n3", DOUBLE_BIT)
    _finish_remediation(fleet, "n3", dry_run=False)
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    assert _needs(fleet) == []


def test_dry_run_cordon_is_listed_until_the_node_returns() -> None:
    fleet = _fleet(remediation={"mode": Mode.ENFORCE})
    fleet.raise_finding("n3", DOUBLE_BIT)
    _finish_remediation(fleet, "n3", dry_run=True)
    (need,) = _needs(fleet)
    assert (need.kind, need.subject) == ("dry_run", "n3")
    assert "no system was asked to keep other work away from it (remediation_backend is dry_run)" in need.reason
    fleet.clear_finding("n3", DOUBLE_BIT.key)
    fleet.order(OperatorAction.READMIT, node="n3")
    fleet.advance(60.0, *fleet.state.nodes)
    assert fleet.node_state("n3") is NodeState.HEALTHY
    assert _needs(fleet) == []


def test_hot_gpu_is_listed_once_it_should_have_cooled() -> None:
    hot = Finding(
        kind=FindingKind.GPU_TEMPERATURE,
        subject="GPU-0",
        severity=Severity.CRITICAL,
        message="95 C",
        action=Action.DRAIN,
    )
    fleet = _fleet()
    fleet.raise_finding("n3", hot)
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    assert _needs(fleet) == []
    fleet.now += CLEARING_PATIENCE_S
    (need,) = _needs(fleet)
    assert "gpu.temperature/GPU-0 has not cleared by itself" in need.reason


def test_node_in_repair_is_listed_and_a_held_one_is_not() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.REPAIR, node="n3")
    fleet.order(OperatorAction.HOLD, node="n4")
    assert _kinds(fleet) == [("repair", "n3")]
    _finish_remediation(fleet, "n3", dry_run=True)
    assert "no system was asked to repair it" in _needs(fleet)[0].reason


def test_lost_node_is_listed_after_the_time_of_a_reboot() -> None:
    fleet = _fleet(3)
    fleet.advance(120.0, "n1", "n2")
    assert fleet.node_state("n3") is NodeState.LOST
    assert _needs(fleet) == []
    fleet.advance(LOST_PATIENCE_S, "n1", "n2")
    (need,) = _needs(fleet)
    assert (need.kind, need.command) == ("lost", "everstep node forget n3 --reason WHY")


def test_failed_job_is_listed_for_an_hour_and_stopped_never() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.raise_user_error(0)
    (need,) = _needs(fleet)
    assert (need.kind, need.job, need.severity) == ("job_failed", "job", "critical")
    fleet.now += FAILED_JOB_S
    assert _needs(fleet) == []
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.order(OperatorAction.STOP_JOB, job="job")
    assert _needs(fleet) == []


def test_paused_job_and_notices_of_running_jobs_are_listed() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    live = fleet.state.job_runtime["job"].regroup
    live.stall_notice = StallNotice(key="works", since=fleet.now, text="rank 0 works alone")
    assert _needs(fleet) == []
    live.stall_notice = StallNotice(key="x", since=fleet.now, text="rank 3 hangs again", needs_person=True)
    (need,) = _needs(fleet)
    assert (need.kind, need.job, need.severity, need.reason) == ("job_notice", "job", "warning", "rank 3 hangs again")
    fleet.leave("n1")
    assert _kinds(fleet) == [("job_paused", "job")]
