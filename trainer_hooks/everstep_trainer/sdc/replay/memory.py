"""Tell before a step whether a unit can be captured and replayed in the memory that the step leaves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from everstep.host.cgroups import cgroup_available_bytes
from everstep_trainer.sdc.replay.units import Unit

GRADIENT_COPIES = 2
"""Gradients of the unit that an audit holds at most: those of the captured call, and those of the replay."""
MEMORY_FILE, STATUS_FILE = Path("/proc/meminfo"), Path("/proc/self/status")


class MemoryLevels(NamedTuple):
    """Bytes of a rank's device between two steps. ``until_peak``: what this process used at its peak beyond now."""

    available: int
    until_peak: int


def read_memory_levels(device: torch.device) -> MemoryLevels | None:
    """Return the levels of a GPU or of the host; None if they cannot be read."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - held
        return MemoryLevels(torch.cuda.mem_get_info(device)[0] + cached, torch.cuda.max_memory_allocated(device) - held)
    try:
        available = _read_bytes(MEMORY_FILE, "MemAvailable")
        until_peak = _read_bytes(STATUS_FILE, "VmHWM") - _read_bytes(STATUS_FILE, "VmRSS")
    except (OSError, StopIteration, ValueError):
        return None
    in_group = cgroup_available_bytes()
    return MemoryLevels(available if in_group is None else min(available, in_group), max(0, until_peak))


def _read_bytes(file: Path, name: str) -> int:
    return next(int(line.split()[1]) << 10 for line in file.read_text().splitlines() if line.startswith(f"{name}:"))


def describe_shortage(unit: Unit, levels: MemoryLevels | None, ranks: int) -> str:
    """Return why there is no memory for an audit of the unit; empty if there is.

    A replay takes no more than the step's own passes, which are over by then. Gradients come on top of both.

    Args:
        unit: The unit.
        levels: Those of the device; None: unknown, and no reason.
        ranks: Ranks that share the device's memory, as all of them audit at once.
    """
    gradients = sum(
        parameter.numel() * parameter.element_size()
        for parameter in unit.module.parameters()
        if parameter.requires_grad
    )
    if levels is None:
        return ""
    needed = ranks * (levels.until_peak + GRADIENT_COPIES * gradients)
    if levels.available >= needed:
        return ""
    return f"its audit needs {needed / 2**30:.1f} GiB of memory, and {levels.available / 2**30:.1f} GiB are free"
