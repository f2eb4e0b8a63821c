"""Explain what follows from a finding under the controller's policy, and where the values of a rule come from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from everstep.policy_explanations import Consequence, ExplainedValue, RuleExplanation
from everstep.settings import find_line, read_text
from everstep.vocabulary import Action, Finding, Mode, Severity
from everstep_controller.core.policy import (
    BlameIsolationMethod,
    CorePolicy,
    VerdictRule,
    describe_action,
    next_ladder_step,
)

Origins = Mapping[str, Mapping[str, str]]
"""File and line by rule and key."""


def key_origins(folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Return the file and line of each key of the rules in the policy files; later folders come before earlier ones."""
    found: dict[str, dict[str, str]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        text = read_text(path)
        for number, table in enumerate(tomllib.loads(text).get("rule", ())):
            name = ".".join(filter(None, (table["kind"], table.get("name", ""))))
            lines = {key: find_line(text, f".rule[{number}]", key) for key in table}
            found.setdefault(name, {}).update({key: f"{path} line {line}" for key, line in lines.items()})
    return found


def explain_rule(rule: VerdictRule, origins: Origins) -> RuleExplanation:
    """Return a rule of the controller with the places of its values."""
    known = origins.get(rule.id, {})
    values = {
        key: ExplainedValue(msgspec.to_builtins(getattr(rule, key)), known.get(key, "default"))
        for key in rule.__struct_fields__
    }
    return RuleExplanation(rule=rule.id, owner="controller", section="rule", enabled=True, values=values)


def explain_consequence(policy: CorePolicy, finding: Finding, origin: str) -> Consequence:
    """Return what follows from a first finding on a healthy node. ``origin``: where the policy comes from."""
    rule = policy.rules.rule_for(finding)
    mode = rule.effective_mode(finding)
    asked = "no action" if finding.action is Action.NONE else describe_action(finding.action)
    sentences = [
        f"The agent reports severity {finding.severity} and asks for {asked}, mode {finding.mode}.",
        f"The controller's rule {rule.id} has mode {rule.mode}: {_outcome(policy, rule, finding, mode)}.",
    ]
    if rule.n_of_m[0] > 1 and rule.counts_against_node(finding):
        sentences.append("Reports are counted, so the mode of the controller's rule alone holds.")
    elif finding.mode is not rule.mode:
        sentences.append(f"The weaker of the two modes holds, {mode}.")
    return Consequence(
        rule=rule.id,
        policy=origin,
        agent_mode=finding.mode,
        controller_mode=rule.mode,
        mode=mode,
        sentence=" ".join(sentences),
    )


def _outcome(policy: CorePolicy, rule: VerdictRule, finding: Finding, mode: Mode) -> str:
    if rule.already_handled and rule.n_of_m[0] == 1:
        return f"nothing more is done, since {rule.already_handled}"
    if not rule.counts_against_node(finding):
        return _outcome_of_mild(rule, finding)
    n, m = rule.n_of_m
    count = f"once {n} of the last {m} reports within {rule.window_s:g} s are bad, " if n > 1 else ""
    grace = f" (not within {rule.boot_grace_s:g} s after a boot)" if rule.boot_grace_s else ""
    step = rule.ladder[next_ladder_step(rule, finding, [], 0.0)]
    if mode is Mode.OBSERVE:
        return f"{count}it is shown, and nothing follows"
    if mode is Mode.RECOMMEND:
        return f"{count}a person decides, and is advised: {describe_action(step)}{grace}"
    return f"{count}{_automatic_outcome(policy, rule, step)}{grace}"


def _outcome_of_mild(rule: VerdictRule, finding: Finding) -> str:
    if finding.severity.gravity < rule.min_severity.gravity:
        counted = f"severity {rule.min_severity}{' or graver' if rule.min_severity is not Severity.CRITICAL else ''}"
    else:
        counted = f"action {' or '.join(rule.actions)}"
    advised = finding.severity is Severity.CRITICAL and finding.mode is not Mode.OBSERVE
    shown = "a person is advised, and nothing else follows" if advised else "it is shown, and nothing follows"
    return f"it counts findings of {counted} only, so {shown}"


def _automatic_outcome(policy: CorePolicy, rule: VerdictRule, step: Action) -> str:
    budget, remediation = policy.budget, policy.remediation
    if step is Action.RESTART_RANK:
        return f"ranks are restarted, {remediation.rank_restarts_per_node} times at most, and the node stays"
    limit = f"within the budget of {budget.count} evictions or {budget.share:.0%} of the fleet in {budget.window_s:g} s"
    evicted = f"the node is evicted, {limit}"
    if rule.blame_isolation is not BlameIsolationMethod.NONE:
        evicted = f"diagnostics ({rule.blame_isolation}) show which node is at fault, and {evicted}"
    if step is Action.DRAIN:
        return f"{evicted}, and stays out until the finding clears"
    if remediation.mode is not Mode.ENFORCE:
        return f"{evicted}, and waits for a person to {describe_action(step)}, since remediation.mode is recommend"
    return f"{evicted}, and {describe_action(step)} is requested"
