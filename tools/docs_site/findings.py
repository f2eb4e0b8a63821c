"""Page of findings: every kind, the agent's rules that raise them and the controller's rules that judge them."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import Action, FindingKind, Mode, Severity
from everstep_agent.policy.rules import FindingRule as AgentRule
from everstep_agent.policy.rules import load_policy
from everstep_controller.core.policy import VerdictRule
from everstep_controller.policy.rulebook import shipped_rulebook
from tools.docs_site.markdown import code, sentence, table
from tools.docs_site.settings import Setting, settings_of
from tools.docs_site.signals import clears


def page() -> str:
    """Return the page."""
    policy, book = load_policy(), shipped_rulebook()
    agent = policy.rules
    raised = {kind: [rule.id for rule in (*agent, *policy.line_rules) if rule.kind is kind] for kind in FindingKind}
    kinds = [
        (code(kind), ", ".join(map(code, raised[kind])), ", ".join(code(rule.id) for rule in book.rules_by_kind[kind]))
        for kind in FindingKind
    ]
    parts = [
        "# Findings and rules\n\nA finding is a fact that a sensor, a probe or a check saw. Rules of the agent turn "
        "measured values into findings; rules of the controller decide what follows from them. A site changes "
        "the agent's by the [setting](settings/agent.md) `site_policy`, and the controller's by the "
        "[setting](settings/controller.md) `policy_dir`.\n",
        "## Kinds\n",
        "A kind without an agent's rule is raised by other code, such as the vault or the controller itself.\n",
        table(("Kind", "Raised by", "Judged by"), kinds),
        f"Severities: {_words(Severity)}.\n",
        f"Actions, weakest first: {_words(Action)}.\n",
        f"Modes, weakest first: {_words(Mode)}.\n",
        "## Rules of the agent\n",
        table(
            ("Rule", "Metric", "Test", "Polls", "Severity", "Action", "Mode", "Clears", "Source"),
            [_agent_row(rule) for rule in agent],
        ),
        "[Signals of the kernel log](signals.md) has the rules on lines, XIDs and SXids.\n",
        "## Rules of the controller\n",
        table(
            ("Rule", "Counts", "Mode", "Actions in turn", "Probes before return", "Source"),
            [_controller_row(rule) for rules in book.rules_by_kind.values() for rule in rules],
        ),
        "## Keys of a controller's rule\n",
        table(
            ("Key", "Default", "Meaning"),
            [_key_row(setting) for setting in settings_of(VerdictRule)],
        ),
    ]
    return "\n".join(parts)


def _words(values: Iterable[str]) -> str:
    return ", ".join(code(str(value)) for value in values)


def _agent_row(rule: AgentRule) -> tuple[object, ...]:
    window = f" within {rule.window_s:g} s" if rule.window_s else ""
    return (
        code(rule.id),
        code(rule.metric),
        f"{str(rule.criterion).replace('_', ' ')} {rule.threshold:g}{window}",
        f"{rule.n_of_m[0]} of {rule.n_of_m[1]}",
        rule.severity,
        rule.action,
        rule.mode,
        clears(rule),
        rule.source,
    )


def _key_row(key: Setting) -> tuple[str, str, str]:
    return code(key.name), code(key.default) or "required", sentence(key.description)


def _controller_row(rule: VerdictRule) -> tuple[object, ...]:
    least = f"{rule.min_severity} or graver" if rule.min_severity is not Severity.CRITICAL else str(rule.min_severity)
    counted = f", {rule.n_of_m[0]} of {rule.n_of_m[1]} reports in {rule.window_s:g} s" if rule.n_of_m[1] > 1 else ""
    only = f"XID {', '.join(map(str, rule.xids))}, " if rule.xids else ""
    return (
        code(rule.id),
        only + least + counted,
        rule.mode,
        ", ".join(str(action) for action in rule.ladder),
        ", ".join(str(probe) for probe in rule.diagnostics)
        + (f", {rule.required_passes} times" if rule.required_passes > 1 else ""),
        rule.source,
    )
