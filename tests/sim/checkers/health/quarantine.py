"""Check that a node leaves quarantine only after the minimum time, and when its causes are gone.

A node that computed wrongly, or that an operator evicted, also needs an operator or other hardware.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.vocabulary import Decision, FindingKind, NodeState, Severity, Verdict
from everstep_controller.core.effects import AppendToEventLog, DeleteNode, PutNode, PutVerdict
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.core.records import NodeRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted

WRONG_RESULTS = (
    FindingKind.DIGEST_MISMATCH,
    FindingKind.AUDIT_MISMATCH,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
)
"""Findings that prove wrong results of a node."""
CLEARING_KINDS = ("node.eviction_rolled_back", "node.repaired", "remediation.confirmed")
"""Kinds of log entries after which a proof of wrong results does not count any more."""


class _Stay(NamedTuple):
    """A node's time in quarantine, with the findings that caused it."""

    since: float
    causes: frozenset[str]


class Quarantine(Checker):
    """Follow nodes into quarantine and out of it. An operator or a rolled back eviction may end it early."""

    name = "quarantine"

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}
        self._needs_operator: dict[str, str] = {}
        self._written: set[str] = set()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def _on_write(self, write: BatchWritten) -> None:
        self._written |= {row.id for row in write.batch.verdicts}

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._stays.clear()
        written = self._written
        self._needs_operator = {node: verdict for node, verdict in self._needs_operator.items() if verdict in written}

    def _on_decision(self, decision: LeaderDecided) -> None:
        event, released = decision.event, set[str]()
        if isinstance(event, OperatorCommand) and event.action is OperatorAction.READMIT:
            released.add(event.node or "")
        for effect in decision.effects:
            if isinstance(effect, AppendToEventLog) and effect.entry.kind in CLEARING_KINDS:
                released.add(effect.entry.node or "")
            elif isinstance(effect, PutVerdict):
                self._note_verdict(decision, effect.verdict)
            elif isinstance(effect, DeleteNode):
                released.add(effect.node)
        for node in released:
            self._needs_operator.pop(node, None)
            self._stays.pop(node, None)
        for effect in decision.effects:
            if isinstance(effect, PutNode):
                self._check_record(decision.at, effect.doc)

    def _note_verdict(self, decision: LeaderDecided, verdict: Verdict) -> None:
        is_proven = any(
            finding.kind in WRONG_RESULTS and finding.severity is Severity.CRITICAL for finding in verdict.evidence
        )
        event = decision.event
        is_commanded = isinstance(event, OperatorCommand) and (event.action, event.node) == (
            OperatorAction.EVICT,
            verdict.node,
        )
        if (is_proven or is_commanded) and verdict.decision in (Decision.EVICT, Decision.QUARANTINE):
            self._needs_operator[verdict.node] = verdict.id

    def _check_record(self, now: float, record: NodeRecord) -> None:
        node, stay = record.node, self._stays.pop(record.node, None)
        if record.state is NodeState.QUARANTINED:
            self._stays[node] = _Stay(record.since, frozenset(record.quarantine.causes))
        if record.state is not NodeState.PROBATION:
            return
        if node in self._needs_operator:
            raise Violation(self.name, f"{node} needs an operator, and returns without one: {record.sentence}")
        if stay is None:
            return
        if (stay_s := now - stay.since) < self.world.plan.policy.readmission.quarantine_min_s:
            raise Violation(self.name, f"{node} leaves quarantine after {stay_s:.2f} s: {record.sentence}")
        if remaining := stay.causes & {finding.key for finding in record.all_findings()}:
            raise Violation(
                self.name, f"{node} leaves quarantine, and still has {sorted(remaining)}: {record.sentence}"
            )
