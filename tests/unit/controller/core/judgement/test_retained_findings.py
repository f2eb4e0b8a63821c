"""The number and choice of a node's findings that the controller keeps, and the cost of the choice."""

from __future__ import annotations

import pytest

from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import MAX_FINDINGS
from everstep_controller.core.events import HeartbeatChanged
from tests.support.fleet.core_fleet import CoreFleet


def disk(number: int, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(kind=FindingKind.HOST_DISK, subject=f"/mnt/{number}", severity=severity, message="90 % full")


@pytest.fixture
def fleet() -> CoreFleet:
    fleet = CoreFleet()
    fleet.register("n1")
    return fleet


def beat(fleet: CoreFleet, *findings: Finding) -> None:
    fleet.feed(HeartbeatChanged(node="n1", incarnation=fleet.incarnations["n1"], findings=findings, trace="t"))


def test_findings_report_retains_the_most_severe(fleet: CoreFleet) -> None:
    mild = [disk(number) for number in range(MAX_FINDINGS)]
    grave = [disk(1000 + number, Severity.CRITICAL) for number in range(3)]
    beat(fleet, *grave, *mild)
    assert list(fleet.state.nodes["n1"].health.agent_findings) == [finding.key for finding in [*grave, *mild[3:]]]


def test_finding_beyond_the_bound_replaces_the_oldest_mild_one(fleet: CoreFleet) -> None:
    mild = [disk(number) for number in range(MAX_FINDINGS)]
    beat(fleet, *mild)
    fleet.raise_finding("n1", disk(1000))
    assert list(fleet.state.nodes["n1"].health.agent_findings) == [
        *(finding.key for finding in mild[1:]),
        disk(1000).key,
    ]
