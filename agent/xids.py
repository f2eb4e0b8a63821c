"""What each XID means: the table ``xids.csv``, and the driver's own recovery actions.

Vendors disagree about some numbers (32, 45, 63, 94, 109), so a site's policy may override any row.
"""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Severity

XID_FILE = Path(__file__).with_name("xids.csv")

FALLEN_OFF_BUS = 79
RECOVERY_ACTION_CHANGED = 154

_SEVERITIES = {
    "fatal": Severity.CRITICAL,
    "critical": Severity.WARNING,
    "warning": Severity.WARNING,
    "info": Severity.INFO,
    "per-action": Severity.INFO,
}
"""The table says how bad it is for the application that runs: "critical" ends it. We ask whether the GPU is fit for
the next one, which only "fatal" denies."""

_ACTIONS = (
    ("restart_app", Action.RESTART_RANK),
    ("reset_gpu", Action.RESET_GPU),
    ("reboot_node(power cycle)", Action.DRAIN),
    ("reboot_vm_or_node", Action.REBOOT_NODE),
    ("workflow: reset_gpu or reboot_node", Action.REBOOT_NODE),
    ("workflow: reset_gpu", Action.RESET_GPU),
    ("workflow: solo", Action.NONE),
    ("check_mechanicals", Action.REPAIR),
    ("contact_support", Action.REPAIR),
    ("update_sw_fw", Action.NONE),
    ("check_uvm", Action.NONE),
    ("decode sub-code", Action.NONE),
    ("do what the recovery action says", Action.NONE),
    ("not listed: gpud says reboot", Action.REBOOT_NODE),
    ("not listed", Action.NONE),
    ("none", Action.NONE),
)
"""How the table's first step reads as ours. A power cycle is more than a node can do to itself: an operator, or the
scheduler, has to take it out. Where the table leaves it to the driver's word, NONE gives way to that word."""

RECOVERY_NAMES = (
    "none",
    "GPU reset required",
    "node reboot required",
    "drain peer-to-peer",
    "drain and reset",
    "recover IMEX domain",
    "bus reset required",
    "system reboot required",
)
"""Field 230 (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) and XID 154, by number."""

_RECOVERY_ACTIONS = (
    Action.NONE,
    Action.RESET_GPU,
    Action.REBOOT_NODE,
    Action.DRAIN,
    Action.DRAIN,
    Action.DRAIN,
    Action.REBOOT_NODE,
    Action.REBOOT_NODE,
)


class XidEntry(msgspec.Struct, frozen=True):
    """One row: what the number means, how bad it is for the GPU's fitness, and what would cure it."""

    xid: int
    name: str
    severity: Severity
    action: Action
    advice: str
    source: str


def recovery_action(number: int) -> Action:
    """What the driver asks for, in our words. A number from a newer driver is taken for the gravest known one."""
    return _RECOVERY_ACTIONS[number] if 0 <= number < len(_RECOVERY_ACTIONS) else Action.REBOOT_NODE


def recovery_name(number: int) -> str:
    """The driver's recovery action in words."""
    return RECOVERY_NAMES[number] if 0 <= number < len(RECOVERY_NAMES) else f"unknown action {number}"


def load_xids(path: Path = XID_FILE) -> dict[int, XidEntry]:
    """The table, by number. Raises ConfigurationError for a row that it cannot read."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return {entry.xid: entry for entry in (_entry(row, f"{path} line {rows.line_num}") for row in rows)}


def unknown_xid(xid: int) -> XidEntry:
    """For a number that the table lacks: worth a person's look, and no ground to evict by itself."""
    return XidEntry(xid, "not in the table", Severity.WARNING, Action.NONE, "look it up", "agent/xids.csv")


def _entry(row: dict[str, str], where: str) -> XidEntry:
    try:
        severity = _SEVERITIES[row["severity"]]
        action = next(ours for prefix, ours in _ACTIONS if row["action"].startswith(prefix))
        xid = int(row["xid"])
    except (KeyError, ValueError, StopIteration) as error:
        raise ConfigurationError(f"{where}: cannot read {row}: {error!r}") from error
    if severity is Severity.CRITICAL and action in (Action.NONE, Action.RESTART_RANK):
        action = Action.RESET_GPU
    return XidEntry(xid, row["name"], severity, action, row["action"], row["source"])
