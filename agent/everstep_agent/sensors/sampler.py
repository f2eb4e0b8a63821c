"""The sensor process: read NVML, /sys and /proc, and send polls to the supervisor.

Started as ``python -m everstep_agent.sensors.sampler SOCKET_FD PAGE_FD PARENT_PID``. Calls that a driver can block run
here. The process judges nothing, so it may be killed at any time.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys
import time
from pathlib import Path
from types import ModuleType

import msgspec

# pynvml imports ctypes.util.find_library and never calls it. The real module imports subprocess, shutil and every
# compressor: 1.4 MB in a process that should be small.
if "ctypes.util" not in sys.modules:
    sys.modules["ctypes.util"] = ModuleType("ctypes.util")
    sys.modules["ctypes.util"].find_library = lambda name: None  # type: ignore[attr-defined]

from everstep.parent_process import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep_agent.drivers import sysfs
from everstep_agent.sensors.gpu import NO_PCIE_LIMIT, GpuSensor
from everstep_agent.sensors.host import HostSensor, NetworkSensor, PathSensor
from everstep_agent.sensors.sensor_messages import ACTIVITY_BYTES, PollResult, SensorConfig
from everstep_agent.virtual.scenario import VirtualMachine

PCI_EVERY = 60
"""Polls between counts of the GPUs on the PCI bus: hundreds of files, which change when a person opens the case."""

CONTROL_CHECK_S = 0.1
"""Seconds between checks of a virtual machine's control file between polls."""


class NodeSensors:
    """The sensors of one machine, real or virtual."""

    def __init__(self, config: SensorConfig, activity_page: mmap.mmap) -> None:
        self._activity_page = activity_page
        self._interval_s = config.interval_s
        self._gpu = GpuSensor(config.slow_every, self._set_activity, self._slot)
        self._machine: VirtualMachine | None = None
        if config.scenario is not None:
            from everstep_agent.virtual import virtual_nvml  # a real node never needs it

            self._machine = VirtualMachine(config.scenario, config.control_file, config.is_resumed)
            virtual_nvml.install(self._machine, SYSTEM_CLOCK)
        self._sysfs, self._proc = Path(config.sysfs_root), Path(config.proc_root)
        self._polls = 0
        self._pci_gpu_count: int | None = None
        self._network = NetworkSensor(self._sysfs)
        self._host = HostSensor(self._proc)
        self._host_id = sysfs.host_identity(self._sysfs, self._proc)
        self._paths = PathSensor(config.disk_paths, self._proc, SYSTEM_CLOCK)

    def poll_urgent(self) -> PollResult | None:
        """Return data to send before touching anything that may block, or None."""
        if self._machine is None:
            return None
        self._machine.reload_control()
        lines = self._machine.take_lines()
        return PollResult(is_full=False, kernel_lines=tuple(lines)) if lines else None

    def poll(self) -> PollResult:
        started_at = time.perf_counter()
        gpus = self._gpu.poll()
        around = self._poll_real_machine() if self._machine is None else self._poll_virtual_machine(self._machine)
        return msgspec.structs.replace(
            around,
            driver_version=self._gpu.driver_version,
            known_gpus=tuple(self._gpu.known_gpus.values()),
            gpus=gpus,
            nvml_error=self._gpu.error,
            poll_s=time.perf_counter() - started_at,
        )

    def wait_xid_events(self, until: float) -> PollResult | None:
        """Wait until the next poll (monotonic seconds), or for XIDs that should not wait for it."""
        remaining_s = until - SYSTEM_CLOCK.monotonic()
        if remaining_s <= 0:
            return None
        if self._machine is not None:
            remaining_s = min(remaining_s, CONTROL_CHECK_S)
        events = self._gpu.wait_xid_events(remaining_s)
        if events is None:
            time.sleep(remaining_s)
        return PollResult(is_full=False, xids=tuple(events)) if events else None

    def _poll_real_machine(self) -> PollResult:
        """Poll everything but the GPUs on this machine."""
        self._set_activity("network ports")
        ports = self._network.poll()
        self._set_activity("host")
        boot_id, faults = "", []
        try:
            boot_id = sysfs.boot_id(self._proc)
        except OSError as error:
            faults = [("boot id", str(error))]
        if self._polls % PCI_EVERY == 0:
            self._pci_gpu_count = sysfs.count_nvidia_gpus_on_pci(self._sysfs)
        self._polls += 1
        return PollResult(
            is_full=True,
            boot_id=boot_id,
            ports=ports,
            paths=self._paths.poll(),
            host=self._host.poll(),
            host_identity=self._host_id,
            pci_gpu_count=self._pci_gpu_count,
            sensor_errors=tuple(faults),
        )

    def _slot(self, bus_id: str) -> sysfs.PcieLimit:
        """Return the limit of the PCIe slot at the address. Virtual GPUs have none."""
        return NO_PCIE_LIMIT if self._machine is not None else sysfs.pcie_limit(self._sysfs, bus_id)

    def _poll_virtual_machine(self, machine: VirtualMachine) -> PollResult:
        """Poll everything but the GPUs of the virtual machine."""
        return PollResult(
            is_full=True,
            boot_id=machine.boot_id,
            ports=machine.port_samples(),
            paths=machine.path_samples(),
            host=machine.host_sample(),
            host_identity=machine.host_identity(),
            pci_gpu_count=len(machine.gpus),
            sensor_errors=(("virtual machine", machine.error),) if machine.error else (),
        )

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
    node = NodeSensors(config, activity_page)
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
