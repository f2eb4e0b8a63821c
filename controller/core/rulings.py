"""What a rule says of a finding on a node, before anything is done about it."""

from __future__ import annotations

from controller.core.outbreaks import is_of_outbreak
from controller.core.records import NodeRecord
from controller.core.rules import Rule, Scope, SecondPass, bad_reports, in_words, next_rung
from controller.core.state import FleetState
from everstep.vocabulary import Action, Finding, FindingKind, Mode

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
