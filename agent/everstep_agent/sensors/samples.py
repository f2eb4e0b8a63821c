"""Plain samples of the sensors, without judgement.

``None`` means that the device does not offer the value or that it could not be read; it never stands for zero.
"""

from __future__ import annotations

import msgspec

HARDWARE_THROTTLE_BITS = 0x8 | 0x40 | 0x80
"""NVML clock event reasons: hardware slowdown, hardware thermal slowdown, power brake."""

HEAT_THROTTLE_BITS = 0x20 | 0x40
"""NVML clock event reasons: software and hardware thermal slowdown."""

THROTTLE_REASONS = {
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""NVML clock event reasons that slow a GPU down against its will, by name."""

LINK_LOADED_UTILIZATION = 0.5
"""Utilization from which on a PCIe link must run at its full speed and width."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base class; encoded as an array, since both ends are of one installation."""


class GpuSample(Sample, frozen=True, kw_only=True):
    """One GPU at one poll."""

    index: int
    pci_bus_id: str
    uuid: str
    lost: bool = False  # NVML reports the GPU as gone
    error: str = ""  # why the other values are missing

    temperature_c: int | None = None
    temperature_margin_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
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
    sram_threshold_exceeded: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    retired_pages: int | None = None
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
    processes: int | None = None

    @property
    def is_lost(self) -> int:
        return int(self.lost)

    @property
    def unreadable(self) -> int:
        """1 if NVML returned an error other than a loss."""
        return int(bool(self.error) and not self.lost)

    @property
    def hardware_throttled(self) -> int | None:
        return None if self.throttle_reasons is None else int(bool(self.throttle_reasons & HARDWARE_THROTTLE_BITS))

    @property
    def heat_throttled(self) -> int | None:
        return None if self.throttle_reasons is None else int(bool(self.throttle_reasons & HEAT_THROTTLE_BITS))

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


class PortSample(Sample, frozen=True, kw_only=True):
    """One network port."""

    name: str
    kind: str
    up: bool
    was_up: bool  # since the sensor started, so that being down is news
    rate_gbps: float | None = None
    errors: int | None = None
    link_downs: int | None = None
    identity: dict[str, str] = {}  # address, pci_bus_id, board and firmware, as far as the kernel knows them

    @property
    def lost_link(self) -> int | None:
        """1 if down after having been up, 0 if up, None if never up (an empty socket is no fault)."""
        return None if not self.was_up else int(not self.up)


class PathSample(Sample, frozen=True, kw_only=True):
    """One file system. ``silent_s``: seconds that a query has gone unanswered (a dead NFS server)."""

    path: str
    free_fraction: float | None = None
    silent_s: float = 0.0


class HostSample(Sample, frozen=True, kw_only=True):
    """The machine itself. ``stuck_processes`` are in uninterruptible sleep (state D)."""

    uptime_s: float | None = None
    memory_available_fraction: float | None = None
    memory_total_bytes: int | None = None
    stuck_processes: int | None = None
    zombies: int | None = None
    load: float | None = None
    clock_skew_s: float | None = None
    error: str = ""

    @property
    def unreadable(self) -> int:
        return int(bool(self.error))

    @property
    def clock_skew_magnitude_s(self) -> float | None:
        return None if self.clock_skew_s is None else abs(self.clock_skew_s)


class SensorState(Sample, frozen=True, kw_only=True):
    """Health of the sensing itself."""

    hangs: int | None = None  # consecutive polls that missed their deadline; 0 after a good one
    crashes: int | None = None  # consecutive ends of the sensor process
    nvml_failed: int | None = None  # 1 if GPUs are expected and NVML lists none
    gpus_missing: int | None = None  # number of expected GPUs that NVML does not list
    faults: int | None = None  # number of sensors that failed in the last poll
    log_failed: int | None = None  # 1 if the kernel log cannot be read
    detail: str = ""  # the failed parts and the reasons
