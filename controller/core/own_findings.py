"""What the controller itself has found on a node, beside the picture that the node's agent gives."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.effects import NoteCleared, NoteFinding
from controller.core.turn import Turn
from everstep.vocabulary import Finding


def raise_own(turn: Turn, node: str, finding: Finding) -> None:
    """Keeps the finding with the node until it is cleared."""
    turn.state.nodes[node].own[finding.key] = finding
    turn.node_changed(node)
    turn.emit(NoteFinding(node, finding, turn.now))


def clear_own(turn: Turn, node: str, keys: Iterable[str] | None = None) -> None:
    """Drops the findings of these keys, or all."""
    own = turn.state.nodes[node].own
    for key in list(own if keys is None else keys):
        if own.pop(key, None) is not None:
            turn.node_changed(node)
            turn.emit(NoteCleared(node, key, turn.now))
