"""Plain samples of the sensors, without judgement.

``None`` means that the device does not offer the value or that it could not be read; it never stands for zero.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

HARDWARE_SLOWDOWN, SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
"""NVML clock event reasons. The first comes with each of the last two, or alone if the GPU draws too much power."""

HARDWARE_THROTTLE_BITS = HARDWARE_SLOWDOWN | HARDWARE_THERMAL | POWER_BRAKE
HEAT_THROTTLE_BITS = SOFTWARE_THERMAL | HARDWARE_THERMAL

THROTTLE_REASONS = {
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""NVML clock event reasons that slow a GPU down against its will, by name."""

HBM_LIMIT_C = 95
"""Degrees at which the memory of a GPU slows down that does not tell its limit: H100's, by nvidia-smi -q."""

LINK_LOADED_UTILIZATION = 0.5
"""Utilization from which on a PCIe link must run at its full speed and width."""


GIB = 1 << 30


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base class; encoded as an array, since both ends are of one installation."""


class LinkSample(Sample, frozen=True, kw_only=True):
    """One NVLink of a GPU. Counters are since the driver was loaded or the GPU reset; see ``sensors/nvlinks.py``."""

    link: int
    up: bool | None = None
    was_up: bool = False  # since the sensor started
    errors: int | None = None  # replays, recoveries and CRC errors; from Blackwell on, packets lost to errors
    recoveries: int | None = None  # times that the link trained anew
    recovery_failures: int | None = None
    discards: int | None = None  # packets that were not sent
    effective_errors: int | None = None  # errors left after forward error correction
    symbol_errors: int | None = None
    raw_errors: int | None = None  # errors before forward error correction
    effective_ber: float | None = None  # bit error rates
    symbol_ber: float | None = None
    raw_ber: float | None = None
    repaired_symbols: int | None = None  # most symbols that forward error correction repaired in one block
    far_end: str = ""  # "NVSwitch 0000:c1:00 link 30", or less if NVML knows less


class FabricState(IntEnum):
    """How far a GPU has come in joining its NVLink fabric (nvml.h, NVML_GPU_FABRIC_STATE_*)."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3


MISCONFIGURATIONS = {
    2: "wrong system GUID",
    3: "wrong serial number of the chassis",
    5: "too few NVLinks",
    6: "firmware of the GPU that does not fit",
    7: "invalid location",
    8: "invalid state of the GPU",
}
"""What is wrong in a fabric's configuration (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*)."""
NO_PARTITION = 4
"""The same value's number for a GPU that an administrator has put into no partition."""


class FabricSample(Sample, frozen=True, kw_only=True):
    """One GPU's part in the NVLink fabric. Flags are 1 for yes and 0 for no."""

    state: int
    status: int | None = None  # how joining ended, as an NVML error; 0 is good
    clique: int | None = None  # GPUs of one cluster and clique reach each other
    cluster: str = ""
    has_switch_links: bool = False  # whether links that are up lead to NVSwitches
    degraded_bandwidth: int | None = None
    route_recovery: int | None = None  # routes are being recovered
    route_unhealthy: int | None = None
    access_timeout_recovery: int | None = None  # the GPU recovers from accesses that timed out
    incorrect_configuration: int | None = None  # 1 for none; see ``MISCONFIGURATIONS`` and ``NO_PARTITION``
    partition_assigned: int | None = None
    manager_disconnected: int | None = None  # the manager of a whole rack's fabric

    @property
    def is_joined(self) -> bool:
        return self.state == FabricState.COMPLETED and not self.status

    @property
    def not_joined(self) -> int | None:
        """1 if links lead to NVSwitches and the GPU has not joined; None without a fabric, as for a single GPU."""
        if self.state == FabricState.NOT_SUPPORTED or not self.has_switch_links:
            return None
        return int(self.state != FabricState.COMPLETED)

    @property
    def join_failed(self) -> int | None:
        return None if self.status is None else int(self.status != 0)

    @property
    def misconfigured(self) -> int | None:
        return None if self.incorrect_configuration is None else int(self.incorrect_configuration in MISCONFIGURATIONS)

    @property
    def unpartitioned(self) -> int | None:
        if self.incorrect_configuration is None and self.partition_assigned is None:
            return None
        return int(self.incorrect_configuration == NO_PARTITION or self.partition_assigned == 0)

    @property
    def detail(self) -> str:
        """The state and the misconfiguration in words."""
        names = {state.value: state.name.lower().replace("_", " ") for state in FabricState}
        words = [f"state {names.get(self.state, str(self.state))}"]
        words += [f"NVML error {self.status}"] if self.status else []
        words += [MISCONFIGURATIONS[self.incorrect_configuration or 0]] if self.misconfigured else []
        return ", ".join(words)


class GpuPeerSample(Sample, frozen=True, kw_only=True):
    """Whether a GPU reaches another one by peer-to-peer access over NVLink. ``status`` is NVML's; 0 is good."""

    pci_bus_id: str
    status: int


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


class GpuSample(Sample, frozen=True, kw_only=True):
    """One GPU at one poll."""

    index: int
    pci_bus_id: str
    uuid: str
    lost: bool = False  # NVML calls the GPU lost, or it has left the PCI bus
    error: str = ""  # why most values are missing
    is_closed: bool = False  # the error is that NVML as a whole is closed, which says nothing of this GPU
    hung_s: float = 0.0  # seconds that a call of this GPU has not returned
    failed_values: int = 0  # number of values that NVML offers and did not answer
    failures: str = ""  # the first of their errors

    temperature_c: int | None = None
    temperature_margin_c: int | None = None
    memory_temperature_c: int | None = None
    slowdown_temperature_c: int | None = None  # at which the hardware slows the GPU down
    memory_temperature_limit_c: int | None = None  # at which the driver slows the GPU down for its memory's sake
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None  # of the model
    energy_j: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    gpu_utilization: float | None = None
    memory_utilization: float | None = None
    recovery_action: int | None = None
    remap_pending: int | None = None
    remap_failure: int | None = None

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    ecc_dram_corrected: int | None = None
    ecc_dram_uncorrected: int | None = None
    ecc_sram_corrected: int | None = None
    ecc_sram_uncorrected: int | None = None
    ecc_sram_uncorrected_lifetime: int | None = None
    sram_threshold_exceeded: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    banks_low_on_spare_rows: int | None = None
    banks_without_spare_rows: int | None = None
    retired_pages: int | None = None
    retired_pages_pending: int | None = None  # 1 if pages are to be retired at the next reset
    ecc_mode: int | None = None  # modes: 1 on, 0 off; a pending one takes effect at the next reset
    ecc_mode_pending: int | None = None
    mig_mode: int | None = None
    mig_mode_pending: int | None = None
    persistence_mode: int | None = None
    pcie_replays: int | None = None
    pcie_fatal_errors: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None  # of the GPU and its slot together
    pcie_width: int | None = None
    pcie_width_max: int | None = None  # of the GPU and its slot together
    pcie_utilization: float | None = None  # the GPU's utilization when its link was read, at polls that read it
    nvlinks: int | None = None
    nvlinks_down: int | None = None
    nvlink_errors: int | None = None
    nvlink_recovery_failures: int | None = None
    nvlinks_down_at: tuple[int, ...] = ()  # their numbers
    links: tuple[LinkSample, ...] = ()
    links_were_read: bool = False  # whether the links were read at this poll
    nvlink_far_ends: tuple[str, ...] = ()  # by link: as ``LinkSample.far_end``, "" if unknown
    fabric: FabricSample | None = None
    c2c_links: int | None = None  # links to the CPU (NVLink-C2C) that were ever active
    c2c_links_down: int | None = None
    peers: tuple[GpuPeerSample, ...] = ()  # the node's other GPUs, as far as NVML answers
    encoder_utilization: float | None = None
    decoder_utilization: float | None = None
    memory_reserved_bytes: int | None = None  # by the driver; part of the memory in use
    nvlink_bytes: int | None = None  # sent and received by all links
    vgpu_licensed: int | None = None
    graphics_activity: float | None = None  # shares of the time since the last reading, and rates, by GPM
    tensor_activity: float | None = None
    dram_activity: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    processes: int | None = None  # that compute
    graphics_processes: int | None = None
    sees_all_processes: bool = False  # whether no container hides processes from the agent

    @property
    def is_lost(self) -> int:
        return int(self.lost)

    @property
    def fabric_state(self) -> int | None:
        return None if self.fabric is None else self.fabric.state

    @property
    def unreadable(self) -> int:
        """1 if most values failed, the GPU is not lost and none of its calls hangs."""
        return int(bool(self.error) and not self.lost and not self.is_closed and not self.hung_s)

    @property
    def partly_unreadable(self) -> int:
        """Number of values that failed on a GPU that can be read otherwise."""
        return 0 if self.error else self.failed_values

    @property
    def hardware_throttled(self) -> int | None:
        return None if self.throttle_reasons is None else int(bool(self.throttle_reasons & HARDWARE_THROTTLE_BITS))

    @property
    def heat_throttled(self) -> int | None:
        return None if self.throttle_reasons is None else int(bool(self.throttle_reasons & HEAT_THROTTLE_BITS))

    @property
    def hardware_slowdown(self) -> int | None:
        """1 while the hardware slows the GPU down for its own heat or power, not for an external power brake."""
        if self.throttle_reasons is None:
            return None
        own = HARDWARE_THERMAL if self.throttle_reasons & POWER_BRAKE else HARDWARE_THERMAL | HARDWARE_SLOWDOWN
        return int(bool(self.throttle_reasons & own))

    @property
    def software_thermal_slowdown(self) -> int | None:
        """1 while the driver slows the GPU down for heat that the hardware still tolerates."""
        if self.throttle_reasons is None:
            return None
        return int(self.throttle_reasons & HEAT_THROTTLE_BITS == SOFTWARE_THERMAL)

    @property
    def power_braked(self) -> int | None:
        return None if self.throttle_reasons is None else int(bool(self.throttle_reasons & POWER_BRAKE))

    @property
    def memory_temperature_margin_c(self) -> int | None:
        """Degrees left until the memory slows the GPU down."""
        if self.memory_temperature_c is None:
            return None
        return (self.memory_temperature_limit_c or HBM_LIMIT_C) - self.memory_temperature_c

    @property
    def power_limit_cut_w(self) -> float | None:
        """Watts by which the power limit is below the model's default."""
        if self.power_limit_w is None or self.power_limit_default_w is None:
            return None
        return self.power_limit_default_w - self.power_limit_w

    @property
    def ecc_mode_waits(self) -> int | None:
        """1 if another ECC mode waits for a reset."""
        return _differ(self.ecc_mode, self.ecc_mode_pending)

    @property
    def mig_mode_waits(self) -> int | None:
        """1 if another MIG mode waits for a reset."""
        return _differ(self.mig_mode, self.mig_mode_pending)

    @property
    def unowned_memory_gib(self) -> float | None:
        """Memory in use on a GPU without any process in GiB, 0 if it has one; None if unknown.

        Known at polls that read the slow values, outside MIG mode (whose instances reserve memory), and where the agent
        sees the processes of all containers.
        """
        if not self.links_were_read or not self.sees_all_processes or self.mig_mode:
            return None
        if self.memory_used_bytes is None or self.processes is None or self.graphics_processes is None:
            return None
        return 0.0 if self.processes or self.graphics_processes else self.memory_used_bytes / GIB

    @property
    def pcie_lanes_missing(self) -> int | None:
        """Lanes fewer than the GPU and its slot have; None if unknown (see ``_missing_under_load``)."""
        return self._missing_under_load(self.pcie_width, self.pcie_width_max)

    @property
    def pcie_generations_missing(self) -> int | None:
        """Generations below the maximum of the GPU and its slot; None if unknown (see ``_missing_under_load``)."""
        return self._missing_under_load(self.pcie_generation, self.pcie_generation_max)

    def _missing_under_load(self, now: int | None, most: int | None) -> int | None:
        """Return None unless the link was read under load: an idle GPU lowers the speed and width of its link."""
        if now is None or most is None or (self.pcie_utilization or 0.0) < LINK_LOADED_UTILIZATION:
            return None
        return max(0, most - now)


def _differ(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else int(now != then)


class GpuPeerComparison(Sample, frozen=True, kw_only=True):
    """One GPU beside the node's other GPUs of its model; see ``findings/gpu_peers.py``."""

    clock_fraction: float | None = None  # of the others' SM clock, while all are under load and nothing explains it
    set_clock_fraction: float | None = None  # the same, while a person or a program has set the GPU's clocks
    power_limit_gap_w: float | None = None  # watts by which the power limit is below the others'
    ecc_off: int | None = None  # 1 if ECC is off, and on with most others
    dram_corrected: int | None = None  # corrected errors, where they are many times the others'
    sram_corrected: int | None = None


class XidEvent(Sample, frozen=True, kw_only=True):
    """One XID, from the kernel log (``source`` "kernel") or NVML ("nvml").

    ``recovery_action`` is the driver's demand.
    """

    pci_bus_id: str
    xid: int
    source: str
    text: str = ""
    recovery_action: int | None = None
    count: int = 1


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


class PortCounterGrowth(Sample, frozen=True, kw_only=True):
    """Growth of a compute or storage port's counters, by the kernel's names, since the sensor started.

    It starts again at 0 when the device's counter does. Errors of a link in training are left out.
    """

    # InfiniBand's, of the port itself
    symbol_error: int | None = None
    link_error_recovery: int | None = None  # the link was trained again, and is up
    port_rcv_errors: int | None = None
    local_link_integrity_errors: int | None = None  # the link had more errors at once than it may have
    excessive_buffer_overrun_errors: int | None = None
    port_xmit_discards: int | None = None
    # RDMA's of mlx5, for InfiniBand and RoCE
    rnr_nak_retry_err: int | None = None  # a peer had no buffer ready
    local_ack_timeout_err: int | None = None  # a peer did not acknowledge in time
    req_transport_retries_exceeded: int | None = None  # connections that were given up after such time-outs
    out_of_sequence: int | None = None
    packet_seq_err: int | None = None  # a peer missed packets
    implied_nak_seq_err: int | None = None
    roce_slow_restart: int | None = None
    roce_adp_retrans: int | None = None
    rx_icrc_encapsulated: int | None = None  # RoCE packets that were changed on their way
    # EFA's
    rdma_read_wr_err: int | None = None
    rdma_write_wr_err: int | None = None
    retrans_timeout_events: int | None = None
    impaired_remote_conn_events: int | None = None  # connections whose rate was lowered
    unresponsive_remote_events: int | None = None
    no_completion_cmds: int | None = None  # commands that the device did not answer
    # Ethernet's
    rx_errors: int | None = None
    rx_crc_errors: int | None = None
    rx_missed_errors: int | None = None  # frames for which the host had no buffer
    tx_carrier_errors: int | None = None


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
