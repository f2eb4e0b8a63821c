"""Read PCI devices and the machine's state from /sys and /proc below injectable roots.

Functions return None if the kernel does not offer a value; they raise OSError only if a whole required tree is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from everstep.wire.v1.agent import MAX_HARDWARE_TEXT, Host


class PcieLimit(NamedTuple):
    """The fastest generation and the most lanes of a PCIe link known to the kernel; None if unknown."""

    generation: int | None
    width: int | None


class ProcessCounts(NamedTuple):
    uninterruptible: int
    zombies: int


_PCIE_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by gigatransfers a second, as in ``max_link_speed`` (Linux, drivers/pci/probe.c)."""
MAX_PCIE_LANES = 32
"""Maximum number of lanes of a PCIe link. The kernel shows 255 for an unknown width."""


def read_text(path: Path) -> str | None:
    """Return the file's text without white space around it; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the decimal number in the file; None if there is none."""
    text = read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def leading_number(path: Path) -> float | None:
    """Return the number before the unit, as in ``400 Gb/sec (4X NDR)``."""
    try:
        return float((read_text(path) or "").partition(" ")[0])
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """Return what is in the folder, by name; nothing if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def host_identity(sysfs: Path, proc: Path) -> Host:
    """Return the machine's identity from its firmware tables, whose serial numbers only root may read."""
    dmi = sysfs / "class/dmi/id"
    files = {"vendor": dmi / "sys_vendor", "product": dmi / "product_name", "serial": dmi / "product_serial"}
    files |= {"chassis_serial": dmi / "chassis_serial", "kernel": proc / "sys/kernel/osrelease"}
    return Host(**{name: (read_text(path) or "")[:MAX_HARDWARE_TEXT] for name, path in files.items()})


def pcie_limit(root: Path, bus_id: str) -> PcieLimit:
    """Return the common limit of the device at ``bus_id`` (``0000:1b:00``) and the port above it."""
    device = root / f"bus/pci/devices/{bus_id}.0"
    ends = (device, device.resolve().parent) if device.exists() else ()
    speeds = [_PCIE_GENERATIONS.get(leading_number(end / "max_link_speed") or 0.0) for end in ends]
    widths = [read_int(end / "max_link_width") for end in ends]
    return PcieLimit(
        min((speed for speed in speeds if speed is not None), default=None),
        min((width for width in widths if width is not None and 0 < width <= MAX_PCIE_LANES), default=None),
    )


def boot_id(root: Path) -> str:
    """Return the kernel's id of this boot. Raises OSError."""
    return (root / "sys/kernel/random/boot_id").read_text().strip()


def uptime_s(root: Path) -> float:
    """Return seconds since boot. Raises OSError, ValueError."""
    return float((root / "uptime").read_text().split()[0])


def load_average(root: Path) -> float:
    """Return the load average over one minute. Raises OSError, ValueError."""
    return float((root / "loadavg").read_text().split()[0])


def memory_bytes(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes of memory. Raises OSError, KeyError."""
    lines = (line.split() for line in (root / "meminfo").read_text().splitlines())
    kibibytes = {name: int(number) for name, number, *_ in lines if name in ("MemTotal:", "MemAvailable:")}
    return kibibytes["MemTotal:"] << 10, kibibytes["MemAvailable:"] << 10


def pressure(root: Path, resource: str, kind: str) -> float | None:
    """Return the share of the last five minutes in which ``kind`` ("some", "full") of the processes waited.

    None where the kernel does not measure it (Documentation/accounting/psi.rst).
    """
    for line in (read_text(root / "pressure" / resource) or "").splitlines():
        words = line.split()
        if words[0] == kind:
            averages = [word.removeprefix("avg300=") for word in words if word.startswith("avg300=")]
            return float(averages[0]) / 100
    return None


def open_files_fraction(root: Path) -> float | None:
    """Return the open files as a fraction of those permitted (Documentation/admin-guide/sysctl/fs.rst, file-nr)."""
    numbers = (read_text(root / "sys/fs/file-nr") or "").split()
    return int(numbers[0]) / int(numbers[2]) if len(numbers) == 3 and int(numbers[2]) else None


def is_memory_mount(root: Path, path: str) -> bool:
    """Return whether a memory file system is mounted at ``path``. Raises OSError."""
    with (root / "self/mounts").open() as file:
        return any(line.split(" ")[1:3] == [path, "tmpfs"] for line in file)


def network_mounts(root: Path) -> list[str]:
    """Return the mount points of network file systems. Raises OSError."""
    network = ("nfs", "cifs", "ceph", "lustre", "gpfs", "beegfs", "fuse.juicefs")
    with (root / "self/mounts").open() as file:  # names may hold what str.splitlines takes for the end of a line
        mounts = [line.split(" ") for line in file]
    return [place.replace("\\040", " ") for _, place, kind, *_ in mounts if kind.startswith(network)]


def count_processes(root: Path) -> ProcessCounts:
    """Count processes in uninterruptible sleep (without kernel threads) and zombies. Raises OSError."""
    stuck = zombies = 0
    for name in os.listdir(root):
        if not name.isdigit():
            continue
        try:
            with open(f"{root}/{name}/stat", "rb") as file:
                fields = file.read(512).rpartition(b")")[2].split()
        except OSError:
            continue
        stuck += fields[0] == b"D" and fields[1] != b"2"
        zombies += fields[0] == b"Z"
    return ProcessCounts(stuck, zombies)


def is_host_pid_namespace(proc: Path) -> bool:
    """Return whether this process sees the processes of all containers."""
    try:
        return os.readlink(proc / "self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False


_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The first namespace of processes has a fixed number (Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO)."""
