"""GPU samples through NVML. Nothing raises: the sample of an unreadable GPU holds the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers import nvml
from everstep_agent.drivers.nvml import GpuDevice, Nvml, NvmlError
from everstep_agent.drivers.sysfs import PcieLimit
from everstep_agent.sensors.samples import GpuSample, XidEvent

REOPEN_EVERY = 10
"""Polls between attempts to open NVML, or to find a lost GPU again: opening takes the driver's big lock."""

NO_PCIE_LIMIT = PcieLimit(None, None)
MAX_EVENTS_PER_WAIT = 64
"""Events taken at once; the kernel log counts a storm."""


@dataclass(eq=False)
class GpuSensor:
    """All GPUs of the node."""

    slow_every: int  # slow-moving values are read at every n-th poll, at different polls for different GPUs
    set_activity: Callable[[str], None]  # receives the next activity before it starts
    platform: Callable[[str], PcieLimit] = lambda bus_id: NO_PCIE_LIMIT  # of the PCIe slot at a bus address
    _limits: dict[str, PcieLimit] = field(default_factory=dict)
    _library: Nvml | None = None
    _polls: int = 0
    _slow_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    _links_seen: dict[str, set[int]] = field(default_factory=dict)
    known_gpus: dict[str, Gpu] = field(default_factory=dict)
    error: str = ""
    driver_version: str = ""

    def poll(self) -> tuple[GpuSample, ...]:
        """Return one sample for each GPU ever seen; a GPU that is no longer listed is lost."""
        self._open_if_due()
        self._polls += 1
        if self._library is None:
            return tuple(_unreadable_sample(gpu, self.error, lost=False) for gpu in self.known_gpus.values())
        listed = {device.identity.pci_bus_id: device for device in self._library.devices}
        samples = []
        for bus_id, identity in self.known_gpus.items():
            if bus_id in listed:
                samples.append(self._read(listed[bus_id]))
            else:
                samples.append(_unreadable_sample(identity, "NVML no longer lists this GPU", lost=True))
        is_broken = bool(self.error) or any(sample.lost or sample.error for sample in samples)
        if is_broken and self._polls % REOPEN_EVERY == 0:
            self.close()
        return tuple(samples)

    def wait_xid_events(self, timeout_s: float) -> list[XidEvent] | None:
        """Wait for NVML events. Returns None, without waiting, if this machine offers none."""
        if self._library is None or not self._library.has_events:
            return None
        events: list[XidEvent] = []
        timeout_ms = max(0, int(timeout_s * 1000))
        self.set_activity("nvml event wait")
        try:
            while len(events) < MAX_EVENTS_PER_WAIT and (event := self._library.wait_event(timeout_ms)) is not None:
                device, kind, data = event
                timeout_ms = 0
                if kind == pynvml.nvmlEventTypeXidCriticalError and device is not None:
                    events.append(XidEvent(pci_bus_id=device.identity.pci_bus_id, xid=data, source="nvml"))
        except NvmlError:
            return None
        return events

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
            self._library = None

    def _open_if_due(self) -> None:
        if self._library is not None or self._polls % REOPEN_EVERY:
            return
        self.set_activity("nvml initialization")
        try:
            self._library = Nvml(self._links_seen)
        except NvmlError as fault:
            self.error = str(fault)
            return
        self.error = "; ".join(f"GPU {index}: {fault}" for index, fault in self._library.failed_devices)
        self.driver_version = self._library.driver_version
        for device in self._library.devices:
            bus_id = device.identity.pci_bus_id
            self.known_gpus[bus_id] = device.identity
            self._limits[bus_id] = self.platform(bus_id)

    def _read(self, device: GpuDevice) -> GpuSample:
        gpu = device.identity
        self.set_activity(f"gpu {gpu.index} at {gpu.pci_bus_id}")
        try:
            values = _read_fast_values(device)
            if gpu.uuid not in self._slow_values or (self._polls + gpu.index) % self.slow_every == 0:
                self._slow_values[gpu.uuid] = _read_slow_values(device, self._limits.get(gpu.pci_bus_id, NO_PCIE_LIMIT))
                values["pcie_utilization"] = values["gpu_utilization"]
        except NvmlError as fault:
            recovery = 1 if fault.is_reset_required else None
            return _unreadable_sample(gpu, str(fault), lost=fault.is_gpu_lost, recovery_action=recovery)
        return GpuSample(
            index=gpu.index, pci_bus_id=gpu.pci_bus_id, uuid=gpu.uuid, **values, **self._slow_values[gpu.uuid]
        )


def _unreadable_sample(gpu: Gpu, error: str, *, lost: bool, recovery_action: int | None = None) -> GpuSample:
    where: dict[str, Any] = {"index": gpu.index, "pci_bus_id": gpu.pci_bus_id, "uuid": gpu.uuid}
    return GpuSample(**where, lost=lost, error=error, recovery_action=recovery_action)


_ECC_CORRECTED = (pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
_ECC_UNCORRECTED = (pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)

_FAST_FIELDS = {
    "memory_temperature_c": pynvml.NVML_FI_DEV_MEMORY_TEMP,
    "energy_j": pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    "remap_pending": pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    "remap_failure": pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    "recovery_action": pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
}
_SLOW_FIELDS = {
    "remapped_corrected": pynvml.NVML_FI_DEV_REMAPPED_COR,
    "remapped_uncorrected": pynvml.NVML_FI_DEV_REMAPPED_UNC,
    "pcie_fatal_errors": pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR,
    "nvlink_recovery_failures": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
}
_NVLINK_COUNTERS = (
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
)


def _read_fast_values(device: GpuDevice) -> dict[str, Any]:
    """Read the values that change from second to second. Raises NvmlError."""
    memory = device.read(pynvml.nvmlDeviceGetMemoryInfo)
    utilization = device.read(pynvml.nvmlDeviceGetUtilizationRates)
    fields = dict(zip(_FAST_FIELDS, device.read_fields(tuple(_FAST_FIELDS.values())), strict=True))
    return fields | {
        "energy_j": _scaled(fields["energy_j"], 1e-3),
        "temperature_c": device.read(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "temperature_margin_c": device.read(pynvml.nvmlDeviceGetMarginTemperature),
        "power_w": _scaled(device.read(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
        "sm_clock_mhz": device.read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "throttle_reasons": device.read(pynvml.nvmlDeviceGetCurrentClocksEventReasons),
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "gpu_utilization": None if utilization is None else utilization.gpu / 100,
        "memory_utilization": None if utilization is None else utilization.memory / 100,
    }


def _read_slow_values(device: GpuDevice, limit: PcieLimit) -> dict[str, Any]:
    """Read the values that change rarely, or cost a call for each of many links. Raises NvmlError."""
    numbers = device.read_fields((*_SLOW_FIELDS.values(), *_NVLINK_COUNTERS))
    fields = dict(zip(_SLOW_FIELDS, numbers, strict=False))
    nvlink_counters = [each for each in numbers[len(_SLOW_FIELDS) :] if each is not None]
    links, links_down = device.count_nvlinks()
    processes = device.read(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
    return fields | {
        "power_limit_w": _scaled(device.read(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
        "memory_clock_mhz": device.read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        "ecc_corrected": device.read(*_ECC_CORRECTED, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected": device.read(*_ECC_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_lifetime": device.read(*_ECC_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC),
        "sram_threshold_exceeded": device.read(nvml.sram_threshold_exceeded),
        "retired_pages": device.read(nvml.retired_pages),
        "pcie_replays": device.read(pynvml.nvmlDeviceGetPcieReplayCounter),
        "pcie_generation": device.read(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_generation_max": _lesser_limit(device.read(pynvml.nvmlDeviceGetMaxPcieLinkGeneration), limit.generation),
        "pcie_width": device.read(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        "pcie_width_max": _lesser_limit(device.read(pynvml.nvmlDeviceGetMaxPcieLinkWidth), limit.width),
        "nvlinks": links or None,
        "nvlinks_down": links_down if links else None,
        "nvlink_errors": sum(nvlink_counters) if nvlink_counters else None,
        "processes": None if processes is None else len(processes),
    }


def _lesser_limit(offered: int | None, limit: int | None) -> int | None:
    """Return the link's maximum by NVML, unless the platform's is lower."""
    return offered if offered is None or limit is None else min(offered, limit)


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
