"""PCI devices below an injectable /sys, by class, and the GPUs of vendors that Everstep does not watch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

AMD, INTEL = "0x1002", "0x8086"
GPU_DRIVERS = {AMD: ("AMD", ("amdgpu",)), INTEL: ("Intel", ("i915", "xe"))}
"""Vendors of GPUs that are not watched, with the drivers under which they compute."""

VGA_CLASS = "0x0300"
GPU_CLASSES = (VGA_CLASS, "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers, and processing accelerators (PCI code and ID assignment specification)."""

INTEL_INTEGRATED = ":00:02."
"""Part of the address of the graphics that Intel builds into processors: bus 0, device 2."""

MIN_VGA_MEMORY_BYTES = 8 << 30
"""Memory from which a VGA controller of AMD is taken for a card that computes. Graphics in its processors have less."""


class PciDevice(NamedTuple):
    """A device on the bus."""

    folder: Path
    vendor: str  # "0x10de"
    kind: str  # its class: "0x030200"

    @property
    def driver(self) -> str:
        """The kernel driver that is bound to it; empty for none."""
        link = self.folder / "driver"
        return link.resolve().name if link.exists() else ""

    @property
    def is_virtual(self) -> bool:
        """Whether it is a virtual function, which belongs to its physical function."""
        return (self.folder / "physfn").exists()


def pci_devices(sysfs: Path) -> tuple[PciDevice, ...] | None:
    """Return all devices by address, or None without a readable bus. A bus has hundreds of them."""
    try:
        folders = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:
        return None
    return tuple(PciDevice(folder, _text(folder / "vendor"), _text(folder / "class")) for folder in folders)


def other_gpus(devices: Iterable[PciDevice]) -> dict[str, int]:
    """Return the number of GPUs, which may be 0, by vendor, for vendors other than NVIDIA.

    Graphics built into a processor or a board management controller do not count.
    """
    found = Counter(map(_other_vendor, devices))
    return {name: found[name] for name, _ in GPU_DRIVERS.values()}


def _other_vendor(device: PciDevice) -> str:
    name, drivers = GPU_DRIVERS.get(device.vendor, ("", ()))
    if not name or not device.kind.startswith(GPU_CLASSES) or device.is_virtual:
        return ""
    if device.driver not in drivers or (device.vendor == INTEL and INTEL_INTEGRATED in device.folder.name):
        return ""
    if device.vendor == AMD and device.kind.startswith(VGA_CLASS):
        memory = _text(device.folder / "mem_info_vram_total")
        return name if memory.isdigit() and int(memory) >= MIN_VGA_MEMORY_BYTES else ""
    return name


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
