"""Read the verdict rules: the shipped policy files, overridden by a site's files kind by kind and key by key."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import ConfigurationError
from everstep.settings import parse_toml, suggest_key
from everstep.vocabulary import FindingKind
from everstep.wire.v1.operator_history import PolicyChange, PolicyCheckResult, PolicyDocument
from everstep_controller.core.policy import (
    LADDER_ACTIONS,
    MAX_REMEMBERED,
    BlameIsolationMethod,
    CorePolicy,
    Rulebook,
    VerdictRule,
)

POLICY_FOLDER = Path(__file__).parent


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of one policy file."""

    rule: tuple[VerdictRule, ...] = ()


Tables = dict[tuple[str, str], dict[str, Any]]


def override_rules(rulebook: Rulebook, changes: Iterable[Mapping[str, Any]]) -> Rulebook:
    """Return the rules overridden by ``changes``, the tables of a site's files. Raises ConfigurationError.

    A change with the kind and name of a rule replaces the keys that it gives and keeps the others. A rule with a new
    name is tried before the unnamed rule of its kind.
    """
    tables: Tables = {
        (str(rule.kind), rule.name): msgspec.to_builtins(rule)
        for rules in rulebook.rules_by_kind.values()
        for rule in rules
    }
    for change in changes:
        key = (str(change.get("kind", "")), str(change.get("name", "")))
        if key not in tables and "source" not in change:
            raise ConfigurationError(f"there is no rule {'.'.join(filter(None, key))!r}; a new one needs its source")
        tables[key] = {**tables.get(key, {}), **change}
    return build_rulebook(tables)


def build_rulebook(tables: Tables) -> Rulebook:
    """Return the rules of these tables. Raises ConfigurationError if one is invalid, or a kind has none."""
    rules = [_validated(table) for table in tables.values()]
    rules.sort(key=lambda rule: (not rule.name, rule.name))
    rulebook = Rulebook({kind: tuple(rule for rule in rules if rule.kind is kind) for kind in FindingKind})
    if missing := [kind for kind, found in rulebook.rules_by_kind.items() if not found or found[-1].name]:
        raise ConfigurationError(f"finding kinds without an unnamed default rule: {', '.join(missing)}")
    return rulebook


@functools.cache
def shipped_rulebook() -> Rulebook:
    """Return the rules as shipped."""
    return build_rulebook(read_rules(POLICY_FOLDER))


def with_rules(policy: CorePolicy) -> CorePolicy:
    """Return the policy, with the shipped rules if it has none."""
    return policy if policy.rules.rules_by_kind else msgspec.structs.replace(policy, rules=shipped_rulebook())


def read_rules(folder: Path) -> Tables:
    """Return the checked rules of all ``*.toml`` files in the folder, as tables keyed by kind and name.

    Raises ConfigurationError with file, line and key.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"the policy folder {folder} is not a directory")
    tables: Tables = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from error
        file = parse_toml(text, str(path), PolicyFile, (PolicyFile, VerdictRule))
        for rule, table in zip(file.rule, tomllib.loads(text).get("rule", ()), strict=True):
            key = (str(rule.kind), rule.name)
            if key in tables:
                raise ConfigurationError(f"{path}: {rule.id} is defined twice in {folder}")
            tables[key] = table
    return tables


def _validated(table: dict[str, Any]) -> VerdictRule:
    """Return the rule merged from all files. Raise ConfigurationError if the merged rule is invalid."""
    try:
        rule = msgspec.convert(table, VerdictRule)
    except msgspec.ValidationError as error:
        name = ".".join(str(table[key]) for key in ("kind", "name") if table.get(key))
        raise ConfigurationError(f"rule {name}: {error}") from error
    for is_wrong, message in _contradictions(rule):
        if is_wrong:
            raise ConfigurationError(f"rule {rule.id}: {message}")
    return rule


def _contradictions(rule: VerdictRule) -> tuple[tuple[bool, str], ...]:
    n, m = rule.n_of_m
    seconds = (rule.window_s, rule.boot_grace_s, rule.step_memory_s, rule.coalesce_s, rule.clear_s, rule.correlated_s)
    order = [LADDER_ACTIONS.index(ladder_action) for ladder_action in rule.ladder if ladder_action in LADDER_ACTIONS]
    return (
        (not rule.source, "it has no source: give the origin of its numbers"),
        (
            not 1 <= n <= m <= MAX_REMEMBERED,
            f"n_of_m = [{n}, {m}] must be [n, m] with 1 <= n <= m <= {MAX_REMEMBERED}",
        ),
        (n > 1 and rule.window_s <= 0, "n_of_m counts within window_s: give a window_s above zero"),
        (min(seconds) < 0, "seconds cannot be negative"),
        (rule.coalesce_s > rule.step_memory_s, "coalesce_s must not exceed step_memory_s"),
        (len(order) != len(rule.ladder), f"the actions of a ladder are {', '.join(LADDER_ACTIONS)}"),
        (not order or order != sorted(set(order)), "ladder actions must be distinct and ordered weakest first"),
        (rule.required_passes < 1, "required_passes must be at least 1"),
        (rule.correlated_nodes < 2, "correlated_nodes must be at least 2"),
        (not 0 < rule.correlated_share <= 1, "correlated_share is a share of the fleet: above 0, at most 1"),
        (
            rule.blame_isolation is not BlameIsolationMethod.NONE and not rule.diagnostics,
            "blame isolation needs diagnostics that the node must pass",
        ),
    )


# ---- policy changes


def policy_document(policy: CorePolicy, origins: Mapping[str, str] | None = None) -> PolicyDocument:
    """Return the policy in the form shown to people; ``origins`` are the sources of values that are not shipped."""
    knobs = msgspec.to_builtins(policy.values())
    rules = (rule for kind in policy.rules.rules_by_kind.values() for rule in kind)
    shown = tuple(msgspec.to_builtins(rule) for rule in rules)
    return PolicyDocument(knobs=knobs, rules=shown, origins=dict(origins or {}))


def policy_from_document(document: PolicyDocument) -> CorePolicy:
    """Return the policy that a document shows. Raises ConfigurationError if this release does not know it."""
    change = PolicyChange(knobs=document.knobs)
    rules = build_rulebook({(str(rule["kind"]), str(rule.get("name", ""))): rule for rule in document.rules})
    return msgspec.structs.replace(apply_change(with_rules(CorePolicy()), change), rules=rules)


def apply_change(policy: CorePolicy, change: PolicyChange) -> CorePolicy:
    """Return the policy with the change applied. Raises ConfigurationError, which says how to correct the change."""
    known = policy.values()
    tables: dict[str, dict[str, Any]] = {}
    for name, value in (known | change.knobs).items():
        if name == "rules":
            raise ConfigurationError("`rules` is not a [policy] setting: put rules into [[rule]] tables")
        if name not in known:
            raise ConfigurationError(f"unknown policy setting `{name}`; {suggest_key(name, known)}")
        table, field = name.split(".")
        tables.setdefault(table, {})[field] = value
    try:
        changed = msgspec.convert(tables, CorePolicy, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"invalid policy setting: {error}") from error
    return msgspec.structs.replace(changed, rules=override_rules(policy.rules, change.rules)).validate()


def check_change(policy: CorePolicy, change: PolicyChange) -> PolicyCheckResult:
    """Return whether the change is valid, and how it would change the policy."""
    try:
        changed = apply_change(policy, change)
    except ConfigurationError as error:
        return PolicyCheckResult(ok=False, error=str(error))
    return PolicyCheckResult(ok=True, changes=_differences(policy_document(policy), policy_document(changed)))


def _differences(before: PolicyDocument, after: PolicyDocument) -> dict[str, str]:
    differences = {
        name: f"{_text(before.knobs[name])} -> {_text(value)}"
        for name, value in after.knobs.items()
        if value != before.knobs[name]
    }
    rules = {_name(rule): rule for rule in before.rules}
    for rule in after.rules:
        was = rules.get(_name(rule), {})
        for key in sorted(rule.keys() | was.keys()):
            if rule.get(key) != was.get(key):
                differences[f"{_name(rule)}: {key}"] = f"{_text(was.get(key))} -> {_text(rule.get(key))}"
    return differences


def _name(rule: dict[str, Any]) -> str:
    return f"{rule['kind']}.{rule['name']}" if rule.get("name") else str(rule["kind"])


def _text(value: Any) -> str:
    return "default" if value is None else msgspec.json.encode(value).decode()
