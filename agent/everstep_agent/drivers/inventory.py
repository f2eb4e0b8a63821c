"""Count the parts of the machine without a library of their vendor: processors and network devices on the PCI bus."""

from __future__ import annotations

from pathlib import Path

from everstep_agent.drivers.samples import InventorySample
from everstep_agent.drivers.sysfs import entries, read_text

NETWORK_CLASS_PREFIX = "0x02"
"""PCI class of network controllers: Ethernet, InfiniBand and others."""


def read_inventory(sysfs: Path, gpus: int | None) -> InventorySample:
    """Return the parts of the machine. ``gpus``: number of GPUs on the PCI bus, counted by the caller."""
    return InventorySample(cpus=_online_cpus(sysfs), gpus=gpus, network_devices=_network_devices(sysfs))


def _online_cpus(sysfs: Path) -> int | None:
    """Return the number of processors in a list such as ``0-63,128-191``; None if it cannot be read."""
    try:
        spans = [part.split("-") for part in (read_text(sysfs / "devices/system/cpu/online") or "").split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    except ValueError:
        return None


def _network_devices(sysfs: Path) -> tuple[str, ...] | None:
    """Return the addresses of network devices, those of other namespaces and drivers included; None without a bus."""
    classes = {device.name: read_text(device / "class") or "" for device in entries(sysfs / "bus/pci/devices")}
    return tuple(name for name, kind in classes.items() if kind.startswith(NETWORK_CLASS_PREFIX)) or None
