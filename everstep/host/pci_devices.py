"""PCI devices below an injectable /sys, by class, and the GPUs of vendors that Everstep does not watch."""

from __future__ import annotations

from collections import Counter
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
    driver: str  # empty for none


def pci_devices(sysfs: Path, classes: tuple[str, ...]) -> list[PciDevice]:
    """Return the devices whose class begins with one of ``classes``, by address; none without a readable bus.

    Virtual functions belong to their physical function and are left out.
    """
    try:
        folders = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:
        return []
    found = ((folder, kind) for folder in folders if (kind := _text(folder / "class")).startswith(classes))
    return [
        PciDevice(folder, _text(folder / "vendor"), kind, _driver(folder))
        for folder, kind in found
        if not (folder / "physfn").exists()
    ]


def other_gpus(sysfs: Path) -> dict[str, int]:
    """Return the number of GPUs, which may be 0, by vendor, for vendors other than NVIDIA.

    Graphics built into a processor or a board management controller do not count.
    """
    found = Counter(map(_other_vendor, pci_devices(sysfs, GPU_CLASSES)))
    return {name: found[name] for name, _ in GPU_DRIVERS.values()}


def _other_vendor(device: PciDevice) -> str:
    name, drivers = GPU_DRIVERS.get(device.vendor, ("", ()))
    if device.driver not in drivers or (device.vendor == INTEL and INTEL_INTEGRATED in device.folder.name):
        return ""
    if device.vendor == AMD and device.kind.startswith(VGA_CLASS):
        memory = _text(device.folder / "mem_info_vram_total")
        return name if memory.isdigit() and int(memory) >= MIN_VGA_MEMORY_BYTES else ""
    return name


def _driver(folder: Path) -> str:
    link = folder / "driver"
    return link.resolve().name if link.exists() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
