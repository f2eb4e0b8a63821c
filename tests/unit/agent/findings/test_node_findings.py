"""A node's findings merged from several sources, their urgency, and findings about the agent itself."""

from __future__ import annotations

import itertools

import pytest

from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.training import FindingCleared, FindingRaised
from everstep_agent.findings.node_findings import (
    MAX_ONE_TIME_FINDINGS,
    ONE_TIME_FINDING_S,
    ClockSkewEstimate,
    NodeFindings,
    find_agent_problems,
)


def finding(subject: str = "g0", severity: Severity = Severity.CRITICAL, **more: object) -> Finding:
    return Finding(kind=FindingKind.GPU_LOST, subject=subject, severity=severity, message="m", **more)  # type: ignore[arg-type]


@pytest.fixture
def board() -> NodeFindings:
    numbers = itertools.count(1)
    return NodeFindings(lambda: f"t{next(numbers)}")


def test_critical_finding_is_urgent_when_raised_and_cleared(board: NodeFindings) -> None:
    (raised,) = board.replace_source("sensors", [finding()])
    assert isinstance(raised, FindingRaised)
    assert raised.finding.trace == "t1"
    assert board.replace_source("sensors", [finding()]) == []
    assert board.replace_source("sensors", []) == [FindingCleared(key=finding().key, trace="t1")]
    assert not board.findings


def test_severity_change_raises_and_clears_urgently(board: NodeFindings) -> None:
    board.replace_source("sensors", [finding(severity=Severity.WARNING)])
    (raised,) = board.replace_source("sensors", [finding()])
    assert isinstance(raised, FindingRaised)
    (cleared,) = board.replace_source("sensors", [finding(severity=Severity.WARNING)])
    assert isinstance(cleared, FindingCleared)
    assert len(board.findings) == 1


def test_finding_keeps_its_trace_while_its_message_changes(board: NodeFindings) -> None:
    board.replace_source("sensors", [finding(value=1.0)])
    assert board.replace_source("sensors", [finding(value=2.0)]) == []
    assert [(f.value, f.trace) for f in board.findings] == [(2.0, "t1")]


def test_sources_are_merged_by_worst_severity(board: NodeFindings) -> None:
    board.replace_source("sensors", [finding(), finding("g1", Severity.INFO)])
    board.replace_source("agent", [finding("g1", Severity.WARNING)])
    assert {f.subject: f.severity for f in board.findings} == {"g0": Severity.CRITICAL, "g1": Severity.WARNING}
    board.replace_source("agent", [])
    assert {f.subject: f.severity for f in board.findings} == {"g0": Severity.CRITICAL, "g1": Severity.INFO}


def test_held_finding_expires_after_its_time(board: NodeFindings) -> None:
    raised = board.add_one_time(FindingRaised(finding=finding("slot"), job="j"), now=0.0)
    assert (raised.job, raised.finding.trace) == ("j", "t1")
    assert list(board.findings) == [raised.finding]
    assert board.expire(ONE_TIME_FINDING_S - 1) == []
    assert board.expire(ONE_TIME_FINDING_S) == [FindingCleared(key=raised.finding.key, trace="t1")]
    assert not board.findings


def test_held_findings_are_bounded(board: NodeFindings) -> None:
    for number in range(MAX_ONE_TIME_FINDINGS + 10):
        board.add_one_time(FindingRaised(finding=finding(str(number), Severity.INFO)), now=0.0)
    assert len(board.findings) == MAX_ONE_TIME_FINDINGS
    assert board.findings[-1].subject == str(MAX_ONE_TIME_FINDINGS + 9)


def test_healthy_agent_finds_nothing() -> None:
    assert find_agent_problems("", 0.0, 0, 0.0) == []


def test_lost_vault_is_critical_and_states_the_reason() -> None:
    (found,) = find_agent_problems("its process ended with status -9", 5.0, 0, 0.0)
    assert (found.kind, found.severity, found.since) == (FindingKind.VAULT_LOST, Severity.CRITICAL, 5.0)
    assert "status -9" in found.message


def test_skew_is_taken_from_the_quickest_round_trip() -> None:
    skew = ClockSkewEstimate()
    assert skew.skew_s is None
    skew.add_sample(server_at=100.0, received_at=103.0, round_trip_s=1.0)
    skew.add_sample(server_at=200.0, received_at=203.01, round_trip_s=0.02)
    assert skew.skew_s == pytest.approx(3.0)


def test_skew_follows_a_set_clock_at_once() -> None:
    skew = ClockSkewEstimate()
    skew.add_sample(server_at=100.0, received_at=105.0, round_trip_s=0.001)
    skew.add_sample(server_at=101.0, received_at=101.0, round_trip_s=0.1)
    assert skew.skew_s == 0.0
