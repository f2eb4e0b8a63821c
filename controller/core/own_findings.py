"""What the controller itself has found on a node, beside the picture that the node's agent gives.

It is kept here at once, and judged by its rule like any agent's at the end of the event (``pictures.judge_own``), or
before where a rule needs to know what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.turn import OwnNews, Turn
from everstep.vocabulary import Finding


def raise_own(turn: Turn, node: str, finding: Finding, lasts_s: float = 0.0, proof: str = "") -> None:
    """Keeps the finding with the node until it is cleared, or was not seen for ``lasts_s`` (0.0: for ever).

    ``proof``: what its second pass has shown, where it has had one.
    """
    record = turn.state.nodes[node]
    turn.own.append(OwnNews(node, before=record.own.get(finding.key), finding=finding, why=proof))
    record.own[finding.key] = finding
    turn.node_changed(node)
    record.own_until.pop(finding.key, None)
    if lasts_s:
        see_again(turn, node, finding.key, lasts_s)


def see_again(turn: Turn, node: str, key: str, lasts_s: float) -> None:
    """A finding that stands was seen once more: it lasts for ``lasts_s`` from now on."""
    record = turn.state.nodes[node]
    record.own_until[key] = turn.now + lasts_s
    turn.node_changed(node)
    turn.wake(record.own_until[key], "care", node)


def clear_own(turn: Turn, node: str, keys: Iterable[str] | None = None, why: str = "") -> None:
    """Drops the findings of these keys, or all. ``why``: what the log says, in a sentence."""
    record = turn.state.nodes[node]
    for key in list(record.own if keys is None else keys):
        finding = record.own.pop(key, None)
        record.own_until.pop(key, None)
        if finding is None:
            continue
        if key in record.causes:
            record.cleared[key] = turn.now
        turn.node_changed(node)
        turn.own.append(OwnNews(node, before=finding, finding=None, why=why))


def forget_unseen(turn: Turn, node: str) -> None:
    """Drops what was not seen again in its time."""
    record = turn.state.nodes[node]
    for key, until in list(record.own_until.items()):
        if turn.now < until:
            turn.wake(until, "care", node)
        else:
            clear_own(turn, node, [key], f"{key} was not seen again on {node}")
