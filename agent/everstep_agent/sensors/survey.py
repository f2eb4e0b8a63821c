"""Say what each sensor reads on this machine, what it cannot and why, and how to mend it.

``everstep doctor --sensors`` runs ``python -m everstep_agent.sensors.survey``, which prints a line of JSON per result.
A driver may hang the process: it prints each result at once, NVML's last, and its parent waits no longer than it likes.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from everstep.doctor.results import CheckResult, fail, ok, run_checks, warn
from everstep.host.pci_devices import pci_devices
from everstep_agent.config import PROGRAM
from everstep_agent.drivers import nvml
from everstep_agent.drivers.kmsg import KernelLog, LogPosition, is_null_device
from everstep_agent.drivers.pci_gpus import PciGpu, pci_gpus
from everstep_agent.drivers.samples import FABRIC_ROLES, Sample, flat_fields
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.sensors.hardware import HostHardwareSensor
from everstep_agent.sensors.host import HostSensor
from everstep_agent.sensors.network import NetworkSensor

CHECKS = ("kernel log", "host", "network ports", "PCI bus", "hardware", "GPUs")
"""Names of the sensors, in the order in which they are read."""

SYS = Path("/sys")

MAX_NAMES = 6
"""Names that a sentence lists; the others are counted."""

_NVML_ADVICE = {
    nvml.DRIVER_NOT_LOADED: "load the kernel driver (modprobe nvidia)",
    nvml.LIBRARY_NOT_FOUND: "install the driver's libraries (libnvidia-ml.so.1); in a container run with --gpus all "
    "and NVIDIA_DRIVER_CAPABILITIES=utility",
    nvml.LIBRARY_MISMATCH: "reload the kernel driver, or reboot, after the upgrade of its libraries",
    nvml.NO_PERMISSION: "let this user open /dev/nvidiactl and /dev/nvidia*",
}


def survey(sys_root: Path, proc: Path, dev: Path, kernel_log: str) -> Iterator[CheckResult]:
    """Yield what each sensor reads, one after another. Raises nothing; NVML may block the caller."""
    bus: list[PciGpu] = []
    checks: tuple[Callable[[], Iterator[CheckResult]], ...] = (
        lambda: check_kernel_log(kernel_log),
        lambda: check_host(proc),
        lambda: check_ports(sys_root, proc, is_own_sysfs=sys_root == SYS),
        lambda: check_bus(sys_root, proc, dev, bus),
        lambda: check_hardware(sys_root),
        lambda: check_gpus(bus),
    )
    for name, check in zip(CHECKS, checks, strict=True):
        yield from run_checks({name: check}).results


def check_kernel_log(path: str) -> Iterator[CheckResult]:
    """Check the source of XIDs and of the host's faults."""
    name = "kernel log"
    if is_null_device(path):
        yield warn(name, f"{path}: none is read, so most XIDs and the host's faults will not be seen")
        return
    try:
        is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        yield fail(name, f"{path} does not exist: in a container give it the host's, or --kernel-log FILE")
        return
    except PermissionError as error:
        advice = "run the agent as root or with CAP_SYSLOG (kernel.dmesg_restrict is set), and a container privileged"
        yield fail(name, f"{path}: {error.strerror}: {advice}")
        return
    if is_pipe:  # whose lines are the agent's
        yield ok(name, f"{path} is a pipe that this user may read")
        return
    log = KernelLog(path, LogPosition())
    count = sum(len(lines) for lines in itertools.takewhile(bool, iter(log.read, None)))
    log.close()
    if log.error:
        yield fail(name, log.error)
    elif not count:
        yield warn(name, f"{path} has no line of the kernel: a container may have a log of its own")
    else:
        yield ok(name, f"{count} lines of the kernel in {path}")


def check_host(proc: Path) -> Iterator[CheckResult]:
    """Check the host's own values."""
    sample = HostSensor(proc).poll()
    if sample.error:
        yield fail("host", f"{proc} cannot be read ({sample.error}): mount proc")
        return
    if not (proc / "1").exists():
        yield warn("host", "processes of other users are hidden (hidepid), so stuck ones will not be counted")
    yield ok("host", _coverage(sample, ("error", "clock_skew_s")))


def check_ports(sys_root: Path, proc: Path, *, is_own_sysfs: bool) -> Iterator[CheckResult]:
    """Check that the machine's ports are visible, and those of training among them.

    Args:
        sys_root: The root of sysfs.
        proc: The root of procfs.
        is_own_sysfs: ``sys_root`` shows the ports of this process's network, and not the host's by a mount.
    """
    name = "network ports"
    if not (sys_root / "class").is_dir():
        yield fail(name, f"{sys_root} is empty: mount sysfs")
        return
    ports = NetworkSensor(sys_root, proc).poll()
    shows_own_network = is_own_sysfs and _has_own_network(proc)
    fabric = [f"{port.name} ({port.role})" for port in ports if port.role in FABRIC_ROLES]
    others = [f"{port.name} ({port.role})" for port in ports if port.role not in FABRIC_ROLES]
    if shows_own_network:
        advice = "give the agent the host's network (hostNetwork, --network host), or --sysfs-root with the host's /sys"
        yield warn(name, f"this process is in a network namespace of its own and sees only its ports: {advice}")
    if fabric:
        yield ok(name, f"watched: {_listed(fabric)}" + (f"; shown only: {_listed(others)}" if others else ""))
    elif not shows_own_network:
        seen = f"shown only: {_listed(others)}" if others else "no port with a device is here"
        yield ok(name, f"no port of a compute or storage network; {seen}")


def check_hardware(sys_root: Path) -> Iterator[CheckResult]:
    """Count the parts around the GPUs whose errors are watched."""
    samples = HostHardwareSensor(sys_root).poll()
    advice = "" if samples.memory else "; memory errors are counted once an EDAC driver of the platform is loaded"
    yield ok(
        "hardware",
        f"watched: {len(samples.memory)} counters of memory, {len(samples.pci)} ends of PCIe links, "
        f"{len(samples.arrays)} RAID arrays, {len(samples.disks)} disks{advice}",
    )


def check_bus(sys_root: Path, proc: Path, dev: Path, found: list[PciGpu]) -> Iterator[CheckResult]:
    """Check the GPUs on the PCI bus, and put them into ``found``."""
    name = "PCI bus"
    gpus = pci_gpus(pci_devices(sys_root), proc, dev)
    if gpus is None:
        yield warn(name, f"{sys_root} has no bus/pci, so a GPU that leaves the bus will not be missed: mount sysfs")
        return
    found += gpus
    for gpu in gpus:
        if not gpu.driver:
            yield fail(
                name, f"no driver is bound to the GPU at {gpu.bus_id}: load the NVIDIA driver, see the kernel log"
            )
        elif not gpu.is_visible:
            yield warn(name, f"this process may not open the GPU at {gpu.bus_id}, which will not be watched")
        elif not gpu.is_usable:
            yield ok(name, f"the GPU at {gpu.bus_id} belongs to {gpu.driver} and is not watched")
    yield ok(name, f"{sum(gpu.is_usable for gpu in gpus)} of {len(gpus)} NVIDIA GPUs are for the agent")


def check_gpus(on_bus: list[PciGpu]) -> Iterator[CheckResult]:
    """Check NVML: the GPUs, the values that they offer, and events. May block."""
    name, expected = "GPUs", sum(gpu.is_usable for gpu in on_bus)
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None)
    samples = sensor.poll()
    if sensor.error:
        advice = _NVML_ADVICE.get(sensor.error_code, "see the kernel log")
        has_gpus = bool(on_bus)
        report = fail if has_gpus else ok
        yield report(name, f"{sensor.error}: {advice}" if has_gpus else "no NVIDIA GPU is here, and no NVML")
        return
    for sample in samples:
        if sample.error or sample.failures:
            where = f"gpu {sample.index}" + (f" at {sample.pci_bus_id}" if ":" in sample.pci_bus_id else "")
            report = fail if sample.error else warn
            yield report(name, f"{where}: {sample.error or sample.failures}: see `nvidia-smi -q` and the kernel log")
    if len(samples) < expected:
        yield fail(name, f"NVML lists {len(samples)} of the {expected} GPUs on the PCI bus: see the kernel log")
    if samples:
        read = [sample for sample in samples if not sample.error]
        skipped = ("uuid", "error", "failures", "lost", "is_closed", "hung_s", "failed_values", "links_were_read")
        values = f"; {_coverage(read[0], skipped)}" if read else ""
        yield ok(name, f"{len(read)} of {len(samples)} GPUs answer, driver {sensor.driver_version}{values}")
        if sensor.wait_xid_events(0.0) is None:
            yield warn("XID events", "NVML offers no events here, so XIDs come from the kernel log alone")
    sensor.close()


def _coverage(sample: Sample, skipped: tuple[str, ...]) -> str:
    """Return how many values a sample has, and the names of those that this machine does not offer."""
    values = {name: value for name, value in flat_fields(sample).items() if name not in skipped}
    absent = [name for name, value in values.items() if value is None]
    found = f"{len(values) - len(absent)} values are read"
    return found + (f"; not offered here: {_listed(absent, len(absent))}" if absent else "")


def _listed(names: list[str], most: int = MAX_NAMES) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _has_own_network(proc: Path) -> bool:
    """Return whether this process is surely in another network namespace than the first process that it sees."""
    try:
        return os.readlink(proc / "self/ns/net") != os.readlink(proc / "1/ns/net")
    except OSError:
        return False  # only root may look at the first process's


def main() -> None:
    given = PROGRAM.read({}, os.environ)
    kernel_log = given.get("kernel_log") or "/dev/kmsg"
    for result in survey(given.get("sysfs_root", SYS), Path("/proc"), Path("/dev"), kernel_log):
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
