"""Findings that stand and cannot be judged yet: each is looked at again when what stood in the way may be over."""

from __future__ import annotations

import math

from controller.core.turn import Turn


def look_later(turn: Turn, node: str, key: str, why: str, due: float) -> None:
    """One look a second at most, however often findings are raised meanwhile."""
    turn.state.nodes[node].undecided[key] = why
    turn.node_changed(node)
    turn.wake(float(math.ceil(due)), "care", node)
