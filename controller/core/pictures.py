"""What is known of a node changes, by its own word, by the controller's or by time: what is new is judged, once."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core import casebook, second_pass
from controller.core.acquittals import spared
from controller.core.effects import NoteCleared
from controller.core.eviction import freed_scopes, release, serving
from controller.core.finding_log import is_written, write
from controller.core.outbreaks import UNDECIDED, has_cleared, is_of_outbreak
from controller.core.quarantine import begin_checks, check_quarantine, relapse
from controller.core.records import NodeRecord
from controller.core.rulings import standing_against
from controller.core.turn import Turn
from controller.core.undecided import look_later
from controller.core.verdict import convict, count_report, judge, judge_by_rule, judge_settled, say_spared
from everstep.vocabulary import Finding, Mode, NodeState, Severity
from everstep.wire.v1.agent import MOST_FINDINGS

_GRAVITY = {severity: gravity for gravity, severity in enumerate(Severity)}


# --- the agent's picture -----------------------------------------------------------------------------------------


def take_picture(turn: Turn, node: str, findings: Iterable[Finding]) -> None:
    """Replaces what is known of the node by its own full picture, and judges what is new in it."""
    record = turn.state.nodes[node]
    turn.state.live_nodes[node].picture = True
    before, record.findings = record.findings, {finding.key: finding for finding in findings}
    _forget_the_mildest(record)
    for key in before:
        if key not in record.findings:
            _cleared(turn, node, before[key])
    for key, finding in record.findings.items():
        _judge_if_new(turn, node, before.get(key), finding)
    if before != record.findings:
        turn.node_changed(node)
    _settle(turn, node)


def take_finding(turn: Turn, node: str, finding: Finding) -> None:
    """One urgent finding; the next picture has it too, or says that it stands no more."""
    record = turn.state.nodes[node]
    before = record.findings.get(finding.key)
    record.findings[finding.key] = finding
    _forget_the_mildest(record)
    turn.node_changed(node)
    _judge_if_new(turn, node, before, finding)
    _settle(turn, node)


def _forget_the_mildest(record: NodeRecord) -> None:
    """Drop findings beyond MOST_FINDINGS: the mildest first, the oldest of equal ones first, and those that keep the
    node out, or would, last of all."""
    excess = len(record.findings) - MOST_FINDINGS
    if excess <= 0:
        return
    for key in sorted(record.findings, key=lambda key: _weight(record, key))[:excess]:
        del record.findings[key]
        record.undecided.pop(key, None)


def _weight(record: NodeRecord, key: str) -> tuple[bool, int]:
    return key in record.causes or key == record.overruled, _GRAVITY[record.findings[key].severity]


def clear_finding(turn: Turn, node: str, key: str) -> None:
    """A finding's clearing rule holds."""
    finding = turn.state.nodes[node].findings.pop(key, None)
    if finding is None:
        turn.ignore("finding_cleared.unknown")
        return
    turn.node_changed(node)
    _cleared(turn, node, finding)
    _settle(turn, node)


def _cleared(turn: Turn, node: str, finding: Finding, why: str = "") -> None:
    record = turn.state.nodes[node]
    if record.overruled == finding.key:
        release(turn, node)
    record.undecided.pop(finding.key, None)
    has_cleared(turn.state, node, finding)
    _unvouch(record, finding.key)
    if finding.key in record.causes:
        record.cleared[finding.key] = turn.now
    rule = turn.policy.rules.rule(finding)
    if rule.n_of[1] > 1:
        count_report(record, rule, finding, turn.now, bad=False)
    if is_written(turn, node, finding, more=False):
        casebook.enter(record, turn.now, "cleared", finding.key)
        turn.audit("finding.cleared", why or f"{finding.key} on {node} has cleared", node=node)
        turn.emit(NoteCleared(node, finding.key, turn.now))


def _settle(turn: Turn, node: str) -> None:
    """After the picture changed: a way out may be open, or closed again."""
    record = turn.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)
    elif record.state is NodeState.PROBATION:
        _judge_standing(turn, node)


def _judge_standing(turn: Turn, node: str) -> None:
    """Whether what stands against a node on probation puts an end to that. One on which a job computes is judged as
    one that serves: a budget, or its job, may hold it, and it is on probation for as long."""
    record = turn.state.nodes[node]
    for finding in standing_against(turn.state, record, turn.now):
        rule = turn.policy.rules.rule(finding)
        if serving(turn, node):
            if not record.overruled:
                judge_by_rule(turn, node, finding, rule, written=True)
        elif why := spared(turn, rule, node, finding):
            say_spared(turn, node, finding, rule, why)
        else:
            release(turn, node)
            relapse(turn, node, finding, f"{node} cannot come back: {finding.message}")
        if record.state is not NodeState.PROBATION:
            return


def judge_returning(turn: Turn) -> None:
    """Judges what stood already when a node came on probation, or was to become healthy. Who may stay is examined."""
    while turn.returning:
        node = next(iter(turn.returning))
        del turn.returning[node]
        record = turn.state.nodes[node]
        if record.state is NodeState.PROBATION:
            _judge_standing(turn, node)
        if record.state is NodeState.PROBATION and not record.probe:
            begin_checks(turn, node)


def _unvouch(record: NodeRecord, key: str) -> None:
    """An operator's word on the finding is over: it has cleared, or got worse."""
    if key in record.vouched:
        record.vouched.remove(key)


# --- what the controller found itself ----------------------------------------------------------------------------


def judge_own(turn: Turn) -> None:
    """Judges what the controller found itself since this was called last, by the same rules as what agents say."""
    while turn.own:
        news = turn.own.pop(0)
        if news.finding is not None:
            _judge_if_new(turn, news.node, news.before, news.finding, news.why)
        elif news.before is not None:
            _cleared(turn, news.node, news.before, news.why)
        _settle(turn, news.node)


# --- what is written down ----------------------------------------------------------------------------------------


def _judge_if_new(turn: Turn, node: str, before: Finding | None, finding: Finding, proof: str = "") -> None:
    """The same finding is judged once; a graver form of it, another occurrence, or what has been proved, again."""
    same = before is not None and (before.severity, before.action, before.mode) == (
        finding.severity,
        finding.action,
        finding.mode,
    )
    if not same:
        _unvouch(turn.state.nodes[node], finding.key)
    written = _is_news(before, finding, same=same) and is_written(turn, node, finding, more=True)
    if written:
        write(turn, node, finding)
    if proof:
        judge_settled(turn, node, finding, proof)
    elif _is_news(before, finding, same=same):
        judge(turn, node, finding, written=written, again=same)


def _is_news(before: Finding | None, finding: Finding, *, same: bool) -> bool:
    return not same or (before is not None and _happened_again(before, finding))


def _happened_again(before: Finding, finding: Finding) -> bool:
    """Whether a standing finding tells of something new: it began anew, or an XID was counted again."""
    counted = finding.xid is not None and (finding.value or 0.0) > (before.value or 0.0)
    return counted or finding.since != before.since


# --- looking again -----------------------------------------------------------------------------------------------


def look_again(turn: Turn, node: str) -> None:
    """What could not be decided when it was said, and still stands, is judged now. Who is being tried is left alone."""
    record = turn.state.nodes[node]
    if not record.undecided or second_pass.suspected(turn, node):
        return
    undecided, record.undecided = record.undecided, {}
    turn.node_changed(node)
    for key, why in undecided.items():
        finding = record.finding(key)
        if finding is None:
            continue
        rule = turn.policy.rules.rule(finding)
        due = record.booted_at + rule.boot_grace_s
        if turn.now < due:
            look_later(turn, node, key, "boot grace", due)
        elif serving(turn, node) or record.state is NodeState.QUARANTINED:
            judge_by_rule(turn, node, finding, rule, written=False, anew=why != UNDECIDED)
        elif why == UNDECIDED and is_of_outbreak(turn.state, rule, node, finding, turn.now):
            look_later(turn, node, key, UNDECIDED, turn.now + rule.correlated_s)
    _settle(turn, node)


def reconsider(turn: Turn) -> None:
    """Evictions that were held are judged anew once what held them may do so no more: by what stands now."""
    state = turn.state
    for scope in freed_scopes(turn):
        for node in list(state.held.get(scope, ())):
            record = state.nodes[node]
            finding = record.finding(record.overruled)
            rule = None if finding is None else state.policy.rules.rule(finding)
            if (
                finding is None
                or rule is None
                or rule.mode is not Mode.ENFORCE
                or not rule.applies(finding)
                or not serving(turn, node)
                or spared(turn, rule, node, finding, anew=False)
            ):
                release(turn, node)
                _settle(turn, node)
            else:
                convict(turn, node, finding)
