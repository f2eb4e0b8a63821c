"""Decode the NVLink errors that an XID's number alone does not judge: XID 74, and XIDs 144 to 150.

An XID 74 carries seven registers, in which each bit has a meaning (``xid74.csv``)::

    NVRM: Xid (PCI:0000:9b:00): 74, pid=.., name=.., NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, ...)

XIDs 144 to 150 name the unit, and carry IntrInfo and the error status (``nvlink5.csv``)::

    NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 ...)

IntrInfo has the unit's code in its lowest bits: ten before driver 575, seven since. No value fits both for one unit.
Both tables are those of NVIDIA's public Xid catalogue. A value that they lack is no ground to act.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path

import msgspec

from everstep.vocabulary import Action, Severity

XID_NVLINK = 74
NVLINK5_XIDS = range(144, 151)
NVLINK5_FILE = Path(__file__).with_name("nvlink5.csv")
XID74_FILE = Path(__file__).with_name("xid74.csv")

MAX_LINKS = 64
"""Links of a GPU whose errors are counted; NVML's maximum is 36 (``NVML_NVLINK_MAX_LINKS``, nvml.h of driver 595)."""


class LinkErrorKind(StrEnum):
    """What a bit of an XID 74 register stands for, mildest first."""

    IGNORED = "ignored"
    ECC_THRESHOLD = "ecc_threshold"
    SYMPATHETIC = "sympathetic"
    UNEXPECTED = "unexpected"
    REPEATED = "repeated"
    ECC_OR_PARITY = "ecc_or_parity"
    SIGNAL_INTEGRITY = "signal_integrity"
    HARDWARE = "hardware"
    FABRIC_RESET = "fabric_reset"


_RANK = {kind: rank for rank, kind in enumerate(LinkErrorKind)}

TOLERATED = {LinkErrorKind.ECC_OR_PARITY: 2, LinkErrorKind.REPEATED: 1}
"""Occurrences on one link up to which these kinds need nothing. NVIDIA names the first; "repeatedly" is read as more
than once."""

_ADVICE = {
    LinkErrorKind.IGNORED: "nothing to do",
    LinkErrorKind.ECC_THRESHOLD: "go on; field diagnostics can check the link",
    LinkErrorKind.SYMPATHETIC: "follow the other XIDs and SXids; report it if there are none",
    LinkErrorKind.UNEXPECTED: "report it",
    LinkErrorKind.REPEATED: "report it if it repeats; run field diagnostics",
    LinkErrorKind.ECC_OR_PARITY: "report it if the link shows it more than twice",
    LinkErrorKind.SIGNAL_INTEGRITY: "check the link's connections, then run field diagnostics",
    LinkErrorKind.HARDWARE: "check the link's connections and seat them again, then run diagnostics",
    LinkErrorKind.FABRIC_RESET: "reset the GPUs and switches together",
}


class LinkError(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded NVLink error.

    Attributes:
        name: Its meaning, for a sentence.
        severity: Severity for the GPU's fitness.
        action: The action that the catalogue names for it.
        advice: What a person can do.
        link: Number of the link on the GPU; None if the line names none.
        tolerated: Occurrences on one link up to which no action follows.
    """

    name: str
    severity: Severity
    action: Action
    advice: str
    link: int | None = None
    tolerated: int = 0


def decode_link_error(xid: int, text: str) -> LinkError | None:
    """Return the decoded error of a log line; None for another XID, or for a line that the tables do not decode."""
    if xid == XID_NVLINK:
        return _decode_registers(text)
    return _decode_nvlink5(xid, text) if xid in NVLINK5_XIDS else None


# XID 74

_REGISTERS = re.compile(r"\blink (?P<link>\d{1,3})\s?\((?P<values>0x[0-9a-fA-F]{1,8}(?:, ?0x[0-9a-fA-F]{1,8}){6})\)")


@cache
def load_register_bits(path: Path = XID74_FILE) -> Mapping[tuple[int, int], LinkErrorKind]:
    """Return the meaning of each bit by register (1 to 7) and bit."""
    with path.open(encoding="utf-8", newline="") as file:
        return {(int(row["register"]), int(row["bit"])): LinkErrorKind(row["meaning"]) for row in csv.DictReader(file)}


def _decode_registers(text: str) -> LinkError | None:
    match = _REGISTERS.search(text)
    if match is None:
        return None
    known = load_register_bits()
    values = [int(value, 16) for value in match["values"].split(",")]
    kinds = {
        known.get((register, bit), LinkErrorKind.UNEXPECTED)
        for register, value in enumerate(values, 1)
        for bit in range(32)
        if value >> bit & 1
    }
    if not kinds:
        return None
    return register_judgement(max(kinds, key=_RANK.__getitem__), int(match["link"]))


def register_judgement(kind: LinkErrorKind, link: int | None) -> LinkError:
    """Return the judgement of a bit's meaning on a link."""
    return LinkError(
        name=f"NVLink error, {kind.replace('_', ' ')}",
        severity=_register_severity(kind),
        action=_register_action(kind),
        advice=_ADVICE[kind],
        link=link,
        tolerated=TOLERATED.get(kind, 0),
    )


def _register_severity(kind: LinkErrorKind) -> Severity:
    if kind is LinkErrorKind.FABRIC_RESET:
        return Severity.CRITICAL
    return Severity.INFO if kind in (LinkErrorKind.IGNORED, LinkErrorKind.ECC_THRESHOLD) else Severity.WARNING


def _register_action(kind: LinkErrorKind) -> Action:
    """Return the action. Only the fabric's reset is an order of the catalogue; checks of the link are a person's."""
    if kind is LinkErrorKind.FABRIC_RESET:
        return Action.REBOOT_NODE
    needs_a_person = _RANK[kind] >= _RANK[LinkErrorKind.REPEATED]
    return Action.REPAIR if needs_a_person else Action.NONE


# XIDs 144 to 150

_NVLINK5 = re.compile(
    r", (?P<unit>[A-Z][A-Z0-9_]{0,40}(?:/[A-Z0-9_]{1,40})?) (?:Fatal|Nonfatal|Link Fatal) XC[01] i[01] "
    r"Link (?P<link>-?\d{1,3}) \((?P<info>0x[0-9a-fA-F]{1,8}) (?P<status>0x[0-9a-fA-F]{1,8})\b"
)
DETAIL_SHIFT, DETAIL_MASK = 20, 0x3F
BEFORE_575_MASK, SINCE_575_MASK = 0x3FF, 0x7F
PROMOTED_BEFORE_575, PROMOTED_SINCE_575 = 1 << 10, 1 << 7
"""Bits of IntrInfo that make a promotable error fatal."""

_NVLINK5_ACTIONS = {
    "ignore": Action.NONE,
    "xid_154_eval": Action.RESTART_RANK,  # and XID 154 if the driver reports one, which XidHistory adds
    "reset_gpu": Action.RESET_GPU,
}


class Nvlink5Rule(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        units: Names of the unit in the line, of drivers before 575 and since.
        detail: Bits 25 to 20 of IntrInfo.
        before_575, since_575: Code of the unit in the lowest bits of IntrInfo.
        status: The error status; None for any.
        action: The catalogue's immediate action.
        is_promotable: Whether another bit of IntrInfo makes the error fatal.
        advice: The catalogue's investigatory action.
    """

    xid: int
    units: tuple[str, ...]
    detail: int
    before_575: int
    since_575: int
    status: int | None
    action: str
    is_promotable: bool
    advice: str

    def promotes(self, info: int) -> bool | None:
        """Return whether IntrInfo makes this error fatal, in either encoding; None if the row does not fit it."""
        if info >> DETAIL_SHIFT & DETAIL_MASK != self.detail:
            return None
        if info & SINCE_575_MASK == self.since_575:
            return self.is_promotable and bool(info & PROMOTED_SINCE_575)
        if info & BEFORE_575_MASK == self.before_575:
            return self.is_promotable and bool(info & PROMOTED_BEFORE_575)
        return None


@cache
def load_nvlink5_rules(path: Path = NVLINK5_FILE) -> Mapping[tuple[int, str], tuple[Nvlink5Rule, ...]]:
    """Return the rows by XID and each name of their unit."""
    found: dict[tuple[int, str], tuple[Nvlink5Rule, ...]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rule = Nvlink5Rule(
                xid=int(row["xid"]),
                units=tuple(row["unit"].split("/")),
                detail=int(row["detail"]),
                before_575=int(row["code_before_575"], 16),
                since_575=int(row["code_since_575"], 16),
                status=int(row["status"], 16) if row["status"] else None,
                action=row["action"],
                is_promotable=row["promoted"] == "yes",
                advice=row["advice"],
            )
            for unit in rule.units:
                found[rule.xid, unit] = (*found.get((rule.xid, unit), ()), rule)
    return found


def _decode_nvlink5(xid: int, text: str) -> LinkError | None:
    match = _NVLINK5.search(text)
    if match is None:
        return None
    units, rules = match["unit"].split("/"), load_nvlink5_rules()
    candidates = {rule for unit in units for rule in rules.get((xid, unit), ())}
    info, status = int(match["info"], 16), int(match["status"], 16)
    errors = [
        _nvlink5_error(rule, is_promoted, int(match["link"]))
        for rule in candidates
        if (is_promoted := rule.promotes(info)) is not None and _has_status(rule, status)
    ]
    return max(errors, key=lambda error: (error.severity.gravity, bool(error.advice), error.advice), default=None)


def _has_status(rule: Nvlink5Rule, status: int) -> bool:
    """Return whether the row's status is the line's. XIDs 144 to 148 set one bit for each of several errors; 149 and
    150 number them."""
    if rule.status is None or rule.status == status:
        return True
    return rule.xid < 149 and bool(rule.status & status)


def _nvlink5_error(rule: Nvlink5Rule, is_promoted: bool, link: int) -> LinkError:
    action = Action.RESET_GPU if is_promoted else _NVLINK5_ACTIONS[rule.action]
    if action is Action.RESET_GPU:
        severity = Severity.CRITICAL
    else:
        severity = Severity.WARNING if rule.advice or action is not Action.NONE else Severity.INFO
    return LinkError(
        name=f"NVLink error of unit {rule.units[-1]}",
        severity=severity,
        action=action,
        advice=rule.advice or "nothing to do",
        link=link if link >= 0 else None,
    )
