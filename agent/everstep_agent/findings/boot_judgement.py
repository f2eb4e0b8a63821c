"""Judge what the boot before this one left. Pure: no clock, no files.

A boot has cured most faults, so that they are shown and nothing follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from everstep.vocabulary import Severity
from everstep_agent.drivers.samples import EarlierBoot, EarlierBootSample
from everstep_agent.findings.kernel_lines import MAX_SHOWN_LENGTH, LineFindings
from everstep_agent.policy.rules import FindingPolicy
from everstep_agent.policy.xids import XidParser

EARLIER_BOOT_SUBJECT = "earlier-boot"
MAX_SHOWN_FAULTS = 3
_PANIC = "Kernel panic - not syncing"
_ORDERED_PANIC = "sysrq triggered crash"
"""Text of a panic that an operator orders, to test crash dumps (Linux, drivers/tty/sysrq.c)."""


def judge_earlier_boot(policy: FindingPolicy, records: EarlierBoot) -> EarlierBootSample:
    """Return whether the boot ended in a panic that no person ordered, and its gravest lines."""
    panic = next((line for line in records.panic_lines if _PANIC in line), "")
    has_panicked = records.panicked_at > 0 and _ORDERED_PANIC not in panic
    lines = (line for line in (*records.panic_lines, *records.log_lines) if _PANIC not in line)
    faults = grave_lines(policy, lines)
    at = f"{datetime.fromtimestamp(records.panicked_at, UTC):%Y-%m-%d %H:%M} UTC: {panic}" if has_panicked else ""
    shown = [text[:MAX_SHOWN_LENGTH] for text in (at, *faults[:MAX_SHOWN_FAULTS]) if text]
    return EarlierBootSample(panics=int(has_panicked), faults=len(faults), detail="; ".join(shown))


def grave_lines(policy: FindingPolicy, lines: Iterable[str]) -> list[str]:
    """Return the lines that would be critical findings, each kind of line once."""
    parser, findings = XidParser(), LineFindings(policy)
    xids: dict[tuple[str, int], str] = {}
    for line in lines:
        if (event := parser.parse_line(line)) is None:
            findings.process(line, 0.0, 0.0)
        elif policy.get_xid_entry(event.xid).severity is Severity.CRITICAL:
            xids.setdefault((event.pci_bus_id, event.xid), line)
    return [*xids.values(), *(each.message for each in findings.findings if each.severity is Severity.CRITICAL)]
