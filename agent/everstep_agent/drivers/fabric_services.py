"""NVSwitches on the PCI bus, the programs that manage NVLink fabrics, and the configuration of IMEX domains."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from everstep.host.pci_devices import PciDevice
from everstep_agent.drivers.pci_gpus import NVIDIA_VENDOR_ID
from everstep_agent.drivers.sysfs import entries, read_text

SWITCH_CLASS, SWITCH_DRIVER = "0x0680", "nvidia-nvswitch"
"""PCI class and kernel driver of NVSwitches (open kernel modules, export_nvswitch.h). Under vfio-pci they belong to a
virtual machine, which has the Fabric Manager too."""

FABRIC_MANAGER, IMEX = "nv-fabricmanage", "nvidia-imex"
"""Names of the programs as the kernel shows them: the first 15 characters."""

KERNEL_THREADS_PID, KERNEL_THREADS = 2, "kthreadd"


def count_switches(devices: Iterable[PciDevice]) -> int:
    """Return the number of NVSwitches among the devices that the NVIDIA driver holds."""
    return sum(is_switch(device) and not device.is_virtual and device.driver == SWITCH_DRIVER for device in devices)


def is_switch(device: PciDevice) -> bool:
    return device.vendor == NVIDIA_VENDOR_ID and device.kind.startswith(SWITCH_CLASS)


def sees_host(proc: Path) -> bool:
    """Return whether the host's processes can be seen: not from a PID namespace, nor with the option hidepid."""
    return process_name(proc, KERNEL_THREADS_PID) == KERNEL_THREADS


def process_name(proc: Path, pid: int) -> str:
    """Return a process's name, or nothing if it is gone."""
    return read_text(proc / str(pid) / "comm") or ""


def find_processes(proc: Path, names: Collection[str]) -> dict[str, int]:
    """Return the process ids of programs by their names, as far as they run."""
    pids = [int(entry.name) for entry in entries(proc) if entry.name.isdigit()]
    return {name: pid for pid in pids if (name := process_name(proc, pid)) in names}


def is_imex_configured(etc: Path, dev: Path) -> bool:
    """Return whether this node has an IMEX domain that the administrator wants always: nodes in the configuration, an
    enabled service and channels. Where a scheduler starts IMEX with each job, its service is not enabled."""
    nodes = (read_text(etc / "nvidia-imex/nodes_config.cfg") or "").splitlines()
    has_nodes = any(line.strip() and not line.strip().startswith("#") for line in nodes)
    is_enabled = (etc / "systemd/system/multi-user.target.wants/nvidia-imex.service").is_symlink()
    return has_nodes and is_enabled and bool(entries(dev / "nvidia-caps-imex-channels"))
