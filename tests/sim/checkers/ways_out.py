"""The way out of quarantine opens when its time is served, its causes are gone, and a person, or other hardware, has
answered for who computed wrongly, or was evicted by order."""

from __future__ import annotations

from typing import NamedTuple

from everstep_controller.core.effects import Audit, DeleteNode, PutNode, PutVerdict
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.core.records import NodeRecord

from everstep.vocabulary import Decision, FindingKind, NodeState, Severity, Verdict
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation

WRONG = (
    FindingKind.DIGEST_MISMATCH,
    FindingKind.AUDIT_MISMATCH,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
)
CLEARED = ("node.eviction_rolled_back", "node.repaired", "remediation.confirmed")
"""Lines of the log by which what was proved is no more: others showed it, the GPUs are others, memory was reset."""


class _Quarantine(NamedTuple):
    since: float
    causes: frozenset[str]


class WaysOut(Checker):
    """Follows nodes into quarantine and out of it. An operator's word is above that, and so is an acquittal."""

    name = "ways_out"

    def __init__(self) -> None:
        self._quarantined: dict[str, _Quarantine] = {}
        self._wrong: dict[str, str] = {}
        self._written: set[str] = set()

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Durable: self._durable, facts.TookOver: self._took_over}

    def _durable(self, fact: facts.Durable) -> None:
        self._written |= {row.id for row in fact.batch.verdicts}

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._quarantined.clear()
        self._wrong = {node: verdict for node, verdict in self._wrong.items() if verdict in self._written}

    def _handled(self, fact: facts.Decided) -> None:
        event, above = fact.event, set[str]()
        if isinstance(event, OperatorCommand) and event.action is OperatorAction.READMIT:
            above.add(event.node or "")
        for effect in fact.effects:
            if isinstance(effect, Audit) and effect.entry.kind in CLEARED:
                above.add(effect.entry.node or "")
            elif isinstance(effect, PutVerdict):
                self._judged(fact, effect.verdict)
            elif isinstance(effect, DeleteNode):
                above.add(effect.node)
        for node in above:
            self._wrong.pop(node, None)
            self._quarantined.pop(node, None)
        for effect in fact.effects:
            if isinstance(effect, PutNode):
                self._take(fact.at, effect.doc)

    def _judged(self, fact: facts.Decided, verdict: Verdict) -> None:
        proved = any(found.kind in WRONG and found.severity is Severity.CRITICAL for found in verdict.evidence)
        event = fact.event
        ordered = isinstance(event, OperatorCommand) and (event.action, event.node) == (
            OperatorAction.EVICT,
            verdict.node,
        )
        if (proved or ordered) and verdict.decision in (Decision.EVICT, Decision.QUARANTINE):
            self._wrong[verdict.node] = verdict.id

    def _take(self, now: float, record: NodeRecord) -> None:
        node, before = record.node, self._quarantined.pop(record.node, None)
        if record.state is NodeState.QUARANTINED:
            self._quarantined[node] = _Quarantine(record.since, frozenset(record.quarantine.causes))
        if record.state is not NodeState.PROBATION:
            return
        if node in self._wrong:
            raise Violation(self.name, f"{node} needs somebody's word, and comes back by itself: {record.sentence}")
        if before is None:
            return
        if (served_s := now - before.since) < self.world.plan.policy.quarantine_min_s:
            raise Violation(self.name, f"{node} leaves quarantine after {served_s:.2f} s: {record.sentence}")
        if standing := before.causes & {finding.key for finding in record.all_findings()}:
            raise Violation(self.name, f"{node} leaves quarantine, and {sorted(standing)} stand: {record.sentence}")
