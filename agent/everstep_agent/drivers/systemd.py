"""Read the states of systemd's units from ``systemctl show``."""

from __future__ import annotations

from collections.abc import Sequence

from everstep_agent.drivers.commands import run_bounded
from everstep_agent.drivers.samples import UnitSample

PROPERTIES = ("LoadState", "ActiveState", "Result", "NRestarts")
TIMEOUT_S = 5.0
"""Seconds after which systemctl is killed: a busy systemd answers within one."""
MAX_BYTES = 1 << 16


def show_units(units: Sequence[str]) -> str:
    """Return the properties of the units, as lines ``NAME=VALUE`` with an empty line between two; "" on failure."""
    command = ("systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", *units)
    return run_bounded(command, TIMEOUT_S, MAX_BYTES) or ""


def parse_units(units: Sequence[str], text: str) -> tuple[UnitSample, ...]:
    """Return a sample of each unit, in the order in which they were asked for; none if the text has other parts."""
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    if len(blocks) != len(units):
        return ()
    return tuple(
        UnitSample(
            name=unit,
            load_state=block.get("LoadState", ""),
            active_state=block.get("ActiveState", ""),
            result=block.get("Result", ""),
            restarts=int(block["NRestarts"]) if block.get("NRestarts", "").isdigit() else None,
        )
        for unit, block in zip(units, blocks, strict=True)
    )
