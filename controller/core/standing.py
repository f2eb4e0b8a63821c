"""Where a node stands: every change of its state goes through here, and the scheduler is told of it."""

from __future__ import annotations

from controller.core import remedies
from controller.core.records import NodeRecord
from controller.core.turn import Turn
from everstep.vocabulary import NodeState

OUT = (NodeState.QUARANTINED, NodeState.HELD, NodeState.REPAIR)
"""States in which nobody else should give the node work either."""
IN_SERVICE = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION)
"""Those in which a node serves, or is about to."""


def set_state(turn: Turn, node: str, state: NodeState, sentence: str) -> None:
    """Moves a node to ``state``, for the reason in ``sentence``; cordons it with the scheduler, or gives it back.

    One that is healthy by somebody's word, and silent, is suspected until its own next word.
    """
    record = turn.state.nodes[node]
    doubted = state is NodeState.HEALTHY and node in turn.state.silent
    record.state, record.since = NodeState.SUSPECT if doubted else state, turn.now
    record.sentence, record.trace = sentence, turn.trace
    turn.node_changed(node)
    if state in OUT:
        remedies.cordon(turn, node, sentence)
    elif state is NodeState.HEALTHY:
        record.course = None
        remedies.uncordon(turn, node, sentence)


def kept_out(record: NodeRecord, now: float) -> str:
    """Whose word keeps the node out of service, in a sentence; empty where nobody's does."""
    if record.foreign:
        return f"{record.node} is cordoned by {record.foreign}, and stays out until that is lifted"
    if record.hold:
        return record.hold
    if now < record.maintenance_until:
        return f"{record.node} is in maintenance"
    return ""
