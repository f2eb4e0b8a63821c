"""Nobody is out for what is not their own: an outbreak evicts nobody at its end; of a failed pair only those leave who
failed with a partner that was known to be good."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from everstep_controller.core.effects import Audit, DeleteNode, PutNode, PutVerdict, Send
from everstep_controller.core.events import AgentRegistered, HeartbeatChanged, OperatorCommand, ReportArrived

from everstep.vocabulary import Action, Decision, Finding, FindingKind, NodeState, Severity, Verdict
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingCleared, FindingRaised
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation

SERVING = (NodeState.HEALTHY, NodeState.SUSPECT)
OUT = (NodeState.QUARANTINED, NodeState.REPAIR)
OF_TWO = (FindingKind.NETWORK_SLOW_LINK, FindingKind.PROBE_FAILED)


class Blame(Checker):
    """Counts by itself who told of the same XID while it served, or was on its way back, in the life of one controller:
    where those are as many as make an outbreak, none of them may be out for it."""

    name = "blame"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}
        self._causes: dict[str, list[str]] = {}
        self._shown: dict[str, set[str]] = defaultdict(set)
        self._told: dict[str, dict[str, float]] = defaultdict(dict)
        self._evicted: dict[str, dict[str, float]] = defaultdict(dict)
        self._members: dict[str, tuple[str, ...]] = {}
        self._failed_with: dict[str, set[str]] = defaultdict(set)

    def watches(self) -> Watches:
        return {
            facts.Decided: self._handled,
            facts.TookOver: self._took_over,
            facts.ProbeAnswered: self._probe_answered,
        }

    def _took_over(self, _fact: facts.TookOver) -> None:
        """What was not written when the last one died is not known to this one."""
        self._told.clear()
        self._evicted.clear()

    def _handled(self, fact: facts.Decided) -> None:
        news, latches = self._news(fact), False
        for effect in fact.effects:
            if isinstance(effect, PutNode):
                self._states[effect.node], self._causes[effect.node] = (
                    effect.doc.state,
                    list(effect.doc.quarantine.causes),
                )
            elif isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
            elif isinstance(effect, Send) and isinstance(effect.body, RunProbe):
                self._members[effect.body.probe] = effect.body.nodes
            elif isinstance(effect, Audit):
                latches = latches or effect.entry.kind == "fleet.breaker_tripped"
            elif isinstance(effect, PutVerdict) and not isinstance(fact.event, OperatorCommand):
                if latches:  # the breaker latches on the verdict that is given next
                    self._latched(effect.verdict, fact.at)
                latches = False
                self._judged(effect.verdict, fact.at)
        for key in dict.fromkeys([*news, *(k for k, nodes in self._evicted.items() if fact.at in nodes.values())]):
            self._look(key, fact.at)

    # --- outbreaks ---------------------------------------------------------------------------------------------------

    def _news(self, fact: facts.Decided) -> list[str]:
        """Keys of XIDs that a serving node tells of for the first time; all machines call their GPU the same."""
        event = fact.event
        if isinstance(event, ReportArrived) and isinstance(event.body, FindingCleared):
            self._shown[event.node].discard(event.body.key)
        if isinstance(event, ReportArrived) and isinstance(event.body, FindingRaised):
            return self._tell(event.node, (event.body.finding,), fact.at)
        if isinstance(event, HeartbeatChanged) and event.findings is not None:
            return self._picture(event.node, event.findings, fact.at)
        if isinstance(event, AgentRegistered):
            return self._picture(event.register.node, event.register.findings, fact.at)
        return []

    def _picture(self, node: str, findings: Iterable[Finding], at: float) -> list[str]:
        self._shown[node] &= {finding.key for finding in findings}
        return self._tell(node, findings, at)

    def _tell(self, node: str, findings: Iterable[Finding], at: float) -> list[str]:
        keys = [finding.key for finding in findings if _convicts(finding) and finding.key not in self._shown[node]]
        self._shown[node] |= set(keys)
        if self._states.get(node) not in (*SERVING, NodeState.PROBATION):
            return []
        for key in keys:
            self._told[key][node] = at
        return keys

    def _look(self, key: str, now: float) -> None:
        rule = self.world.plan.policy.rules.default_rule(FindingKind.GPU_XID)
        count = len(self._lately(key, now))
        known = len(self._states)
        if not (
            count >= rule.correlated_nodes
            or (count >= 3 and count >= rule.correlated_share * known)
            or (count >= 2 and 2 * count >= known)
        ):
            return
        for node, at in self._evicted[key].items():
            if at >= now - rule.correlated_s and self._states.get(node) in OUT and key in self._causes[node]:
                raise Violation(self.name, f"{node} is out for {key}, which {count} of {known} nodes show at once")

    def _lately(self, key: str, now: float) -> list[str]:
        """Who told of it within the time that makes an outbreak."""
        since = now - self.world.plan.policy.rules.default_rule(FindingKind.GPU_XID).correlated_s
        return [node for node, at in self._told[key].items() if at >= since]

    def _latched(self, verdict: Verdict, now: float) -> None:
        for finding in verdict.evidence:
            if others := [node for node in self._lately(finding.key, now) if node != verdict.node]:
                raise Violation(self.name, f"the breaker latches for {finding.key}, which {others} show as well")

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def _judged(self, verdict: Verdict, now: float) -> None:
        if verdict.decision in (Decision.QUARANTINE, Decision.READMIT):
            for nodes in self._evicted.values():
                nodes.pop(verdict.node, None)
        if verdict.decision not in (Decision.EVICT, Decision.QUARANTINE):
            return
        for finding in verdict.evidence:
            if _convicts(finding):
                self._evicted[finding.key][verdict.node] = now
            elif (
                verdict.decision is Decision.EVICT
                and finding.kind in OF_TWO
                and not self._failed_with[verdict.node] - {finding.subject}
            ):
                raise Violation(self.name, f"{verdict.node} is evicted and failed with no good partner: {finding.key}")

    def _probe_answered(self, fact: facts.ProbeAnswered) -> None:
        members = self._members.get(fact.probe, ())
        if fact.ok or len(members) < 2:
            return
        *partners, tried = members
        self._failed_with[tried] |= {node for node in partners if self._states.get(node) is NodeState.HEALTHY}


def _convicts(finding: Finding) -> bool:
    grave = finding.kind is FindingKind.GPU_XID and finding.severity is Severity.CRITICAL
    return grave and finding.action not in (Action.NONE, Action.RESTART_RANK)
