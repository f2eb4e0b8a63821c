"""NVIDIA's GPUs on the PCI bus, without NVML: the driver that holds each, and whether this process may see it.

A GPU of a virtual machine is bound to vfio-pci, and a container is given some of the node's GPUs. Neither is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.host.pci_devices import PciDevice

NVIDIA_VENDOR_ID = "0x10de"
DISPLAY_CLASS_PREFIXES = ("0x0300", "0x0302")
"""VGA and 3D controllers; the same vendor's audio functions and NVSwitches (0x0680) are no GPUs."""
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


def pci_gpus(devices: Iterable[PciDevice] | None, proc: Path, dev: Path) -> tuple[PciGpu, ...] | None:
    """Return the GPUs among the devices on the PCI bus, or None without a readable bus.

    Virtual functions (of vGPU) are left out.
    """
    if devices is None:
        return None
    return tuple(_gpu(device, proc, dev) for device in devices if is_nvidia_gpu(device) and not device.is_virtual)


def is_nvidia_gpu(device: PciDevice) -> bool:
    return device.vendor == NVIDIA_VENDOR_ID and device.kind.startswith(DISPLAY_CLASS_PREFIXES)


def _gpu(device: PciDevice, proc: Path, dev: Path) -> PciGpu:
    driver, address = device.driver, device.folder.name
    is_visible = driver != NVIDIA_DRIVER or _is_visible(address, proc / "driver/nvidia/gpus", dev)
    return PciGpu(address.rpartition(".")[0], driver, is_visible)


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
