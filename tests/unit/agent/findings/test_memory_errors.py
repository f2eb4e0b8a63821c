"""One uncorrectable memory error is judged once: contained errors wait for the end of the job."""

from __future__ import annotations

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_agent.drivers.gpu_samples import XidEvent
from everstep_agent.findings.assessment import AssessorState
from everstep_agent.findings.memory_errors import EXPLAINS_S, SETTLE_S, Containment, MemoryErrors
from tests.support.agents.sensors import BUS, TimedAssessor, gpu

DOUBLE_BIT = f"NVRM: Xid (PCI:{BUS}): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error Detected"
REMAPPED = f"NVRM: Xid (PCI:{BUS}): 63, pid=1, Row Remapper: New row (0x12a3c1) marked for remapping."
CONTAINED = f"NVRM: Xid (PCI:{BUS}): 94, pid=7194, name=python3, Contained: CE User Channel (0x9). RST: No, D-RST: No"
UNCONTAINED = f"NVRM: Xid (PCI:{BUS}): 95, pid=7062, name=python3, Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No"
DRAIN = f"NVRM: Xid (PCI:{BUS}): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
RESET = f"NVRM: Xid (PCI:{BUS}): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


def evicting(judge: TimedAssessor) -> set[str]:
    """Return the keys of the findings that make the controller act now."""
    return {finding.key for finding in judge.assessor.findings if finding.severity is Severity.CRITICAL}


def found(judge: TimedAssessor, key: str) -> Finding:
    return next(finding for finding in judge.assessor.findings if finding.key == key)


ECC = f"{FindingKind.GPU_ECC_UNCORRECTABLE}/{BUS}"


@pytest.mark.parametrize(
    "lines", [(CONTAINED,), (DOUBLE_BIT, REMAPPED, CONTAINED), (CONTAINED, DOUBLE_BIT), (REMAPPED,)]
)
def test_contained_error_evicts_by_no_door(lines: tuple[str, ...]) -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(*lines)
    for _ in range(30):
        judge.polls(1, gpu(ecc_uncorrected=1, recovery_action=4))
        judge.lines(DRAIN)
        assert evicting(judge) == set()
    finding = found(judge, ECC)
    assert (finding.severity, finding.action, finding.mode) == (Severity.WARNING, Action.RESET_GPU, Mode.RECOMMEND)


def test_count_before_its_contained_xid_does_not_evict() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.polls(1, gpu(ecc_uncorrected=1))
    assert evicting(judge) == set()
    judge.lines(CONTAINED)
    judge.polls(20, gpu(ecc_uncorrected=1))
    assert evicting(judge) == set()


def test_contained_xid_of_nvml_counts_too() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.assessor.process_xid_events([XidEvent(pci_bus_id=BUS, xid=94, source="nvml")], judge.now())
    judge.polls(20, gpu(ecc_uncorrected=1))
    assert evicting(judge) == set()


def test_uncontained_error_evicts_at_once() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(DOUBLE_BIT, REMAPPED, UNCONTAINED)
    assert evicting(judge) == {f"gpu.xid/{BUS}/48", f"gpu.xid/{BUS}/95"}
    judge.polls(1, gpu(ecc_uncorrected=1))
    assert ECC in evicting(judge)


def test_error_without_companions_evicts_after_settling() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(DOUBLE_BIT)
    judge.polls(2, gpu(ecc_uncorrected=1))
    assert evicting(judge) == set()
    judge.polls(3, gpu(ecc_uncorrected=1))
    assert evicting(judge) == {f"gpu.xid/{BUS}/48", ECC}


def test_later_error_of_a_contained_gpu_evicts() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(CONTAINED)
    judge.polls(int(EXPLAINS_S) + 60, gpu(ecc_uncorrected=1))
    assert evicting(judge) == set()
    judge.polls(6, gpu(ecc_uncorrected=2))
    assert evicting(judge) == {ECC}


def test_required_reset_of_a_contained_error_evicts() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(CONTAINED, RESET)
    assert f"gpu.recovery_action/{BUS}" in evicting(judge)


def test_contained_gpu_stays_contained_across_a_restart() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(DOUBLE_BIT, CONTAINED)
    judge.polls(2, gpu(ecc_uncorrected=1))
    saved = msgspec.json.decode(msgspec.json.encode(judge.assessor.export_state()), type=AssessorState)
    again = TimedAssessor(memory=saved)
    assert {finding.key for finding in again.assessor.findings} >= {ECC, f"gpu.xid/{BUS}/48"}
    assert evicting(again) == set()
    again.polls(20, gpu(ecc_uncorrected=1))
    assert evicting(again) == set()


def test_reset_forgets_contained_errors() -> None:
    judge = TimedAssessor()
    judge.polls(2, gpu(ecc_uncorrected=0, energy_j=500.0))
    judge.lines(CONTAINED)
    judge.polls(1, gpu(ecc_uncorrected=0, energy_j=1.0))
    judge.polls(6, gpu(ecc_uncorrected=1, energy_j=2.0))
    assert evicting(judge) == {ECC}


def test_errors_of_one_gpu_do_not_explain_those_of_another() -> None:
    errors = MemoryErrors()
    errors.note_xid("0000:1b:00", 94, 100.0)
    errors.note_xid("0000:2b:00", 48, 100.0)
    errors.settle(100.0 + SETTLE_S)
    assert errors.containment("0000:1b:00") is Containment.CONTAINED
    assert errors.containment("0000:2b:00") is Containment.UNCONTAINED
    assert errors.contained == ("0000:1b:00",)
