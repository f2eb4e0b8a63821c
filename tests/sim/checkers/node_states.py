"""Every observed change of a node's state is one that the core's table of transitions allows."""

from __future__ import annotations

from everstep_controller.core.effects import DeleteNode, PutNode
from everstep_controller.core.health.node_state import TRANSITIONS

from everstep.vocabulary import NodeState
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class NodeStates(Checker):
    """Compares a node's state after each event with its state before; one event may lead through probation."""

    name = "node_states"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.TookOver: self._took_over}

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._states.clear()

    def _handled(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
            elif isinstance(effect, PutNode):
                after = effect.doc.state
                before = self._states.get(effect.node, after)
                self._states[effect.node] = after
                if after is not before and not _is_allowed(before, after):
                    raise Violation(self.name, f"{effect.node} went from {before} to {after}: {effect.doc.sentence}")


def _is_allowed(before: NodeState, after: NodeState) -> bool:
    following = TRANSITIONS[before]
    return after in following or (NodeState.PROBATION in following and after in TRANSITIONS[NodeState.PROBATION])
