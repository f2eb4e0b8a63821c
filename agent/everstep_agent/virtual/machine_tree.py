"""Write the virtual machine's ports, PCI devices, memory and processes as files of /sys and /proc.

The sensors of real machines read them. File systems are not among them: their free space comes from a system call.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from everstep_agent.drivers.fabric_services import FABRIC_MANAGER, IMEX, KERNEL_THREADS, KERNEL_THREADS_PID
from everstep_agent.drivers.ports import EFA_DRIVER
from everstep_agent.virtual.scenario import (
    COUNTER_FOLDERS,
    SWITCH_BUSES,
    VirtualDisk,
    VirtualFabric,
    VirtualGpu,
    VirtualHost,
    VirtualMachine,
    VirtualPort,
)

_GPU_FILES = {"vendor": "0x10de", "class": "0x030200", "numa_node": "0"}
_NIC_FILES = {"vendor": "0x15b3", "class": "0x020000", "numa_node": "0"}
_PHYS_STATES = {"Sleep": 1, "Polling": 2, "Disabled": 3, "LinkUp": 5}
"""Numbers of InfiniBand's physical port states, as in the kernel's ``phys_state``."""
_FIRST_PID = 1000
_MANAGER_PID, _IMEX_PID = 900, 901
_MAX_FILES = 1_000_000
_USB_PARENT = "pci0000:00/0000:00:14.0/usb1"

Entries = dict[str, str]
"""Files and links by path: a text, or the target of a link with ``_LINK`` before it."""
_LINK = "-> "
_TEXT_LINK = "=> "
"""The same for a target that is not a file, as those of namespaces."""


ROOTS = ("sys", "proc", "etc", "dev")


def remove_tree(folder: Path) -> None:
    """Remove a tree that an earlier process wrote, and the folder if nothing else is in it."""
    for root in (folder / name for name in ROOTS):
        shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


class MachineTree:
    """The tree in ``ROOTS`` below an absolute ``folder``. What is in these already is removed."""

    def __init__(self, folder: Path) -> None:
        """Make the folders. Raises OSError, ValueError."""
        if not folder.is_absolute():  # an empty path would be the current folder
            raise ValueError(f"the virtual machine's folder {str(folder)!r} is not an absolute path")
        self._folder = folder
        self.sys, self.proc, self.etc, self.dev = (folder / name for name in ROOTS)
        self._written: Entries = {}
        self._state: object = None
        remove_tree(folder)
        for root in (self.sys, self.proc, self.etc, self.dev):
            root.mkdir(parents=True)

    def update(self, machine: VirtualMachine) -> None:
        """Write what has changed, as the kernel does. Raises OSError."""
        state = (machine.boot_id, machine.host, machine.ports, machine.gpus, machine.fabric)
        if state == self._state:
            return
        wanted = dict(_host_entries(machine.host, machine.boot_id)) | dict(_device_entries(machine))
        wanted |= dict(_fabric_entries(machine))
        wanted |= dict(_disk_entries(machine.host))
        for name in self._written.keys() - wanted.keys():
            self._remove(self._folder / name)
        for name, text in wanted.items():
            if self._written.get(name) != text:
                self._write(self._folder / name, text)
        self._written, self._state = wanted, state

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith((_LINK, _TEXT_LINK)):
            path.unlink(missing_ok=True)
            is_file = text.startswith(_LINK)
            path.symlink_to(self._folder / text.removeprefix(_LINK) if is_file else text.removeprefix(_TEXT_LINK))
        else:
            path.write_text(f"{text}\n")

    def _remove(self, path: Path) -> None:
        """Remove the entry, and the folders that it leaves empty."""
        path.unlink()
        for folder in path.parents:
            if folder.parent == self._folder or any(folder.iterdir()):
                return
            folder.rmdir()


def _host_entries(host: VirtualHost, boot_id: str) -> Iterator[tuple[str, str]]:
    dmi = {"sys_vendor": host.vendor, "product_name": host.product, "product_serial": host.serial}
    for name, text in (dmi | {"chassis_serial": host.chassis_serial}).items():
        yield f"sys/class/dmi/id/{name}", text
    yield "sys/devices/system/cpu/online", f"0-{host.cpus - 1}"
    total = host.memory_total_bytes >> 10
    yield "proc/meminfo", f"MemTotal: {total} kB\nMemAvailable: {round(total * host.memory_available_fraction)} kB"
    yield "proc/uptime", f"{host.uptime_s:.2f} 0.00"
    yield "proc/loadavg", f"{host.load:.2f} 0.00 0.00 1/1 1"
    yield "proc/self/mounts", ""
    yield "proc/self/ns/pid", f"{_TEXT_LINK}{'pid:[1]' if host.in_container else 'pid:[4026531836]'}"
    for resource, kind, share in (
        ("cpu", "some", host.cpu_pressure),
        ("memory", "full", host.memory_pressure),
        ("io", "full", host.io_pressure),
    ):
        averages = " ".join(f"avg{window}={share * 100:.2f}" for window in (10, 60, 300))
        yield f"proc/pressure/{resource}", f"{kind} {averages} total=0"
    yield "proc/sys/fs/file-nr", f"{round(_MAX_FILES * host.open_files_fraction)}\t0\t{_MAX_FILES}"
    yield "proc/sys/kernel/osrelease", host.kernel
    yield "proc/sys/kernel/random/boot_id", boot_id
    if host.panic_lines:
        yield "sys/fs/pstore/dmesg-efi-179000000001001", "\n".join(["Panic#1 Part1", *host.panic_lines])
    for pid, state in enumerate("D" * host.stuck_processes + "Z" * host.zombies, _FIRST_PID):
        yield f"proc/{pid}/stat", f"{pid} (virtual) {state} 1 1"


def _disk_entries(host: VirtualHost) -> Iterator[tuple[str, str]]:
    """Yield memory modules, RAID arrays and disks."""
    for name, module in host.modules.items():
        folder = f"sys/devices/system/edac/mc/{name}"
        yield f"{folder}/dimm_label", f"CPU_SrcID#0_{name}"
        yield f"{folder}/dimm_ce_count", str(module.corrected)
        yield f"{folder}/dimm_ue_count", str(module.uncorrected)
        for file in ("ce_noinfo_count", "ue_noinfo_count"):
            yield f"sys/devices/system/edac/mc/{name.partition('/')[0]}/{file}", "0"
    for name, array in host.arrays.items():
        folder = f"sys/block/{name}/md"
        values = {"level": array.level, "array_state": array.state}
        if array.degraded is not None:
            values |= {"sync_action": array.sync_action, "degraded": str(array.degraded)}
        values |= {f"dev-sd{disk}/state": "faulty" if at < array.faulty else "in_sync" for at, disk in enumerate("xy")}
        for file, text in values.items():
            yield f"{folder}/{file}", text
    for name, disk in host.disks.items():
        yield from (_nvme if name.startswith("nvme") else _scsi)(name, disk)


def _nvme(name: str, disk: VirtualDisk) -> Iterator[tuple[str, str]]:
    folder = f"sys/class/nvme/{name}"
    for file, text in {"state": disk.state or "live", "model": "Virtual NVMe", "transport": "pcie"}.items():
        yield f"{folder}/{file}", text
    yield f"sys/class/nvme-subsystem/{disk.subsystem or f'of-{name}'}/{name}", f"{_LINK}{folder}"


def _scsi(name: str, disk: VirtualDisk) -> Iterator[tuple[str, str]]:
    folder = f"sys/devices/{_USB_PARENT if disk.usb else 'pci0000:00'}/0000:00:17.0/block/{name}"
    values = {"type": "0", "state": disk.state or "running", "ioerr_cnt": hex(disk.io_errors), "model": "Virtual SATA"}
    for file, text in values.items():
        yield f"{folder}/device/{file}", text
    yield f"{folder}/removable", "0"
    yield f"sys/block/{name}", f"{_LINK}{folder}"


def _aer_files(device: VirtualGpu | VirtualPort) -> Entries:
    """Return the error counters of a PCI device."""
    kinds = (("correctable", "BadTLP", "COR"), ("nonfatal", "CmpltTO", "NONFATAL"), ("fatal", "DLP", "FATAL"))
    counts = (device.aer_corrected, device.aer_nonfatal, device.aer_fatal)
    return {
        f"aer_dev_{kind}": f"{error} {count}\nTOTAL_ERR_{total} {count}"
        for (kind, error, total), count in zip(kinds, counts, strict=True)
    }


def _device_entries(machine: VirtualMachine) -> Iterator[tuple[str, str]]:
    """Yield GPUs, each below a PCIe switch of its own, and ports, the nth below the switch of the nth GPU."""
    for index, gpu in enumerate(machine.gpus):
        yield from _pci_entries(f"{_switch(index)}/{_gpu_address(gpu)}", "nvidia", _GPU_FILES | _aer_files(gpu))
    routes = [name for name, port in machine.ports.items() if port.default_route]
    lines = (f"{name} 00000000 0102000A 0003 0 0 0 00000000" for name in routes)
    yield "proc/net/route", "\n".join(["Iface Destination Gateway Flags RefCnt Use Metric Mask", *lines])
    for index, (name, port) in enumerate(machine.ports.items()):
        if port.missing:
            continue
        if port.usb:
            device = f"sys/devices/{_USB_PARENT}/1-{index + 1}/1-{index + 1}:1.0"
            yield f"{device}/driver", f"{_LINK}sys/bus/usb/drivers/{port.driver}"
            yield f"sys/bus/usb/drivers/{port.driver}/bind", ""
        else:
            address = port.pci_bus_id or f"0000:{index + 0x40:02x}:10.0"
            device = f"sys/devices/{_switch(index)}/{address}"
            yield from _pci_entries(f"{_switch(index)}/{address}", port.driver, _NIC_FILES | _aer_files(port))
        if port.virtual_function:
            yield f"{device}/physfn", f"{_LINK}sys/devices/{_switch(index)}"
        if not port.moved:
            yield from (_infiniband if port.kind == "infiniband" else _ethernet)(name, port, device)


def _switch(index: int) -> str:
    return f"pci0000:{index:02x}/0000:{index:02x}:01.0/0000:{index:02x}:02.0"


def _gpu_address(gpu: VirtualGpu) -> str:
    return f"{gpu.pci_bus_id}.0"


def _pci_entries(place: str, driver: str, files: Entries) -> Iterator[tuple[str, str]]:
    device = f"sys/devices/{place}"
    for name, text in files.items():
        yield f"{device}/{name}", text
    yield f"{device}/driver", f"{_LINK}sys/bus/pci/drivers/{driver}"
    yield f"sys/bus/pci/drivers/{driver}/bind", ""
    yield f"sys/bus/pci/devices/{place.rpartition('/')[2]}", f"{_LINK}{device}"


def _fabric_entries(machine: VirtualMachine) -> Iterator[tuple[str, str]]:
    """Yield NVSwitches, the programs that manage the fabric, and GPUs of other vendors."""
    fabric = machine.fabric
    has_links = any(gpu.nvlinks for gpu in machine.gpus)
    for bus in SWITCH_BUSES[: fabric.switches] if has_links else ():
        files = {"vendor": "0x10de", "class": "0x068000"}
        yield from _pci_entries(f"pci0000:{bus}/0000:{bus}:00.0", fabric.switch_driver, files)
    for index, device in enumerate(fabric.other_gpus):
        files = {"vendor": device.vendor, "class": device.kind}
        if device.memory_bytes is not None:
            files["mem_info_vram_total"] = str(device.memory_bytes)
        yield from _pci_entries(f"pci0000:e{index:x}/{device.address}", device.driver, files)
    processes = {
        KERNEL_THREADS_PID: KERNEL_THREADS if fabric.host_processes else "",
        _MANAGER_PID: FABRIC_MANAGER if fabric.manager and has_links else "",
        _IMEX_PID: IMEX if fabric.imex else "",
    }
    for pid, name in processes.items():
        if name and fabric.host_processes:
            yield f"proc/{pid}/comm", name
    yield from _imex_entries(fabric)


def _imex_entries(fabric: VirtualFabric) -> Iterator[tuple[str, str]]:
    if fabric.imex_nodes:
        yield "etc/nvidia-imex/nodes_config.cfg", "\n".join(["# nodes of the domain", *fabric.imex_nodes])
    if fabric.imex_enabled:
        unit = "etc/systemd/system/nvidia-imex.service"
        yield unit, "[Service]"
        yield "etc/systemd/system/multi-user.target.wants/nvidia-imex.service", f"{_LINK}{unit}"
    for number in range(fabric.imex_channels):
        yield f"dev/nvidia-caps-imex-channels/channel{number}", ""


def _infiniband(name: str, port: VirtualPort, device: str) -> Iterator[tuple[str, str]]:
    """Yield an RDMA device with the port that the name's part after a slash says, or port 1."""
    adapter, _, number = name.partition("/")
    folder = f"{device}/infiniband/{adapter}"
    usual = "LinkUp" if port.up else "Polling" if port.enabled else "Disabled"
    phys_state = port.phys_state or usual
    is_efa = port.driver == EFA_DRIVER
    values = {
        "state": "4: ACTIVE" if port.up else "2: INIT" if phys_state == "LinkUp" else "1: DOWN",
        "phys_state": f"{_PHYS_STATES.get(phys_state, 0)}: {phys_state}",
        "link_layer": port.link_layer or ("Unknown" if is_efa else "InfiniBand"),
        "rate": f"{port.rate_gbps:g} Gb/sec ({port.width}X NDR)",
        **_counter_entries(port, {} if is_efa else {"symbol_error": port.errors}),
    }
    if not is_efa:
        values["counters/link_downed"] = str(port.link_downs)
    for file, text in {"node_guid": port.address, "board_id": port.board, "fw_ver": port.firmware}.items():
        yield f"{folder}/{file}", text
    for file, text in values.items():
        yield f"{folder}/ports/{number or 1}/{file}", text
    yield f"{folder}/device", f"{_LINK}{device}"
    yield f"sys/class/infiniband/{adapter}", f"{_LINK}{folder}"


def _ethernet(name: str, port: VirtualPort, device: str) -> Iterator[tuple[str, str]]:
    folder = f"{device}/net/{name}"
    values = {
        "type": "1",
        "address": port.address,
        "operstate": "up" if port.up else "down",
        "flags": "0x1003" if port.enabled else "0x1002",
        "speed": str(round(port.rate_gbps * 1000)) if port.up else "-1",
        "carrier_down_count": str(port.link_downs),
        **_counter_entries(port, {"rx_errors": port.errors}),
    }
    for file, text in values.items():
        yield f"{folder}/{file}", text
    yield f"{folder}/device", f"{_LINK}{device}"
    yield f"sys/class/net/{name}", f"{_LINK}{folder}"
    if port.bond:
        bond = f"sys/devices/virtual/net/{port.bond}"
        yield f"{folder}/master", f"{_LINK}{bond}"
        yield f"{bond}/lower_{name}", f"{_LINK}{folder}"
        yield f"{bond}/bonding/mode", "802.3ad 4"
        yield f"sys/class/net/{port.bond}", f"{_LINK}{bond}"


def _counter_entries(port: VirtualPort, usual: dict[str, int]) -> Entries:
    """Return the files of all counters of the port's kind, by path below the port's folder."""
    counts = usual | port.counters
    return {f"{folder}/{name}": str(counts.get(name, 0)) for name, folder in COUNTER_FOLDERS[port.counter_kind].items()}
