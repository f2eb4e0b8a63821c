"""What the shell may let rest for a moment: nobody's recovery, no suspicion and nothing new and grave."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.engine import can_defer_findings, can_defer_reports

from everstep.vocabulary import Severity
from everstep.wire.v1.training import FindingCleared, FindingRaised, RankLost
from tests.support.core_fleet import CoreFleet
from tests.support.findings import xid

CRITICAL = FindingRaised(finding=xid(79))
MILD = FindingRaised(finding=msgspec.structs.replace(xid(31), severity=Severity.WARNING))
LOST = RankLost(job="job", at=0.0, generation=1, rank=0, local_rank=0, detail="")


@pytest.fixture
def fleet() -> CoreFleet:
    """A node that has shown its picture."""
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.beat("n1")
    return fleet


@pytest.mark.parametrize(
    ("reports", "waits"),
    [([MILD], True), ([FindingCleared(key="x")], True), ([CRITICAL], False), ([MILD, LOST], False)],
    ids=["mild", "cleared", "critical", "a loss behind it"],
)
def test_only_mild_reports_are_deferrable(fleet: CoreFleet, reports: list[Any], waits: bool) -> None:
    assert can_defer_reports(fleet.state, "n1", reports) is waits


def test_repeated_critical_finding_is_deferrable_worsened_is_not(
    fleet: CoreFleet,
) -> None:
    fleet.report("n1", MILD)
    graver = FindingRaised(finding=msgspec.structs.replace(MILD.finding, severity=Severity.CRITICAL))
    assert graver.finding.key == MILD.finding.key
    assert not can_defer_reports(fleet.state, "n1", [graver])
    assert not can_defer_findings(fleet.state, "n1", [graver.finding])
    fleet.report("n1", graver)
    assert can_defer_reports(fleet.state, "n1", [graver])
    assert can_defer_findings(fleet.state, "n1", [graver.finding])


def test_findings_of_unknown_node_are_not_deferrable() -> None:
    fleet = CoreFleet()
    assert not can_defer_findings(fleet.state, "n1", ())
    fleet.register("n1")
    fleet.restart()
    assert can_defer_findings(fleet.state, "n1", [MILD.finding])
    assert not can_defer_findings(fleet.state, "n1", [CRITICAL.finding])


def test_findings_of_suspect_node_are_not_deferrable(fleet: CoreFleet) -> None:
    fleet.disconnect("n1")
    assert not can_defer_findings(fleet.state, "n1", ())
