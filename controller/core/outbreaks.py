"""The same finding on many nodes at once is software, a driver or the network: no node's own fault, and none leaves."""

from __future__ import annotations

from controller.core.rules import CORRELATED_LEAST, Rule
from controller.core.state import FleetState
from controller.core.turn import Turn
from everstep.vocabulary import Finding

MOST_KINDS = 512
"""Kinds, with their XIDs, that are followed at once; an agent may invent numbers."""


def signature(finding: Finding) -> str:
    """What makes findings of different nodes the same: their kind, and XID."""
    return str(finding.kind) if finding.xid is None else f"{finding.kind}/{finding.xid}"


def correlated(turn: Turn, rule: Rule, node: str, finding: Finding) -> str:
    """Notes that the node shows the finding. Why it is taken for no node's own, in words; empty where it may be.

    An outbreak is said once, when it begins. O(1), but for what ages out, and once in an outbreak O(nodes).
    """
    state, name = turn.state, signature(finding)
    seen = state.sightings.pop(name, {})
    state.sightings[name] = seen
    if len(state.sightings) > MOST_KINDS:
        del state.sightings[next(iter(state.sightings))]
    seen.pop(node, None)
    seen[node] = turn.now
    while (oldest := next(iter(seen.items())))[1] < turn.now - rule.correlated_s:
        del seen[oldest[0]]
    why = _why(state, rule, seen, node)
    if not why and name in state.outbreaks:
        state.outbreaks.discard(name)
        turn.audit("fleet.correlated_finding_over", f"{name} is on few nodes again: each is judged for itself")
    elif why and name not in state.outbreaks:
        state.outbreaks.add(name)
        turn.audit(
            "fleet.correlated_finding",
            f"{name} on {why} within {rule.correlated_s:g} s: software, a driver or the network is suspected, "
            f"and no node is evicted for it under {rule.id} while that lasts; who is out stays out",
        )
    return f"{name} is on {why}" if why else ""


def _why(state: FleetState, rule: Rule, seen: dict[str, float], node: str) -> str:
    count, known = len(seen), len(state.nodes)
    if count >= rule.correlated_nodes:
        return f"{count} nodes"
    if count < CORRELATED_LEAST:
        return ""
    if count >= rule.correlated_share * known:
        return f"{count} of {known} nodes"
    driver = state.nodes[node].driver_version
    if not driver:
        return ""
    same = sum(1 for other in seen if state.nodes[other].driver_version == driver)
    of = sum(1 for record in state.nodes.values() if record.driver_version == driver)
    return f"{same} of the {of} nodes with driver {driver}" if same >= CORRELATED_LEAST and 2 * same > of else ""
