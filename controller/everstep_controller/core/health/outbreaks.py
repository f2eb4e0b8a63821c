"""Recognise outbreaks: a finding on many nodes at once is the fault of software, a driver or the network.

Verdicts on the first nodes can be rolled back within ``correlated_s`` (``health.eviction``). Nodes spared by an
outbreak wait for its end, which comes once too few serving nodes show the finding. The module also holds what a rule
says of a finding before anything is done about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import msgspec

from everstep.ids import NodeId
from everstep.vocabulary import Action, Finding, FindingKind, Mode
from everstep_controller.core import policy
from everstep_controller.core.policy import BlameIsolationMethod, VerdictRule
from everstep_controller.core.records import IN_SERVICE, NodeRecord, UndecidedReason
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

ACTION_DELAY_S = 1.0
"""Seconds after an eviction in which the machine is left alone, because a software fault often shows everywhere in
less. The node has left its jobs by then, so nothing waits."""
MAX_SIGNATURES = 512
"""Number of signatures followed at once, because an agent may invent XIDs."""


def signature(finding: Finding) -> str:
    """Return the finding's kind and XID, which identify equal findings of different nodes."""
    return str(finding.kind) if finding.xid is None else f"{finding.kind}/{finding.xid}"


def findings_with_signature(record: NodeRecord, signature_name: str) -> list[Finding]:
    """Return the node's standing findings with that signature."""
    return [finding for finding in record.all_findings() if signature(finding) == signature_name]


def record_sighting(
    transition: Transition, rule: VerdictRule, node: str, finding: Finding, *, is_new: bool = True
) -> tuple[str, list[str]]:
    """Record a sighting of the finding if it ``is_new``.

    Return why the finding belongs to an outbreak ("" if it does not), and which nodes judged earlier join it now.
    O(nodes) once per outbreak, else O(1).
    """
    state, name = transition.state, signature(finding)
    sightings = state.shared_findings.sightings
    seen = sightings.pop(name, {})
    sightings[name] = seen
    if len(sightings) > MAX_SIGNATURES:
        oldest = next(iter(sightings))
        del sightings[oldest]
        _end(transition, oldest)
    if is_new:
        seen.pop(node, None)
        seen[node] = transition.now
    while seen and seen[oldest := next(iter(seen))] < transition.now - rule.correlated_s:
        del seen[oldest]
    if why := common_cause(state, rule, seen, node):
        joined_now = _join_outbreak(transition, rule, name, seen, node, why)
        return f"{name} appeared on {why} within {rule.correlated_s:g} s", joined_now
    waiting = state.shared_findings.outbreaks.get(name)
    if waiting is None:
        return "", []
    nodes = _nodes_sustaining(state, rule, name, seen)
    if waiting.get(node) and (why := common_cause(state, rule, nodes, node)):
        return f"{name} is still present on {why} or more and counts as one outbreak", []
    waiting.pop(node, None)  # the node is judged for itself
    if not _holds_for_any_driver(state, rule, nodes):
        _end(transition, name)
        sentence = f"the outbreak of {name} is over: the remaining nodes are judged one by one"
        transition.log_event("fleet.correlated_finding_ended", sentence)
    return "", []


def _join_outbreak(
    transition: Transition, rule: VerdictRule, name: str, seen: Mapping[str, float], node: str, reason: str
) -> list[str]:
    """Begin the outbreak or add nodes, and return the new ones."""
    state, began = transition.state, name not in transition.state.shared_findings.outbreaks
    if began:
        transition.log_event(
            "fleet.correlated_finding",
            f"{name} appeared on {reason} within {rule.correlated_s:g} s: a common cause (software, driver, network) "
            f"is suspected; rule {rule.id} evicts no node for it during the outbreak",
        )
        state.fleet.outbreaks[name] = next(iter(seen.values()), transition.now)
        transition.mark_fleet_changed()
    waiting = state.shared_findings.outbreaks.setdefault(name, {})
    if began:  # include nodes that showed the finding long ago and were evicted for it just now
        asked = [*seen, *(other for other in _out_with_signature(state, name, transition.now) if other not in seen)]
    elif len(seen) <= rule.correlated_nodes:
        asked = list(seen)
    else:
        asked = [node] if node in seen else []
    new = [other for other in asked if other not in waiting and common_cause(state, rule, seen, other)]
    waiting.update(dict.fromkeys([*new, node], True))
    return new


def _end(transition: Transition, name: str) -> None:
    """Forget the outbreak, if there is one."""
    transition.state.shared_findings.outbreaks.pop(name, None)
    if transition.state.fleet.outbreaks.pop(name, None) is not None:
        transition.mark_fleet_changed()


def wait_for_outbreak_end(state: FleetState, node: str, finding: Finding) -> None:
    """Let the finding wait for the end of its outbreak."""
    waiting = state.shared_findings.outbreaks.get(signature(finding))
    if waiting is not None:
        waiting[node] = True


def mark_cleared(state: FleetState, node: str, finding: Finding) -> None:
    """End the node's wait for an outbreak if it shows no finding with that signature any more."""
    name = signature(finding)
    waiting = state.shared_findings.outbreaks.get(name, {})
    if node in waiting and not findings_with_signature(state.nodes[node], name):
        waiting[node] = False


def _nodes_sustaining(state: FleetState, rule: VerdictRule, name: str, seen: Collection[str]) -> Collection[str]:
    """Return recent sightings and waiting nodes in service that still show it, up to ``correlated_nodes``."""
    found = dict.fromkeys(seen)
    for node, waits in state.shared_findings.outbreaks.get(name, {}).items():
        if len(found) >= rule.correlated_nodes:
            break
        if waits and _sustains_outbreak(state.nodes[node], name):
            found[node] = None
    return found


def _sustains_outbreak(record: NodeRecord, name: str) -> bool:
    """Return whether the node sustains the outbreak: it is reachable, in service and shows it."""
    return record.liveness.reachable and record.state in IN_SERVICE and bool(findings_with_signature(record, name))


def common_cause(state: FleetState, rule: VerdictRule, seen: Collection[str], node: str) -> str:
    """Return what the nodes in ``seen`` have in common with ``node``; "" if it may be chance.

    A count alone would let two of two nodes go, and a share alone a hundred of a thousand.
    """
    count, known = len(seen), len(state.nodes)
    if count >= rule.correlated_nodes:
        return f"{count} nodes"
    pair_share = max(policy.CORRELATED_PAIR_SHARE, rule.correlated_share)
    if count >= 2 and count >= pair_share * known and rule.blame_isolation is BlameIsolationMethod.NONE:
        return f"{count} of {known} nodes"
    if count < policy.MIN_CORRELATED_NODES:
        return ""
    if count >= rule.correlated_share * known:
        return f"{count} of {known} nodes"
    driver = state.nodes[node].identity.driver_version
    if not driver:
        return ""
    same = sum(1 for other in seen if state.nodes[other].identity.driver_version == driver)
    of = sum(1 for record in state.nodes.values() if record.identity.driver_version == driver)
    is_common = same >= policy.MIN_CORRELATED_NODES and 2 * same > of
    return f"{same} of the {of} nodes with driver {driver}" if is_common else ""


def _holds_for_any_driver(state: FleetState, rule: VerdictRule, seen: Collection[str]) -> bool:
    """Return whether the outbreak holds for other nodes, such as those with a driver that the judged node lacks."""
    one_of_each = {state.nodes[node].identity.driver_version: node for node in seen}
    return any(common_cause(state, rule, seen, node) for node in one_of_each.values())


# Queries without side effects


def belongs_to_outbreak(state: FleetState, rule: VerdictRule, node: str, finding: Finding, now: float) -> bool:
    """Return whether the node's finding currently belongs to an outbreak."""
    name, shared = signature(finding), state.shared_findings
    if name not in shared.outbreaks:
        return False
    seen: Collection[str] = [n for n, at in shared.sightings.get(name, {}).items() if at >= now - rule.correlated_s]
    if shared.outbreaks[name].get(node):
        seen = _nodes_sustaining(state, rule, name, seen)
    return bool(common_cause(state, rule, seen, node))


class WidespreadFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that stands on so many nodes that none of them is evicted for it."""

    name: str
    """Signature of the findings: kind and XID."""
    rule: str
    """Id of the rule that would judge them."""
    nodes: tuple[NodeId, ...]
    """Nodes that show it, in the order in which they joined."""
    since: float
    """First sighting, in wall seconds."""
    example: str
    """Message of the first node's finding."""
    again_s: float
    """Seconds after which each node is judged again."""

    def sentence(self, known: int) -> str:
        """Return what stands where, and what Everstep does about it. ``known`` is the number of nodes in the fleet."""
        return (
            f"{self.name} is present on {len(self.nodes)} of {known} nodes ({join_names(self.nodes)}: {self.example}): "
            f"software, a driver or the network is suspected, so no node is evicted for it"
        )

    def advice(self) -> str:
        """Return what happens next, and what a person can do."""
        return (
            f"Find and fix what these nodes have in common. The finding is judged again every {self.again_s:g} s: once "
            f"too few nodes show it to have a common cause, each is judged by rule {self.rule}. To take a node out "
            f"now, run `everstep node evict NODE --reason WHY`"
        )


def active_outbreaks(state: FleetState) -> list[WidespreadFinding]:
    """Return every outbreak with at least one node, oldest first. O(nodes in outbreaks)."""
    found: list[WidespreadFinding] = []
    for name, waiting in state.shared_findings.outbreaks.items():
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
        again_s, nodes = rule.correlated_s, tuple(shows)
        found.append(
            WidespreadFinding(name=name, rule=rule.id, nodes=nodes, since=since, example=first.message, again_s=again_s)
        )
    return sorted(found, key=lambda one: one.since)


def spared_findings_of(state: FleetState, record: NodeRecord) -> list[Finding]:
    """Return the node's standing findings that belong to an outbreak and for which it is not evicted."""
    waiting = state.shared_findings.outbreaks
    if not waiting:
        return []
    return [finding for finding in record.all_findings() if waiting.get(signature(finding), {}).get(record.node)]


def shared_by_other(state: FleetState, node: str, finding: Finding, now: float) -> str:
    """Return which other node shows the finding, or showed it recently enough for an outbreak; "" for none."""
    name, since = signature(finding), now - state.policy.rules.rule_for(finding).correlated_s
    shared = state.shared_findings
    lately = (other for other, at in shared.sightings.get(name, {}).items() if at >= since)
    still = (other for other in shared.outbreaks.get(name, ()) if _sustains_outbreak(state.nodes[other], name))
    alike = chain(lately, still, _out_with_signature(state, name, now))
    return next((f"{other} shows {name} too" for other in alike if other != node), "")


def _out_with_signature(state: FleetState, name: str, now: float) -> Iterator[str]:
    """Yield nodes that are out for the signature and can still be rolled back."""
    for node, record in state.nodes.items():
        plan = record.quarantine.plan
        if plan is not None and now < rollback_possible_until(record) and name in plan.cause_signatures.values():
            yield node


def rollback_possible_until(record: NodeRecord) -> float:
    """Return the time until which an outbreak can roll back the node's eviction; 0.0 if the node was not evicted."""
    plan = record.quarantine.plan
    return plan.evicted_at + plan.rollback_window_s if plan is not None and plan.evicted_at else 0.0


def record_seen_at(transition: Transition, node: str, key: str, name: str) -> None:
    """Store the sighting with the node, for findings that wait or whose eviction is deferred, to survive a restart."""
    health = transition.state.nodes[node].health
    waiting = {*health.undecided_findings, health.deferred_eviction_key}
    kept = {k: at for k, at in health.finding_seen_at.items() if k in waiting}
    seen_at = transition.state.shared_findings.sightings.get(name, {}).get(node, kept.get(key, transition.now))
    health.finding_seen_at = kept | {key: seen_at}
    transition.mark_node_changed(node)


def restore_outbreaks(transition: Transition) -> None:
    """Restore outbreaks from nodes that wait for the end of one, or were evicted or deferred recently."""
    state, now = transition.state, transition.now
    shared = state.shared_findings
    found: list[tuple[float, str, str]] = []
    rules: dict[str, VerdictRule] = {}
    for node, record in state.nodes.items():
        plan = record.quarantine.plan
        if plan is not None and now < rollback_possible_until(record):
            found += [(plan.evicted_at, name, node) for name in plan.cause_signatures.values()]
        for finding in record.all_findings():
            name = signature(finding)
            if record.health.undecided_findings.get(finding.key) is UndecidedReason.OUTBREAK:
                shared.outbreaks.setdefault(name, {})[node] = True
                rules[name] = state.policy.rules.rule_for(finding)
            elif record.health.deferred_eviction_key != finding.key:
                continue
            found.append((record.health.finding_seen_at.get(finding.key, 0.0), name, node))
    for at, name, node in sorted(found):
        seen = shared.sightings.setdefault(name, {})
        seen.pop(node, None)
        seen[node] = at
    for name, rule in rules.items():
        lately = [node for node, at in shared.sightings[name].items() if at >= now - rule.correlated_s]
        if not _holds_for_any_driver(state, rule, _nodes_sustaining(state, rule, name, lately)):
            del shared.outbreaks[name]
    dated = {name: min(shared.sightings[name].values(), default=now) for name in shared.outbreaks}
    restored = {name: state.fleet.outbreaks.get(name, at) for name, at in dated.items()}
    if restored != state.fleet.outbreaks:
        state.fleet.outbreaks = restored
        transition.mark_fleet_changed()


# Rules applied to one node

NOT_SELF_CLEARING = (
    FindingKind.DIGEST_MISMATCH,
    FindingKind.AUDIT_MISMATCH,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
)
"""Findings that no sensor sees heal: the node stays out until an operator readmits it or its GPUs are replaced."""


def blocks_service(state: FleetState, record: NodeRecord, finding: Finding, now: float) -> bool:
    """Return whether the finding keeps a node out: its rule would evict for it, and no operator has accepted it."""
    rule = state.policy.rules.rule_for(finding)
    if finding.key in record.health.accepted_findings or not rule.counts_against_node(finding):
        return False
    if rule.effective_mode(finding) is not Mode.ENFORCE or rule.already_handled or rule.n_of_m[0] > 1:
        return False
    in_boot_grace = now < record.identity.booted_at + rule.boot_grace_s
    if in_boot_grace or rule.blame_isolation is BlameIsolationMethod.PAIR:
        return False
    if due_action(record, rule, finding, now) is Action.RESTART_RANK:
        return False
    return not belongs_to_outbreak(state, rule, record.node, finding, now)


def blocking_findings(state: FleetState, record: NodeRecord, now: float) -> list[Finding]:
    """Return the node's findings that would keep it out of service."""
    return [finding for finding in record.all_findings() if blocks_service(state, record, finding, now)]


def due_action(record: NodeRecord, rule: VerdictRule, finding: Finding, now: float) -> Action:
    """Return the step of the rule's ladder that is due for the node."""
    return rule.ladder[policy.next_ladder_step(rule, finding, record.history.ladder_steps.get(rule.id, []), now)]


def record_ladder_step(record: NodeRecord, rule: VerdictRule, action: Action, now: float) -> None:
    """Remember that the step was taken, unless it was just taken."""
    steps = record.history.ladder_steps
    steps[rule.id] = policy.append_ladder_step(steps.get(rule.id, []), rule, action, now)


def describe_rule(rule: VerdictRule, record: NodeRecord, finding: Finding, action: Action) -> str:
    """Return the rule, the number of reports, the ladder step and what ends it, as a phrase."""
    name = f"{rule.id}:{finding.key}" if rule.scope is policy.CountingScope.SUBJECT else rule.id
    count = max(1, policy.count_bad_reports(record.history.counted_reports.get(name, [])))
    window = f" within {rule.window_s:g} s" if rule.n_of_m[0] > 1 else ""
    clears = f"has been clear for {rule.clear_s:g} s" if rule.clear_s else "clears"
    place = f"next action ({rule.ladder.index(action) + 1} of {len(rule.ladder)}): {policy.describe_action(action)}"
    over = "" if finding.kind in NOT_SELF_CLEARING else f"; the node may return once the finding {clears}"
    return f"rule {rule.id}: occurrence {count} of {rule.n_of_m[0]}{window}; {place}{over}"
