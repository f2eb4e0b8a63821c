"""From findings to decisions: each kind is judged by its rule, and each decision has its sentence."""

from __future__ import annotations

from controller.core import rank_restarts, second_pass
from controller.core.acquittals import spared
from controller.core.eviction import AGAIN_S, evict, serving
from controller.core.generations import Cause
from controller.core.losses import node_left_jobs
from controller.core.outbreaks import UNDECIDED, is_of_outbreak, under_reserve_until, wait_for_end
from controller.core.quarantine import add_cause
from controller.core.records import NodeRecord
from controller.core.rules import Rule, Scope, SecondPass, bad_reports, in_words, is_taken, remember, remember_step
from controller.core.rulings import by_rule, rung_of
from controller.core.standing import kept_out
from controller.core.turn import Turn
from controller.core.undecided import look_later
from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, Mode, NodeState, Severity

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
    if not again and (why := rank_restarts.node_cap(turn, node)) and rule.ladder[-1] is not rung:
        record.steps[rule.id] = remember_step(steps, rule, rung, turn.now - rule.same_s)
        convict(turn, node, finding, f"{finding.message}; {why}")
        return
    if not again and (cap := rank_restarts.fleet_cap(turn))[0]:
        look_later(turn, node, finding.key, "restarts", cap[1])
        if written:
            _say(turn, node, Decision.RECOMMEND, f"{finding.message}; restart rank of {node} waits: {cap[0]}", finding)
        return
    target = rank_restarts.target_of(turn, node, finding, rule)
    words = f"{node}: {finding.message} ({by_rule(rule, record, finding, rung)})"
    record.steps[rule.id] = remember_step(steps, rule, rung, turn.now)
    turn.node_changed(node)
    if target is not None and target.members:
        words = f"{words}; {target.in_words()} is restarted"
        if not again:
            _say(turn, node, Decision.RESTART, words, finding, rung)
        rank_restarts.restart(turn, node, target, words, finding.trace or turn.trace, counted=not again)
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
    if second_pass.open_case(turn, SecondPass.PAIR, found, f"{finding.message} ({node})") is None:
        look_later(turn, node, finding.key, "second pass", turn.now + turn.policy.probe_timeout_s)
    else:
        turn.state.nodes[node].undecided[finding.key] = "second pass"
