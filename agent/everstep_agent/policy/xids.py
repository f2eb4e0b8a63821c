"""Parse XIDs from the kernel log of NVIDIA's drivers, and look up their meaning.

The formats are those of the open kernel modules (``kernel_rc.c``, ``osapi.c``) and of published logs::

    NVRM: GPU at PCI:0000:5d:00: GPU-f1906b9b-557a-e961-045c-9fe4be3ce012
    NVRM: Xid (PCI:0000:5d:00): 79, pid=1234, name=python3, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:02): 43, pid=7194, ...      of a GPU that is partitioned
    NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.
    NVRM: The NVIDIA GPU 0000:5d:00.0                                     while the driver starts, in three lines
    NVRM: (PCI ID: 10de:2330) installed in this system has
    NVRM: fallen off the bus and is not responding to commands.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Severity
from everstep_agent.drivers.gpu_samples import XidEvent

# Meaning of each XID: the table ``xids.csv``, and the driver's own recovery actions.
#
# The table has every number of NVIDIA's public Xid catalogue and of the driver's nverror.h. Its severity is for the
# GPU's fitness for the next application, and its action is the catalogue's immediate action: only where the catalogue
# asks for a reset, a restart or a repair does the table. A node cannot power-cycle itself, so XID 79 is "drain".
# Vendors disagree about some numbers (32, 45, 63, 94, 109), so a site's policy may override any row.

XID_FILE = Path(__file__).with_name("xids.csv")

XID_FALLEN_OFF_BUS = 79
XID_RECOVERY_ACTION_CHANGED = 154
DRAIN_AND_RESET = 4
"""The recovery action that lets jobs end before the reset (Xid catalogue; nvml.h, nvmlDeviceGpuRecoveryAction_t)."""

_RECOVERY = (
    ("none", Action.NONE),
    ("GPU reset required", Action.RESET_GPU),
    ("node reboot required", Action.REBOOT_NODE),
    ("drain peer-to-peer", Action.DRAIN),
    ("drain and reset", Action.DRAIN),
    ("recover IMEX domain", Action.DRAIN),
    ("bus reset required", Action.REBOOT_NODE),
    ("system reboot required", Action.REBOOT_NODE),
)
"""By number: the driver's recovery actions (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and XID 154), and ours."""


class XidEntry(msgspec.Struct, frozen=True):
    """One row: the number's meaning, its severity for the GPU's fitness, and the action that would cure it."""

    xid: int
    mnemonic: str
    name: str
    severity: Severity
    action: Action
    advice: str
    source: str


def recovery_action(number: int) -> Action:
    """Return the action for the driver's recovery number; none for the unknown number of a newer driver or a garbled
    answer, which is no ground to reboot a node."""
    return _RECOVERY[number][1] if is_known_recovery(number) else Action.NONE


def recovery_name(number: int) -> str:
    return _RECOVERY[number][0] if is_known_recovery(number) else f"unknown action {number}, look it up in nvml.h"


def is_known_recovery(number: int) -> bool:
    return 0 <= number < len(_RECOVERY)


def load_xid_table(path: Path = XID_FILE) -> dict[int, XidEntry]:
    """Return the table by number. Raises ConfigurationError for an unreadable row."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return {entry.xid: entry for entry in (_entry(row, f"{path} line {rows.line_num}") for row in rows)}


def unknown_xid_entry(xid: int) -> XidEntry:
    """Return an entry for a number missing from the table: worth a person's look, but no ground to evict."""
    source = "agent/everstep_agent/policy/xids.csv"
    return XidEntry(xid, "", "not in the table", Severity.WARNING, Action.NONE, "look it up", source)


def _entry(row: dict[str, str], where: str) -> XidEntry:
    try:
        return XidEntry(
            xid=int(row["xid"]),
            mnemonic=row["mnemonic"],
            name=row["name"],
            severity=Severity(row["severity"]),
            action=Action(row["action"]),
            advice=row["advice"] or "nothing to do",
            source=row["source"],
        )
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"{where}: cannot read {row}: {error!r}") from error


MAX_TEXT_LENGTH = 300
MAX_ANNOUNCED_UUIDS = 64
"""GPUs whose announcements are remembered; a node has sixteen at most."""
MAX_LINE_DISTANCE = 16
"""Lines within which the parts of one message may stand, because the kernel may interleave other messages."""

_ADDRESS = (
    r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<bus>[0-9a-fA-F]{2}|[0-9a-fA-F]{4}):(?P<slot>[0-9a-fA-F]{2})"
    r"(?:\.[0-9a-fA-F])?(?![0-9a-fA-F])"
)
_UUID = r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

_XID = re.compile(r"NVRM: Xid \((?P<where>[^()]{1,128})\): (?P<xid>[0-9]{1,5})\b(?P<rest>.*)", re.ASCII)
_GPU_ADDRESS = re.compile(rf"(?:PCI:)?{_ADDRESS}")
_NAMED_UUID = re.compile(_UUID)
_ANNOUNCED = re.compile(rf"GPU at (?:PCI:)?{_ADDRESS}: (?P<uuid>{_UUID})")
_GPU = re.compile(rf"\bGPU (?:at )?(?:PCI:)?{_ADDRESS}")
_HEADING = "NVRM: The NVIDIA GPU "
_OFF_BUS = "fallen off the bus"
_CHANGED_RECOVERY = re.compile(
    r"recovery action changed from 0x[0-9a-fA-F]{1,8} .{0,64}? to 0x(?P<to>[0-9a-fA-F]{1,8})\b", re.ASCII
)


def _bus_id_from_match(match: re.Match[str]) -> str:
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{int(match['bus'], 16) & 0xFF:02x}:{int(match['slot'], 16):02x}"


class XidParser:
    """Parse the lines of a log in order.

    The parser keeps unfinished messages of several lines, and the UUID of each GPU. No line content makes it raise.
    ``find_bus_id`` returns the PCI address of the GPU with a UUID, if it is known elsewhere.
    """

    def __init__(self, find_bus_id: Callable[[str], str | None] = lambda uuid: None) -> None:
        self._find_bus_id = find_bus_id
        self._line_number = 0
        self._heading: tuple[int, str, str] | None = None
        self._off_bus_lines: dict[str, int] = {}
        self.bus_id_by_uuid: dict[str, str] = {}

    def parse_line(self, line: str) -> XidEvent | None:
        """Return the XID that the line reports, or None. A message that a GPU is off the bus counts as XID 79, unless
        the lines before contained that number."""
        self._line_number += 1
        if (start := line.find("NVRM:")) < 0:
            return None
        match = _XID.search(line, start)
        return self._parse_numbered(line, match) if match is not None else self._parse_unnumbered(line, line[start:])

    def _parse_numbered(self, line: str, match: re.Match[str]) -> XidEvent | None:
        bus_id = self._find_gpu(match["where"])
        if bus_id is None:
            return None
        xid = int(match["xid"])
        recovery = _CHANGED_RECOVERY.search(match["rest"]) if xid == XID_RECOVERY_ACTION_CHANGED else None
        if xid == XID_FALLEN_OFF_BUS:
            self._note_off_bus(bus_id)
        return XidEvent(
            pci_bus_id=bus_id,
            xid=xid,
            source="kernel",
            text=line[-MAX_TEXT_LENGTH:].strip(),
            recovery_action=None if recovery is None else int(recovery["to"], 16),
        )

    def _find_gpu(self, where: str) -> str | None:
        """Return the GPU that the parenthesis names by its address, or only by its UUID; ignore other words."""
        parts = where.split()
        for address in filter(None, map(_GPU_ADDRESS.fullmatch, parts)):
            return _bus_id_from_match(address)
        for named in filter(None, map(_NAMED_UUID.fullmatch, parts)):
            return self.bus_id_by_uuid.get(named[0]) or self._find_bus_id(named[0])
        return None

    def _parse_unnumbered(self, line: str, text: str) -> XidEvent | None:
        named = _GPU.search(text)
        if _OFF_BUS in text:
            return self._parse_off_bus(line, None if named is None else _bus_id_from_match(named))
        if named is not None and text.startswith(_HEADING):
            self._heading = (self._line_number, _bus_id_from_match(named), line.strip())
        if (announced := _ANNOUNCED.search(text)) is not None:
            self.bus_id_by_uuid.pop(announced["uuid"], None)
            self.bus_id_by_uuid[announced["uuid"]] = _bus_id_from_match(announced)
            if len(self.bus_id_by_uuid) > MAX_ANNOUNCED_UUIDS:
                del self.bus_id_by_uuid[next(iter(self.bus_id_by_uuid))]
        return None

    def _parse_off_bus(self, line: str, bus_id: str | None) -> XidEvent | None:
        text, heading, self._heading = line.strip(), self._heading, None
        if bus_id is None:
            if heading is None or self._line_number - heading[0] > MAX_LINE_DISTANCE:
                return None
            bus_id, text = heading[1], f"{heading[2]} ... {text}"
        is_known = self._line_number - self._off_bus_lines.get(bus_id, -MAX_LINE_DISTANCE) < MAX_LINE_DISTANCE
        self._note_off_bus(bus_id)
        if is_known:
            return None
        return XidEvent(pci_bus_id=bus_id, xid=XID_FALLEN_OFF_BUS, source="kernel", text=text[:MAX_TEXT_LENGTH])

    def _note_off_bus(self, bus_id: str) -> None:
        near = {other: at for other, at in self._off_bus_lines.items() if self._line_number - at < MAX_LINE_DISTANCE}
        self._off_bus_lines = near | {bus_id: self._line_number}
