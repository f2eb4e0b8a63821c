"""From findings to decisions: each kind is judged by its rule, and each decision has its sentence."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, Mode, NodeState, Severity
from everstep.wire.v1.agent import MOST_FINDINGS
from everstep_controller.core import records
from everstep_controller.core.effects import NoteCleared, NoteFinding
from everstep_controller.core.health import diagnostics, remediation_ladder
from everstep_controller.core.health.eviction import AGAIN_S, evict, freed_scopes, release, serving, spared
from everstep_controller.core.health.node_state import kept_out
from everstep_controller.core.health.outbreaks import (
    UNDECIDED,
    by_rule,
    has_cleared,
    is_of_outbreak,
    rung_of,
    standing_against,
    under_reserve_until,
    wait_for_end,
)
from everstep_controller.core.health.quarantine import add_cause, begin_checks, check_quarantine, relapse
from everstep_controller.core.jobs.generations import Cause
from everstep_controller.core.jobs.losses import node_left_jobs
from everstep_controller.core.policy import (
    Rule,
    Scope,
    SecondPass,
    bad_reports,
    in_words,
    is_taken,
    remember,
    remember_step,
)
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import Burst
from everstep_controller.core.transition import Turn, look_later

MOST_COUNTED = 64
"""Findings of a node whose reports are counted: no node has so many different faults."""


def judge(turn: Turn, node: str, finding: Finding, *, written: bool = True, again: bool = False) -> None:
    """What is to be done about a finding of a node.

    ``written``: findings of its kind do not flap, so advice on it is worth a line. ``again``: it stood before.
    """
    record, rule = turn.state.nodes[node], turn.policy.rules.rule(finding)
    if rule.heals and again:
        return
    count = count_report(record, rule, finding, turn.now, bad=True) if rule.n_of[1] > 1 else 1
    if again and rule.n_of[0] == 1:
        return
    if (rule.heals and rule.n_of[0] == 1) or not rule.applies(finding) or count < rule.n_of[0]:
        if written and not again:
            _advise(turn, node, finding, rule)
        return
    if turn.now < record.booted_at + rule.boot_grace_s:
        look_later(turn, node, finding.key, "boot grace", record.booted_at + rule.boot_grace_s)
        return
    judge_by_rule(turn, node, finding, rule, written=written)


def count_report(record: NodeRecord, rule: Rule, finding: Finding, now: float, *, bad: bool) -> int:
    """Bad reports under the rule, with this one."""
    name = f"{rule.id}:{finding.key}" if rule.scope is Scope.SUBJECT else rule.id
    reports = remember(record.reports.pop(name, []), rule, now, bad=bad)
    record.reports[name] = reports
    while len(record.reports) > MOST_COUNTED:
        del record.reports[next(iter(record.reports))]
    return bad_reports(reports)


def judge_settled(turn: Turn, node: str, finding: Finding, because: str) -> None:
    """Judges the finding after its second pass, which has shown ``because``: by mode, outbreak, ladder and budget."""
    judge_by_rule(turn, node, finding, turn.policy.rules.rule(finding), written=True, because=because)


def judge_by_rule(
    turn: Turn, node: str, finding: Finding, rule: Rule, *, written: bool, because: str = "", anew: bool = True
) -> None:
    """By mode, outbreak, ladder and budget. ``anew``: the node shows it now; else it is one that an outbreak spared."""
    record, mode = turn.state.nodes[node], rule.mode_of(finding)
    if mode is Mode.OBSERVE:
        return
    if record.state is NodeState.QUARANTINED:
        if mode is Mode.ENFORCE and not _spared_outside(turn, node, finding, rule, anew=anew):
            add_cause(turn, node, finding)
        return
    if not serving(turn, node) and not (mode is Mode.RECOMMEND and record.state is NodeState.LOST):
        if mode is Mode.ENFORCE and written and (record.hold or record.foreign):
            _leave_to_holder(turn, node, finding, rule)
        on_its_way = mode is Mode.ENFORCE and record.state is NodeState.PROBATION  # not spared: ``pictures`` judges it
        if on_its_way and (why := spared(turn, rule, node, finding, anew=anew)) and written:
            say_spared(turn, node, finding, rule, why)
        return
    if why := spared(turn, rule, node, finding, anew=anew):
        if written:
            say_spared(turn, node, finding, rule, why)
        return
    rung = rung_of(record, rule, finding, turn.now)
    if mode is Mode.RECOMMEND:
        _recommend(turn, node, finding, rule, rung, written=written)
    elif rung is Action.RESTART_RANK:
        _restart(turn, node, finding, rule, written=written)
    elif rule.second_pass is SecondPass.PAIR and not because:
        _ask_others(turn, node, finding)
    else:
        convict(turn, node, finding, because)


def say_spared(turn: Turn, node: str, finding: Finding, rule: Rule, why: str) -> None:
    words = f"{node}: {finding.message}; not evicted: {why}, which is no node's own"
    _say(turn, node, Decision.CORRELATED, words, finding)


def _spared_outside(turn: Turn, node: str, finding: Finding, rule: Rule, *, anew: bool) -> bool:
    """Whether what a quarantined node shows is an outbreak's, and no cause of its own.

    Only of one that was just evicted it counts as a sighting: all that comes of one fault does. What a node shows that
    was ill before says nothing of others.
    """
    record = turn.state.nodes[node]
    if turn.now < under_reserve_until(record) and rule.second_pass is SecondPass.NONE:
        return bool(spared(turn, rule, node, finding, anew=anew))
    if not is_of_outbreak(turn.state, rule, node, finding, turn.now):
        return False
    wait_for_end(turn.state, node, finding)
    look_later(turn, node, finding.key, UNDECIDED, turn.now + rule.correlated_s)
    return True


def _recommend(turn: Turn, node: str, finding: Finding, rule: Rule, rung: Action, *, written: bool) -> None:
    """A step of the ladder that a person takes."""
    record = turn.state.nodes[node]
    steps = record.steps.get(rule.id, [])
    said = is_taken(steps, rule, rung, turn.now)
    record.steps[rule.id] = remember_step(steps, rule, rung, turn.now)
    turn.node_changed(node)
    if written and not said:
        words = f"{finding.message}; recommended for {node}: {in_words(rung)} ({by_rule(rule, record, finding, rung)})"
        _say(turn, node, Decision.RECOMMEND, words, finding, rung)


def _restart(turn: Turn, node: str, finding: Finding, rule: Rule, *, written: bool) -> None:
    """Ranks of the node get other processes, under caps; a node that used up its own is due for the next step."""
    record, rung = turn.state.nodes[node], Action.RESTART_RANK
    steps = record.steps.get(rule.id, [])
    again = is_taken(steps, rule, rung, turn.now)
    if turn.state.store_away:
        look_later(turn, node, finding.key, "database", turn.now + AGAIN_S)
        return
    if not again and (why := remediation_ladder.restart_cap(turn, node)) and rule.ladder[-1] is not rung:
        record.steps[rule.id] = remember_step(steps, rule, rung, turn.now - rule.same_s)
        convict(turn, node, finding, f"{finding.message}; {why}")
        return
    if not again and (cap := remediation_ladder.fleet_cap(turn))[0]:
        look_later(turn, node, finding.key, "restarts", cap[1])
        if written:
            _say(turn, node, Decision.RECOMMEND, f"{finding.message}; restart rank of {node} waits: {cap[0]}", finding)
        return
    target = remediation_ladder.target_of(turn, node, finding, rule)
    words = f"{node}: {finding.message} ({by_rule(rule, record, finding, rung)})"
    record.steps[rule.id] = remember_step(steps, rule, rung, turn.now)
    turn.node_changed(node)
    if target is not None and target.members:
        words = f"{words}; {target.in_words()} is restarted"
        if not again:
            _say(turn, node, Decision.RESTART, words, finding, rung)
        remediation_ladder.restart(turn, node, target, words, finding.trace or turn.trace, counted=not again)
    elif not again:
        why = "no rank computes there" if target is None else "its rank has just been replaced"
        _say(turn, node, Decision.NO_ACTION, f"{words}; {why}", finding)


def _leave_to_holder(turn: Turn, node: str, finding: Finding, rule: Rule) -> None:
    """What would take a serving node out is said to whoever holds this one: a job may still compute on it."""
    record = turn.state.nodes[node]
    rung = rung_of(record, rule, finding, turn.now)
    holder = kept_out(record, turn.now)
    words = f"{finding.message}; recommended for {node}: {in_words(rung)}; nothing is done by itself, since {holder}"
    _say(turn, node, Decision.RECOMMEND, words, finding, rung)


def _advise(turn: Turn, node: str, finding: Finding, rule: Rule) -> None:
    if rule.heals:
        _say(turn, node, Decision.NO_ACTION, f"{finding.message}: {rule.heals}", finding)
        return
    if finding.severity is not Severity.CRITICAL or finding.mode is Mode.OBSERVE:
        return
    what = "look at it" if finding.action is Action.NONE else finding.action.replace("_", " ")
    words = f"{finding.message}; recommended for {node}: {what}"
    _say(turn, node, Decision.RECOMMEND, words, finding, finding.action)


def _say(turn: Turn, node: str, decision: Decision, words: str, finding: Finding, action: Action = Action.NONE) -> None:
    trace = finding.trace or turn.trace
    turn.verdict(node, decision, words, action=action, evidence=(finding,), trace=trace)


# --- convicting --------------------------------------------------------------------------------------------------


def convict(turn: Turn, node: str, finding: Finding, because: str = "") -> bool:
    """Evicts the node when that is allowed; its jobs leave it at the next boundary, while it still computes.

    ``because``: what settled it, after a second pass.
    """
    record, rule = turn.state.nodes[node], turn.policy.rules.rule(finding)
    rung = rung_of(record, rule, finding, turn.now)
    sentence = f"{node}: {because or finding.message} ({by_rule(rule, record, finding, rung)})"
    if not evict(turn, node, finding, sentence):
        return False
    cause = Cause(
        reason=GenerationReason.NODE_EVICTED,
        sentence=f"{node} is evicted ({because or finding.message})",
        trace=finding.trace or turn.trace,
        boundary=finding.kind not in (FindingKind.DIGEST_MISMATCH, FindingKind.COMPUTE_WRONG),
    )
    node_left_jobs(turn, node, cause)
    return True


def _ask_others(turn: Turn, node: str, finding: Finding) -> None:
    """Blame that takes two: the node and the one it names are tried with partners known to be good."""
    peer = finding.evidence.get("peer", finding.subject)
    found = {node: finding}
    if peer != node and peer in turn.state.nodes and serving(turn, peer):
        found[peer] = finding
    if diagnostics.open_case(turn, SecondPass.PAIR, found, f"{finding.message} ({node})") is None:
        look_later(turn, node, finding.key, "second pass", turn.now + turn.policy.probe_timeout_s)
    else:
        turn.state.nodes[node].undecided[finding.key] = "second pass"


# ---- finding log
# What is written down of findings: each kind on each node, until it comes too often.


def write(turn: Turn, node: str, finding: Finding) -> None:
    """A line in the log, in the history and in the node's case book."""
    data = {"severity": str(finding.severity), "rule": finding.rule, "key": finding.key}
    if finding.since:
        data["seen_at"] = f"{finding.since:.6f}"
    trace = finding.trace or turn.trace
    sentence = f"{finding.message} ({node}){_of_many(turn, node, finding)}"
    turn.audit("finding", sentence, node=node, trace=trace, data=data)
    turn.emit(NoteFinding(node, finding, turn.now))
    records.enter(turn.state.nodes[node], turn.now, "finding", finding.message, data | dict(finding.evidence))


def is_written(turn: Turn, node: str, finding: Finding, *, more: bool) -> bool:
    """Whether a line of log is spent on it: what flaps on a node is written at the 16th, 32nd, ... time, each kind for
    itself, and what is grave apart from what is mild."""
    bursts = turn.state.live_nodes[node].bursts
    burst = bursts.setdefault(_burst_of(finding), Burst())
    if turn.now - burst.at > turn.policy.finding_quiet_s:
        burst.count = 0
    burst.at = turn.now
    burst.count += more
    return burst.count <= turn.policy.finding_burst or (more and burst.count.bit_count() == 1)


def _burst_of(finding: Finding) -> str:
    return f"{finding.kind}/{finding.severity}"


def _of_many(turn: Turn, node: str, finding: Finding) -> str:
    count = turn.state.live_nodes[node].bursts[_burst_of(finding)].count
    return f"; number {count} of a burst of {finding.kind}" if count > turn.policy.finding_burst else ""


# ---- pictures
# What is known of a node changes, by its own word, by the controller's or by time: what is new is judged, once.

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
        records.enter(record, turn.now, "cleared", finding.key)
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
    if not record.undecided or diagnostics.suspected(turn, node):
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
