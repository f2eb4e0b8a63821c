"""A node that is lost again and again: it comes back by itself each time, and each time costs its job a regrouping.

What counts is a loss that is the node's own: of one in service, to which nothing was being done, while nothing spoke
for a fault of the network or of this controller. A loss that others share, a moment before or after, is taken back.
"""

from __future__ import annotations

from controller.core.outbreaks import common_cause
from controller.core.own_findings import clear_own, raise_own
from controller.core.records import NodeRecord
from controller.core.standing import IN_SERVICE, kept_out
from controller.core.turn import Turn
from everstep.vocabulary import Finding, FindingKind, Severity

SUBJECT = "node"
KEY = f"{FindingKind.NODE_FLAPPING}/{SUBJECT}"


def note_loss(turn: Turn, node: str, sentence: str) -> None:
    """The node is about to be given up, for the reason in ``sentence``: counts that, and names who is lost too often.

    How many others make it no fault of a node's is the rule's ``correlated_...``. O(nodes lost within that time).
    """
    record, policy = turn.state.nodes[node], turn.policy
    if not policy.rules.judges(FindingKind.NODE_FLAPPING) or not _is_its_own(turn, record):
        return
    record.lost = [*(at for at in record.lost if at > turn.now - policy.node_flap_window_s), turn.now]
    turn.node_changed(node)
    if why := _shared(turn, node):
        for other, at in turn.state.lost_lately.items():
            _take_back(turn, other, at, why)
    elif len(record.lost) >= policy.node_flap_count:
        _name(turn, node, record, sentence)


def _is_its_own(turn: Turn, record: NodeRecord) -> bool:
    if record.state not in IN_SERVICE or kept_out(record, turn.now):
        return False
    if record.course is not None and record.course.remedy:  # a reboot may be under way
        return False
    return turn.state.episode is None and turn.pulse(record.node).since >= turn.state.calm_since


def _shared(turn: Turn, node: str) -> str:
    """What nodes that were lost in the same time have in common, in words; empty where it may be chance."""
    state, rule = turn.state, turn.policy.rules.of_kind(FindingKind.NODE_FLAPPING)
    since = turn.now - rule.correlated_s
    lately = {other: at for other, at in state.lost_lately.items() if at >= since and other in state.nodes}
    state.lost_lately = {**lately, node: turn.now}
    return common_cause(state, rule, state.lost_lately, node)


def _take_back(turn: Turn, node: str, at: float, why: str) -> None:
    record = turn.state.nodes[node]
    if at not in record.lost:
        return
    record.lost = [other for other in record.lost if other != at]
    turn.node_changed(node)
    if KEY in record.own and len(record.lost) < turn.policy.node_flap_count:
        clear_own(turn, node, [KEY], f"{KEY} of {node} is taken back: {why} were lost at once, which is no node's own")


def _name(turn: Turn, node: str, record: NodeRecord, sentence: str) -> None:
    count, window_s = len(record.lost), turn.policy.node_flap_window_s
    finding = Finding(
        kind=FindingKind.NODE_FLAPPING,
        subject=SUBJECT,
        severity=Severity.WARNING,
        message=f"{node} was lost {count} times within {window_s / 3600:g} h, the last time because {sentence}",
        value=float(count),
        threshold=float(turn.policy.node_flap_count),
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, node, finding, window_s)
