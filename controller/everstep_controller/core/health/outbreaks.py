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
    CORRELATED_PAIR_SHARE,
    MIN_CORRELATED_NODES,
    BlameIsolationMethod,
    CountingScope,
    VerdictRule,
    count_bad_reports,
    describe_action,
    next_ladder_step,
)
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

WAITS_FOR_OUTBREAK = "correlated"
"""What a finding of an outbreak is looked at again for (``NodeRecord.undecided``)."""
ACTION_DELAY_S = 1.0
"""Seconds after an eviction in which nothing is done to the machine: a fault of software often shows everywhere in
less. It is out of its jobs meanwhile, so nobody waits."""
MAX_SIGNATURES = 512
"""Kinds, with their XIDs, that are followed at once; an agent may invent numbers."""


def signature(finding: Finding) -> str:
    """What makes findings of different nodes the same: their kind, and XID."""
    return str(finding.kind) if finding.xid is None else f"{finding.kind}/{finding.xid}"


def findings_with_signature(record: NodeRecord, signature_name: str) -> list[Finding]:
    """The node's findings of that signature which stand."""
    return [finding for finding in record.all_findings() if signature(finding) == signature_name]


def check_correlated(
    transition: Transition, rule: VerdictRule, node: str, finding: Finding, *, is_new: bool = True
) -> tuple[str, list[str]]:
    """Why the finding is taken for no node's own, in words, empty where it may be; and who, with the node, is found to
    be in the outbreak only now, having been judged before. Notes that the node shows it, unless it is only looked at
    again (not ``anew``).

    An outbreak is said once, when it begins. O(1), but for what ages out, and once in an outbreak O(nodes).
    """
    state, name = transition.state, signature(finding)
    seen = state.sightings.pop(name, {})
    state.sightings[name] = seen
    if len(state.sightings) > MAX_SIGNATURES:
        oldest = next(iter(state.sightings))
        del state.sightings[oldest]
        _end(transition, oldest)
    if is_new:
        seen.pop(node, None)
        seen[node] = transition.now
    while seen and seen[oldest := next(iter(seen))] < transition.now - rule.correlated_s:
        del seen[oldest]
    if why := common_cause(state, rule, seen, node):
        return f"{name} is on {why} within {rule.correlated_s:g} s", _join_outbreak(
            transition, rule, name, seen, node, why
        )
    waiting = state.outbreaks.get(name)
    if waiting is None:
        return "", []
    standing = _nodes_standing(state, rule, name, seen)
    if waiting.get(node) and (why := common_cause(state, rule, standing, node)):
        return f"{name} stands on {why}, or more, since it was on so many at once", []
    waiting.pop(node, None)  # it is judged for itself
    if not _holds_for_any_driver(state, rule, standing):
        _end(transition, name)
        transition.audit("fleet.correlated_finding_ended", f"{name} is on few nodes again: each is judged for itself")
    return "", []


def _join_outbreak(
    transition: Transition, rule: VerdictRule, name: str, seen: Mapping[str, float], node: str, why: str
) -> list[str]:
    """The outbreak begins, or goes on with more nodes. Beyond ``correlated_nodes`` all before have joined."""
    state, began = transition.state, name not in transition.state.outbreaks
    if began:
        transition.audit(
            "fleet.correlated_finding",
            f"{name} on {why} within {rule.correlated_s:g} s: software, a driver or the network is suspected, "
            f"and no node is evicted for it under {rule.id} while that lasts",
        )
        state.fleet.outbreaks[name] = next(iter(seen.values()), transition.now)
        transition.mark_fleet_changed()
    waiting = state.outbreaks.setdefault(name, {})
    if began:  # and who showed it long ago, and was judged for it a moment ago
        asked = [*seen, *(other for other in _out_with_signature(state, name, transition.now) if other not in seen)]
    elif len(seen) <= rule.correlated_nodes:
        asked = list(seen)
    else:
        asked = [node] if node in seen else []
    new = [other for other in asked if other not in waiting and common_cause(state, rule, seen, other)]
    waiting.update(dict.fromkeys([*new, node], True))
    return new


def _end(turn: Transition, name: str) -> None:
    """Forget the outbreak, if there is one."""
    turn.state.outbreaks.pop(name, None)
    if turn.state.fleet.outbreaks.pop(name, None) is not None:
        turn.mark_fleet_changed()


def wait_for_outbreak_end(state: FleetState, node: str, finding: Finding) -> None:
    """The finding on the node is taken for an outbreak's until that is over."""
    waiting = state.outbreaks.get(signature(finding))
    if waiting is not None:
        waiting[node] = True


def mark_cleared(state: FleetState, node: str, finding: Finding) -> None:
    """Where nothing alike stands on the node any more, it waits for no outbreak's end."""
    name = signature(finding)
    waiting = state.outbreaks.get(name, {})
    if node in waiting and not findings_with_signature(state.nodes[node], name):
        waiting[node] = False


def _nodes_standing(state: FleetState, rule: VerdictRule, name: str, seen: Collection[str]) -> Collection[str]:
    """On whom an outbreak stands: who has ``seen`` it lately, and who waits for its end, serves or is to serve, and
    shows it still. No more of these than it takes."""
    found = dict.fromkeys(seen)
    for node, waits in state.outbreaks.get(name, {}).items():
        if len(found) >= rule.correlated_nodes:
            break
        if waits and _sustains_outbreak(state.nodes[node], name):
            found[node] = None
    return found


def _sustains_outbreak(record: NodeRecord, name: str) -> bool:
    """Whether an outbreak stands on the node. One that is out, or dead, tells nothing of what is so now."""
    return record.reachable and record.state in IN_SERVICE and bool(findings_with_signature(record, name))


def common_cause(state: FleetState, rule: VerdictRule, seen: Collection[str], node: str) -> str:
    """What the nodes that show it (``seen``) have in common with ``node``, in words; empty where it may be chance.

    A count alone would let two of two go, and a share alone a hundred of a thousand. Where it takes two to tell, one
    fault is seen on both.
    """
    count, known = len(seen), len(state.nodes)
    if count >= rule.correlated_nodes:
        return f"{count} nodes"
    pair_share = max(CORRELATED_PAIR_SHARE, rule.correlated_share)
    if count >= 2 and count >= pair_share * known and rule.blame_isolation is BlameIsolationMethod.NONE:
        return f"{count} of {known} nodes"
    if count < MIN_CORRELATED_NODES:
        return ""
    if count >= rule.correlated_share * known:
        return f"{count} of {known} nodes"
    driver = state.nodes[node].driver_version
    if not driver:
        return ""
    same = sum(1 for other in seen if state.nodes[other].driver_version == driver)
    of = sum(1 for record in state.nodes.values() if record.driver_version == driver)
    return f"{same} of the {of} nodes with driver {driver}" if same >= MIN_CORRELATED_NODES and 2 * same > of else ""


def _holds_for_any_driver(state: FleetState, rule: VerdictRule, seen: Collection[str]) -> bool:
    """Whether it is an outbreak of other nodes: those of a driver that the one which was judged last does not have."""
    one_of_each = {state.nodes[node].driver_version: node for node in seen}
    return any(common_cause(state, rule, seen, node) for node in one_of_each.values())


# --- asking, without noting anything -----------------------------------------------------------------------------


def belongs_to_outbreak(state: FleetState, rule: VerdictRule, node: str, finding: Finding, now: float) -> bool:
    """Whether the finding on the node is taken for an outbreak's now."""
    name = signature(finding)
    if name not in state.outbreaks:
        return False
    seen: Collection[str] = [n for n, at in state.sightings.get(name, {}).items() if at >= now - rule.correlated_s]
    if state.outbreaks[name].get(node):
        seen = _nodes_standing(state, rule, name, seen)
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
            f"{self.name} stands on {len(self.nodes)} of {known} nodes ({join_names(self.nodes)}: {self.example}): "
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
        shows = {
            node: kept
            for node, waits in waiting.items()
            if waits and (kept := findings_with_signature(state.nodes[node], name))
        }
        if not shows:
            continue
        first = next(iter(shows.values()))[0]
        rule = state.policy.rules.rule_for(first)
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
    return [finding for finding in record.all_findings() if waiting.get(signature(finding), {}).get(record.node)]


def shared_by_other(state: FleetState, node: str, finding: Finding, now: float) -> str:
    """Which other node shows the finding, or did within the time that would make an outbreak of it, in words; empty
    where nobody did."""
    name, since = signature(finding), now - state.policy.rules.rule_for(finding).correlated_s
    lately = (other for other, at in state.sightings.get(name, {}).items() if at >= since)
    still = (other for other in state.outbreaks.get(name, ()) if _sustains_outbreak(state.nodes[other], name))
    alike = chain(lately, still, _out_with_signature(state, name, now))
    return next((f"{other} shows {name} as well" for other in alike if other != node), "")


def _out_with_signature(state: FleetState, name: str, now: float) -> Iterator[str]:
    """Who is out for it, under reserve."""
    for node, record in state.nodes.items():
        if (
            now < rollback_possible_until(record)
            and record.readmission_plan is not None
            and name in record.readmission_plan.cause_signatures.values()
        ):
            yield node


def rollback_possible_until(record: NodeRecord) -> float:
    """Until when an outbreak may turn out to be behind the eviction by which the node is out, or on its way back; 0.0
    for one that is not out by an eviction."""
    course = record.readmission_plan
    return course.evicted_at + course.rollback_window_s if course is not None and course.evicted_at else 0.0


# --- after a restart ---------------------------------------------------------------------------------------------


def record_seen_at(transition: Transition, node: str, key: str, name: str) -> None:
    """Keeps with the node when it showed the finding that waits, or whose eviction is held: a controller that begins
    has to know."""
    record = transition.state.nodes[node]
    kept = {
        k: at
        for k, at in record.finding_seen_at.items()
        if k in record.undecided_findings or k == record.deferred_eviction_key
    }
    record.finding_seen_at = kept | {
        key: transition.state.sightings.get(name, {}).get(node, kept.get(key, transition.now))
    }
    transition.mark_node_changed(node)


def restore_outbreaks(state: FleetState, now: float) -> None:
    """What the records say of outbreaks: who waits for the end of one, or was evicted or held so lately that one may
    come."""
    found: list[tuple[float, str, str]] = []
    rules: dict[str, VerdictRule] = {}
    for node, record in state.nodes.items():
        if now < rollback_possible_until(record) and record.readmission_plan is not None:
            found += [
                (record.readmission_plan.evicted_at, name, node)
                for name in record.readmission_plan.cause_signatures.values()
            ]
        for finding in record.all_findings():
            name = signature(finding)
            if record.undecided_findings.get(finding.key) == WAITS_FOR_OUTBREAK:
                state.outbreaks.setdefault(name, {})[node] = True
                rules[name] = state.policy.rules.rule_for(finding)
            elif record.deferred_eviction_key != finding.key:
                continue
            found.append((record.finding_seen_at.get(finding.key, 0.0), name, node))
    for at, name, node in sorted(found):
        seen = state.sightings.setdefault(name, {})
        seen.pop(node, None)
        seen[node] = at
    for name, rule in rules.items():
        lately = [node for node, at in state.sightings[name].items() if at >= now - rule.correlated_s]
        if not _holds_for_any_driver(state, rule, _nodes_standing(state, rule, name, lately)):
            del state.outbreaks[name]
    dated = {name: min(state.sightings[name].values(), default=now) for name in state.outbreaks}
    state.fleet.outbreaks = {name: state.fleet.outbreaks.get(name, at) for name, at in dated.items()}


# ---- rulings
# What a rule says of a finding on a node, before anything is done about it.

NOT_SELF_CLEARING = (FindingKind.DIGEST_MISMATCH, FindingKind.COMPUTE_WRONG, FindingKind.MEMORY_WRONG)
"""No sensor sees these heal: who shows one stays out until somebody vouches for it, or its GPUs are others."""


def blocks_service(state: FleetState, record: NodeRecord, finding: Finding, now: float) -> bool:
    """Whether the finding, just as it is, keeps a node out that does not serve: its rule would evict for it, and nobody
    has vouched for the node all the same."""
    rule = state.policy.rules.rule_for(finding)
    if (
        finding.key in record.accepted_findings
        or not rule.counts_against_node(finding)
        or rule.effective_mode(finding) is not Mode.ENFORCE
        or rule.already_handled
    ):
        return False
    if (
        rule.n_of_m[0] > 1
        or rule.blame_isolation is BlameIsolationMethod.PAIR
        or now < record.booted_at + rule.boot_grace_s
    ):
        return False
    if due_action(record, rule, finding, now) is Action.RESTART_RANK:
        return False
    return not belongs_to_outbreak(state, rule, record.node, finding, now)


def blocking_findings(state: FleetState, record: NodeRecord, now: float) -> list[Finding]:
    """What is known of the node that keeps it out, were it out."""
    return [finding for finding in record.all_findings() if blocks_service(state, record, finding, now)]


def due_action(record: NodeRecord, rule: VerdictRule, finding: Finding, now: float) -> Action:
    """The step of the rule's ladder that is due for the node."""
    return rule.ladder[next_ladder_step(rule, finding, record.ladder_history.get(rule.id, []), now)]


def describe_rule(rule: VerdictRule, record: NodeRecord, finding: Finding, action: Action) -> str:
    """Which rule decides, on how many reports, which step of its ladder it is, and what would clear it."""
    name = f"{rule.id}:{finding.key}" if rule.scope is CountingScope.SUBJECT else rule.id
    count = max(1, count_bad_reports(record.report_history.get(name, [])))
    window = f" within {rule.window_s:g} s" if rule.n_of_m[0] > 1 else ""
    clear = f" for {rule.clear_s:g} s" if rule.clear_s else ""
    place = f"step {rule.ladder.index(action) + 1} of {len(rule.ladder)} is {describe_action(action)}"
    over = "" if finding.kind in NOT_SELF_CLEARING else f"; over once it is clear{clear}"
    return f"rule {rule.id}: report {count} of {rule.n_of_m[0]}{window}; {place}{over}"
