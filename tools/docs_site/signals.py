"""Page of signals: every line of the kernel log that the agent knows, with its judgement, its end and its source."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.findings.kernel_lines import MAX_LINE_FINDINGS, SXID_TOTAL
from everstep_agent.findings.memory_errors import SETTLE_S
from everstep_agent.node_profile.profile import COUNTS, LEARN_S, PROFILED, STEADY_S
from everstep_agent.policy.nvlink_errors import load_nvlink5_rules, load_register_bits, register_judgement
from everstep_agent.policy.rules import BenignLine, FindingRule, KernelLineRule, load_policy
from everstep_agent.policy.sxids import load_sxid_table, sxid_rule
from everstep_agent.policy.xids import load_xid_table, unknown_xid_entry
from tools.docs_site.markdown import code, table

LINES_METRIC, XIDS_METRIC = "everstep_agent_kernel_lines_total", "everstep_gpu_xids_total"


def page() -> str:
    """Return the page."""
    policy = load_policy()
    unknown = unknown_xid_entry(0)
    parts = [
        "# Signals of the kernel log\n\nThe agent reads each line of the kernel log once, and judges it by the tables "
        f"below. The metric `{LINES_METRIC}` counts the lines of each rule, and `{XIDS_METRIC}` the XIDs of each GPU. "
        "A line that no table knows is no finding, unless NVIDIA's driver wrote it: then it is a warning that shows "
        f"the line. At most {MAX_LINE_FINDINGS} findings of lines are told apart; graver ones come first, and a "
        "further finding shows the newest line that does not fit.\n",
        "A site changes a rule, adds rules, or calls a line ordinary by the [setting](settings/agent.md) "
        "`site_policy`; [Tune](../how-to/tune.md#xids) has an example.\n",
        "## Rules on lines\n",
        table(
            (
                "Rule",
                "Kind",
                "Pattern",
                "Severity",
                "Action",
                "Mode",
                "Times",
                "Clears",
                "Cleared by the line",
                "Source",
            ),
            [_line_row(rule) for rule in policy.line_rules],
        ),
        "## Ordinary lines\n",
        "These lines make no finding.\n",
        table(("Name", "Text", "Pattern", "Source"), [_benign_row(benign) for benign in policy.benign_lines]),
        "## XIDs\n",
        "NVIDIA's driver reports faults of a GPU by number. The action is the immediate action of NVIDIA's public "
        "catalogue; a number for which it names none is only shown, and XID 154 or NVML's recovery action decides. An "
        f"XID that is not listed has the severity `{unknown.severity}` and the action `{unknown.action}`.\n",
        "XID 48 and a risen count of uncorrectable errors belong to one error, and so do XIDs 63, 94 and 95. The agent "
        f"judges them together after {SETTLE_S:g} s: with XID 63 or 94 the reset waits for the end of the job, with "
        "XID 95 or alone it does not.\n",
        _xids(),
        "## Registers of XID 74\n",
        "Each bit of the seven registers has a meaning; the gravest counts. A bit that is not listed is unexpected.\n",
        table(("Register", "Bit", "Meaning", "Tolerated per link", "Severity", "Action", "Advice"), _register_rows()),
        "## Error codes of XIDs 144 to 150\n",
        "The line names the unit, IntrInfo and the error status. The unit's code is in the lowest ten bits of IntrInfo "
        "before driver 575, and in the lowest seven since; bits 25 to 20 hold the detail. Where a row can be promoted, "
        "another bit of IntrInfo makes the error fatal, and the action `reset_gpu`. `xid_154_eval` is what XID 154 "
        "demands, or else a restart of the rank.\n",
        table(
            ("XID", "Unit", "Detail", "Code before 575", "Code since 575", "Status", "Catalogue", "Promoted", "Advice"),
            _nvlink5_rows(),
        ),
        "## SXids\n",
        "NVSwitches report errors by number, and most lines have a word, Fatal or Non-fatal. Lines are counted in "
        f'`{LINES_METRIC}{{rule="{SXID_TOTAL}"}}`. Where NVML tells which GPU is at the port of a switch, the finding '
        "names it.\n",
        table(("SXid", "Name", "Fatal", "Non-fatal", "Without a word", "Source"), _sxid_rows()),
        "## The node's profile\n",
        f"Besides the log, each poll is compared with what the node had when it was well, values that were steady for "
        f"{LEARN_S:g} s ([monitoring](../how-to/monitoring.md#a-node-has-less-than-it-had)). A changed setting is "
        f"learned after {STEADY_S / 3600:g} h, a loss when a person accepts it. Rules on the metrics are among the "
        "[rules of the agent](findings.md#rules-of-the-agent).\n",
        table(("Part", "Value", "Metric", "Is learned"), _profile_rows()),
    ]
    return "\n".join(parts)


def clears(rule: FindingRule | KernelLineRule) -> str:
    """Return when the finding of a rule ends."""
    after = f"after {rule.clear_after_s:g} s" if rule.clear_after_s is not None else ""
    unknown_s = rule.clear_unknown_after_s if isinstance(rule, FindingRule) else None
    unknown = f"after {unknown_s:g} s without a value" if unknown_s is not None else ""
    return ", ".join(filter(None, (after, unknown, *map(str, rule.clear_on))))


def _line_row(rule: KernelLineRule) -> tuple[object, ...]:
    times = f"{rule.times} within {rule.within_s:g} s" if rule.times > 1 else ""
    return (
        code(rule.id),
        code(rule.kind),
        code(rule.pattern),
        rule.severity,
        rule.action,
        rule.mode,
        times,
        clears(rule),
        code(rule.clear_pattern),
        rule.source,
    )


def _benign_row(benign: BenignLine) -> tuple[object, ...]:
    return code(benign.id), code(benign.contains), code(benign.pattern), benign.source


def _xids() -> str:
    entries = sorted(load_xid_table().values(), key=lambda entry: entry.xid)
    names = list(entries[0].__struct_fields__)
    rows = [[getattr(entry, name) for name in names] for entry in entries]
    return table([name.replace("_", " ").capitalize() for name in names], rows)


def _register_rows() -> Iterable[tuple[object, ...]]:
    for (register, bit), kind in sorted(load_register_bits().items()):
        error = register_judgement(kind, None)
        yield (
            register,
            bit,
            kind.replace("_", " "),
            error.tolerated or "",
            error.severity,
            error.action,
            error.advice,
        )


def _nvlink5_rows() -> Iterable[tuple[object, ...]]:
    rules = {rule for rules in load_nvlink5_rules().values() for rule in rules}
    for rule in sorted(rules, key=lambda rule: (rule.xid, rule.units, rule.detail, rule.status or 0)):
        yield (
            rule.xid,
            " / ".join(rule.units),
            rule.detail,
            f"0x{rule.before_575:03x}",
            f"0x{rule.since_575:02x}",
            "any" if rule.status is None else f"0x{rule.status:08x}",
            code(rule.action),
            "yes" if rule.is_promotable else "",
            rule.advice,
        )


def _sxid_rows() -> Iterable[tuple[object, ...]]:
    for entry in load_sxid_table().values():
        judged = (sxid_rule(entry.sxid, word) for word in ("Fatal", "Non-fatal", ""))
        shown = [_short(rule.severity, rule.action, rule.mode) for rule in judged]
        yield entry.sxid, code(entry.mnemonic), *shown, entry.source


def _profile_rows() -> Iterable[tuple[object, ...]]:
    for part, values in PROFILED.items():
        for value in values:
            learned = "after a day" if value.is_setting else "when accepted"
            yield part, code(value.name), code(f"profile.{value.field}"), learned
            if value.peer_field:
                yield part, code(value.name), code(f"profile.{value.peer_field}"), "not: of the GPUs of its model"
    for part, counts in COUNTS.items():
        for name, field, restarts in counts:
            yield part, code(name), code(f"profile.{field}"), "at each run" + " of one boot" * restarts


def _short(severity: Severity, action: Action, mode: Mode) -> str:
    return str(severity) if action is Action.NONE else f"{severity}, {action}, {mode}"
