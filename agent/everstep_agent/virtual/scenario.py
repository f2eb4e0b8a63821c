"""Simulate a machine from a scenario file and a control file that changes it at run time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import xxhash

from everstep.errors import ConfigurationError
from everstep.settings import explain_error, load_toml
from everstep.wire.v1.agent import HardwareText
from everstep_agent.drivers.pci_gpus import NVIDIA_DRIVER, PciGpu
from everstep_agent.drivers.ports import COUNTERS, EFA_DRIVER
from everstep_agent.drivers.samples import PathSample

# Scenario: the initial state of a virtual machine, and the changes a control file may make.

DGX_BUS_IDS = ("1b:00", "43:00", "52:00", "61:00", "9d:00", "c3:00", "d1:00", "df:00")
"""PCI bus addresses of the eight GPUs of a DGX H100."""
SWITCH_BUSES = ("05", "06", "07", "08")
"""PCI buses of its NVSwitches, at the far end of the links."""

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StrictScenarioStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class that rejects unknown keys."""


class VirtualCall(StrictScenarioStruct, frozen=True, kw_only=True):
    """How one call of a GPU misbehaves."""

    error: int = 0  # the NVML error code that it returns
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # seconds before it answers
    hang: bool = False  # it blocks until this is reset


class VirtualLink(StrictScenarioStruct, frozen=True, kw_only=True):
    """What one NVLink counts. Bit error rates are pairs of a factor and an exponent of ten, such as [3, -15]."""

    up: bool = True
    errors: int = 0
    recoveries: int = 0
    recovery_failures: int = 0
    discards: int = 0
    symbol_errors: int = 0
    raw_errors: int = 0
    ber: tuple[int, int] = (1, -20)
    repaired_symbols: Annotated[int, msgspec.Meta(ge=0, le=15)] = 0


FABRIC_HEALTHY = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8
"""A health mask of the fabric without faults: no to four flags, and no incorrect configuration (nvml.h)."""


class VirtualPciErrors(StrictScenarioStruct, frozen=True, kw_only=True):
    """PCIe errors of one device, as the kernel counts them."""

    aer_corrected: int = 0
    aer_nonfatal: int = 0
    aer_fatal: int = 0


# The parts of a GPU. msgspec cannot join structs that have fields, so each part extends the one before it.


class GpuIdentity(VirtualPciErrors, frozen=True, kw_only=True):
    """The names by which a GPU is known, and its size."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = ""
    pci_bus_id: str = ""
    serial: str = ""
    part_number: str = "692-2G520-0200-000"
    vbios: str = "96.00.74.00.01"
    inforom: str = "G520.0200.00.05"
    memory_bytes: int = 85_520_809_984


class GpuFaults(GpuIdentity, frozen=True, kw_only=True):
    """How a GPU and the calls about it fail."""

    hang: bool = False  # every call blocks until this is reset
    lost: bool = False  # every call reports a lost GPU
    missing: bool = False  # the GPU has left the PCI bus
    driver: str = "nvidia"  # kernel driver that is bound to it; NVML lists only GPUs of "nvidia"
    hidden: bool = False  # the agent's container was not given this GPU
    calls: dict[str, VirtualCall] = {}  # by C function ("nvmlDeviceGetUUID"), or "field 230", or "field 161 link 3"
    error: int = 0  # the NVML error code that every call returns
    frozen: bool = False  # the energy counter stands still
    xid: int | None = None  # the XID to raise, in the kernel log and as an NVML event, when this value changes
    reset_at: float = 0.0  # wall time in seconds of the last reset, which restarted the counters
    recovery_action: int | None = 0


class GpuSettings(GpuFaults, frozen=True, kw_only=True):
    """What an administrator sets on a GPU."""

    power_limit_w: float = 700.0
    power_limit_default_w: float = 0.0  # 0: the scenario's power_limit_w
    ecc_mode: tuple[int, int] | None = (1, 1)  # current and pending
    mig_mode: tuple[int, int] | None = (0, 0)
    persistence_mode: int | None = 1


class GpuLoad(GpuSettings, frozen=True, kw_only=True):
    """How hot and how busy a GPU is."""

    temperature_c: int = 45
    memory_temperature_c: int | None = 52
    slowdown_c: int = 87
    memory_limit_c: int | None = 95
    power_w: float = 320.0
    sm_clock_mhz: int = 1980
    memory_clock_mhz: int = 2619
    throttle_reasons: int = 0
    memory_used_bytes: int = 0
    memory_reserved_bytes: int = 0
    gpu_utilization: Fraction = 0.0
    memory_utilization: Fraction = 0.0
    gpm: bool = True  # whether the GPU counts its activity
    tensor_activity: Fraction = 0.0
    encoder_utilization: Fraction = 0.0
    processes: int = 0
    graphics_processes: int = 0


class GpuMemoryErrors(GpuLoad, frozen=True, kw_only=True):
    """Errors of a GPU's memory, and the repairs that they led to."""

    ecc_corrected: int = 0  # of DRAM
    ecc_uncorrected: int = 0  # of DRAM
    ecc_sram_corrected: int = 0
    ecc_sram_uncorrected: int = 0
    ecc_uncorrected_lifetime: int = 0
    sram_threshold_exceeded: bool = False
    remapped_corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: bool = False
    remap_failure: bool = False
    banks_low_on_spare_rows: int = 0
    banks_without_spare_rows: int = 0
    retired_pages: int | None = None
    retired_pages_pending: bool = False


class GpuPcieLink(GpuMemoryErrors, frozen=True, kw_only=True):
    """A GPU's link to the host."""

    pcie_replays: int = 0
    pcie_fatal_errors: int = 0
    pcie_generation: int = 5
    pcie_generation_max: int = 5
    pcie_width: int = 16
    pcie_width_max: int = 16


class GpuNvlinks(GpuPcieLink, frozen=True, kw_only=True):
    """A GPU's links to other GPUs, and the fabric that they form."""

    nvlinks: int = 18
    nvlinks_down: int = 0
    nvlink_version: int = 4  # 5: Blackwell, which has other counters
    nvlink_errors: int = 0  # of link 0
    nvlink_recovery_failures: int = 0  # of link 0
    links: dict[str, VirtualLink] = {}  # what single links count, by number
    nvlink_far_device: int = 2  # 0: the links lead to GPUs; 2: to NVSwitches
    nvlink_kib: int = 0  # sent by all links, and received as well
    unreachable_gpus: tuple[int, ...] = ()  # indices of GPUs that this one does not reach over NVLink
    fabric_state: int | None = 3  # 0 not supported, 1 not started, 2 in progress, 3 completed
    fabric_status: int = 0  # NVML error with which joining the fabric ended
    fabric_clique: int = 0
    fabric_health: int = FABRIC_HEALTHY  # NVML's health mask
    c2c_links: int = 0
    c2c_links_down: int = 0


class VirtualGpu(GpuNvlinks, frozen=True, kw_only=True):
    """One GPU; the defaults are a healthy H100 SXM5 at moderate load. None means that NVML reports "not supported"."""


class VirtualPort(VirtualPciErrors, frozen=True, kw_only=True):
    """One network port. ``address``, ``pci_bus_id``, ``board`` and ``firmware`` identify it to a vendor."""

    kind: Literal["infiniband", "ethernet"] = "infiniband"
    address: str = ""
    pci_bus_id: str = ""
    board: str = "MT_0000000838"
    firmware: str = "28.39.1002"
    driver: str = "mlx5_core"
    usb: bool = False  # on USB instead of PCI, as the management controller's
    virtual_function: bool = False  # an SR-IOV function
    default_route: bool = False
    enabled: bool = True  # whether the administrator wants it up
    up: bool = True
    phys_state: str = ""  # of InfiniBand; default: LinkUp, Polling or Disabled, by the two before
    moved: bool = False  # in a container; the device stays
    missing: bool = False  # the device has left the bus
    rate_gbps: float = 400.0
    width: int = 4  # lanes of an InfiniBand link
    link_layer: str = ""  # of an RDMA device; default: that of its driver
    bond: str = ""  # bond that an Ethernet port belongs to
    errors: int = 0  # symbol errors of InfiniBand, receive errors of Ethernet
    counters: dict[str, int] = {}  # further counters, by the kernel's names
    link_downs: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a counter that no sensor reads."""
        if unknown := self.counters.keys() - COUNTER_FOLDERS[self.counter_kind].keys():
            raise ValueError(f"no counter {', '.join(sorted(unknown))} of {self.counter_kind} ports is read")

    @property
    def counter_kind(self) -> str:
        """Kind of the port in ``COUNTERS``."""
        return EFA_DRIVER if self.driver == EFA_DRIVER else self.kind


COUNTER_FOLDERS = {
    kind: {name: folder for folder, names in reversed(folders.items()) for name in names}
    for kind, folders in COUNTERS.items()
}
"""Folder of each counter below the port's, by kind of port."""


class VirtualPciDevice(StrictScenarioStruct, frozen=True, kw_only=True):
    """A graphics device or accelerator of another vendor than NVIDIA."""

    address: str
    vendor: str = "0x1002"
    kind: str = "0x120000"  # its PCI class
    driver: str = "amdgpu"
    memory_bytes: int | None = None  # as amdgpu shows it


class VirtualModule(StrictScenarioStruct, frozen=True, kw_only=True):
    """What the kernel counts of one memory module."""

    corrected: int = 0
    uncorrected: int = 0


class VirtualArray(StrictScenarioStruct, frozen=True, kw_only=True):
    """One RAID array of two disks; ``faulty`` of them have failed and are still its members."""

    level: str = "raid1"
    state: str = "clean"
    sync_action: str = "idle"
    degraded: int | None = 0  # None: an array without redundancy
    faulty: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0


class VirtualDisk(StrictScenarioStruct, frozen=True, kw_only=True):
    """One disk: an NVMe controller if its name begins with nvme, or else a SATA disk."""

    state: str = ""  # default: "live" or "running"
    subsystem: str = ""  # that of the NVMe controllers that are paths to one disk
    usb: bool = False
    io_errors: int = 0


class VirtualUnit(StrictScenarioStruct, frozen=True, kw_only=True):
    """One unit of systemd."""

    load: str = "loaded"
    active: str = "active"
    result: str = "success"
    restarts: int = 0


def _named(struct: Callable[[], T], *names: str) -> Callable[[], dict[str, T]]:
    return lambda: {name: struct() for name in names}


class HostIdentity(StrictScenarioStruct, frozen=True, kw_only=True):
    """The machine's names and its kernel."""

    vendor: HardwareText = "NVIDIA"
    product: HardwareText = "DGXH100"
    serial: HardwareText = ""
    chassis_serial: HardwareText = ""
    kernel: HardwareText = "5.15.0-1046-nvidia"


class HostLoad(HostIdentity, frozen=True, kw_only=True):
    """The machine's size, and how busy it is."""

    uptime_s: float = 86_400.0
    memory_available_fraction: Fraction = 0.9
    memory_total_bytes: int = 2 << 40
    cpus: Annotated[int, msgspec.Meta(ge=1)] = 224
    stuck_processes: int = 0
    zombies: int = 0
    in_container: bool = False  # the agent sees the processes of its container only
    load: float = 1.0
    cpu_pressure: Fraction = 0.1
    memory_pressure: Fraction = 0.0
    io_pressure: Fraction = 0.05
    open_files_fraction: Fraction = 0.01


class VirtualHost(HostLoad, frozen=True, kw_only=True):
    """The machine around the GPUs, with its storage, its units and the records of the boot before."""

    free_fraction: Fraction = 0.5
    free_inode_fraction: Fraction | None = 0.9
    free_shared_memory_fraction: Fraction = 0.9  # of what the vault leaves in /dev/shm
    mount_silent_s: float = 0.0
    modules: dict[str, VirtualModule] = msgspec.field(default_factory=_named(VirtualModule, "mc0/dimm0", "mc1/dimm0"))
    arrays: dict[str, VirtualArray] = msgspec.field(default_factory=_named(VirtualArray, "md0"))
    panic_lines: tuple[str, ...] = ()  # lines of the panic in which the boot before ended
    earlier_lines: tuple[str, ...] = ()  # last kernel lines of that boot, in the journal
    units: dict[str, VirtualUnit] = msgspec.field(default_factory=_named(VirtualUnit, "slurmd.service"))
    disks: dict[str, VirtualDisk] = msgspec.field(default_factory=_named(VirtualDisk, "nvme0", "nvme1", "sda"))


class VirtualFabric(StrictScenarioStruct, frozen=True, kw_only=True):
    """The NVLink fabric around the GPUs, and GPUs of other vendors."""

    switches: int = 4  # NVSwitches on the PCI bus, if the GPUs have NVLinks
    switch_driver: str = "nvidia-nvswitch"
    manager: bool = True  # whether the Fabric Manager runs
    host_processes: bool = True  # whether the agent sees the host's processes
    imex_nodes: tuple[str, ...] = ()  # addresses in nodes_config.cfg
    imex_enabled: bool = False  # whether systemd starts nvidia-imex
    imex_channels: int = 0
    imex: bool = False  # whether nvidia-imex runs
    other_gpus: tuple[VirtualPciDevice, ...] = ()


class Scenario(StrictScenarioStruct, frozen=True, kw_only=True):
    """A virtual machine. ``nvml_error`` is the result of opening NVML (12: no library, 9: driver not loaded)."""

    name: str = "default"
    boot_id: str = "virtual-boot-1"
    driver_version: str = "570.133.20"
    nvml_error: int = 0
    gpu: tuple[VirtualGpu, ...] = ()
    port: dict[str, VirtualPort] = {}
    host: VirtualHost = VirtualHost()
    fabric: VirtualFabric = VirtualFabric()


class ScenarioControl(StrictScenarioStruct, frozen=True, kw_only=True):
    """The control file (JSON, replaced atomically): the current differences from the scenario.

    ``gpus``, ``ports``, ``host`` and ``fabric`` hold only the keys that differ, GPUs by index. ``kernel_lines`` are
    lines of the kernel log; lines beyond the number already emitted are emitted. Omitted keys are as in the scenario.
    """

    boot_id: str | None = None
    nvml_error: int | None = None
    gpus: dict[str, dict[str, msgspec.Raw]] = {}
    ports: dict[str, dict[str, msgspec.Raw]] = {}
    host: dict[str, msgspec.Raw] = {}
    fabric: dict[str, msgspec.Raw] = {}
    kernel_lines: tuple[str, ...] = ()


class ScenarioFile(Scenario, frozen=True, kw_only=True):
    """A hand-written scenario: ``gpus = 8`` makes that many GPUs; ``[[gpu]]`` describes single ones by position."""

    name: str = "unnamed"
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None


# Loading of scenarios, in the supervisor: a typo is reported at once, and the sensor process stays small.

DEFAULT_GPUS = 8
MAX_GPUS = 64


_SCENARIO_PARTS = (
    *(ScenarioFile, VirtualGpu, VirtualHost, VirtualPort, VirtualFabric, VirtualPciDevice),
    *(VirtualModule, VirtualArray, VirtualDisk, VirtualUnit),
)


def load_scenario(source: str, node: str) -> Scenario:
    """Return the scenario that ``source`` names: a TOML file, ``default`` (8 GPUs) or ``default:N``. Serial numbers and
    UUIDs derive from ``node``. Raises ConfigurationError if the scenario cannot be used."""
    if source == "default" or source.startswith("default:"):
        ports = {f"mlx5_{index}": VirtualPort() for index in range(2)}
        return _build(ScenarioFile(name="default", gpus=_default_count(source), port=ports), node)
    return _build(load_toml(Path(source), ScenarioFile, _SCENARIO_PARTS), node)


def _default_count(which: str) -> int:
    _, colon, count = which.partition(":")
    if not colon:
        return DEFAULT_GPUS
    if not count.isdigit() or int(count) > MAX_GPUS:
        raise ConfigurationError(f"{which!r}: use default, default:N with N up to {MAX_GPUS}, or a scenario file")
    return int(count)


def _build(file: ScenarioFile, node: str) -> Scenario:
    count = len(file.gpu) if file.gpus is None else file.gpus
    if count < len(file.gpu):
        raise ConfigurationError(f"scenario {file.name!r}: gpus = {count}, but {len(file.gpu)} [[gpu]] are described")
    described = [*file.gpu, *(VirtualGpu() for _ in range(count - len(file.gpu)))]
    number = int(xxhash.xxh3_64_hexdigest(node.encode())[:10], 16)
    return _shared_fields(
        Scenario,
        file,
        gpu=tuple(_with_identity(gpu, index, node) for index, gpu in enumerate(described)),
        port={name: _with_defaults(port, address=_guid(f"{node}/{name}")) for name, port in file.port.items()},
        host=_with_defaults(file.host, serial=str(number), chassis_serial=f"C{number}"),
    )


def _guid(name: str) -> str:
    digest = xxhash.xxh3_64_hexdigest(name.encode())
    return ":".join(digest[i : i + 4] for i in range(0, 16, 4))


def _with_identity(gpu: VirtualGpu, index: int, node: str) -> VirtualGpu:
    digest = xxhash.xxh3_128_hexdigest(f"{node}/{index}".encode())
    uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
    bus = DGX_BUS_IDS[index] if index < len(DGX_BUS_IDS) else f"{index:02x}:00"
    gpu = msgspec.structs.replace(gpu, power_limit_default_w=gpu.power_limit_default_w or gpu.power_limit_w)
    return _with_defaults(gpu, uuid=uuid, pci_bus_id=f"0000:{bus}", serial=str(int(digest[:10], 16)))


MAX_CONTROL_BYTES = 1 << 20
DRIVER_NOT_LOADED = 9
"""NVML_ERROR_DRIVER_NOT_LOADED of nvml.h; the agent imports this module without NVML."""


class VirtualMachine:
    """The machine that the virtual drivers read. A bad control file changes nothing but ``error``."""

    def __init__(self, scenario: Scenario, control_path: str, is_resumed: bool = False) -> None:
        """If ``is_resumed``, another process has already emitted the control file's events."""
        self._scenario = scenario
        self._control_path = control_path
        self._lock = threading.RLock()
        self._skip_first_events = is_resumed
        self._stamp: tuple[int, int, int] | None = None
        self._emitted_lines = 0
        self._lines: list[str] = []
        self._events: list[tuple[int, int]] = []
        self.error = ""
        self.boot_id = scenario.boot_id
        self.driver_version = scenario.driver_version
        self.nvml_error = scenario.nvml_error
        self.gpus: list[VirtualGpu] = list(scenario.gpu)
        self.host: VirtualHost = scenario.host
        self.fabric: VirtualFabric = scenario.fabric
        self.ports: dict[str, VirtualPort] = dict(scenario.port)
        self._emit_xids([VirtualGpu()] * len(self.gpus))

    def reload_control(self) -> bool:
        """Apply a changed control file. Returns whether there was one. Any thread may call this."""
        with self._lock:
            return self._reload_control()

    def _reload_control(self) -> bool:
        try:
            status = os.stat(self._control_path)
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.error = ""
        try:
            with open(self._control_path, "rb") as file:
                self._apply(msgspec.json.decode(file.read(MAX_CONTROL_BYTES), type=ScenarioControl))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            detail = explain_error(error, (ScenarioControl,)) if isinstance(error, msgspec.ValidationError) else error
            self.error = f"control file {self._control_path}: {detail}"
        return True

    def take_events(self) -> list[tuple[int, int]]:
        """Return the (GPU index, XID) pairs due since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def take_lines(self) -> list[str]:
        """Return the kernel lines due since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def pci_gpus(self) -> tuple[PciGpu, ...]:
        """Return the GPUs on the PCI bus. A driver that is not loaded is bound to none."""
        unloaded = self.nvml_error == DRIVER_NOT_LOADED
        return tuple(
            PciGpu(gpu.pci_bus_id, "" if unloaded and gpu.driver == NVIDIA_DRIVER else gpu.driver, not gpu.hidden)
            for gpu in self.gpus
            if not gpu.missing
        )

    def show_units(self, units: Sequence[str]) -> str:
        """Return what ``systemctl show`` prints of the units."""
        missing = VirtualUnit(load="not-found", active="inactive")
        shown = (self.host.units.get(unit, missing) for unit in units)
        return "\n\n".join(
            f"LoadState={unit.load}\nActiveState={unit.active}\nResult={unit.result}\nNRestarts={unit.restarts}"
            for unit in shown
        )

    def journal_lines(self) -> tuple[str, ...]:
        """Return the last kernel lines of the boot before."""
        return self.host.earlier_lines

    def path_samples(self) -> tuple[PathSample, ...]:
        host = self.host
        inodes = host.free_inode_fraction
        return (
            PathSample(
                path="/", free_fraction=host.free_fraction, free_inode_fraction=inodes, silent_s=host.mount_silent_s
            ),
            PathSample(path="/dev/shm", free_memory_fraction=host.free_shared_memory_fraction),  # noqa: S108 - simulated
        )

    def _apply(self, control: ScenarioControl) -> None:
        before, scenario = self.gpus, self._scenario
        gpus = [_apply_changes(gpu, control.gpus.get(str(i), {}), f"gpus.{i}") for i, gpu in enumerate(scenario.gpu)]
        if unknown := control.gpus.keys() - {str(index) for index in range(len(gpus))}:
            raise ValueError(f"no GPU {', '.join(sorted(unknown))}: this machine has {len(gpus)}, numbered from 0")
        if unknown := control.ports.keys() - scenario.port.keys():
            raise ValueError(f"no port {', '.join(sorted(unknown))}: there are {', '.join(sorted(scenario.port))}")
        ports = {n: _apply_changes(p, control.ports.get(n, {}), f"ports.{n}") for n, p in scenario.port.items()}
        self.host = _apply_changes(scenario.host, control.host, "host")
        self.fabric = _apply_changes(scenario.fabric, control.fabric, "fabric")
        self.gpus, self.ports = gpus, ports
        self.boot_id = scenario.boot_id if control.boot_id is None else control.boot_id
        self.nvml_error = scenario.nvml_error if control.nvml_error is None else control.nvml_error
        if not self._skip_first_events:
            self._lines += control.kernel_lines[self._emitted_lines :]
            self._emit_xids(before)
        self._skip_first_events = False
        self._emitted_lines = len(control.kernel_lines)

    def _emit_xids(self, before: list[VirtualGpu]) -> None:
        """Emit the XIDs that are new against ``before``, in the log and as events, like the driver."""
        if self._skip_first_events:
            return
        for index, (old, new) in enumerate(zip(before, self.gpus, strict=True)):
            if new.xid is not None and new.xid != old.xid:
                self._events.append((index, new.xid))
                self._lines.append(f"NVRM: Xid (PCI:{new.pci_bus_id}): {new.xid}, raised by the control file")


def _shared_fields(kind: type[S], source: msgspec.Struct, **others: Any) -> S:
    """Return a ``kind`` with ``others`` and the values of those of its fields that ``source`` has too."""
    shared = {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}
    return kind(**shared | others)


def _with_defaults(struct: S, **defaults: str) -> S:
    """Return the struct with these values for its empty fields."""
    return msgspec.structs.replace(struct, **{name: getattr(struct, name) or text for name, text in defaults.items()})


def _apply_changes(base: S, changes: dict[str, msgspec.Raw], location: str) -> S:
    if not changes:
        return base
    values = msgspec.structs.asdict(base) | {key: msgspec.json.decode(raw) for key, raw in changes.items()}
    try:
        return msgspec.convert(values, type(base))
    except msgspec.ValidationError as error:
        raise ValueError(f"{location}: {explain_error(error, (type(base),))}") from error
