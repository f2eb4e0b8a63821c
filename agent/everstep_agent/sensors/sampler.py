"""The sensor process: read NVML, /sys and /proc, and send polls to the supervisor.

Started as ``python -m everstep_agent.sensors.sampler SOCKET_FD PAGE_FD PARENT_PID``. Calls that a driver can block run
here. The process judges nothing, so it may be killed at any time.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec

# pynvml imports ctypes.util.find_library and never calls it. The real module imports subprocess, shutil and every
# compressor: 1.4 MB in a process that should be small.
if "ctypes.util" not in sys.modules:
    sys.modules["ctypes.util"] = ModuleType("ctypes.util")
    sys.modules["ctypes.util"].find_library = lambda name: None  # type: ignore[attr-defined]

from everstep.clock import Clock
from everstep.host.parent_process import die_with_parent
from everstep.host.pci_devices import PciDevice, other_gpus, pci_devices
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.commands import at_once
from everstep_agent.drivers.fabric_services import count_switches
from everstep_agent.drivers.inventory import read_inventory
from everstep_agent.drivers.pci_gpus import PciGpu, pci_gpus
from everstep_agent.drivers.samples import InventorySample, OtherGpusSample, PciGpuCounts
from everstep_agent.sensors.earlier_boot import EarlierBootSensor
from everstep_agent.sensors.fabric import NvlinkFabricSensor
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.sensors.gpu_driver import GpuDriver
from everstep_agent.sensors.gpu_watch import GpuWatch
from everstep_agent.sensors.hardware import HostHardwareSensor
from everstep_agent.sensors.host import HostSensor, PathSensor
from everstep_agent.sensors.network import NetworkSensor
from everstep_agent.sensors.sensor_messages import ACTIVITY_BYTES, PollResult, SensorConfig
from everstep_agent.sensors.units import SystemdUnitSensor
from everstep_agent.virtual.scenario import VirtualMachine

DEV, ETC = Path("/dev"), Path("/etc")
PCI_EVERY = 60
"""Polls between looks at the PCI bus, which has hundreds of files."""

CONTROL_CHECK_S = 0.1
"""Seconds between checks of a virtual machine's control file between polls."""


class NodeSensors:
    """The sensors of one machine, real or virtual."""

    def __init__(self, config: SensorConfig, activity_page: mmap.mmap, clock: Clock) -> None:
        self._activity_page = activity_page
        self._clock = clock
        self._machine: VirtualMachine | None = None
        if config.scenario is None:
            self._sysfs, self._proc = Path(config.sysfs_root), Path(config.proc_root)
            etc, dev = ETC, DEV
            # What an earlier process of this agent has read, its supervisor knows.
            self._earlier_boot = EarlierBootSensor(self._sysfs, clock, _has_started=config.is_resumed)
            self._units = SystemdUnitSensor(config.watch_units)
        else:
            from everstep_agent.virtual import machine_tree, virtual_nvml  # a real node never needs them

            machine = self._machine = VirtualMachine(config.scenario, config.control_file, config.is_resumed)
            virtual_nvml.install(machine, clock)
            self._tree = machine_tree.MachineTree(Path(config.machine_folder))
            self._tree.update(machine)
            self._sysfs, self._proc = self._tree.sys, self._tree.proc
            etc, dev = self._tree.etc, self._tree.dev
            self._earlier_boot = EarlierBootSensor(
                self._sysfs, clock, self._sysfs, machine.journal_lines, at_once, math.inf
            )
            units = config.watch_units or tuple(machine.host.units)
            self._units = SystemdUnitSensor(units, machine.show_units, at_once)
        self._gpu = GpuSensor(
            config.slow_every,
            lambda activity: None,
            partial(sysfs.pcie_limit, self._sysfs),
            lambda: self._gpus_among(pci_devices(self._sysfs)),
            sees_all_processes=sysfs.is_host_pid_namespace(self._proc),
            reads_gpm=config.reads_gpm,
        )
        self._driver: GpuDriver = GpuWatch(self._gpu, clock, config.hang_timeout_s, config.start_timeout_s)
        self._polls = 0
        self._pause_file = config.pause_file
        self._network = NetworkSensor(self._sysfs, self._proc)
        self._host = HostSensor(self._proc)
        self._hardware = HostHardwareSensor(self._sysfs)
        self._host_id = sysfs.host_identity(self._sysfs, self._proc)
        self._fabric = NvlinkFabricSensor(self._proc, etc, dev)
        self._paths = PathSensor(
            config.disk_paths, self._proc, clock, Path(config.vault_folder) if config.vault_folder else None
        )
        self._inventory = InventorySample()
        self._other_gpus: tuple[OtherGpusSample, ...] = ()
        self._switches = 0

    def poll_urgent(self) -> PollResult | None:
        """Return data to send before touching anything that may block, or None."""
        if self._machine is None:
            return None
        self._machine.reload_control()
        lines = self._machine.take_lines()
        return PollResult(is_full=False, kernel_lines=tuple(lines)) if lines else None

    def poll(self) -> PollResult:
        started_at = time.perf_counter()
        self._set_activity("gpus")
        held_s = self._held_s()
        gpus = self._driver.poll() if held_s is None else self._driver.close()
        nvml = msgspec.structs.replace(self._driver.state, paused_s=held_s)
        self._polls += 1
        on_bus = self._gpu.bus
        around = self._poll_machine()
        return msgspec.structs.replace(
            around,
            driver_version=self._driver.version,
            known_gpus=self._driver.devices,
            gpus=gpus,
            fabric=self._fabric.poll(gpus, self._switches),
            other_gpus=self._other_gpus,
            nvml=nvml,
            pci_gpus=PciGpuCounts(
                usable=None if on_bus is None else sum(gpu.is_usable for gpu in on_bus),
                unbound=sum(not gpu.driver for gpu in on_bus or ()),
                hidden=sum(not gpu.is_visible for gpu in on_bus or ()),
            ),
            poll_s=time.perf_counter() - started_at,
        )

    def wait_xid_events(self, until: float) -> PollResult | None:
        """Wait until the next poll (monotonic seconds), or for XIDs that should not wait for it."""
        remaining_s = until - self._clock.monotonic()
        if remaining_s <= 0:
            return None
        if self._machine is not None:
            remaining_s = min(remaining_s, CONTROL_CHECK_S)
        events = None if self._held_s() is not None else self._driver.events(remaining_s)
        if events is None:
            time.sleep(remaining_s)
        return PollResult(is_full=False, xids=tuple(events)) if events else None

    def _poll_machine(self) -> PollResult:
        """Poll everything but the GPUs."""
        boot_id, faults = "", []
        if self._machine is not None:
            self._tree.update(self._machine)
            faults = [("virtual machine", self._machine.error)] if self._machine.error else []
        self._set_activity("network ports")
        ports = self._network.poll()
        self._set_activity("host")
        if self._polls % PCI_EVERY == 1:
            self._walk_bus()
        try:
            boot_id = sysfs.boot_id(self._proc)
        except OSError as error:
            faults.append(("boot id", str(error)))
        host = self._host.poll()
        return PollResult(
            is_full=True,
            boot_id=boot_id,
            ports=ports,
            paths=self._paths.poll() if self._machine is None else self._machine.path_samples(),
            host=host,
            earlier_boot=self._earlier_boot.poll(host.uptime_s),
            hardware=msgspec.structs.replace(self._hardware.poll(), units=self._units.poll()),
            host_identity=self._host_id,
            inventory=self._inventory,
            sensor_errors=tuple(faults),
        )

    def _held_s(self) -> float | None:
        """Return for how long NVML has to stay closed by order, or None if it has not."""
        if not self._pause_file:
            return None
        try:
            return max(0.0, self._clock.wall() - os.stat(self._pause_file).st_mtime)
        except OSError:
            return None

    def _walk_bus(self) -> None:
        """Read the devices on the PCI bus once, for all sensors that look for some of them."""
        devices = pci_devices(self._sysfs)
        gpus, found = self._gpus_among(devices), devices or ()
        self._gpu.check_bus(gpus)
        self._inventory = read_inventory(self._sysfs, found, None if gpus is None else len(gpus))
        self._other_gpus = tuple(OtherGpusSample(vendor=name, unwatched=n) for name, n in other_gpus(found).items())
        self._switches = count_switches(found)

    def _gpus_among(self, devices: tuple[PciDevice, ...] | None) -> tuple[PciGpu, ...] | None:
        machine = self._machine
        return pci_gpus(devices, self._proc, DEV) if machine is None else machine.pci_gpus()

    def _set_activity(self, activity: str) -> None:
        self._activity_page[:ACTIVITY_BYTES] = activity.encode()[:ACTIVITY_BYTES].ljust(ACTIVITY_BYTES, b"\0")


def _receive_config(channel: socket.socket) -> SensorConfig:
    decoder: FrameDecoder[SensorConfig] = FrameDecoder(SensorConfig, 1 << 20)
    while data := channel.recv(1 << 16):
        if messages := decoder.feed(data):
            return messages[0]
    raise SystemExit(0)


def serve(channel: socket.socket, activity_page: mmap.mmap) -> None:
    """Poll until the supervisor disconnects."""
    config = _receive_config(channel)
    node = NodeSensors(config, activity_page, SYSTEM_CLOCK)
    due = SYSTEM_CLOCK.monotonic()

    def send(*messages: PollResult | None) -> None:
        for message in filter(None, messages):
            channel.sendall(encode_frame(message))

    try:
        while True:
            send(node.poll_urgent(), node.poll())
            due = max(due + config.interval_s, SYSTEM_CLOCK.monotonic())
            while SYSTEM_CLOCK.monotonic() < due:
                send(node.wait_xid_events(due), node.poll_urgent())
    except (BrokenPipeError, ConnectionResetError):
        return


def main() -> None:
    descriptor, page_descriptor, parent = map(int, sys.argv[1:4])
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    serve(socket.socket(fileno=descriptor), mmap.mmap(page_descriptor, ACTIVITY_BYTES))


if __name__ == "__main__":
    main()
