"""Read ports, PCI devices and the machine's state from /sys and /proc below injectable roots.

Functions return None, or leave a port out, if the kernel does not offer a value; they raise OSError only if a whole
required tree is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from everstep.wire.v1.agent import MAX_HARDWARE_TEXT, Host

NVIDIA_VENDOR_ID = "0x10de"
DISPLAY_CLASS_PREFIXES = ("0x0300", "0x0302")
"""VGA and 3D controllers; the same vendor's audio functions and NVSwitches (0x0680) are no GPUs."""


class PortReading(NamedTuple):
    """One port as the kernel shows it; counters are since the driver was loaded."""

    sysfs_folder: Path
    name: str
    kind: str
    up: bool
    rate_gbps: float | None
    errors: int | None
    link_downs: int | None
    identity: dict[str, str]  # as in ``PortSample``


class PcieLimit(NamedTuple):
    """The fastest generation and the most lanes of a PCIe link known to the kernel; None if unknown."""

    generation: int | None
    width: int | None


class ProcessCounts(NamedTuple):
    uninterruptible: int
    zombies: int


_IB_ERRORS = ("symbol_error", "port_rcv_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors")
_ETHERNET_ERRORS = ("rx_errors", "tx_errors")
_ARPHRD_ETHER = "1"
_PCIE_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by gigatransfers a second, as in ``max_link_speed`` (Linux, drivers/pci/probe.c)."""
MAX_PCIE_LANES = 32
"""Maximum number of lanes of a PCIe link. The kernel shows 255 for an unknown width."""


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _leading_number(path: Path) -> float | None:
    """Return the number before the unit, as in ``400 Gb/sec (4X NDR)``."""
    try:
        return float((_read_text(path) or "").partition(" ")[0])
    except ValueError:
        return None


def _sum_counters(folder: Path, names: tuple[str, ...]) -> int | None:
    values = [value for name in names if (value := _read_int(folder / name)) is not None]
    return sum(values) if values else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _identity(device: Path, **files: Path) -> dict[str, str]:
    """Return the contents of ``files`` and the device's bus address, as far as they exist."""
    found = {name: text for name, path in files.items() if (text := _read_text(path))}
    return found | ({"pci_bus_id": device.resolve().name} if device.is_symlink() else {})


def host_identity(sysfs: Path, proc: Path) -> Host:
    """Return the machine's identity from its firmware tables, whose serial numbers only root may read."""
    dmi = sysfs / "class/dmi/id"
    files = {"vendor": dmi / "sys_vendor", "product": dmi / "product_name", "serial": dmi / "product_serial"}
    files |= {"chassis_serial": dmi / "chassis_serial", "kernel": proc / "sys/kernel/osrelease"}
    return Host(**{name: (_read_text(path) or "")[:MAX_HARDWARE_TEXT] for name, path in files.items()})


def infiniband_ports(root: Path) -> list[PortReading]:
    """Return InfiniBand and RoCE ports, such as ``mlx5_0/1``."""
    ports = []
    for device in _entries(root / "class/infiniband"):
        files = {"board": device / "board_id", "firmware": device / "fw_ver", "address": device / "node_guid"}
        identity = _identity(device / "device", **files)
        for port in _entries(device / "ports"):
            state = _read_text(port / "state")
            if state is None:
                continue
            ports.append(
                PortReading(
                    sysfs_folder=port,
                    name=f"{device.name}/{port.name}",
                    kind="infiniband",
                    up="ACTIVE" in state,
                    rate_gbps=_leading_number(port / "rate"),
                    errors=_sum_counters(port / "counters", _IB_ERRORS),
                    link_downs=_read_int(port / "counters/link_downed"),
                    identity=identity,
                )
            )
    return ports


def ethernet_ports(root: Path) -> list[PortReading]:
    """Return physical Ethernet ports; bridges, tunnels and container interfaces have no device and are left out."""
    ports = []
    for port in _entries(root / "class/net"):
        if not (port / "device").exists() or _read_text(port / "type") != _ARPHRD_ETHER:
            continue
        speed = _read_int(port / "speed")
        ports.append(
            PortReading(
                sysfs_folder=port,
                name=port.name,
                kind="ethernet",
                up=_read_text(port / "operstate") == "up",
                rate_gbps=speed / 1000 if speed is not None and speed > 0 else None,
                errors=_sum_counters(port / "statistics", _ETHERNET_ERRORS),
                link_downs=_read_int(port / "carrier_down_count"),
                identity=_identity(port / "device", address=port / "address"),
            )
        )
    return ports


def refresh_port(port: PortReading) -> PortReading | None:
    """Return the port with its state read again and other values unchanged; None if it is gone."""
    infiniband = port.kind == "infiniband"
    state = _read_text(port.sysfs_folder / ("state" if infiniband else "operstate"))
    if state is None:
        return None
    return port._replace(up="ACTIVE" in state if infiniband else state == "up")


def count_nvidia_gpus_on_pci(root: Path) -> int | None:
    """Count the NVIDIA display controllers on the PCI bus, without NVML. None without a readable PCI bus."""
    folder = root / "bus/pci/devices"
    if not folder.is_dir():
        return None
    return sum(
        _read_text(device / "vendor") == NVIDIA_VENDOR_ID
        and (_read_text(device / "class") or "").startswith(DISPLAY_CLASS_PREFIXES)
        for device in _entries(folder)
    )


def pcie_limit(root: Path, bus_id: str) -> PcieLimit:
    """Return the common limit of the device at ``bus_id`` (``0000:1b:00``) and the port above it."""
    device = root / f"bus/pci/devices/{bus_id}.0"
    ends = (device, device.resolve().parent) if device.exists() else ()
    speeds = [_PCIE_GENERATIONS.get(_leading_number(end / "max_link_speed") or 0.0) for end in ends]
    widths = [_read_int(end / "max_link_width") for end in ends]
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
