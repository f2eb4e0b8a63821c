"""Kernel lines about GPUs, read: pure functions from a line to what it says."""

from __future__ import annotations

import re

from agent.sensors.samples import XidEvent
from agent.xids import FALLEN_OFF_BUS, RECOVERY_ACTION_CHANGED

MOST_TEXT = 300

_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d{1,5})\b(?P<rest>.*)")
_OFF_BUS = re.compile(
    r"NVRM:.*?GPU (?:at (?:PCI:)?)?(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}[.0-7]*)"
    r".*has fallen off the bus"
)
_RECOVERY = re.compile(r"recovery action changed from 0x[0-9a-fA-F]+ .*? to 0x(?P<to>[0-9a-fA-F]+)")


def normal_bus_id(text: str) -> str:
    """A PCI address in the spelling that all sensors use: ``0000:1b:00``."""
    domain, _, rest = text.lower().partition(":")
    if rest.count(":") == 0:
        domain, rest = "0000", f"{domain}:{rest}"
    return f"{domain[-4:].rjust(4, '0')}:{rest.partition('.')[0]}"


def read_xid(line: str) -> XidEvent | None:
    """The XID that a kernel line reports, or None. A line without a number that says a GPU is off the bus is a 79."""
    if "NVRM" not in line:
        return None
    match = _XID.search(line)
    if match is not None:
        xid = int(match["xid"])
        recovery = _RECOVERY.search(match["rest"]) if xid == RECOVERY_ACTION_CHANGED else None
        return XidEvent(
            pci_bus_id=normal_bus_id(match["bus"]),
            xid=xid,
            source="kernel",
            text=line[-MOST_TEXT:].strip() if len(line) > MOST_TEXT else line.strip(),
            recovery=None if recovery is None else int(recovery["to"], 16),
        )
    match = _OFF_BUS.search(line)
    if match is None:
        return None
    return XidEvent(pci_bus_id=normal_bus_id(match["bus"]), xid=FALLEN_OFF_BUS, source="kernel", text=line[:MOST_TEXT])
