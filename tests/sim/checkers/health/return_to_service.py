"""Check that no node returns to service while it has a finding for which a node is evicted."""

from __future__ import annotations

import math
from collections import defaultdict

from everstep.vocabulary import Action, Finding, Mode, NodeState
from everstep_controller.core.effects import DeleteNode, PutNode
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import NodeRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted

SERVING = (NodeState.HEALTHY, NodeState.SUSPECT)
"""States of nodes in service."""


class ReturnToService(Checker):
    """Check the findings of each node when it becomes healthy.

    An operator may readmit a node in spite of findings. A finding that other nodes share is part of an outbreak.
    """

    name = "return_to_service"

    def __init__(self) -> None:
        self._records = StoredRecords()
        self._states: dict[str, NodeState] = {}
        self._current: dict[str, set[tuple[str, int | None]]] = {}
        self._ended: dict[tuple[str, str, int | None], float] = {}  # end of a finding, by node, kind and XID
        self._accepted: dict[str, set[str]] = defaultdict(set)

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        """Begin from the stored states: decisions that were not written are lost."""
        self._states = {node: record.state for node, record in self._records.nodes().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
                self._current.pop(effect.node, None)
            elif isinstance(effect, PutNode):
                self._check_record(decision, effect.doc)

    def _check_record(self, decision: LeaderDecided, record: NodeRecord) -> None:
        node, event = record.node, decision.event
        known = {
            finding.key: finding
            for finding in (*record.health.agent_findings.values(), *record.health.controller_findings.values())
        }
        previous = self._current.get(node, set())
        self._current[node] = {_finding_type(finding) for finding in known.values()}
        self._ended |= {(node, *finding_type): decision.at for finding_type in previous - self._current[node]}
        self._accepted[node] &= set(known)
        if isinstance(event, OperatorCommand) and event.action is OperatorAction.READMIT and event.node == node:
            self._accepted[node] = set(known)
        before, self._states[node] = self._states.get(node), record.state
        if record.state is not NodeState.HEALTHY or before is None or before in SERVING:
            return
        for key, finding in known.items():
            is_single = not self._other_nodes(node, finding, decision.at)
            if key not in self._accepted[node] and is_single and self._is_evicting(record, finding, decision.at):
                raise Violation(self.name, f"{node} becomes healthy while it has {key}")

    def _other_nodes(self, node: str, finding: Finding, now: float) -> list[str]:
        """Return the other nodes with the same finding, now or within the time that counts for an outbreak."""
        finding_type = _finding_type(finding)
        since = now - self.world.plan.policy.rules.rule_for(finding).correlated_s
        return [
            other
            for other, current in self._current.items()
            if other != node
            and (finding_type in current or self._ended.get((other, *finding_type), -math.inf) >= since)
        ]

    def _is_evicting(self, record: NodeRecord, finding: Finding, now: float) -> bool:
        rule = self.world.plan.policy.rules.rule_for(finding)
        if rule.n_of_m[0] > 1 or rule.already_handled or rule.blame_isolation is BlameIsolationMethod.PAIR:
            return False  # the finding alone does not evict
        if finding.action is Action.RESTART_RANK or now < record.identity.booted_at + rule.boot_grace_s:
            return False
        return rule.counts_against_node(finding) and rule.effective_mode(finding) is Mode.ENFORCE


def _finding_type(finding: Finding) -> tuple[str, int | None]:
    """Return the kind and the XID of a finding, which its equals on other nodes share."""
    return str(finding.kind), finding.xid
