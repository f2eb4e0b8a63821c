"""The same finding on many nodes at once is software, a driver or the network: no node's own fault, and none leaves.

A node is judged the moment it shows something, when nobody can know yet who will show it next. So what is decided about
the first ones stands under reserve for ``correlated_s``: ``acquittals`` takes it back.
"""

from __future__ import annotations

from collections.abc import Collection

from controller.core.records import NodeRecord
from controller.core.rules import CORRELATED_LEAST, CORRELATED_PAIR_SHARE, Rule, SecondPass
from controller.core.state import FleetState
from controller.core.turn import Turn
from everstep.vocabulary import Finding

UNDECIDED = "correlated"
"""What a finding of an outbreak is looked at again for (``NodeRecord.undecided``)."""
GATHER_S = 1.0
"""Seconds after an eviction in which nothing is done to the machine: a fault of software often shows everywhere in
less. It is out of its jobs meanwhile, so nobody waits."""
MOST_KINDS = 512
"""Kinds, with their XIDs, that are followed at once; an agent may invent numbers."""


def signature(finding: Finding) -> str:
    """What makes findings of different nodes the same: their kind, and XID."""
    return str(finding.kind) if finding.xid is None else f"{finding.kind}/{finding.xid}"


def shown(record: NodeRecord, name: str) -> list[Finding]:
    """The node's findings of that signature which stand."""
    return [finding for finding in record.known() if signature(finding) == name]


def correlated(turn: Turn, rule: Rule, node: str, finding: Finding) -> str:
    """Notes that the node shows the finding. Why it is taken for no node's own, in words; empty where it may be.

    An outbreak is said once, when it begins. O(1), but for what ages out, and once in an outbreak O(nodes).
    """
    state, name = turn.state, signature(finding)
    seen = state.sightings.pop(name, {})
    state.sightings[name] = seen
    if len(state.sightings) > MOST_KINDS:
        oldest = next(iter(state.sightings))
        del state.sightings[oldest]
        state.outbreaks.discard(oldest)
    seen.pop(node, None)
    seen[node] = turn.now
    _age(state, name, seen, turn.now - rule.correlated_s, turn.now)
    why = common_cause(state, rule, seen, node)
    if not why and name in state.outbreaks and not _anybodys(state, rule, seen):
        state.outbreaks.discard(name)
        turn.audit("fleet.correlated_finding_over", f"{name} is on few nodes again: each is judged for itself")
    elif why and name not in state.outbreaks:
        state.outbreaks.add(name)
        turn.audit(
            "fleet.correlated_finding",
            f"{name} on {why} within {rule.correlated_s:g} s: software, a driver or the network is suspected, "
            f"and no node is evicted for it under {rule.id} while that lasts",
        )
    return f"{name} is on {why}" if why else ""


def _age(state: FleetState, name: str, seen: dict[str, float], since: float, now: float) -> None:
    """Forgets who showed it before ``since``. In an outbreak, only where it stands no more: those are what it is."""
    while (oldest := next(iter(seen.items())))[1] < since:
        del seen[oldest[0]]
        if name in state.outbreaks and shown(state.nodes[oldest[0]], name):
            seen[oldest[0]] = now


def common_cause(state: FleetState, rule: Rule, seen: Collection[str], node: str) -> str:
    """What the nodes that show it (``seen``) have in common with ``node``, in words; empty where it may be chance.

    A count alone would let two of two go, and a share alone a hundred of a thousand. Where it takes two to tell, one
    fault is seen on both.
    """
    count, known = len(seen), len(state.nodes)
    if count >= rule.correlated_nodes:
        return f"{count} nodes"
    pair_share = max(CORRELATED_PAIR_SHARE, rule.correlated_share)
    if count >= 2 and count >= pair_share * known and rule.second_pass is SecondPass.NONE:
        return f"{count} of {known} nodes"
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


def _anybodys(state: FleetState, rule: Rule, seen: Collection[str]) -> bool:
    """Whether it is an outbreak of other nodes: those of a driver that the one which was judged last does not have."""
    one_of_each = {state.nodes[node].driver_version: node for node in seen}
    return any(common_cause(state, rule, seen, node) for node in one_of_each.values())


# --- asking, without noting anything -----------------------------------------------------------------------------


def is_of_outbreak(state: FleetState, rule: Rule, node: str, finding: Finding, now: float) -> bool:
    """Whether the finding on the node is taken for an outbreak's now."""
    name = signature(finding)
    if name not in state.outbreaks:
        return False
    since = now - rule.correlated_s
    seen = [n for n, at in state.sightings.get(name, {}).items() if at >= since or shown(state.nodes[n], name)]
    return bool(common_cause(state, rule, seen, node))


def shared(state: FleetState, node: str, finding: Finding, now: float) -> str:
    """Which other node showed the finding within the time that would make an outbreak of it, in words; empty where
    nobody did."""
    name, since = signature(finding), now - state.policy.rules.rule(finding).correlated_s
    others = (other for other, at in state.sightings.get(name, {}).items() if other != node and at >= since)
    return next((f"{other} shows {name} as well" for other in others), "")


def under_reserve_until(record: NodeRecord) -> float:
    """Until when an outbreak may turn out to be behind the eviction by which the node is out, or on its way back; 0.0
    for one that is not out by an eviction."""
    course = record.course
    return course.evicted_at + course.reserve_s if course is not None and course.evicted_at else 0.0


# --- after a restart ---------------------------------------------------------------------------------------------


def recall(state: FleetState, now: float) -> None:
    """What the records say of outbreaks: who waits for the end of one, or was evicted so lately that one may come."""
    found: list[tuple[float, str, str]] = []
    waiting: list[tuple[str, Finding]] = []
    for node, record in state.nodes.items():
        if now < under_reserve_until(record) and record.course is not None:
            found += [(record.course.evicted_at, name, node) for name in record.course.signs.values()]
        for finding in record.known():
            if record.undecided.get(finding.key) == UNDECIDED:
                found.append((now, signature(finding), node))
                waiting.append((node, finding))
            elif record.overruled == finding.key:
                found.append((now, signature(finding), node))
    for at, name, node in sorted(found):
        seen = state.sightings.setdefault(name, {})
        seen.pop(node, None)
        seen[node] = at
    for node, finding in waiting:
        name = signature(finding)
        if common_cause(state, state.policy.rules.rule(finding), state.sightings[name], node):
            state.outbreaks.add(name)
