"""Plain samples of GPUs, their links and their errors, without judgement.

``None`` means that the device does not offer the value or that it could not be read; it never stands for zero.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from everstep_agent.drivers.samples import Sample, SamplePart, value_reader

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


# The parts of a GPU's sample


class GpuTemperatures(SamplePart, frozen=True, kw_only=True):
    """Temperatures of one GPU and their limits."""

    temperature_c: int | None = None
    temperature_margin_c: int | None = None
    memory_temperature_c: int | None = None
    slowdown_temperature_c: int | None = None  # at which the hardware slows the GPU down
    memory_temperature_limit_c: int | None = None  # at which the driver slows the GPU down for its memory's sake

    @property
    def memory_temperature_margin_c(self) -> int | None:
        """Degrees left until the memory slows the GPU down."""
        if self.memory_temperature_c is None:
            return None
        return (self.memory_temperature_limit_c or HBM_LIMIT_C) - self.memory_temperature_c


class GpuPower(SamplePart, frozen=True, kw_only=True):
    """Power that one GPU draws and may draw."""

    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None  # of the model
    energy_j: float | None = None

    @property
    def power_limit_cut_w(self) -> float | None:
        """Watts by which the power limit is below the model's default."""
        if self.power_limit_w is None or self.power_limit_default_w is None:
            return None
        return self.power_limit_default_w - self.power_limit_w


class GpuClocks(SamplePart, frozen=True, kw_only=True):
    """Clocks of one GPU, and the reasons for which they are low."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: int | None = None

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


class GpuMemory(SamplePart, frozen=True, kw_only=True):
    """Memory of one GPU and its use."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver; part of the memory in use


class GpuMemoryErrors(SamplePart, frozen=True, kw_only=True):
    """Memory errors of one GPU since its driver was loaded, and its means to repair them."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    ecc_dram_corrected: int | None = None
    ecc_dram_uncorrected: int | None = None
    ecc_sram_corrected: int | None = None
    ecc_sram_uncorrected: int | None = None
    ecc_sram_uncorrected_lifetime: int | None = None
    sram_threshold_exceeded: int | None = None
    remap_pending: int | None = None
    remap_failure: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    banks_low_on_spare_rows: int | None = None
    banks_without_spare_rows: int | None = None
    retired_pages: int | None = None
    retired_pages_pending: int | None = None  # 1 if pages are to be retired at the next reset


class GpuDriverModes(SamplePart, frozen=True, kw_only=True):
    """Modes of one GPU: 1 on, 0 off. A pending mode takes effect at the next reset."""

    ecc_mode: int | None = None
    ecc_mode_pending: int | None = None
    mig_mode: int | None = None
    mig_mode_pending: int | None = None
    persistence_mode: int | None = None
    vgpu_licensed: int | None = None

    @property
    def ecc_mode_waits(self) -> int | None:
        """1 if another ECC mode waits for a reset."""
        return _differ(self.ecc_mode, self.ecc_mode_pending)

    @property
    def mig_mode_waits(self) -> int | None:
        """1 if another MIG mode waits for a reset."""
        return _differ(self.mig_mode, self.mig_mode_pending)


def _differ(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else int(now != then)


class GpuPcieLink(SamplePart, frozen=True, kw_only=True):
    """The PCIe link of one GPU."""

    pcie_replays: int | None = None
    pcie_fatal_errors: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None  # of the GPU and its slot together
    pcie_width: int | None = None
    pcie_width_max: int | None = None  # of the GPU and its slot together
    pcie_utilization: float | None = None  # the GPU's utilization when its link was read, at polls that read it

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


class GpuNvlink(SamplePart, frozen=True, kw_only=True):
    """NVLinks of one GPU, its part in their fabric, and its links to the CPU (NVLink-C2C)."""

    nvlinks: int | None = None
    nvlinks_down: int | None = None
    nvlink_errors: int | None = None
    nvlink_recovery_failures: int | None = None
    nvlink_bytes: int | None = None  # sent and received by all links
    nvlinks_down_at: tuple[int, ...] = ()  # their numbers
    links: tuple[LinkSample, ...] = ()
    nvlink_far_ends: tuple[str, ...] = ()  # by link: as ``LinkSample.far_end``, "" if unknown
    fabric: FabricSample | None = None
    peers: tuple[GpuPeerSample, ...] = ()  # the node's other GPUs, as far as NVML answers
    c2c_links: int | None = None  # links to the CPU that were ever active
    c2c_links_down: int | None = None

    @property
    def fabric_state(self) -> int | None:
        return None if self.fabric is None else self.fabric.state


class GpuUtilization(SamplePart, frozen=True, kw_only=True):
    """How busy one GPU and its parts are. GPM counts the last five values between two of its readings."""

    gpu_utilization: float | None = None
    memory_utilization: float | None = None
    encoder_utilization: float | None = None
    decoder_utilization: float | None = None
    graphics_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None


class GpuProcesses(SamplePart, frozen=True, kw_only=True):
    """Processes on one GPU."""

    processes: int | None = None  # that compute
    graphics_processes: int | None = None
    sees_all_processes: bool = False  # whether no container hides processes from the agent


class GpuSample(Sample, frozen=True, kw_only=True):
    """One GPU at one poll.

    Rules, metrics and profiles name its values without the part, such as ``remap_pending``; see ``value``.
    """

    index: int
    pci_bus_id: str
    uuid: str
    lost: bool = False  # NVML calls the GPU lost, or it has left the PCI bus
    error: str = ""  # why most values are missing
    is_closed: bool = False  # the error is that NVML as a whole is closed, which says nothing of this GPU
    hung_s: float = 0.0  # seconds that a call of this GPU has not returned
    failed_values: int = 0  # number of values that NVML offers and did not answer
    failures: str = ""  # the first of their errors
    recovery_action: int | None = None
    links_were_read: bool = False  # whether the links were read at this poll
    temperatures: GpuTemperatures = GpuTemperatures()
    power: GpuPower = GpuPower()
    clocks: GpuClocks = GpuClocks()
    memory: GpuMemory = GpuMemory()
    memory_errors: GpuMemoryErrors = GpuMemoryErrors()
    modes: GpuDriverModes = GpuDriverModes()
    pcie: GpuPcieLink = GpuPcieLink()
    nvlink: GpuNvlink = GpuNvlink()
    utilization: GpuUtilization = GpuUtilization()
    processes: GpuProcesses = GpuProcesses()

    def value(self, name: str) -> Any:
        """Return the value of this name, of the sample or of one of its parts. Raises KeyError."""
        return value_reader(GpuSample, name)(self)

    @property
    def is_lost(self) -> int:
        return int(self.lost)

    @property
    def unreadable(self) -> int:
        """1 if most values failed, the GPU is not lost and none of its calls hangs."""
        return int(bool(self.error) and not self.lost and not self.is_closed and not self.hung_s)

    @property
    def partly_unreadable(self) -> int:
        """Number of values that failed on a GPU that can be read otherwise."""
        return 0 if self.error else self.failed_values

    @property
    def unowned_memory_gib(self) -> float | None:
        """Memory in use on a GPU without any process in GiB, 0 if it has one; None if unknown.

        Known at polls that read the slow values, outside MIG mode (whose instances reserve memory), and where the agent
        sees the processes of all containers.
        """
        used, owners = self.memory.memory_used_bytes, self.processes
        if not self.links_were_read or not owners.sees_all_processes or self.modes.mig_mode:
            return None
        if used is None or owners.processes is None or owners.graphics_processes is None:
            return None
        return 0.0 if owners.processes or owners.graphics_processes else used / GIB


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
