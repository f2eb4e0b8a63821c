"""Every eviction has evidence that its node really gave; every way back leads through a probe."""

from __future__ import annotations

from collections import defaultdict

from everstep_controller.core.effects import Audit, DeleteNode, PutNode, PutVerdict, Send
from everstep_controller.core.events import AgentRegistered, HeartbeatChanged, OperatorCommand, ReportArrived

from everstep.vocabulary import Decision, FindingKind, NodeState, Verdict
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingRaised
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation

PROBED = (
    FindingKind.PROBE_FAILED,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
    FindingKind.NETWORK_SLOW_LINK,
)
OUT = (NodeState.QUARANTINED, NodeState.REPAIR, NodeState.LOST)


class Evidence(Checker):
    """Follows each node's state as it is decided, and as the next controller finds it."""

    name = "evidence"

    def __init__(self) -> None:
        self._told: dict[str, set[str]] = defaultdict(set)
        self._lied: set[str] = set()
        self._states: dict[str, NodeState] = {}
        self._stored = Stored()
        self._probes: dict[str, set[str]] = defaultdict(set)
        self._members: dict[str, tuple[str, ...]] = {}
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._skipped: set[str] = set()
        self._failed: set[str] = set()

    def watches(self) -> Watches:
        return {
            facts.Decided: self._handled,
            facts.Durable: self._durable,
            facts.TookOver: self._took_over,
            facts.FaultBegan: self._fault,
            facts.ProbeAnswered: self._probe_answered,
        }

    def _fault(self, fact: facts.FaultBegan) -> None:
        if fact.kind in ("compute_wrongly", "audit_wrongly"):
            self._lied.add(fact.node)

    def _probe_answered(self, fact: facts.ProbeAnswered) -> None:
        if fact.ok:
            self._passed[fact.probe].add(fact.node)
        else:
            self._failed |= {fact.node, *self._members.get(fact.probe, ())}

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._states = {node: record.state for node, record in self._stored.nodes().items()}

    def _handled(self, fact: facts.Decided) -> None:
        self._note_findings(fact)
        for effect in fact.effects:
            if isinstance(effect, PutNode) and effect.doc.state is NodeState.PROBATION:
                self._on_probation(effect.node)
        for effect in fact.effects:
            if isinstance(effect, Send) and isinstance(effect.body, RunProbe):
                self._members[effect.body.probe] = effect.body.nodes
                self._probes[effect.body.nodes[-1]].add(effect.body.probe)
            elif isinstance(effect, Audit) and effect.entry.kind == "probe.skipped":
                self._skipped.add(effect.entry.node or "")
        for effect in fact.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)  # whoever comes by that name is new
            elif isinstance(effect, PutVerdict):
                self._judged(fact, effect.verdict)
            elif isinstance(effect, PutNode):
                self._changed(fact, effect)

    def _note_findings(self, fact: facts.Decided) -> None:
        event = fact.event
        if isinstance(event, AgentRegistered):
            self._told[event.register.node] |= {finding.key for finding in event.register.findings}
        elif isinstance(event, HeartbeatChanged):
            self._told[event.node] |= {finding.key for finding in event.findings or ()}
        elif isinstance(event, ReportArrived) and isinstance(event.body, FindingRaised):
            self._told[event.node].add(event.body.finding.key)

    def _judged(self, fact: facts.Decided, verdict: Verdict) -> None:
        if not verdict.sentence:
            raise Violation(self.name, f"verdict {verdict.id} says nothing")
        if verdict.decision is not Decision.EVICT or isinstance(fact.event, OperatorCommand):
            return
        if not verdict.evidence:
            raise Violation(self.name, f"{verdict.node} is evicted without evidence: {verdict.sentence}")
        for finding in verdict.evidence:
            if finding.kind in PROBED:
                if verdict.node not in self._failed:
                    raise Violation(self.name, f"{verdict.node} is evicted and failed no probe: {verdict.sentence}")
            elif finding.kind in (FindingKind.DIGEST_MISMATCH, FindingKind.AUDIT_MISMATCH):
                if verdict.node not in self._lied and not self._tied_with_two_liars(verdict):
                    raise Violation(self.name, f"{verdict.node} is evicted and never lied: {verdict.sentence}")
            elif finding.kind is FindingKind.RANK_STRAGGLER:
                pass  # its ranks told how long they take, which ``paces`` looks at
            elif finding.key not in self._told[verdict.node]:
                raise Violation(self.name, f"{verdict.node} is evicted for {finding.key}, which it never told")

    def _tied_with_two_liars(self, verdict: Verdict) -> bool:
        """Who is in ties with two that compute wrongly is taken for the one that is in both."""
        return (
            len(self._lied - {verdict.node}) > 1
            and "was already in an undecided vote with other nodes" in verdict.sentence
        )

    # --- the way back ------------------------------------------------------------------------------------------------

    def _changed(self, fact: facts.Decided, effect: PutNode) -> None:
        node, state = effect.node, effect.doc.state
        before = self._states.get(node)
        if state is NodeState.HEALTHY and before in OUT:
            raise Violation(self.name, f"{node} is healthy straight from {before}: {effect.doc.sentence}")
        if state is NodeState.HEALTHY and before is NodeState.PROBATION:
            self._came_back(fact, node)
        self._states[node] = state

    def _on_probation(self, node: str) -> None:
        """What was passed before a probation began does not count in it; one that is still under way does."""
        if self._states.get(node) is not NodeState.PROBATION:
            self._probes[node] = {probe for probe in self._probes[node] if node not in self._passed[probe]}
            self._skipped.discard(node)

    def _came_back(self, fact: facts.Decided, node: str) -> None:
        if node in self._skipped or isinstance(fact.event, OperatorCommand):
            return
        started = self._probes[node]
        if not any(set(self._members[probe]) <= self._passed[probe] for probe in started):
            raise Violation(self.name, f"{node} is healthy, and none of its probes was passed: {sorted(started)}")
