"""Count the parts of the machine without a library of their vendor: processors and network devices on the PCI bus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.host.pci_devices import PciDevice
from everstep_agent.drivers.samples import InventorySample
from everstep_agent.drivers.sysfs import read_text

NETWORK_CLASS_PREFIX = "0x02"
"""PCI class of network controllers: Ethernet, InfiniBand and others."""


def read_inventory(sysfs: Path, devices: Iterable[PciDevice], gpus: int | None) -> InventorySample:
    """Return the parts of the machine.

    Args:
        sysfs: The root of sysfs.
        devices: The devices on the PCI bus.
        gpus: Number of GPUs among them, counted by the caller.
    """
    # Devices of other namespaces and drivers count, too.
    network = tuple(device.folder.name for device in devices if device.kind.startswith(NETWORK_CLASS_PREFIX))
    return InventorySample(cpus=_online_cpus(sysfs), gpus=gpus, network_devices=network or None)


def _online_cpus(sysfs: Path) -> int | None:
    """Return the number of processors in a list such as ``0-63,128-191``; None if it cannot be read."""
    try:
        spans = [part.split("-") for part in (read_text(sysfs / "devices/system/cpu/online") or "").split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    except ValueError:
        return None
