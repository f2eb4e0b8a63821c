"""A change of policy, checked as the settings are."""

from __future__ import annotations

from typing import Any

import msgspec

from controller.core.policy import CorePolicy
from controller.rulebook import changed_rules
from everstep.errors import ConfigurationError
from everstep.wire.v1.history import PolicyChange, PolicyChecked, PolicyDocument


def document(policy: CorePolicy) -> PolicyDocument:
    """The policy as people read it."""
    knobs: dict[str, Any] = msgspec.to_builtins(policy)
    del knobs["rules"]
    rules = (rule for kind in policy.rules.kinds.values() for rule in kind)
    return PolicyDocument(knobs=knobs, rules=tuple(msgspec.to_builtins(rule) for rule in rules))


def apply(policy: CorePolicy, change: PolicyChange) -> CorePolicy:
    """The policy with the change. Raises ConfigurationError for what cannot be put in force, and how to mend it."""
    if "rules" in change.knobs:
        raise ConfigurationError("rules is no knob: give the rules beside the knobs")
    knobs: dict[str, Any] = {name: getattr(policy, name) for name in policy.__struct_fields__ if name != "rules"}
    try:
        changed = msgspec.convert({**knobs, **change.knobs}, CorePolicy, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"a knob is wrong: {error}") from error
    return msgspec.structs.replace(changed, rules=changed_rules(policy.rules, change.rules)).validate()


def check(policy: CorePolicy, change: PolicyChange) -> PolicyChecked:
    """Whether the change could be put in force, and what of the policy it changes."""
    try:
        changed = apply(policy, change)
    except ConfigurationError as error:
        return PolicyChecked(ok=False, complaint=str(error))
    return PolicyChecked(ok=True, changes=_differences(document(policy), document(changed)))


def _differences(before: PolicyDocument, after: PolicyDocument) -> dict[str, str]:
    told = {
        name: f"{_text(before.knobs[name])} -> {_text(value)}"
        for name, value in after.knobs.items()
        if value != before.knobs[name]
    }
    rules = {_name(rule): rule for rule in before.rules}
    for rule in after.rules:
        was = rules.get(_name(rule), {})
        for key in sorted(rule.keys() | was.keys()):
            if rule.get(key) != was.get(key):
                told[f"{_name(rule)}: {key}"] = f"{_text(was.get(key))} -> {_text(rule.get(key))}"
    return told


def _name(rule: dict[str, Any]) -> str:
    return f"{rule['kind']}.{rule['name']}" if rule.get("name") else str(rule["kind"])


def _text(value: Any) -> str:
    return "default" if value is None else msgspec.json.encode(value).decode()
