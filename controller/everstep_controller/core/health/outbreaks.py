"""The same finding on many nodes at once is software, a driver or the network: no node's own fault, and none leaves.

A node is judged the moment it shows something, when nobody can know yet who will show it next. So what is decided about
the first ones stands under reserve for ``correlated_s``: ``acquittals`` takes it back.

Whom an outbreak has spared waits for its end, for as long as it stands on as many that serve. Who shows the same later
is spared only where as many show it then: a fault that stays on a few nodes keeps no others from being judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import msgspec

from everstep.ids import NodeId
from everstep.vocabulary import Action, Finding, FindingKind, Mode
from everstep_controller.core.health.node_state import IN_SERVICE
from everstep_controller.core.policy import (
    CORRELATED_LEAST,
    CORRELATED_PAIR_SHARE,
    Rule,
    Scope,
    SecondPass,
    bad_reports,
    in_words,
    next_rung,
)
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named

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


def correlated(turn: Turn, rule: Rule, node: str, finding: Finding, *, anew: bool = True) -> tuple[str, list[str]]:
    """Why the finding is taken for no node's own, in words, empty where it may be; and who, with the node, is found to
    be in the outbreak only now, having been judged before. Notes that the node shows it, unless it is only looked at
    again (not ``anew``).

    An outbreak is said once, when it begins. O(1), but for what ages out, and once in an outbreak O(nodes).
    """
    state, name = turn.state, signature(finding)
    seen = state.sightings.pop(name, {})
    state.sightings[name] = seen
    if len(state.sightings) > MOST_KINDS:
        oldest = next(iter(state.sightings))
        del state.sightings[oldest]
        _end(turn, oldest)
    if anew:
        seen.pop(node, None)
        seen[node] = turn.now
    while seen and seen[oldest := next(iter(seen))] < turn.now - rule.correlated_s:
        del seen[oldest]
    if why := common_cause(state, rule, seen, node):
        return f"{name} is on {why} within {rule.correlated_s:g} s", _joined(turn, rule, name, seen, node, why)
    waiting = state.outbreaks.get(name)
    if waiting is None:
        return "", []
    standing = _standing(state, rule, name, seen)
    if waiting.get(node) and (why := common_cause(state, rule, standing, node)):
        return f"{name} stands on {why}, or more, since it was on so many at once", []
    waiting.pop(node, None)  # it is judged for itself
    if not _anybodys(state, rule, standing):
        _end(turn, name)
        turn.audit("fleet.correlated_finding_over", f"{name} is on few nodes again: each is judged for itself")
    return "", []


def _joined(turn: Turn, rule: Rule, name: str, seen: Mapping[str, float], node: str, why: str) -> list[str]:
    """The outbreak begins, or goes on with more nodes. Beyond ``correlated_nodes`` all before have joined."""
    state, began = turn.state, name not in turn.state.outbreaks
    if began:
        turn.audit(
            "fleet.correlated_finding",
            f"{name} on {why} within {rule.correlated_s:g} s: software, a driver or the network is suspected, "
            f"and no node is evicted for it under {rule.id} while that lasts",
        )
        state.fleet.outbreaks[name] = next(iter(seen.values()), turn.now)
        turn.fleet_changed()
    waiting = state.outbreaks.setdefault(name, {})
    if began:  # and who showed it long ago, and was judged for it a moment ago
        asked = [*seen, *(other for other in _out_for(state, name, turn.now) if other not in seen)]
    elif len(seen) <= rule.correlated_nodes:
        asked = list(seen)
    else:
        asked = [node] if node in seen else []
    new = [other for other in asked if other not in waiting and common_cause(state, rule, seen, other)]
    waiting.update(dict.fromkeys([*new, node], True))
    return new


def _end(turn: Turn, name: str) -> None:
    """Forget the outbreak, if there is one."""
    turn.state.outbreaks.pop(name, None)
    if turn.state.fleet.outbreaks.pop(name, None) is not None:
        turn.fleet_changed()


def wait_for_end(state: FleetState, node: str, finding: Finding) -> None:
    """The finding on the node is taken for an outbreak's until that is over."""
    waiting = state.outbreaks.get(signature(finding))
    if waiting is not None:
        waiting[node] = True


def has_cleared(state: FleetState, node: str, finding: Finding) -> None:
    """Where nothing alike stands on the node any more, it waits for no outbreak's end."""
    name = signature(finding)
    waiting = state.outbreaks.get(name, {})
    if node in waiting and not shown(state.nodes[node], name):
        waiting[node] = False


def _standing(state: FleetState, rule: Rule, name: str, seen: Collection[str]) -> Collection[str]:
    """On whom an outbreak stands: who has ``seen`` it lately, and who waits for its end, serves or is to serve, and
    shows it still. No more of these than it takes."""
    found = dict.fromkeys(seen)
    for node, waits in state.outbreaks.get(name, {}).items():
        if len(found) >= rule.correlated_nodes:
            break
        if waits and _keeps_alive(state.nodes[node], name):
            found[node] = None
    return found


def _keeps_alive(record: NodeRecord, name: str) -> bool:
    """Whether an outbreak stands on the node. One that is out, or dead, tells nothing of what is so now."""
    return record.reachable and record.state in IN_SERVICE and bool(shown(record, name))


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
    seen: Collection[str] = [n for n, at in state.sightings.get(name, {}).items() if at >= now - rule.correlated_s]
    if state.outbreaks[name].get(node):
        seen = _standing(state, rule, name, seen)
    return bool(common_cause(state, rule, seen, node))


class Outbreak(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that stands on so many nodes that none of them is evicted for it.

    Attributes:
        name: the findings' signature: kind, and XID.
        rule: id of the rule that would judge them.
        nodes: the nodes on which it stands, in the order in which they joined.
        since: when the first of them showed it, in wall seconds.
        example: what the first of them says.
        again_s: seconds after which each node is looked at again.
    """

    name: str
    rule: str
    nodes: tuple[NodeId, ...]
    since: float
    example: str
    again_s: float

    def sentence(self, known: int) -> str:
        """What stands where, and what Everstep does about it. ``known``: how many nodes the fleet has."""
        return (
            f"{self.name} stands on {len(self.nodes)} of {known} nodes ({named(self.nodes)}: {self.example}): "
            f"software, a driver or the network is suspected, so no node is evicted for it"
        )

    def advice(self) -> str:
        """What happens next, and what a person can do."""
        return (
            f"Find what these nodes have in common and mend that. The finding is judged again every "
            f"{self.again_s:g} s: once it stands on too few nodes to have a common cause, each is treated "
            f"by rule {self.rule}. To take a node out now: everstep node evict NODE --reason WHY"
        )


def standing(state: FleetState) -> list[Outbreak]:
    """Every outbreak that stands on at least one node, the oldest first. O(nodes that are in one)."""
    found: list[Outbreak] = []
    for name, waiting in state.outbreaks.items():
        shows = {node: kept for node, waits in waiting.items() if waits and (kept := shown(state.nodes[node], name))}
        if not shows:
            continue
        first = next(iter(shows.values()))[0]
        rule = state.policy.rules.rule(first)
        since = state.fleet.outbreaks.get(name, 0.0)
        found.append(
            Outbreak(
                name=name,
                rule=rule.id,
                nodes=tuple(shows),
                since=since,
                example=first.message,
                again_s=rule.correlated_s,
            )
        )
    return sorted(found, key=lambda one: one.since)


def spared_of(state: FleetState, record: NodeRecord) -> list[Finding]:
    """The node's standing findings that are taken for an outbreak's, for which it is not evicted."""
    waiting = state.outbreaks
    if not waiting:
        return []
    return [finding for finding in record.known() if waiting.get(signature(finding), {}).get(record.node)]


def shared(state: FleetState, node: str, finding: Finding, now: float) -> str:
    """Which other node shows the finding, or did within the time that would make an outbreak of it, in words; empty
    where nobody did."""
    name, since = signature(finding), now - state.policy.rules.rule(finding).correlated_s
    lately = (other for other, at in state.sightings.get(name, {}).items() if at >= since)
    still = (other for other in state.outbreaks.get(name, ()) if _keeps_alive(state.nodes[other], name))
    alike = chain(lately, still, _out_for(state, name, now))
    return next((f"{other} shows {name} as well" for other in alike if other != node), "")


def _out_for(state: FleetState, name: str, now: float) -> Iterator[str]:
    """Who is out for it, under reserve."""
    for node, record in state.nodes.items():
        if now < under_reserve_until(record) and record.course is not None and name in record.course.signs.values():
            yield node


def under_reserve_until(record: NodeRecord) -> float:
    """Until when an outbreak may turn out to be behind the eviction by which the node is out, or on its way back; 0.0
    for one that is not out by an eviction."""
    course = record.course
    return course.evicted_at + course.reserve_s if course is not None and course.evicted_at else 0.0


# --- after a restart ---------------------------------------------------------------------------------------------


def date(turn: Turn, node: str, key: str, name: str) -> None:
    """Keeps with the node when it showed the finding that waits, or whose eviction is held: a controller that begins
    has to know."""
    record = turn.state.nodes[node]
    kept = {k: at for k, at in record.shown_at.items() if k in record.undecided or k == record.overruled}
    record.shown_at = kept | {key: turn.state.sightings.get(name, {}).get(node, kept.get(key, turn.now))}
    turn.node_changed(node)


def recall(state: FleetState, now: float) -> None:
    """What the records say of outbreaks: who waits for the end of one, or was evicted or held so lately that one may
    come."""
    found: list[tuple[float, str, str]] = []
    rules: dict[str, Rule] = {}
    for node, record in state.nodes.items():
        if now < under_reserve_until(record) and record.course is not None:
            found += [(record.course.evicted_at, name, node) for name in record.course.signs.values()]
        for finding in record.known():
            name = signature(finding)
            if record.undecided.get(finding.key) == UNDECIDED:
                state.outbreaks.setdefault(name, {})[node] = True
                rules[name] = state.policy.rules.rule(finding)
            elif record.overruled != finding.key:
                continue
            found.append((record.shown_at.get(finding.key, 0.0), name, node))
    for at, name, node in sorted(found):
        seen = state.sightings.setdefault(name, {})
        seen.pop(node, None)
        seen[node] = at
    for name, rule in rules.items():
        lately = [node for node, at in state.sightings[name].items() if at >= now - rule.correlated_s]
        if not _anybodys(state, rule, _standing(state, rule, name, lately)):
            del state.outbreaks[name]
    dated = {name: min(state.sightings[name].values(), default=now) for name in state.outbreaks}
    state.fleet.outbreaks = {name: state.fleet.outbreaks.get(name, at) for name, at in dated.items()}


# ---- rulings
# What a rule says of a finding on a node, before anything is done about it.

INCURABLE = (FindingKind.DIGEST_MISMATCH, FindingKind.COMPUTE_WRONG, FindingKind.MEMORY_WRONG)
"""No sensor sees these heal: who shows one stays out until somebody vouches for it, or its GPUs are others."""


def convicts(state: FleetState, record: NodeRecord, finding: Finding, now: float) -> bool:
    """Whether the finding, just as it is, keeps a node out that does not serve: its rule would evict for it, and nobody
    has vouched for the node all the same."""
    rule = state.policy.rules.rule(finding)
    if (
        finding.key in record.vouched
        or not rule.applies(finding)
        or rule.mode_of(finding) is not Mode.ENFORCE
        or rule.heals
    ):
        return False
    if rule.n_of[0] > 1 or rule.second_pass is SecondPass.PAIR or now < record.booted_at + rule.boot_grace_s:
        return False
    if rung_of(record, rule, finding, now) is Action.RESTART_RANK:
        return False
    return not is_of_outbreak(state, rule, record.node, finding, now)


def standing_against(state: FleetState, record: NodeRecord, now: float) -> list[Finding]:
    """What is known of the node that keeps it out, were it out."""
    return [finding for finding in record.known() if convicts(state, record, finding, now)]


def rung_of(record: NodeRecord, rule: Rule, finding: Finding, now: float) -> Action:
    """The step of the rule's ladder that is due for the node."""
    return rule.ladder[next_rung(rule, finding, record.steps.get(rule.id, []), now)]


def by_rule(rule: Rule, record: NodeRecord, finding: Finding, rung: Action) -> str:
    """Which rule decides, on how many reports, which step of its ladder it is, and what would clear it."""
    name = f"{rule.id}:{finding.key}" if rule.scope is Scope.SUBJECT else rule.id
    count = max(1, bad_reports(record.reports.get(name, [])))
    window = f" within {rule.window_s:g} s" if rule.n_of[0] > 1 else ""
    clear = f" for {rule.clear_s:g} s" if rule.clear_s else ""
    place = f"step {rule.ladder.index(rung) + 1} of {len(rule.ladder)} is {in_words(rung)}"
    over = "" if finding.kind in INCURABLE else f"; over once it is clear{clear}"
    return f"rule {rule.id}: report {count} of {rule.n_of[0]}{window}; {place}{over}"
