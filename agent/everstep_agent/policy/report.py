"""Check a site's policy for agents, and explain one of its rules: the agent's part of ``everstep policy``.

``python -m everstep_agent.policy.report check|explain [RULE] [FILE...]`` prints JSON. Without a FILE it reads
those of the agent's settings in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.errors import ConfigurationError, exit_on_errors
from everstep.policy_explanations import ExplainedValue, Explanation, RuleExplanation
from everstep.vocabulary import Finding, FindingKind
from everstep.wire.v1.operator_history import PolicyCheckResult
from everstep_agent.config import PROGRAM
from everstep_agent.policy.nvlink_errors import NVLINK5_XIDS, XID_NVLINK
from everstep_agent.policy.rules import (
    SECTIONS,
    FindingPolicy,
    FindingRule,
    KernelLineRule,
    PolicyTables,
    RuleTable,
)
from everstep_agent.policy.xids import XID_FILE, load_xid_table

XID_PREFIX = "xid-"
"""Begins the names of XIDs in findings."""

DECODED_XIDS = (XID_NVLINK, *NVLINK5_XIDS)
"""XIDs whose lines have registers, which are judged by tables of their own."""

DEFAULT = "default"
"""Origin of a value that no file gives."""


def site_files(files: Sequence[str]) -> tuple[str, ...]:
    """Return the given files, or those of the agent's settings in the environment."""
    return tuple(files) or tuple(PROGRAM.read({}, os.environ).get("site_policy", ()))


def check(files: Sequence[str]) -> PolicyCheckResult:
    """Return whether the files can be put in force together, and what they change."""
    try:
        tables = PolicyTables(files)
        tables.build()
    except ConfigurationError as error:
        return PolicyCheckResult(ok=False, error=str(error))
    changes: dict[str, str] = {}
    shipped = PolicyTables().tables
    for key, table in tables.tables.items():
        changes |= _changes(_name(table), shipped.get(key), table)
    return PolicyCheckResult(ok=True, changes=changes)


def _name(table: RuleTable) -> str:
    if table.section in ("xid", "xid_clearing"):
        return f"{table.section} {table.name}"
    return table.name


def _changes(name: str, before: RuleTable | None, after: RuleTable) -> dict[str, str]:
    if before is None and after.section != "xid":
        return {name: f"new [[{after.section}]]"}
    old = _xid_values(after.name) if before is None else _values(before)
    new = _values(after)
    return {
        f"{name}: {key}": f"{_text(old.get(key))} -> {_text(value)}"
        for key, value in new.items()
        if value != old.get(key) and (before is not None or value is not None) and key != "xid"
    }


def _values(table: RuleTable) -> dict[str, Any]:
    """Return all values of a table, with those that the file omits."""
    built: dict[str, Any] = msgspec.to_builtins(msgspec.convert(table.values, SECTIONS[table.section][0]))
    return built


def _xid_values(number: str) -> dict[str, Any]:
    entry = load_xid_table().get(int(number))
    return {} if entry is None else msgspec.to_builtins(entry)


def _text(value: object) -> str:
    return "default" if value is None else msgspec.json.encode(value).decode()


def explain(name: str, files: Sequence[str]) -> Explanation:
    """Return the rule of this id with the places of its values. Raises ConfigurationError if the policy does not
    load."""
    tables = PolicyTables(files)
    policy = tables.build()
    if name.startswith(XID_PREFIX) and name.removeprefix(XID_PREFIX).isdigit():
        return Explanation(explanation=_explain_xid(int(name.removeprefix(XID_PREFIX)), tables, policy))
    for section in SECTIONS:
        table = tables.tables.get((section, name))
        if table is not None and section != "xid":
            return Explanation(explanation=_explain_table(table, policy))
    return Explanation(names=tuple(name for section, name in tables.tables if section != "xid"))


def _explain_table(table: RuleTable, policy: FindingPolicy) -> RuleExplanation:
    values = {
        key: ExplainedValue(value, str(table.origins[key]) if key in table.origins else DEFAULT)
        for key, value in _values(table).items()
    }
    made: tuple[FindingRule | KernelLineRule, ...] = (*policy.rules, *policy.line_rules)
    rule = next((rule for rule in made if rule.id == table.name and table.section in ("rule", "line")), None)
    return RuleExplanation(
        rule=table.name,
        owner="agent",
        section=table.section,
        enabled=bool(table.values.get("enabled", True)),
        values=values,
        finding=None if rule is None else rule.finding("SUBJECT", rule.message, 0.0),
    )


def _explain_xid(number: int, tables: PolicyTables, policy: FindingPolicy) -> RuleExplanation:
    entry, mode = policy.get_xid_entry(number), policy.get_xid_mode(number)
    site = tables.tables.get(("xid", str(number)))
    shown = {"name": entry.name, "severity": entry.severity, "action": entry.action, "mode": mode}
    shown |= {"source": entry.source}
    values = {
        key: ExplainedValue(value, str(site.origins[key]) if site and key in site.origins else str(XID_FILE))
        for key, value in shown.items()
    }
    if not site or "mode" not in site.origins:
        values["mode"] = ExplainedValue(mode, "enforce if critical, else observe")
    if number in DECODED_XIDS and number not in policy.xids_of_site:
        registers = "what the registers in a line say comes before this row"
        values["decoded"] = ExplainedValue(registers, str(XID_FILE.parent))
    clearing = tables.tables["xid_clearing", entry.action]
    values |= {
        key: ExplainedValue(clearing.values[key], str(clearing.origins[key]))
        for key in ("clear_after_s", "clear_on")
        if key in clearing.values
    }
    finding = Finding(
        kind=FindingKind.GPU_XID,
        subject="SUBJECT",
        severity=entry.severity,
        message=entry.name,
        action=entry.action,
        mode=mode,
        rule=f"{XID_PREFIX}{number}",
        xid=number,
    )
    return RuleExplanation(
        rule=finding.rule, owner="agent", section="xid", enabled=True, values=values, finding=finding
    )


def main(words: Sequence[str]) -> None:
    """Print the answer to ``words``, the command line without the program."""
    with exit_on_errors("everstep"):
        command, *rest = words
        answer = check(site_files(rest)) if command == "check" else explain(rest[0], site_files(rest[1:]))
        sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
