"""Which NUMA node a rank's memory should be near: its GPU's, else that of the processors it may run on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SYSFS = Path("/sys")


def numa_node(sysfs: Path = SYSFS) -> int | None:
    """None where the machine has one node only, or the rank belongs to none of them more than to another.

    A process that has not used CUDA yet is judged by its processors (``numactl``, Slurm's and the launcher's bindings).
    """
    nodes = _nodes(sysfs)
    if len(nodes) < 2:
        return None
    device = _gpu_address()
    if device is not None:
        return _of_device(sysfs, device)
    allowed = os.sched_getaffinity(0)
    return next((node for node, processors in nodes.items() if allowed <= processors), None)


def _nodes(sysfs: Path) -> dict[int, set[int]]:
    """The processors of each node that has some."""
    found = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        if processors := _listed((folder / "cpulist").read_text()):
            found[int(folder.name.removeprefix("node"))] = processors
    return found


def _listed(text: str) -> set[int]:
    """The kernel's form of a set of numbers: ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _gpu_address() -> str | None:
    """Where on the PCI bus the GPU is that this process uses, as sysfs writes it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _of_device(sysfs: Path, address: str) -> int | None:
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say
