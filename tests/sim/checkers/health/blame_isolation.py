"""Check that no node is evicted for an outbreak, or for a failed pair probe whose partner was not known to be good."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from everstep.vocabulary import Action, Decision, Finding, FindingKind, NodeState, Severity, Verdict
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingCleared, FindingRaised
from everstep_controller.core.effects import AppendToEventLog, DeleteNode, PutNode, PutVerdict, Send
from everstep_controller.core.events import AgentRegistered, HeartbeatChanged, OperatorCommand, ReportArrived
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import LeaderDecided, LeaderStarted, ProbeCompleted

SERVING = (NodeState.HEALTHY, NodeState.SUSPECT)
"""States of nodes in service."""
OUT_OF_SERVICE = (NodeState.QUARANTINED, NodeState.REPAIR)
"""States of evicted nodes."""
PAIR_FINDINGS = (FindingKind.NETWORK_SLOW_LINK, FindingKind.PROBE_FAILED)
"""Findings that may be caused by either of two nodes."""


class BlameIsolation(Checker):
    """Count the nodes that report the same XID to one leader, in service or on probation.

    If the nodes are enough for an outbreak, none of them may stay evicted for that XID.
    """

    name = "blame_isolation"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}
        self._causes: dict[str, list[str]] = {}
        self._current_keys: dict[str, set[str]] = defaultdict(set)
        self._reported: dict[str, dict[str, float]] = defaultdict(dict)
        self._evicted: dict[str, dict[str, float]] = defaultdict(dict)
        self._members: dict[str, tuple[str, ...]] = {}
        self._failed_with: dict[str, set[str]] = defaultdict(set)

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            LeaderStarted: self._on_leader,
            ProbeCompleted: self._on_probe,
        }

    def _on_leader(self, _start: LeaderStarted) -> None:
        """Forget reports and evictions: the new leader does not know those that were not written."""
        self._reported.clear()
        self._evicted.clear()

    def _on_decision(self, decision: LeaderDecided) -> None:
        new_keys, is_tripped = self._new_keys(decision), False
        for effect in decision.effects:
            if isinstance(effect, PutNode):
                self._states[effect.node], self._causes[effect.node] = (
                    effect.doc.state,
                    list(effect.doc.quarantine.causes),
                )
            elif isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
            elif isinstance(effect, Send) and isinstance(effect.body, RunProbe):
                self._members[effect.body.probe] = effect.body.nodes
            elif isinstance(effect, AppendToEventLog):
                is_tripped = is_tripped or effect.entry.kind == "fleet.breaker_tripped"
            elif isinstance(effect, PutVerdict) and not isinstance(decision.event, OperatorCommand):
                if is_tripped:  # the breaker trips on the verdict that follows
                    self._check_latch(effect.verdict, decision.at)
                is_tripped = False
                self._check_verdict(effect.verdict, decision.at)
        evicting_keys = [key for key, nodes in self._evicted.items() if decision.at in nodes.values()]
        for key in dict.fromkeys([*new_keys, *evicting_keys]):
            self._check_outbreak(key, decision.at)

    def _new_keys(self, decision: LeaderDecided) -> list[str]:
        """Return the keys of XIDs that a node in service begins to report. The GPUs of all machines have one name."""
        event = decision.event
        if isinstance(event, ReportArrived) and isinstance(event.body, FindingCleared):
            self._current_keys[event.node].discard(event.body.key)
        if isinstance(event, ReportArrived) and isinstance(event.body, FindingRaised):
            return self._add_findings(event.node, (event.body.finding,), decision.at)
        if isinstance(event, HeartbeatChanged) and event.findings is not None:
            return self._replace_findings(event.node, event.findings, decision.at)
        if isinstance(event, AgentRegistered):
            return self._replace_findings(event.register.node, event.register.findings, decision.at)
        return []

    def _replace_findings(self, node: str, findings: Iterable[Finding], at: float) -> list[str]:
        self._current_keys[node] &= {finding.key for finding in findings}
        return self._add_findings(node, findings, at)

    def _add_findings(self, node: str, findings: Iterable[Finding], at: float) -> list[str]:
        evicting = [finding.key for finding in findings if _is_evicting(finding)]
        keys = [key for key in evicting if key not in self._current_keys[node]]
        self._current_keys[node] |= set(keys)
        if self._states.get(node) not in (*SERVING, NodeState.PROBATION):
            return []
        for key in keys:
            self._reported[key][node] = at
        return keys

    def _check_outbreak(self, key: str, now: float) -> None:
        rule = self.world.plan.policy.rules.default_rule(FindingKind.GPU_XID)
        count = len(self._recent_reporters(key, now))
        known = len(self._states)
        if not (
            count >= rule.correlated_nodes
            or (count >= 3 and count >= rule.correlated_share * known)
            or (count >= 2 and 2 * count >= known)
        ):
            return
        for node, at in self._evicted[key].items():
            if at >= now - rule.correlated_s and self._states.get(node) in OUT_OF_SERVICE and key in self._causes[node]:
                raise Violation(
                    self.name, f"{node} is out of service for {key}, which {count} of {known} nodes show at once"
                )

    def _recent_reporters(self, key: str, now: float) -> list[str]:
        """Return the nodes that reported the key within the time that counts for an outbreak."""
        since = now - self.world.plan.policy.rules.default_rule(FindingKind.GPU_XID).correlated_s
        return [node for node, at in self._reported[key].items() if at >= since]

    def _check_latch(self, verdict: Verdict, now: float) -> None:
        for finding in verdict.evidence:
            if others := [node for node in self._recent_reporters(finding.key, now) if node != verdict.node]:
                raise Violation(self.name, f"the breaker trips for {finding.key}, which {others} have too")

    def _check_verdict(self, verdict: Verdict, now: float) -> None:
        if verdict.decision in (Decision.QUARANTINE, Decision.READMIT):
            for nodes in self._evicted.values():
                nodes.pop(verdict.node, None)
        if verdict.decision not in (Decision.EVICT, Decision.QUARANTINE):
            return
        for finding in verdict.evidence:
            if _is_evicting(finding):
                self._evicted[finding.key][verdict.node] = now
            elif (
                verdict.decision is Decision.EVICT
                and finding.kind in PAIR_FINDINGS
                and not self._failed_with[verdict.node] - {finding.subject}
            ):
                raise Violation(self.name, f"{verdict.node} is evicted and failed with no good partner: {finding.key}")

    def _on_probe(self, result: ProbeCompleted) -> None:
        members = self._members.get(result.probe, ())
        if result.ok or len(members) < 2:
            return
        *partners, tested = members
        self._failed_with[tested] |= {node for node in partners if self._states.get(node) is NodeState.HEALTHY}


def _is_evicting(finding: Finding) -> bool:
    is_critical_xid = finding.kind is FindingKind.GPU_XID and finding.severity is Severity.CRITICAL
    return is_critical_xid and finding.action not in (Action.NONE, Action.RESTART_RANK)
