"""Parse SXids, the errors of NVSwitches, from the kernel log, and judge them by number and by the driver's word.

The formats are those of the open kernel modules (``common_nvswitch.h``, ``error_nvswitch.c``)::

    nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 30 sourcetrack timeout error (First)
    nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Severity 1 Engine instance 30 Sub-engine instance 00
    nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Data {0x00000001, 0x00000001, ...}
    nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 26006, SOE HALTED

Numbers have moved between drivers, so a word of the line outranks the table (``sxids.csv``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from everstep.vocabulary import Action, FindingKind, Mode, Severity
from everstep_agent.policy.rules import ClearEvent, KernelLineRule

SXID_FILE = Path(__file__).with_name("sxids.csv")
SXID_MARK = "SXid ("

_SXID = re.compile(
    r"SXid \((?:PCI:)?(?P<bus>[0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,4}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?)\): "
    r"(?P<sxid>[0-9]{1,6}), (?:(?P<word>Fatal|Non-fatal)\b(?:, )?)?(?P<rest>.*)",
    re.ASCII,
)
_LINK = re.compile(r"\bLink (?P<link>\d{1,3})\b", re.ASCII)
_DETAIL = re.compile(r"Severity \d|Data \{|SOE HALT data\[")
"""Lines that repeat the number of the error before them, with its registers."""


class SxidKind(StrEnum):
    """How a number is judged.

    BY_WORD: by the driver's word. ALWAYS_FATAL: fatal in NVIDIA's guide, whatever the word. CORRECTED, INFORMATION:
    nothing to do. STALL: not fatal, but the GPU at the link waits for ever. CONNECTION: a broken link, or a GPU that
    was shut down. STOPPED: the switch's controller stopped; the line has no word. THERMAL, THERMAL_END: too hot, and
    over.
    """

    BY_WORD = "by_word"
    ALWAYS_FATAL = "always_fatal"
    CORRECTED = "corrected"
    INFORMATION = "information"
    STALL = "stall"
    CONNECTION = "connection"
    STOPPED = "stopped"
    THERMAL = "thermal"
    THERMAL_END = "thermal_end"


class SxidEntry(msgspec.Struct, frozen=True):
    """One row: the number's name in the driver, how it is judged, and where that is from."""

    sxid: int
    mnemonic: str
    kind: SxidKind
    source: str


class Sxid(msgspec.Struct, frozen=True):
    """One error of a switch. ``word``: "Fatal", "Non-fatal" or "". ``link``: the switch's port, if named."""

    bus_id: str
    sxid: int
    word: str
    link: int | None


@cache
def load_sxid_table(path: Path = SXID_FILE) -> Mapping[int, SxidEntry]:
    """Return the table by number."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            int(row["sxid"]): SxidEntry(int(row["sxid"]), row["mnemonic"], SxidKind(row["kind"]), row["source"])
            for row in csv.DictReader(file)
        }


def parse_sxid(line: str) -> Sxid | None:
    """Return the error that a line reports; None for another line."""
    match = _SXID.search(line)
    if match is None:
        return None
    link = _LINK.search(match["rest"])
    return Sxid(
        bus_id=match["bus"].lower(),
        sxid=int(match["sxid"]),
        word=match["word"] or "",
        link=None if link is None else int(link["link"]),
    )


def is_sxid_detail(line: str) -> bool:
    """Return whether the line only adds registers to an error that another line reports."""
    match = _SXID.search(line)
    return match is not None and _DETAIL.match(match["rest"]) is not None


class _Judgement(msgspec.Struct, frozen=True):
    severity: Severity
    action: Action = Action.NONE
    mode: Mode = Mode.OBSERVE


_FATAL = _Judgement(Severity.CRITICAL, Action.REBOOT_NODE, Mode.ENFORCE)
_FATAL_BUT_UNSURE = _Judgement(Severity.CRITICAL, Action.REBOOT_NODE, Mode.RECOMMEND)
_WARNING = _Judgement(Severity.WARNING)
_INFO = _Judgement(Severity.INFO)

_JUDGEMENTS: Mapping[tuple[SxidKind, str], _Judgement] = {
    (SxidKind.ALWAYS_FATAL, "Non-fatal"): _FATAL_BUT_UNSURE,
    (SxidKind.STOPPED, ""): _FATAL_BUT_UNSURE,
    (SxidKind.STOPPED, "Non-fatal"): _FATAL_BUT_UNSURE,
    (SxidKind.CONNECTION, "Fatal"): _FATAL_BUT_UNSURE,
    (SxidKind.CONNECTION, "Non-fatal"): _WARNING,
    (SxidKind.STALL, "Non-fatal"): _WARNING,
    (SxidKind.THERMAL, "Non-fatal"): _WARNING,
    (SxidKind.THERMAL_END, ""): _INFO,
    (SxidKind.CORRECTED, ""): _INFO,
    (SxidKind.INFORMATION, ""): _INFO,
}
"""By kind and word, where it differs from the word alone."""

_BY_WORD: Mapping[str, _Judgement] = {"Fatal": _FATAL, "Non-fatal": _INFO, "": _WARNING}


@lru_cache(maxsize=1024)
def sxid_rule(sxid: int, word: str) -> KernelLineRule:
    """Return the rule for a number and the driver's word. An unknown number is a warning unless the word is "Fatal"."""
    entry = load_sxid_table().get(sxid)
    if entry is None:
        judgement, name, source = (_FATAL if word == "Fatal" else _WARNING), "not in the table", "sxids.csv"
    else:
        judgement = _JUDGEMENTS.get((entry.kind, word), _BY_WORD[word])
        name, source = entry.mnemonic, entry.source
    is_lasting = judgement.severity is Severity.CRITICAL
    return KernelLineRule(
        id=f"sxid-{sxid}",
        kind=FindingKind.GPU_NVLINK,
        severity=judgement.severity,
        action=judgement.action,
        mode=judgement.mode,
        message=f"SXid {sxid} ({name}) on NVSwitch {{subject}}: {{line}}",
        source=source,
        pattern="",
        clear_after_s=None if is_lasting else 600.0,
        clear_on=(ClearEvent.BOOT,),
    )
