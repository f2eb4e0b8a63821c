"""Check that every eviction has evidence from its node, and that a node returns to service after a passed probe."""

from __future__ import annotations

from collections import defaultdict

from everstep.vocabulary import Decision, FindingKind, NodeState, Verdict
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingRaised
from everstep_controller.core.effects import AppendToEventLog, DeleteNode, PutNode, PutVerdict, Send
from everstep_controller.core.events import AgentRegistered, HeartbeatChanged, OperatorCommand, ReportArrived
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import (
    BatchWritten,
    FaultInjected,
    LeaderDecided,
    LeaderStarted,
    ProbeCompleted,
)

PROBE_FINDINGS = (
    FindingKind.PROBE_FAILED,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
    FindingKind.NETWORK_SLOW_LINK,
)
"""Findings that a failed probe must confirm."""
OUT_OF_SERVICE = (NodeState.QUARANTINED, NodeState.REPAIR, NodeState.LOST)
"""States from which a node returns through probation."""


class EvictionEvidence(Checker):
    """Track each node's state as a controller decides it, and as the next controller loads it."""

    name = "eviction_evidence"

    def __init__(self) -> None:
        self._reported: dict[str, set[str]] = defaultdict(set)
        self._computed_wrongly: set[str] = set()
        self._states: dict[str, NodeState] = {}
        self._records = StoredRecords()
        self._probes: dict[str, set[str]] = defaultdict(set)
        self._members: dict[str, tuple[str, ...]] = {}
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._skipped: set[str] = set()
        self._failed: set[str] = set()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
            FaultInjected: self._on_fault,
            ProbeCompleted: self._on_probe,
        }

    def _on_fault(self, fault: FaultInjected) -> None:
        if fault.kind in ("compute_wrongly", "audit_wrongly"):
            self._computed_wrongly.add(fault.node)

    def _on_probe(self, result: ProbeCompleted) -> None:
        if result.ok:
            self._passed[result.probe].add(result.node)
        else:
            self._failed |= {result.node, *self._members.get(result.probe, ())}

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._states = {node: record.state for node, record in self._records.nodes().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        self._note_findings(decision)
        for effect in decision.effects:
            if isinstance(effect, PutNode) and effect.doc.state is NodeState.PROBATION:
                self._begin_probation(effect.node)
        for effect in decision.effects:
            if isinstance(effect, Send) and isinstance(effect.body, RunProbe):
                self._members[effect.body.probe] = effect.body.nodes
                self._probes[effect.body.nodes[-1]].add(effect.body.probe)
            elif isinstance(effect, AppendToEventLog) and effect.entry.kind == "probe.skipped":
                self._skipped.add(effect.entry.node or "")
        for effect in decision.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)  # a later node of that name is another node
            elif isinstance(effect, PutVerdict):
                self._check_verdict(decision, effect.verdict)
            elif isinstance(effect, PutNode):
                self._check_state(decision, effect)

    def _note_findings(self, decision: LeaderDecided) -> None:
        event = decision.event
        if isinstance(event, AgentRegistered):
            self._reported[event.register.node] |= {finding.key for finding in event.register.findings}
        elif isinstance(event, HeartbeatChanged):
            self._reported[event.node] |= {finding.key for finding in event.findings or ()}
        elif isinstance(event, ReportArrived) and isinstance(event.body, FindingRaised):
            self._reported[event.node].add(event.body.finding.key)

    def _check_verdict(self, decision: LeaderDecided, verdict: Verdict) -> None:
        if not verdict.sentence:
            raise Violation(self.name, f"verdict {verdict.id} has no sentence")
        if verdict.decision is not Decision.EVICT or isinstance(decision.event, OperatorCommand):
            return
        if not verdict.evidence:
            raise Violation(self.name, f"{verdict.node} is evicted without evidence: {verdict.sentence}")
        for finding in verdict.evidence:
            if finding.kind in PROBE_FINDINGS:
                if verdict.node not in self._failed:
                    raise Violation(self.name, f"{verdict.node} is evicted and failed no probe: {verdict.sentence}")
            elif finding.kind in (FindingKind.DIGEST_MISMATCH, FindingKind.AUDIT_MISMATCH):
                if verdict.node not in self._computed_wrongly and not self._tied_with_two_wrong_nodes(verdict):
                    raise Violation(self.name, f"{verdict.node} is evicted and computed correctly: {verdict.sentence}")
            elif finding.kind is FindingKind.RANK_STRAGGLER:
                pass  # its evidence is the ranks' step times, which the model of stragglers compares
            elif finding.key not in self._reported[verdict.node]:
                raise Violation(self.name, f"{verdict.node} is evicted for {finding.key}, which it never reported")

    def _tied_with_two_wrong_nodes(self, verdict: Verdict) -> bool:
        """Return whether the node is blamed for undecided votes against two nodes that both compute wrongly."""
        return (
            len(self._computed_wrongly - {verdict.node}) > 1
            and "was already in an undecided vote with other nodes" in verdict.sentence
        )

    def _check_state(self, decision: LeaderDecided, effect: PutNode) -> None:
        node, state = effect.node, effect.doc.state
        before = self._states.get(node)
        if state is NodeState.HEALTHY and before in OUT_OF_SERVICE:
            raise Violation(self.name, f"{node} is healthy directly from {before}: {effect.doc.sentence}")
        if state is NodeState.HEALTHY and before is NodeState.PROBATION:
            self._check_return(decision, node)
        self._states[node] = state

    def _begin_probation(self, node: str) -> None:
        """Drop the probes that the node passed before this probation. Probes under way still count."""
        if self._states.get(node) is not NodeState.PROBATION:
            self._probes[node] = {probe for probe in self._probes[node] if node not in self._passed[probe]}
            self._skipped.discard(node)

    def _check_return(self, decision: LeaderDecided, node: str) -> None:
        if node in self._skipped or isinstance(decision.event, OperatorCommand):
            return
        probes = self._probes[node]
        if not any(set(self._members[probe]) <= self._passed[probe] for probe in probes):
            raise Violation(self.name, f"{node} is healthy, and none of its probes was passed: {sorted(probes)}")
