"""NVIDIA's GPUs on the PCI bus, without NVML: the driver that holds each, and whether this process may see it.

A GPU of a virtual machine is bound to vfio-pci, and a container is given some of the node's GPUs. Neither is missing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from everstep_agent.drivers.sysfs import nvidia_gpus_on_pci

NVIDIA_DRIVER = "nvidia"
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)


class PciGpu(NamedTuple):
    """One GPU on the bus."""

    bus_id: str  # as in the kernel log: 0000:1b:00
    driver: str  # name of the kernel driver that is bound to it; empty for none
    is_visible: bool = True  # False if this process may not open its device

    @property
    def is_usable(self) -> bool:
        """Whether NVML should list it to this process."""
        return self.driver == NVIDIA_DRIVER and self.is_visible

    @property
    def is_given_away(self) -> bool:
        """Whether another driver holds it, or another container was given it."""
        return bool(self.driver) and not self.is_usable


def pci_gpus(sysfs: Path, proc: Path, dev: Path) -> tuple[PciGpu, ...] | None:
    """Return the GPUs on the PCI bus by address, or None without a readable PCI bus.

    Virtual functions (of vGPU) belong to their physical function and are left out.
    """
    if not (sysfs / "bus/pci/devices").is_dir():
        return None
    folders = sorted(folder for folder in nvidia_gpus_on_pci(sysfs) if not (folder / "physfn").exists())
    return tuple(_gpu(folder, proc, dev) for folder in folders)


def _gpu(folder: Path, proc: Path, dev: Path) -> PciGpu:
    link = folder / "driver"
    driver = link.resolve().name if link.exists() else ""
    is_visible = driver != NVIDIA_DRIVER or _is_visible(folder.name, proc / "driver/nvidia/gpus", dev)
    return PciGpu(folder.name.rpartition(".")[0], driver, is_visible)


def _is_visible(address: str, gpus: Path, dev: Path) -> bool:
    """Return whether this process may open the GPU's device file.

    A container runtime hides the folder of /proc/driver/nvidia/gpus, the device file, or forbids its use. Opening the
    file would start the GPU; the kernel's check of permissions asks the device controller of the cgroup too.
    """
    if not gpus.is_dir():
        return True  # the driver shows nothing to judge by
    minor = _MINOR.search(_text(gpus / address / "information"))
    if minor is None:
        return (gpus / address).is_dir()
    return os.access(dev / f"nvidia{minor[1]}", os.R_OK | os.W_OK)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
