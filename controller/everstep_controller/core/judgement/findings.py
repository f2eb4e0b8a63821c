"""Keep the findings on nodes: have new ones judged, and limit their log entries."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import Finding, Mode, NodeState
from everstep.wire.v1.agent import MAX_FINDINGS
from everstep_controller.core import policy
from everstep_controller.core.effects import RecordFindingCleared, RecordFindingRaised
from everstep_controller.core.health import diagnostics, eviction, outbreaks
from everstep_controller.core.health.quarantine import (
    begin_diagnostics,
    quarantine_again,
    reconsider_quarantine,
)
from everstep_controller.core.judgement import verdicts
from everstep_controller.core.judgement.verdicts import FindingReport
from everstep_controller.core.notices import reconsider_notice
from everstep_controller.core.policy import VerdictRule
from everstep_controller.core.records import DiagnosticsStatus, HistoryKind, NodeRecord, UndecidedReason
from everstep_controller.core.state import FindingBurst
from everstep_controller.core.transition import Transition, defer_judgement

MAX_COUNTED_FINDINGS = 64
"""Number of a node's findings whose reports are counted; no node has so many different faults."""


def _judge_report(transition: Transition, node: str, finding: Finding, *, is_logged: bool, is_repeat: bool) -> None:
    """Count and judge a report of a finding. A repeat of equal gravity counts for rules that count reports only."""
    record, rule = transition.state.nodes[node], transition.policy.rules.rule_for(finding)
    needed, most = rule.n_of_m
    if rule.already_handled and is_repeat:
        return
    count = count_report(record, rule, finding, transition.now, bad=True) if most > 1 else 1
    if is_repeat and (needed == 1 or count < needed or not rule.counts_against_node(finding)):
        return
    verdicts.settle(transition, FindingReport(node=node, finding=finding, count=count, is_logged=is_logged))


def count_report(record: NodeRecord, rule: VerdictRule, finding: Finding, now: float, *, bad: bool) -> int:
    """Count this report and return the number of bad reports under the rule."""
    name = f"{rule.id}:{finding.key}" if rule.scope is policy.CountingScope.SUBJECT else rule.id
    reports = policy.append_report(record.history.counted_reports.pop(name, []), rule, now, bad=bad)
    record.history.counted_reports[name] = reports
    while len(record.history.counted_reports) > MAX_COUNTED_FINDINGS:
        del record.history.counted_reports[next(iter(record.history.counted_reports))]
    return policy.count_bad_reports(reports)


# Log of findings


def record_finding(transition: Transition, node: str, finding: Finding) -> None:
    """Write a finding to the event log, the finding history and the node's history."""
    data = {"severity": str(finding.severity), "rule": finding.rule, "key": finding.key}
    if finding.since:
        data["seen_at"] = f"{finding.since:.6f}"
    trace = finding.trace or transition.trace
    count = transition.state.node_runtime[node].finding_bursts[_burst_key(finding)].count
    burst = f"; number {count} of a burst of {finding.kind}" if count > transition.policy.findings.burst_count else ""
    sentence = f"{finding.message} ({node}){burst}"
    transition.log_event("finding", sentence, node=node, trace=trace, data=data)
    transition.emit(RecordFindingRaised(node, finding, transition.now))
    transition.append_history(node, HistoryKind.FINDING, finding.message, data | dict(finding.evidence))


def should_record(transition: Transition, node: str, finding: Finding, *, raised: bool) -> bool:
    """Return whether a finding is logged. A flapping kind is logged at the 16th, 32nd, ... time, per severity."""
    bursts = transition.state.node_runtime[node].finding_bursts
    burst = bursts.setdefault(_burst_key(finding), FindingBurst())
    if transition.now - burst.last_at > transition.policy.findings.quiet_s:
        burst.count = 0
    burst.last_at = transition.now
    burst.count += raised
    return burst.count <= transition.policy.findings.burst_count or (raised and burst.count.bit_count() == 1)


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
    reconsider_notice(transition, node)


def add_agent_finding(transition: Transition, node: str, finding: Finding) -> None:
    """Add one urgent finding of the agent. The next full report confirms or drops it."""
    record = transition.state.nodes[node]
    before = record.health.agent_findings.get(finding.key)
    record.health.agent_findings[finding.key] = finding
    _drop_mildest(record)
    transition.mark_node_changed(node)
    _judge_if_new(transition, node, before, finding)
    _recheck_node(transition, node)
    reconsider_notice(transition, node)


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
    reconsider_notice(transition, node)


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
        transition.log_event("finding.cleared", reason or f"{finding.key} on {node} has cleared", node=node)
        transition.emit(RecordFindingCleared(node, finding.key, transition.now))


def _recheck_node(transition: Transition, node: str) -> None:
    """Recheck quarantine or probation after the node's findings changed."""
    record = transition.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        reconsider_quarantine(transition, node)
    elif record.state is NodeState.PROBATION:
        _judge_blocking(transition, node)


def _judge_blocking(transition: Transition, node: str) -> None:
    """Judge findings against a node on probation. One on which a job computes is judged like a serving one."""
    record = transition.state.nodes[node]
    for finding in outbreaks.blocking_findings(transition.state, record, transition.now):
        if verdicts.is_serving(transition.state, node):
            if not record.health.deferred_eviction_key:
                verdicts.settle(transition, FindingReport(node=node, finding=finding))
        elif not verdicts.withhold_eviction(transition, FindingReport(node=node, finding=finding)):
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
        verdicts.settle(transition, FindingReport(node=node, finding=finding, proof=proof))
    elif is_news:
        _judge_report(transition, node, finding, is_logged=written, is_repeat=same)


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
        elif verdicts.is_serving(transition.state, node) or record.state is NodeState.QUARANTINED:
            is_new = why is not UndecidedReason.OUTBREAK
            verdicts.settle(transition, FindingReport(node=node, finding=finding, is_logged=False, is_new=is_new))
        elif why is UndecidedReason.OUTBREAK and outbreaks.belongs_to_outbreak(
            transition.state, rule, node, finding, transition.now
        ):
            defer_judgement(transition, node, key, UndecidedReason.OUTBREAK, transition.now + rule.correlated_s)
    _recheck_node(transition, node)


def retry_deferred_evictions(transition: Transition) -> None:
    """Judge deferred evictions again whose scope may no longer defer them, by the findings that stand now."""
    state = transition.state
    if not state.evictions.deferred:
        return
    for scope in eviction.pop_freed_scopes(transition):
        for node in list(state.evictions.deferred.get(scope, ())):
            record = state.nodes[node]
            finding = record.get_finding(record.health.deferred_eviction_key)
            rule = None if finding is None else state.policy.rules.rule_for(finding)
            if (
                finding is None
                or rule is None
                or rule.mode is not Mode.ENFORCE
                or not rule.counts_against_node(finding)
                or not verdicts.is_serving(state, node)
                or verdicts.record_sighting(transition, FindingReport(node=node, finding=finding, is_new=False))
            ):
                eviction.drop_deferral(transition, node)
                _recheck_node(transition, node)
            else:
                verdicts.settle_deferred_eviction(transition, FindingReport(node=node, finding=finding))
