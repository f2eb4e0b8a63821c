"""Judge findings by their rules, keep the agent's findings and limit their log entries."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, Mode, NodeState, Severity
from everstep.wire.v1.agent import MAX_FINDINGS
from everstep_controller.core import policy
from everstep_controller.core.effects import RecordFindingCleared, RecordFindingRaised
from everstep_controller.core.health import diagnostics, eviction, outbreaks
from everstep_controller.core.health.node_state import out_of_service_reason
from everstep_controller.core.health.quarantine import add_cause, begin_diagnostics, check_quarantine, quarantine_again
from everstep_controller.core.jobs import losses
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.policy import BlameIsolationMethod, VerdictRule
from everstep_controller.core.records import DiagnosticsStatus, HistoryKind, NodeRecord, UndecidedReason
from everstep_controller.core.state import FindingBurst
from everstep_controller.core.transition import Transition, defer_judgement

WRONG_RESULTS = (FindingKind.DIGEST_MISMATCH, FindingKind.AUDIT_MISMATCH, FindingKind.COMPUTE_WRONG)
"""Findings for which a job leaves the node at once: each further step would be wrong, too."""
MAX_COUNTED_FINDINGS = 64
"""Number of a node's findings whose reports are counted; no node has so many different faults."""


def judge_finding(
    transition: Transition, node: str, finding: Finding, *, is_logged: bool = True, stood_before: bool = False
) -> None:
    """Judge a finding; a repeat if it ``stood_before``. Advice on a flapping kind is not ``is_logged``."""
    record, rule = transition.state.nodes[node], transition.policy.rules.rule_for(finding)
    if rule.already_handled and stood_before:
        return
    count = count_report(record, rule, finding, transition.now, bad=True) if rule.n_of_m[1] > 1 else 1
    if stood_before and rule.n_of_m[0] == 1:
        return
    due = record.identity.booted_at + rule.boot_grace_s
    is_handled = rule.already_handled and rule.n_of_m[0] == 1
    if is_handled or not rule.counts_against_node(finding) or count < rule.n_of_m[0]:
        if is_logged and not stood_before:
            _advise(transition, node, finding, rule)
    elif transition.now < due:
        defer_judgement(transition, node, finding.key, UndecidedReason.BOOT_GRACE, due)
    else:
        judge_by_rule(transition, node, finding, is_logged=is_logged)


def count_report(record: NodeRecord, rule: VerdictRule, finding: Finding, now: float, *, bad: bool) -> int:
    """Count this report and return the number of bad reports under the rule."""
    name = f"{rule.id}:{finding.key}" if rule.scope is policy.CountingScope.SUBJECT else rule.id
    reports = policy.append_report(record.history.counted_reports.pop(name, []), rule, now, bad=bad)
    record.history.counted_reports[name] = reports
    while len(record.history.counted_reports) > MAX_COUNTED_FINDINGS:
        del record.history.counted_reports[next(iter(record.history.counted_reports))]
    return policy.count_bad_reports(reports)


def judge_by_rule(
    transition: Transition, node: str, finding: Finding, *, is_logged: bool = True, proof: str = "", is_new: bool = True
) -> None:
    """Judge a finding by mode, outbreak, ladder and budget; ``proof`` is the result of a blame isolation."""
    record, rule = transition.state.nodes[node], transition.policy.rules.rule_for(finding)
    mode = rule.effective_mode(finding)
    if mode is Mode.OBSERVE:
        return
    if record.state is NodeState.QUARANTINED:
        if mode is Mode.ENFORCE and not _is_spared_in_quarantine(transition, node, finding, rule, is_new=is_new):
            add_cause(transition, node, finding)
        return
    if not eviction.is_serving(transition, node) and not (mode is Mode.RECOMMEND and record.state is NodeState.LOST):
        if mode is not Mode.ENFORCE:
            return
        if is_logged and (record.scheduling.hold_reason or record.scheduling.external_cordon_by):
            _recommend_to_holder(transition, node, finding, rule)
        if record.state is NodeState.PROBATION:  # if it is not spared, ``_judge_blocking`` judges it
            _is_spared(transition, node, finding, rule, is_new=is_new, is_logged=is_logged)
        return
    if _is_spared(transition, node, finding, rule, is_new=is_new, is_logged=is_logged):
        return
    ladder_action = outbreaks.due_action(record, rule, finding, transition.now)
    if mode is Mode.RECOMMEND:
        _recommend(transition, node, finding, rule, ladder_action, is_logged=is_logged)
    elif ladder_action is Action.RESTART_RANK:
        _restart_ranks(transition, node, finding, rule, is_logged=is_logged)
    elif rule.blame_isolation is BlameIsolationMethod.PAIR and not proof:
        _open_pair_case(transition, node, finding)
    else:
        evict_for(transition, node, finding, proof)


def _is_spared(
    transition: Transition,
    node: str,
    finding: Finding,
    rule: VerdictRule,
    *,
    is_new: bool = True,
    is_logged: bool = True,
) -> bool:
    """Return whether an outbreak spares the node, after a verdict that says so."""
    why = eviction.spare_if_correlated(transition, rule, node, finding, is_new=is_new)
    if why and is_logged:
        words = f"{node}: {finding.message}; not evicted: {why} (a cause outside the nodes)"
        _add_verdict(transition, node, Decision.CORRELATED, words, finding)
    return bool(why)


def _is_spared_in_quarantine(
    transition: Transition, node: str, finding: Finding, rule: VerdictRule, *, is_new: bool
) -> bool:
    """Return whether a quarantined node's finding belongs to an outbreak instead of being a further cause.

    It counts as a sighting only on a node that was just evicted, since one fault raises several findings.
    """
    record = transition.state.nodes[node]
    if transition.now < outbreaks.rollback_possible_until(record) and rule.blame_isolation is BlameIsolationMethod.NONE:
        return bool(eviction.spare_if_correlated(transition, rule, node, finding, is_new=is_new))
    if not outbreaks.belongs_to_outbreak(transition.state, rule, node, finding, transition.now):
        return False
    outbreaks.wait_for_outbreak_end(transition.state, node, finding)
    defer_judgement(transition, node, finding.key, UndecidedReason.OUTBREAK, transition.now + rule.correlated_s)
    return True


def _recommend(
    transition: Transition, node: str, finding: Finding, rule: VerdictRule, action: Action, *, is_logged: bool
) -> None:
    """Recommend a ladder step that a person carries out."""
    record = transition.state.nodes[node]
    said = policy.was_step_taken(record.history.ladder_steps.get(rule.id, []), rule, action, transition.now)
    outbreaks.record_ladder_step(record, rule, action, transition.now)
    transition.mark_node_changed(node)
    if is_logged and not said:
        why = outbreaks.describe_rule(rule, record, finding, action)
        words = f"{finding.message}; recommended for {node}: {policy.describe_action(action)} ({why})"
        _add_verdict(transition, node, Decision.RECOMMEND, words, finding, action)


def _restart_ranks(transition: Transition, node: str, finding: Finding, rule: VerdictRule, *, is_logged: bool) -> None:
    """Restart ranks of the node within the caps. A node that has used up its own restarts is due for the next step."""
    record, ladder_action = transition.state.nodes[node], Action.RESTART_RANK
    again = policy.was_step_taken(record.history.ladder_steps.get(rule.id, []), rule, ladder_action, transition.now)
    if transition.state.database_outage:
        due = transition.now + eviction.DEFERRAL_RECHECK_S
        defer_judgement(transition, node, finding.key, UndecidedReason.DATABASE_OUTAGE, due)
        return
    if not again and (why := losses.node_restart_cap(transition, node)) and rule.ladder[-1] is not ladder_action:
        outbreaks.record_ladder_step(record, rule, ladder_action, transition.now - rule.coalesce_s)
        evict_for(transition, node, finding, f"{finding.message}; {why}")
        return
    if not again and (cap := losses.fleet_restart_cap(transition))[0]:
        defer_judgement(transition, node, finding.key, UndecidedReason.RESTART_CAP, cap[1])
        if is_logged:
            words = f"{finding.message}; the restart of ranks on {node} is postponed: {cap[0]}"
            _add_verdict(transition, node, Decision.RECOMMEND, words, finding)
        return
    target = losses.find_restart_target(transition, node, finding, rule)
    words = f"{node}: {finding.message} ({outbreaks.describe_rule(rule, record, finding, ladder_action)})"
    outbreaks.record_ladder_step(record, rule, ladder_action, transition.now)
    transition.mark_node_changed(node)
    if target is not None and target.members:
        words = f"{words}; {target.describe()} is restarted"
        if not again:
            _add_verdict(transition, node, Decision.RESTART, words, finding, ladder_action)
        losses.restart_ranks(transition, node, target, words, finding.trace or transition.trace, counted=not again)
    elif not again:
        why = "no rank runs there" if target is None else "its rank was replaced just before"
        _add_verdict(transition, node, Decision.NO_ACTION, f"{words}; {why}", finding)


def _recommend_to_holder(transition: Transition, node: str, finding: Finding, rule: VerdictRule) -> None:
    """Recommend to the holder of the node what would evict a serving node, since a job may still compute on it."""
    record = transition.state.nodes[node]
    ladder_action = outbreaks.due_action(record, rule, finding, transition.now)
    holder = out_of_service_reason(record, transition.now)
    action = policy.describe_action(ladder_action)
    words = f"{finding.message}; recommended for {node}: {action}; no automatic action, because {holder}"
    _add_verdict(transition, node, Decision.RECOMMEND, words, finding, ladder_action)


def _advise(transition: Transition, node: str, finding: Finding, rule: VerdictRule) -> None:
    if rule.already_handled:
        _add_verdict(transition, node, Decision.NO_ACTION, f"{finding.message}: {rule.already_handled}", finding)
        return
    if finding.severity is not Severity.CRITICAL or finding.mode is Mode.OBSERVE:
        return
    what = "inspect it" if finding.action is Action.NONE else finding.action.replace("_", " ")
    words = f"{finding.message}; recommended for {node}: {what}"
    _add_verdict(transition, node, Decision.RECOMMEND, words, finding, finding.action)


def _add_verdict(
    transition: Transition, node: str, decision: Decision, sentence: str, finding: Finding, action: Action = Action.NONE
) -> None:
    trace = finding.trace or transition.trace
    transition.add_verdict(node, decision, sentence, action=action, evidence=(finding,), trace=trace)


def evict_for(transition: Transition, node: str, finding: Finding, proof: str = "") -> bool:
    """Evict the node if allowed. Its jobs leave it at the next boundary, except after wrong results."""
    record, rule = transition.state.nodes[node], transition.policy.rules.rule_for(finding)
    ladder_action = outbreaks.due_action(record, rule, finding, transition.now)
    sentence = f"{node}: {proof or finding.message} ({outbreaks.describe_rule(rule, record, finding, ladder_action)})"
    if not eviction.evict(transition, node, finding, sentence):
        return False
    cause = RegroupCause(
        reason=GenerationReason.NODE_EVICTED,
        sentence=f"{node} is evicted ({proof or finding.message})",
        trace=finding.trace or transition.trace,
        at_boundary=finding.kind not in WRONG_RESULTS,
    )
    losses.regroup_jobs_without(transition, node, cause)
    return True


def _open_pair_case(transition: Transition, node: str, finding: Finding) -> None:
    """Try the node and the peer that its finding names with partners known to be good."""
    peer = finding.evidence.get("peer", finding.subject)
    found = {node: finding}
    if peer != node and peer in transition.state.nodes and eviction.is_serving(transition, peer):
        found[peer] = finding
    if diagnostics.open_blame_case(transition, BlameIsolationMethod.PAIR, found, f"{finding.message} ({node})") is None:
        due = transition.now + transition.policy.probe_timeout_s
        defer_judgement(transition, node, finding.key, UndecidedReason.BLAME_ISOLATION, due)
    else:
        transition.state.nodes[node].health.undecided_findings[finding.key] = UndecidedReason.BLAME_ISOLATION


# Log of findings


def record_finding(transition: Transition, node: str, finding: Finding) -> None:
    """Write a finding to the audit log, the finding history and the node's history."""
    data = {"severity": str(finding.severity), "rule": finding.rule, "key": finding.key}
    if finding.since:
        data["seen_at"] = f"{finding.since:.6f}"
    trace = finding.trace or transition.trace
    count = transition.state.node_runtime[node].finding_bursts[_burst_key(finding)].count
    burst = f"; number {count} of a burst of {finding.kind}" if count > transition.policy.finding_burst_count else ""
    sentence = f"{finding.message} ({node}){burst}"
    transition.audit("finding", sentence, node=node, trace=trace, data=data)
    transition.emit(RecordFindingRaised(node, finding, transition.now))
    transition.append_history(node, HistoryKind.FINDING, finding.message, data | dict(finding.evidence))


def should_record(transition: Transition, node: str, finding: Finding, *, raised: bool) -> bool:
    """Return whether a finding is logged. A flapping kind is logged at the 16th, 32nd, ... time, per severity."""
    bursts = transition.state.node_runtime[node].finding_bursts
    burst = bursts.setdefault(_burst_key(finding), FindingBurst())
    if transition.now - burst.last_at > transition.policy.finding_quiet_s:
        burst.count = 0
    burst.last_at = transition.now
    burst.count += raised
    return burst.count <= transition.policy.finding_burst_count or (raised and burst.count.bit_count() == 1)


def _burst_key(finding: Finding) -> str:
    return f"{finding.kind}/{finding.severity}"


# Agent findings


def replace_agent_findings(transition: Transition, node: str, findings: Iterable[Finding]) -> None:
    """Replace the agent's findings by its full report, and judge the new ones."""
    record = transition.state.nodes[node]
    transition.state.node_runtime[node].has_full_findings = True
    before, record.health.agent_findings = record.health.agent_findings, {finding.key: finding for finding in findings}
    _drop_mildest(record)
    for key in before:
        if key not in record.health.agent_findings:
            _handle_cleared(transition, node, before[key])
    for key, finding in record.health.agent_findings.items():
        _judge_if_new(transition, node, before.get(key), finding)
    if before != record.health.agent_findings:
        transition.mark_node_changed(node)
    _recheck_node(transition, node)


def add_agent_finding(transition: Transition, node: str, finding: Finding) -> None:
    """Add one urgent finding of the agent. The next full report confirms or drops it."""
    record = transition.state.nodes[node]
    before = record.health.agent_findings.get(finding.key)
    record.health.agent_findings[finding.key] = finding
    _drop_mildest(record)
    transition.mark_node_changed(node)
    _judge_if_new(transition, node, before, finding)
    _recheck_node(transition, node)


def _drop_mildest(record: NodeRecord) -> None:
    """Drop findings beyond MAX_FINDINGS: mildest first, then oldest, and those that keep the node out last."""
    excess = len(record.health.agent_findings) - MAX_FINDINGS
    if excess <= 0:
        return
    for key in sorted(record.health.agent_findings, key=lambda key: _retention_key(record, key))[:excess]:
        del record.health.agent_findings[key]
        record.health.undecided_findings.pop(key, None)


def _retention_key(record: NodeRecord, key: str) -> tuple[bool, int]:
    is_kept = key in record.quarantine.causes or key == record.health.deferred_eviction_key
    return is_kept, record.health.agent_findings[key].severity.gravity


def clear_agent_finding(transition: Transition, node: str, key: str) -> None:
    """Clear a finding whose clearing rule holds."""
    finding = transition.state.nodes[node].health.agent_findings.pop(key, None)
    if finding is None:
        transition.count_ignored("finding_cleared.unknown")
        return
    transition.mark_node_changed(node)
    _handle_cleared(transition, node, finding)
    _recheck_node(transition, node)


def _handle_cleared(transition: Transition, node: str, finding: Finding, reason: str = "") -> None:
    record = transition.state.nodes[node]
    if record.health.deferred_eviction_key == finding.key:
        eviction.drop_deferral(transition, node)
    record.health.undecided_findings.pop(finding.key, None)
    outbreaks.mark_cleared(transition.state, node, finding)
    _drop_acceptance(record, finding.key)
    if finding.key in record.quarantine.causes:
        record.quarantine.cause_cleared_at[finding.key] = transition.now
    rule = transition.policy.rules.rule_for(finding)
    if rule.n_of_m[1] > 1:
        count_report(record, rule, finding, transition.now, bad=False)
    if should_record(transition, node, finding, raised=False):
        transition.append_history(node, HistoryKind.CLEARED, finding.key)
        transition.audit("finding.cleared", reason or f"{finding.key} on {node} has cleared", node=node)
        transition.emit(RecordFindingCleared(node, finding.key, transition.now))


def _recheck_node(transition: Transition, node: str) -> None:
    """Recheck quarantine or probation after the node's findings changed."""
    record = transition.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        check_quarantine(transition, node)
    elif record.state is NodeState.PROBATION:
        _judge_blocking(transition, node)


def _judge_blocking(transition: Transition, node: str) -> None:
    """Judge findings against a node on probation. One on which a job computes is judged like a serving one."""
    record = transition.state.nodes[node]
    for finding in outbreaks.blocking_findings(transition.state, record, transition.now):
        if eviction.is_serving(transition, node):
            if not record.health.deferred_eviction_key:
                judge_by_rule(transition, node, finding)
        elif not _is_spared(transition, node, finding, transition.policy.rules.rule_for(finding)):
            eviction.drop_deferral(transition, node)
            quarantine_again(transition, node, finding, f"{node} cannot return to service: {finding.message}")
        if record.state is not NodeState.PROBATION:
            return


def judge_returning_nodes(transition: Transition) -> None:
    """Judge what stood when a node entered or was about to leave probation; begin diagnostics of those that stay."""
    while transition.returning_nodes:
        node = next(iter(transition.returning_nodes))
        del transition.returning_nodes[node]
        record = transition.state.nodes[node]
        if record.state is NodeState.PROBATION:
            _judge_blocking(transition, node)
        if record.state is NodeState.PROBATION and record.quarantine.diagnostics is DiagnosticsStatus.NOT_STARTED:
            begin_diagnostics(transition, node)


def _drop_acceptance(record: NodeRecord, key: str) -> None:
    """End an operator's acceptance of the finding, which has cleared or become graver."""
    if key in record.health.accepted_findings:
        record.health.accepted_findings.remove(key)


def judge_controller_findings(transition: Transition) -> None:
    """Judge the controller's new findings by the same rules as those of agents."""
    while transition.controller_finding_changes:
        news = transition.controller_finding_changes.pop(0)
        if news.finding is not None:
            _judge_if_new(transition, news.node, news.before, news.finding, news.reason)
        elif news.before is not None:
            _handle_cleared(transition, news.node, news.before, news.reason)
        _recheck_node(transition, news.node)


def _judge_if_new(
    transition: Transition, node: str, previous: Finding | None, finding: Finding, proof: str = ""
) -> None:
    """Judge a finding once, and again if it became graver, occurred again or was proved."""
    gravity = finding.severity, finding.action, finding.mode
    same = previous is not None and (previous.severity, previous.action, previous.mode) == gravity
    if not same:
        _drop_acceptance(transition.state.nodes[node], finding.key)
    is_news = not same or (previous is not None and _happened_again(previous, finding))
    written = is_news and should_record(transition, node, finding, raised=True)
    if written:
        record_finding(transition, node, finding)
    if proof:
        judge_by_rule(transition, node, finding, proof=proof)
    elif is_news:
        judge_finding(transition, node, finding, is_logged=written, stood_before=same)


def _happened_again(previous: Finding, finding: Finding) -> bool:
    """Return whether a standing finding has a new occurrence: it started again, or another XID was counted."""
    counted = finding.xid is not None and (finding.value or 0.0) > (previous.value or 0.0)
    return counted or finding.since != previous.since


def recheck_undecided(transition: Transition, node: str) -> None:
    """Judge findings that could not be decided earlier and still stand, unless the node is being tried."""
    record = transition.state.nodes[node]
    if not record.health.undecided_findings or diagnostics.is_suspect(transition, node):
        return
    undecided, record.health.undecided_findings = record.health.undecided_findings, {}
    transition.mark_node_changed(node)
    for key, why in undecided.items():
        finding = record.get_finding(key)
        if finding is None:
            continue
        rule = transition.policy.rules.rule_for(finding)
        due = record.identity.booted_at + rule.boot_grace_s
        if transition.now < due:
            defer_judgement(transition, node, key, UndecidedReason.BOOT_GRACE, due)
        elif eviction.is_serving(transition, node) or record.state is NodeState.QUARANTINED:
            judge_by_rule(transition, node, finding, is_logged=False, is_new=why is not UndecidedReason.OUTBREAK)
        elif why is UndecidedReason.OUTBREAK and outbreaks.belongs_to_outbreak(
            transition.state, rule, node, finding, transition.now
        ):
            defer_judgement(transition, node, key, UndecidedReason.OUTBREAK, transition.now + rule.correlated_s)
    _recheck_node(transition, node)


def retry_deferred_evictions(transition: Transition) -> None:
    """Judge deferred evictions again whose scope may no longer defer them, by the findings that stand now."""
    state = transition.state
    if not state.deferred_evictions:
        return
    for scope in eviction.pop_freed_scopes(transition):
        for node in list(state.deferred_evictions.get(scope, ())):
            record = state.nodes[node]
            finding = record.get_finding(record.health.deferred_eviction_key)
            rule = None if finding is None else state.policy.rules.rule_for(finding)
            if (
                finding is None
                or rule is None
                or rule.mode is not Mode.ENFORCE
                or not rule.counts_against_node(finding)
                or not eviction.is_serving(transition, node)
                or eviction.spare_if_correlated(transition, rule, node, finding, is_new=False)
            ):
                eviction.drop_deferral(transition, node)
                _recheck_node(transition, node)
            else:
                evict_for(transition, node, finding)
