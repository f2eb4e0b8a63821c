"""Read RAID arrays (md), NVMe controllers and SCSI disks below an injectable root. Nothing here raises OSError.

No command is sent to a disk: one that fails would block its reader. The wear of an NVMe disk needs such a command.
"""

from __future__ import annotations

import re
from pathlib import Path

from everstep_agent.drivers.samples import DiskSample, RaidArraySample
from everstep_agent.drivers.sysfs import entries, read_int, read_text

_HEX = re.compile(r"0x[0-9a-f]+")
_NVME = re.compile(r"nvme\d+")
_SCSI_DISK_TYPE = 0
"""Peripheral device type of a disk (SCSI Primary Commands); an optical drive has 5."""


def raid_arrays(root: Path) -> list[RaidArraySample]:
    """Return the md arrays. Facts: the kernel's Documentation/admin-guide/md.rst."""
    samples = []
    for block in entries(root / "block"):
        folder = block / "md"
        if block.name.startswith("md") and (state := read_text(folder / "array_state")) is not None:
            members = [entry for entry in entries(folder) if entry.name.startswith("dev-")]
            faulty = [member for member in members if "faulty" in (read_text(member / "state") or "").split(",")]
            samples.append(
                RaidArraySample(
                    name=block.name,
                    level=read_text(folder / "level") or "",
                    state=state,
                    sync_action=read_text(folder / "sync_action") or "",
                    missing=read_int(folder / "degraded"),
                    faulty=tuple(member.name.removeprefix("dev-") for member in faulty),
                )
            )
    return samples


def nvme_controllers(root: Path) -> list[DiskSample]:
    """Return the NVMe controllers, each with the paths to its subsystem. Facts: drivers/nvme/host/sysfs.c."""
    subsystems = {
        member.name: (subsystem.name, sum(bool(_NVME.fullmatch(each.name)) for each in entries(subsystem)))
        for subsystem in entries(root / "class/nvme-subsystem")
        for member in entries(subsystem)
    }
    samples = []
    for controller in entries(root / "class/nvme"):
        if (state := read_text(controller / "state")) is None:
            continue
        subsystem, paths = subsystems.get(controller.name, ("", 1))
        samples.append(
            DiskSample(
                name=controller.name,
                state=state,
                model=read_text(controller / "model") or "",
                serial=read_text(controller / "serial") or "",
                firmware=read_text(controller / "firmware_rev") or "",
                transport=read_text(controller / "transport") or "",
                subsystem=subsystem,
                paths=paths,
            )
        )
    return samples


def scsi_disks(root: Path) -> list[DiskSample]:
    """Return the SCSI and SATA disks but those that are removable or on USB. Facts: drivers/scsi/scsi_sysfs.c."""
    samples = []
    for block in entries(root / "block"):
        device = block / "device"
        is_fixed = read_int(device / "type") == _SCSI_DISK_TYPE and not read_int(block / "removable")
        if not block.name.startswith("sd") or not is_fixed or "/usb" in str(block.resolve()):
            continue
        errors = _HEX.fullmatch(read_text(device / "ioerr_cnt") or "")
        samples.append(
            DiskSample(
                name=block.name,
                state=read_text(device / "state") or "",
                model=read_text(device / "model") or "",
                firmware=read_text(device / "rev") or "",
                transport="scsi",
                io_errors=int(errors[0], 16) if errors else None,
            )
        )
    return samples
