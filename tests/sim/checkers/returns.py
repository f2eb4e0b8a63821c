"""Who comes back into service is well: nobody becomes healthy with a finding standing for which a node is evicted."""

from __future__ import annotations

import math
from collections import defaultdict

from everstep_controller.core.effects import DeleteNode, PutNode
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import NodeRecord

from everstep.vocabulary import Action, Finding, Mode, NodeState
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation

SERVING = (NodeState.HEALTHY, NodeState.SUSPECT)


class Returns(Checker):
    """Looks at each record as it becomes healthy: at what its node and the controller say of it then. An operator's
    word is above that, and what others show as well is nobody's own."""

    name = "returns"

    def __init__(self) -> None:
        self._stored = Stored()
        self._states: dict[str, NodeState] = {}
        self._shown: dict[str, set[tuple[str, int | None]]] = {}
        self._ended: dict[tuple[str, str, int | None], float] = {}  # by node and what is alike: when it showed it last
        self._vouched: dict[str, set[str]] = defaultdict(set)

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Durable: self._durable, facts.TookOver: self._took_over}

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        """What was decided and not written has never been."""
        self._states = {node: record.state for node, record in self._stored.nodes().items()}

    def _handled(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
                self._shown.pop(effect.node, None)
            elif isinstance(effect, PutNode):
                self._take(fact, effect.doc)

    def _take(self, fact: facts.Decided, record: NodeRecord) -> None:
        node, event = record.node, fact.event
        known = {
            finding.key: finding
            for finding in (*record.health.agent_findings.values(), *record.health.controller_findings.values())
        }
        before_it, self._shown[node] = self._shown.get(node, set()), {_alike(finding) for finding in known.values()}
        self._ended |= {(node, *alike): fact.at for alike in before_it - self._shown[node]}
        self._vouched[node] &= set(known)
        if isinstance(event, OperatorCommand) and event.action is OperatorAction.READMIT and event.node == node:
            self._vouched[node] = set(known)
        before, self._states[node] = self._states.get(node), record.state
        if record.state is not NodeState.HEALTHY or before is None or before in SERVING:
            return
        for key, finding in known.items():
            alone = not self._others(node, finding, fact.at)
            if key not in self._vouched[node] and alone and self._evicts(record, finding, fact.at):
                raise Violation(self.name, f"{node} becomes healthy while {key} stands")

    def _others(self, node: str, finding: Finding, now: float) -> list[str]:
        """Who shows it too, or did so within the time for which it counts among those of an outbreak."""
        alike, since = _alike(finding), now - self.world.plan.policy.rules.rule_for(finding).correlated_s
        return [
            other
            for other, shown in self._shown.items()
            if other != node and (alike in shown or self._ended.get((other, *alike), -math.inf) >= since)
        ]

    def _evicts(self, record: NodeRecord, finding: Finding, now: float) -> bool:
        rule = self.world.plan.policy.rules.rule_for(finding)
        if rule.n_of_m[0] > 1 or rule.already_handled or rule.blame_isolation is BlameIsolationMethod.PAIR:
            return False  # not as it is
        if finding.action is Action.RESTART_RANK or now < record.identity.booted_at + rule.boot_grace_s:
            return False
        return rule.counts_against_node(finding) and rule.effective_mode(finding) is Mode.ENFORCE


def _alike(finding: Finding) -> tuple[str, int | None]:
    return str(finding.kind), finding.xid
