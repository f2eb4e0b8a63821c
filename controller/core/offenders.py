"""Repeat offenders: a score that every offence raises and time halves.

A few nodes cause most exclusions: of one fleet 1.2 % were lemons, of another three nodes of 63 caused half of all
exclusions. Counting inside a window forgets an offence all at once; a score that decays tells a node with three
evictions this week from one with three a quarter, and needs two numbers per node.
"""

from __future__ import annotations

import math

from controller.core.records import NodeRecord
from controller.core.turn import Turn

EVICTED = 1.0
RELAPSED = 1.0
"""It fell ill again on probation."""
FAILED_PROBE = 0.5
"""Less than an eviction: partners and networks fail too."""


def offender_score(record: NodeRecord, now: float, half_life_s: float) -> float:
    """The node's offences, each weighed by how long ago it was. 0.0 for a clean one."""
    if not record.offences:
        return 0.0
    return record.offences * math.pow(0.5, max(0.0, now - record.offended_at) / half_life_s)


def score_now(turn: Turn, node: str) -> float:
    """``offender_score`` now, under the policy's half-life."""
    return offender_score(turn.state.nodes[node], turn.now, turn.policy.offender_half_life_s)


def offend(turn: Turn, node: str, weight: float) -> None:
    """Raises the node's score."""
    record = turn.state.nodes[node]
    record.offences, record.offended_at = score_now(turn, node) + weight, turn.now
    turn.node_changed(node)


def forgive(turn: Turn, node: str, weight: float, at: float) -> None:
    """Takes back an offence of ``weight`` that was counted at ``at``."""
    record = turn.state.nodes[node]
    left = weight * math.pow(0.5, (turn.now - at) / turn.policy.offender_half_life_s)
    record.offences, record.offended_at = max(0.0, score_now(turn, node) - left), turn.now
    turn.node_changed(node)


def wait_s(turn: Turn, node: str) -> float:
    """Least seconds in quarantine at the node's score: none for a first offence, ``offender_wait_s`` at a score of 2,
    twice that for each point more."""
    score, policy = score_now(turn, node), turn.policy
    if score <= EVICTED:
        return 0.0
    return min(policy.offender_wait_max_s, policy.offender_wait_s * math.pow(2.0, min(score - 2.0, 30.0)))


def is_lemon(turn: Turn, node: str) -> bool:
    """Whether the node belongs in repair, whatever its findings say now."""
    return score_now(turn, node) >= turn.policy.offender_repair_score


def in_words(turn: Turn, node: str) -> str:
    """The score in words."""
    return f"its score of offences is {score_now(turn, node):.1f} of {turn.policy.offender_repair_score:g}"
