"""What is written down of findings: each kind on each node, until it comes too often."""

from __future__ import annotations

from controller.core import casebook
from controller.core.effects import NoteFinding
from controller.core.state import Burst
from controller.core.turn import Turn
from everstep.vocabulary import Finding


def write(turn: Turn, node: str, finding: Finding) -> None:
    """A line in the log, in the history and in the node's case book."""
    data = {"severity": str(finding.severity), "rule": finding.rule, "key": finding.key}
    if finding.since:
        data["seen_at"] = f"{finding.since:.6f}"
    trace = finding.trace or turn.trace
    sentence = f"{finding.message} ({node}){_of_many(turn, node, finding)}"
    turn.audit("finding", sentence, node=node, trace=trace, data=data)
    turn.emit(NoteFinding(node, finding, turn.now))
    casebook.enter(turn.state.nodes[node], turn.now, "finding", finding.message, data | dict(finding.evidence))


def is_written(turn: Turn, node: str, finding: Finding, *, more: bool) -> bool:
    """Whether a line of log is spent on it: what flaps on a node is written at the 16th, 32nd, ... time, each kind for
    itself, and what is grave apart from what is mild."""
    bursts = turn.state.live_nodes[node].bursts
    burst = bursts.setdefault(_burst_of(finding), Burst())
    if turn.now - burst.at > turn.policy.finding_quiet_s:
        burst.count = 0
    burst.at = turn.now
    burst.count += more
    return burst.count <= turn.policy.finding_burst or (more and burst.count.bit_count() == 1)


def _burst_of(finding: Finding) -> str:
    return f"{finding.kind}/{finding.severity}"


def _of_many(turn: Turn, node: str, finding: Finding) -> str:
    count = turn.state.live_nodes[node].bursts[_burst_of(finding)].count
    return f"; number {count} of a burst of {finding.kind}" if count > turn.policy.finding_burst else ""
