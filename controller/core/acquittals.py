"""Whoever was convicted before an outbreak was recognised is acquitted: out by the same fault as everybody, and for it.

An eviction is taken back whole: its place in the budgets, its weight among offences, its step of the ladder; and so is
the quarantine of a node that was ill before it served. The node serves again by the way that leads back, on probation,
since its jobs have gone on without it.
"""

from __future__ import annotations

from controller.core import offenders
from controller.core.budget import FLEET
from controller.core.degraded import STORE
from controller.core.eviction import NEEDED, release_acquitted, take_back
from controller.core.outbreaks import UNDECIDED, correlated, date, shown, signature, under_reserve_until
from controller.core.quarantine import begin_probation
from controller.core.rules import Rule
from controller.core.rulings import INCURABLE
from controller.core.turn import Turn
from controller.core.undecided import look_later
from everstep.vocabulary import Decision, Finding, NodeState


def spared(turn: Turn, rule: Rule, node: str, finding: Finding, *, anew: bool = True) -> str:
    """Whether the finding, which the node shows, or which is only looked at again (not ``anew``), is an outbreak's:
    why, in words, and it is judged later; empty elsewhere. Who was convicted before that was known is acquitted."""
    name = signature(finding)
    why, judged_before = correlated(turn, rule, node, finding, anew=anew)
    for other in judged_before:
        _acquit(turn, rule, other, name, why)
    if why:
        _wait(turn, node, finding.key, name, turn.now + rule.correlated_s)
    return why


def _wait(turn: Turn, node: str, key: str, name: str, due: float) -> None:
    look_later(turn, node, key, UNDECIDED, due)
    date(turn, node, key, name)


def _acquit(turn: Turn, rule: Rule, node: str, name: str, why: str) -> None:
    """Nothing of that signature counts against the node, whether it is out for it or only held."""
    record, due = turn.state.nodes[node], turn.now + rule.correlated_s
    findings = shown(record, name)
    if any(finding.key == record.overruled for finding in findings):
        _wait(turn, node, record.overruled, name, due)
        release_acquitted(turn, node)
    course = record.course
    if course is None or turn.now > under_reserve_until(record):
        return
    dropped = [key for key, sign in course.signs.items() if sign == name]
    if not dropped or (record.needs_operator and rule.kind not in INCURABLE):
        return
    for key in dropped:
        del course.signs[key]
        _wait(turn, node, key, name, due)
    record.causes = [key for key in record.causes if key not in dropped]
    if not course.signs:
        _take_back(turn, node, findings, f"{why}, which is no node's own")


def _take_back(turn: Turn, node: str, findings: list[Finding], why: str) -> None:
    state, record, course = turn.state, turn.state.nodes[node], turn.state.nodes[node].course
    at = course.evicted_at if course is not None else 0.0
    take_back(turn, node, at)
    what = "eviction" if at in record.evictions else "quarantine"
    record.evictions = [one for one in record.evictions if one != at]
    offenders.forgive(turn, node, course.offence if course is not None else 0.0, at)
    record.steps = {rule: kept for rule, steps in record.steps.items() if (kept := [s for s in steps if s[0] < at])}
    record.needs_operator, record.condemned = False, []
    sentence = f"the {what} of {node} is taken back: {why}"
    turn.verdict(node, Decision.CORRELATED, sentence, evidence=tuple(findings))
    counts = "counts against no budget" if what == "eviction" else "is no offence"
    turn.audit("node.acquitted", f"the {what} of {node} {counts} any more", node=node)
    if record.state is NodeState.QUARANTINED and record.reachable:
        begin_probation(turn, node, sentence)
    elif record.state is NodeState.QUARANTINED:
        record.returns_at = turn.now  # its way back opens when it is heard
    for scope in state.held:
        if scope != FLEET and not scope.startswith((NEEDED, STORE)):
            turn.freed[scope] = None
