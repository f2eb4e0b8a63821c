"""Check every observed change of a node's state against the core's table of transitions."""

from __future__ import annotations

from everstep.vocabulary import NodeState
from everstep_controller.core.effects import DeleteNode, PutNode
from everstep_controller.core.health.node_state import TRANSITIONS
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import LeaderDecided, LeaderStarted


class NodeStates(Checker):
    """Compare a node's state before and after each event. One event may lead through probation."""

    name = "node_states"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}

    def handlers(self) -> Handlers:
        return {LeaderDecided: self._on_decision, LeaderStarted: self._on_leader}

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._states.clear()

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
            elif isinstance(effect, PutNode):
                after = effect.doc.state
                before = self._states.get(effect.node, after)
                self._states[effect.node] = after
                if after is not before and not _is_allowed(before, after):
                    raise Violation(self.name, f"{effect.node} went from {before} to {after}: {effect.doc.sentence}")


def _is_allowed(before: NodeState, after: NodeState) -> bool:
    next_states = TRANSITIONS[before]
    return after in next_states or (NodeState.PROBATION in next_states and after in TRANSITIONS[NodeState.PROBATION])
