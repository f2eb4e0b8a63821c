"""Plain samples of the sensors, without judgement.

``None`` means that the device does not offer the value or that it could not be read; it never stands for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base class; encoded as an array, since both ends are of one installation."""


class SamplePart(Sample, frozen=True, kw_only=True):
    """Base class of a sample's parts. Rules name a part's values as if they were the sample's own."""


@cache
def value_hints(kind: type[msgspec.Struct]) -> dict[str, tuple[str, Any]]:
    """Return path and type of each field and property of a sample and its parts, by name.

    The path of ``remap_pending`` is ``memory_errors.remap_pending``.
    """
    found: dict[str, tuple[str, Any]] = {}
    hints = get_type_hints(kind)
    for name in kind.__struct_fields__:
        if isinstance(hints[name], type) and issubclass(hints[name], SamplePart):
            inner = value_hints(hints[name])
            found |= {each: (f"{name}.{path}", hint) for each, (path, hint) in inner.items()}
        else:
            found[name] = name, hints[name]
    for name, member in vars(kind).items():
        if isinstance(member, property):
            found[name] = name, get_type_hints(member.fget).get("return")
    return found


@cache
def value_reader(kind: type[msgspec.Struct], name: str) -> Callable[[Any], Any]:
    """Return the function that reads the value of this name from a sample. Raises KeyError for an unknown name."""
    return attrgetter(value_hints(kind)[name][0])


def flat_fields(sample: Sample) -> dict[str, Any]:
    """Return the fields of a sample and of its parts, by name."""
    fields: dict[str, Any] = {}
    for name in sample.__struct_fields__:
        value = getattr(sample, name)
        fields |= flat_fields(value) if isinstance(value, SamplePart) else {name: value}
    return fields


class NvlinkFabricSample(Sample, frozen=True, kw_only=True):
    """The NVLink fabric of the node as a whole."""

    switches: int | None = None  # NVSwitches on the PCI bus that the NVIDIA driver holds
    manager_running: bool | None = None  # the Fabric Manager; None if the host's processes cannot be seen
    imex_wanted: bool = False  # a domain is configured, its service is enabled and processes use GPUs
    imex_running: bool | None = None
    domains: int | None = None  # different fabrics and cliques that the node's GPUs have joined
    unreachable_pairs: int | None = None  # pairs of GPUs that do not reach each other while most do
    detail: str = ""  # which ones

    @property
    def manager_missing(self) -> int | None:
        """1 if there are NVSwitches and no Fabric Manager; None if unknown, and without switches of its own."""
        return None if not self.switches or self.manager_running is None else int(not self.manager_running)

    @property
    def imex_missing(self) -> int | None:
        return None if self.imex_running is None else int(self.imex_wanted and not self.imex_running)


class OtherGpusSample(Sample, frozen=True, kw_only=True):
    """The GPUs of a vendor that the agent cannot watch."""

    vendor: str
    unwatched: int


class PortRole(StrEnum):
    """Use of a network port. Only ports of a role in ``FABRIC_ROLES`` can make findings."""

    COMPUTE = "compute"
    STORAGE = "storage"
    MANAGEMENT = "management"
    VIRTUAL = "virtual"  # a function that is made for, and moves into, containers and virtual machines
    OUT_OF_BAND = "out_of_band"  # USB: the management controller's, or what a person has plugged in
    UNKNOWN = "unknown"


FABRIC_ROLES = (PortRole.COMPUTE, PortRole.STORAGE)

IFF_UP = 0x1
"""Interface flag: the administrator wants the port up (Linux, include/uapi/linux/if.h)."""


class PortPresence(StrEnum):
    """Where a port is. ELSEWHERE: its device is there, so the port is in a container or its driver is reloaded."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    GONE = "gone"  # the device has left the bus


LINK_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "rx_errors",
    "tx_errors",
)
"""Counters of a port whose sum is its number of errors."""


class InfinibandGrowth(SamplePart, frozen=True, kw_only=True):
    """Growth of the counters of an InfiniBand port itself."""

    symbol_error: int | None = None
    link_error_recovery: int | None = None  # the link was trained again, and is up
    port_rcv_errors: int | None = None
    local_link_integrity_errors: int | None = None  # the link had more errors at once than it may have
    excessive_buffer_overrun_errors: int | None = None
    port_xmit_discards: int | None = None


class RdmaGrowth(SamplePart, frozen=True, kw_only=True):
    """Growth of the RDMA counters of mlx5, for InfiniBand and RoCE."""

    rnr_nak_retry_err: int | None = None  # a peer had no buffer ready
    local_ack_timeout_err: int | None = None  # a peer did not acknowledge in time
    req_transport_retries_exceeded: int | None = None  # connections that were given up after such time-outs
    out_of_sequence: int | None = None
    packet_seq_err: int | None = None  # a peer missed packets
    implied_nak_seq_err: int | None = None
    roce_slow_restart: int | None = None
    roce_adp_retrans: int | None = None
    rx_icrc_encapsulated: int | None = None  # RoCE packets that were changed on their way


class EfaGrowth(SamplePart, frozen=True, kw_only=True):
    """Growth of the counters of an EFA device."""

    rdma_read_wr_err: int | None = None
    rdma_write_wr_err: int | None = None
    retrans_timeout_events: int | None = None
    impaired_remote_conn_events: int | None = None  # connections whose rate was lowered
    unresponsive_remote_events: int | None = None
    no_completion_cmds: int | None = None  # commands that the device did not answer


class EthernetGrowth(SamplePart, frozen=True, kw_only=True):
    """Growth of the counters of an Ethernet port."""

    rx_errors: int | None = None
    rx_crc_errors: int | None = None
    rx_missed_errors: int | None = None  # frames for which the host had no buffer
    tx_carrier_errors: int | None = None


class PortCounterGrowth(Sample, frozen=True, kw_only=True):
    """Growth of a compute or storage port's counters, by the kernel's names, since the sensor started.

    It starts again at 0 when the device's counter does. Errors of a link in training are left out.
    """

    infiniband: InfinibandGrowth = InfinibandGrowth()
    rdma: RdmaGrowth = RdmaGrowth()
    efa: EfaGrowth = EfaGrowth()
    ethernet: EthernetGrowth = EthernetGrowth()


class PortSample(Sample, frozen=True, kw_only=True):
    """One network port."""

    name: str
    kind: str
    up: bool
    was_up: bool  # since the sensor started and the port was last enabled, so that being down is news
    role: PortRole = PortRole.UNKNOWN
    presence: PortPresence = PortPresence.HERE
    state: str = ""  # "ACTIVE", "DOWN", ... of InfiniBand; RFC 2863's operational state of Ethernet
    phys_state: str = ""  # "LinkUp", "Polling", "Disabled", ... of InfiniBand
    flags: int | None = None  # interface flags of Ethernet
    link_layer: str = ""
    is_asleep: bool = False  # whether the port saves power
    rate_gbps: float | None = None
    best_rate_gbps: float | None = None  # since the port was last enabled
    usual_rate_gbps: float | None = None  # of most ports of its kind on the node
    width: int | None = None  # lanes of an InfiniBand link
    best_width: int | None = None  # since the port was last enabled
    bond: str = ""  # bond whose other ports are up, of a port that is down
    counters: dict[str, int] = {}  # as the device has them
    counts: PortCounterGrowth = PortCounterGrowth()  # what of them is judged
    link_downs: int | None = None
    identity: dict[str, str] = {}  # address, pci_bus_id, board, firmware, rdma and gpus, as far as they are known

    @property
    def is_fabric(self) -> bool:
        """Whether the port's link is judged. That of a RoCE port is its Ethernet port's.

        RoCE drivers show the physical state "Disabled" without a cable, too, so only the Ethernet port tells the
        administrator's wish.
        """
        is_roce = self.kind == "infiniband" and self.link_layer == "Ethernet"
        return self.role in FABRIC_ROLES and not is_roce

    @property
    def is_enabled(self) -> bool:
        """Whether the administrator wants the port up; unknown counts as yes."""
        if self.kind == "infiniband":
            return self.phys_state != "Disabled"
        return self.flags is None or bool(self.flags & IFF_UP)

    @property
    def has_signal(self) -> bool:
        """Whether the cable has a signal, though the port may not be usable yet."""
        if self.kind == "infiniband":
            return self.up or self.phys_state == "LinkUp"
        return self.up or self.state in ("dormant", "testing")

    @property
    def errors(self) -> int | None:
        """Errors that the device counted, None for ports whose counters are not read."""
        found = [count for name in LINK_ERRORS if (count := self.counters.get(name)) is not None]
        return sum(found) if found else None

    @property
    def lost_link(self) -> int | None:
        """1 if the link is lost and no bond has another port that is up; see ``_lost_link``."""
        return 0 if self.bond and self._lost_link else self._lost_link

    @property
    def lost_bond_link(self) -> int | None:
        """1 if the link is lost and other ports of its bond carry the traffic; see ``_lost_link``."""
        return self._lost_link if self.bond or not self._lost_link else 0

    @property
    def _lost_link(self) -> int | None:
        """1 if the link is down after having been up, 0 if it is up or administratively down, else None.

        None for ports that are not judged, were never up (an empty socket is no fault) or have lost their device.
        """
        if not self.is_fabric or self.presence is PortPresence.GONE:
            return None
        if self.presence is PortPresence.ELSEWHERE or not self.is_enabled or self.is_asleep or self.has_signal:
            return 0
        return 1 if self.was_up else None

    @property
    def unconfigured(self) -> int | None:
        """1 if the link has a signal and no subnet manager has made it active."""
        if not self.is_fabric or self.kind != "infiniband" or self.presence is not PortPresence.HERE:
            return None
        return int(self.phys_state == "LinkUp" and not self.up)

    @property
    def lanes_missing(self) -> int | None:
        """Lanes fewer than the link had before."""
        if not self.is_fabric or not self.up or self.width is None or self.best_width is None:
            return None
        return self.best_width - self.width

    @property
    def rate_fraction(self) -> float | None:
        """Rate of the link as a fraction of the port's best. A link that lost lanes has a lower rate, too."""
        return self._fraction_of(self.best_rate_gbps)

    @property
    def peer_rate_fraction(self) -> float | None:
        """Rate of the link as a fraction of that of most ports of its kind."""
        return self._fraction_of(self.usual_rate_gbps)

    def _fraction_of(self, rate_gbps: float | None) -> float | None:
        if not self.is_fabric or not self.up or self.rate_gbps is None or not rate_gbps:
            return None
        return self.rate_gbps / rate_gbps

    @property
    def link_losses(self) -> int | None:
        """Link losses of a port that is judged and up again, those between two polls included."""
        return self.link_downs if self.is_fabric and self.up else None

    @property
    def device_gone(self) -> int | None:
        """1 if the device of a port that was up has left the bus."""
        return int(self.presence is PortPresence.GONE and self.was_up) if self.is_fabric else None


class PathSample(Sample, frozen=True, kw_only=True):
    """One file system. ``silent_s``: seconds that a query has gone unanswered (a dead NFS server)."""

    path: str
    free_fraction: float | None = None  # None for read-only file systems and for the memory file system
    free_inode_fraction: float | None = None
    free_memory_fraction: float | None = None  # of the memory file system, without the vault's own files
    silent_s: float = 0.0


class HostSample(Sample, frozen=True, kw_only=True):
    """The machine itself. ``stuck_processes`` are in uninterruptible sleep (state D)."""

    uptime_s: float | None = None
    memory_available_fraction: float | None = None
    memory_total_bytes: int | None = None
    stuck_processes: int | None = None
    zombies: int | None = None
    load: float | None = None
    cpu_pressure: float | None = None  # share of five minutes in which some process waited for a processor
    memory_pressure: float | None = None  # share in which all busy processes waited for memory
    io_pressure: float | None = None  # share in which all busy processes waited for disks or network file systems
    open_files_fraction: float | None = None  # open files out of those that the kernel permits
    clock_skew_s: float | None = None
    error: str = ""

    @property
    def unreadable(self) -> int:
        return int(bool(self.error))

    @property
    def clock_skew_magnitude_s(self) -> float | None:
        return None if self.clock_skew_s is None else abs(self.clock_skew_s)


class InventorySample(Sample, frozen=True, kw_only=True):
    """Parts of the machine, whatever driver or container uses them."""

    cpus: int | None = None  # processors that are online
    gpus: int | None = None  # GPUs on the PCI bus
    network_devices: tuple[str, ...] | None = None  # PCI addresses


class MemoryModuleSample(Sample, frozen=True, kw_only=True):
    """Errors of one memory module since its driver was loaded, or those of a controller that belong to no module."""

    name: str  # "mc0/dimm3", or "mc0"
    label: str = ""  # of the slot, such as "CPU_SrcID#0_MC#0_Chan#1_DIMM#0"
    corrected: int | None = None
    uncorrected: int | None = None

    @property
    def subject(self) -> str:
        """The controller, by its name in the kernel log."""
        return self.name.partition("/")[0].upper()

    @property
    def detail(self) -> str:
        return self.label or self.name

    @property
    def identity(self) -> dict[str, str]:
        return {"module": self.name, "label": self.label}


class PciErrorSample(Sample, frozen=True, kw_only=True):
    """Errors of the link of a GPU, an NVSwitch or an RDMA adapter since boot, as one end of the link counts them."""

    name: str  # PCI address of the end
    device: str  # that of the device, at the lower end
    corrected: int | None = None
    nonfatal: int | None = None
    fatal: int | None = None

    @property
    def subject(self) -> str:
        return self.name

    @property
    def detail(self) -> str:
        return self.device

    @property
    def identity(self) -> dict[str, str]:
        return {} if self.device == self.name else {"device": self.device}


class RaidArraySample(Sample, frozen=True, kw_only=True):
    """One RAID array of the kernel (md)."""

    name: str
    level: str = ""
    state: str = ""  # "clean", "active", "broken", ...; "" for an array that was stopped
    sync_action: str = ""  # "idle", "check", "resync", "recover", ...
    missing: int | None = None  # disks fewer than it should have; None without redundancy
    faulty: tuple[str, ...] = ()  # disks that failed and are still members
    was_whole: bool = True  # since the sensor started, or it was there before: then being degraded is news

    @property
    def subject(self) -> str:
        return self.name

    @property
    def detail(self) -> str:
        return f"{self.level}; failed: {', '.join(self.faulty)}" if self.faulty else self.level

    @property
    def identity(self) -> dict[str, str]:
        return {"level": self.level}

    @property
    def lost_disks(self) -> int | None:
        """Disks that it has lost. While an operator adds disks and they are filled, none is."""
        if self.missing is None:
            return None
        is_filling = self.sync_action in ("recover", "reshape", "frozen")
        missing = self.missing if self.was_whole and not is_filling else 0
        return max(missing, len(self.faulty))

    @property
    def not_yet_added(self) -> int | None:
        """Disks that it has not had yet: an array may be made before its last disk is there."""
        return None if self.missing is None else 0 if self.was_whole else self.missing

    @property
    def is_broken(self) -> int | None:
        """1 if it has too few disks for its data."""
        return int(self.state == "broken") if self.state else None


class DiskSample(Sample, frozen=True, kw_only=True):
    """One NVMe controller, or one SCSI or SATA disk."""

    name: str
    state: str = ""  # "live", "resetting", ... of NVMe; "running", "offline", ... of SCSI; "" if it has left
    model: str = ""
    serial: str = ""
    firmware: str = ""
    transport: str = ""
    subsystem: str = ""
    paths: int = 1  # controllers of its subsystem
    io_errors: int | None = None  # commands of SCSI that failed, those that a disk does not support included

    @property
    def subject(self) -> str:
        return self.name

    @property
    def detail(self) -> str:
        path = f", one of {self.paths} paths of {self.subsystem}" if self.paths > 1 else ""
        return f"{self.state}{path}"

    @property
    def identity(self) -> dict[str, str]:
        return {"model": self.model, "serial": self.serial, "firmware": self.firmware}

    @property
    def is_up(self) -> int | None:
        """1 if the disk takes commands."""
        return int(self.state in ("live", "running")) if self.state else None

    @property
    def is_dead(self) -> int | None:
        """1 if the kernel has given the NVMe controller up."""
        return int(self.state == "dead") if self.state else None

    @property
    def is_unready(self) -> int | None:
        """1 while an NVMe controller takes no commands; an operator who removes one makes it "deleting"."""
        return int(self.state in ("new", "resetting", "connecting")) if self.state else None

    @property
    def is_offline(self) -> int | None:
        """1 if the kernel has given the SCSI disk up, or has lost all paths to it."""
        return int(self.state in ("offline", "transport-offline")) if self.state else None


class UnitSample(Sample, frozen=True, kw_only=True):
    """One unit of systemd that the site watches."""

    name: str
    load_state: str = ""
    active_state: str = ""
    result: str = ""  # why it failed: "exit-code", "oom-kill", ...
    restarts: int | None = None  # by systemd, since the unit was loaded
    was_active: bool = False  # since the sensor started

    @property
    def subject(self) -> str:
        return self.name

    @property
    def detail(self) -> str:
        return self.result or self.active_state

    @property
    def identity(self) -> dict[str, str]:
        return {}

    @property
    def is_active(self) -> int | None:
        return int(self.active_state in ("active", "reloading")) if self.active_state else None

    @property
    def has_failed(self) -> int | None:
        return int(self.active_state == "failed") if self.active_state else None

    @property
    def is_stopped(self) -> int | None:
        """1 if it was active and has been stopped; a unit that ends by itself is stopped, too."""
        return int(self.active_state == "inactive" and self.was_active) if self.active_state else None

    @property
    def is_unknown(self) -> int | None:
        """1 if there is no such unit."""
        return int(self.load_state == "not-found") if self.load_state else None


MachinePart = MemoryModuleSample | PciErrorSample | RaidArraySample | DiskSample | UnitSample
"""A part of the machine, with the ``subject``, the ``detail`` and the ``identity`` that its findings show."""


class HardwareSamples(Sample, frozen=True, kw_only=True):
    """What changes seldom."""

    is_new: bool = False  # whether they were read at this poll
    memory: tuple[MemoryModuleSample, ...] = ()
    pci: tuple[PciErrorSample, ...] = ()
    arrays: tuple[RaidArraySample, ...] = ()
    disks: tuple[DiskSample, ...] = ()
    units: tuple[UnitSample, ...] = ()

    @property
    def by_scope(self) -> dict[str, tuple[MachinePart, ...]]:
        """The samples by the word with which the metrics of rules begin."""
        return {
            "memory": self.memory,
            "pci": self.pci,
            "array": self.arrays,
            "disk": self.disks,
            "unit": self.units,
        }


EARLIER_BOOT_S = 86_400.0
"""Seconds since boot for which the end of the boot before is news."""


class EarlierBoot(Sample, frozen=True, kw_only=True):
    """What the boot before this one left."""

    panicked_at: float = 0.0  # wall time of its panic; 0 for none
    panic_lines: tuple[str, ...] = ()  # its last kernel lines, from the record of the panic
    log_lines: tuple[str, ...] = ()  # its last kernel lines, from the journal


class EarlierBootSample(Sample, frozen=True, kw_only=True):
    """Judgement of the boot before this one."""

    panics: int = 0
    faults: int = 0  # lines of its kernel log that would be critical in this boot
    detail: str = ""


class NvmlState(Sample, frozen=True, kw_only=True):
    """NVML as a whole, or the library of another vendor. All values but ``is_open`` are empty while it works."""

    is_open: bool = False  # whether the sensor process holds it open
    error: str = ""  # the reason no GPU could be read
    error_code: int = 0  # the error of opening it, by the library's own number
    busy_with: str = ""  # the work on it as a whole that has not ended, such as its initialization
    hung_s: float = 0.0  # seconds that this work takes longer than it may
    paused_s: float | None = None  # seconds since a person or a program ordered it to be let go


class PciGpuCounts(Sample, frozen=True, kw_only=True):
    """NVIDIA's GPUs on the PCI bus."""

    usable: int | None = None  # that NVML should list to the sensor process; None without a readable bus
    unbound: int = 0  # without a kernel driver
    hidden: int = 0  # that the sensor process may not see


class SensorState(Sample, frozen=True, kw_only=True):
    """Health of the sensing itself."""

    hangs: int | None = None  # consecutive polls that missed their deadline; 0 after a good one
    crashes: int | None = None  # consecutive ends of the sensor process
    nvml_failed: int | None = None  # 1 if GPUs are expected and NVML lists none, for none of the next three reasons
    nvml_hung_s: float | None = None  # seconds that NVML as a whole has not answered, beyond what it may take
    nvml_paused_s: float | None = None  # seconds that NVML has been closed by order
    driver_missing: int | None = None  # 1 if there are GPUs and their kernel driver is not loaded
    library_missing: int | None = None  # 1 if there are GPUs and no NVML library
    library_mismatch: int | None = None  # 1 if the NVML library is of another version than the loaded driver
    gpus_unbound: int | None = None  # number of GPUs without a kernel driver while others have theirs
    gpus_hidden: int | None = None  # number of the machine's GPUs that the agent may not see
    gpus_missing: int | None = None  # number of expected GPUs that NVML does not list
    faults: int | None = None  # number of sensors that failed in the last poll
    log_failed: int | None = None  # 1 if the kernel log cannot be read
    policy_failed: int | None = None  # 1 if the site's rules have changed and cannot be loaded
    detail: str = ""  # the failed parts and the reasons
