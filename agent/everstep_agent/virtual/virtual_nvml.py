"""A Python implementation of the NVML library, installed behind pynvml in place of the C library.

pynvml passes ctypes objects: results go into ``byref(x)``, whose target is ``x._obj``, or into string buffers. Return
values are NVML error codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_void_p, cast
from functools import partial
from typing import Any

import msgspec
import pynvml

from everstep.clock import Clock
from everstep_agent.drivers.pci_gpus import NVIDIA_DRIVER
from everstep_agent.virtual.scenario import SWITCH_BUSES, VirtualCall, VirtualGpu, VirtualLink, VirtualMachine

OK: int = pynvml.NVML_SUCCESS
INVALID_ARGUMENT: int = pynvml.NVML_ERROR_INVALID_ARGUMENT
NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
INSUFFICIENT_SIZE: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
GPU_IS_LOST: int = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT: int = pynvml.NVML_ERROR_TIMEOUT
NOT_FOUND: int = pynvml.NVML_ERROR_NOT_FOUND
GOOD_CALL = VirtualCall()
_LOOKUPS = ("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2")
"""Calls whose first argument is no handle."""

HANG_POLL_S = 0.05
EVENT_POLL_S = 0.1
ENERGY_W = 100.0
"""Watts by which energy counters grow, whatever the power, so that they go back only at an intended reset."""

ENERGY_EPOCH = 1_600_000_000.0

_SCALARS: dict[str, Callable[[VirtualGpu], int | None]] = {
    "nvmlDeviceGetPowerUsage": lambda gpu: int(gpu.power_w * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: int(gpu.power_limit_w * 1000),
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: int(gpu.power_limit_default_w * 1000),
    "nvmlDeviceGetPersistenceMode": lambda gpu: gpu.persistence_mode,
    "nvmlDeviceGetRetiredPagesPendingStatus": lambda gpu: (
        None if gpu.retired_pages is None else int(gpu.retired_pages_pending)
    ),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.throttle_reasons,
    "nvmlDeviceGetPcieReplayCounter": lambda gpu: gpu.pcie_replays,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.pcie_generation,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.pcie_generation_max,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: gpu.pcie_width,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpu.pcie_width_max,
    "nvmlDeviceGetSupportedEventTypes": lambda gpu: 0xDC0F,
}
"""Calls of the form (handle, pointer to one number)."""

_STRINGS: dict[str, Callable[[VirtualGpu], str]] = {
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetSerial": lambda gpu: gpu.serial,
    "nvmlDeviceGetBoardPartNumber": lambda gpu: gpu.part_number,
    "nvmlDeviceGetVbiosVersion": lambda gpu: gpu.vbios,
    "nvmlDeviceGetInforomImageVersion": lambda gpu: gpu.inforom,
}
"""Calls of the form (handle, buffer, its length)."""

_STRUCTS: dict[str, Callable[[VirtualGpu], dict[str, Any]]] = {
    "nvmlDeviceGetPciInfo_v3": lambda gpu: {"busId": f"0000{gpu.pci_bus_id.upper()}.0".encode()},
    "nvmlDeviceGetMarginTemperature": lambda gpu: {"marginTemperature": gpu.slowdown_c - gpu.temperature_c},
    "nvmlDeviceGetMemoryInfo": lambda gpu: {
        "total": gpu.memory_bytes,
        "used": gpu.memory_used_bytes,
        "free": gpu.memory_bytes - gpu.memory_used_bytes,
    },
    "nvmlDeviceGetUtilizationRates": lambda gpu: {
        "gpu": round(gpu.gpu_utilization * 100),
        "memory": round(gpu.memory_utilization * 100),
    },
    "nvmlDeviceGetMemoryInfo_v2": lambda gpu: {
        "total": gpu.memory_bytes,
        "reserved": gpu.memory_reserved_bytes,
        "used": gpu.memory_used_bytes - gpu.memory_reserved_bytes,
        "free": gpu.memory_bytes - gpu.memory_used_bytes,
    },
    "nvmlDeviceGetGridLicensableFeatures_v4": lambda gpu: {"isGridLicenseSupported": 0, "licensableFeaturesCount": 0},
    "nvmlGpmQueryDeviceSupport": lambda gpu: {"isSupportedDevice": int(gpu.gpm)},
    "nvmlDeviceGetC2cModeInfoV": lambda gpu: {"isC2cEnabled": int(gpu.c2c_links > 0)},
    "nvmlDeviceGetSramEccErrorStatus": lambda gpu: {
        "bThresholdExceeded": int(gpu.sram_threshold_exceeded),
        "aggregateUncSecDed": gpu.ecc_sram_uncorrected,
    },
    "nvmlDeviceGetRowRemapperHistogram": lambda gpu: {
        "max": _BANKS - gpu.banks_low_on_spare_rows - gpu.banks_without_spare_rows,
        "low": gpu.banks_low_on_spare_rows,
        "none": gpu.banks_without_spare_rows,
    },
}
"""Calls of the form (handle, pointer to a struct), and the members of the struct."""

_BANKS = 2560
"""Banks of an H100's memory."""

_MODES: dict[str, Callable[[VirtualGpu], tuple[int, int] | None]] = {
    "nvmlDeviceGetEccMode": lambda gpu: gpu.ecc_mode,
    "nvmlDeviceGetMigMode": lambda gpu: gpu.mig_mode,
}
"""Calls of the form (handle, pointer to the current mode, pointer to the pending one)."""

_ENERGY_FIELD = 83
_REMOTE_LINK_FIELD, _C2C_STATUS_FIELD = 146, 171
_NVLINK_TRAFFIC_FIELDS = (138, 139)
_FIELDS: dict[int, Callable[[VirtualGpu], int | None]] = {
    82: lambda gpu: gpu.memory_temperature_c,
    142: lambda gpu: gpu.remapped_corrected,
    143: lambda gpu: gpu.remapped_uncorrected,
    144: lambda gpu: int(gpu.remap_pending),
    145: lambda gpu: int(gpu.remap_failure),
    170: lambda gpu: gpu.c2c_links,
    180: lambda gpu: gpu.pcie_fatal_errors,
    230: lambda gpu: gpu.recovery_action,
}
"""By number of the field (nvml.h, NVML_FI_DEV_*)."""


_GPM: dict[int, Callable[[VirtualGpu], float]] = {
    1: lambda gpu: gpu.gpu_utilization * 100,
    5: lambda gpu: gpu.tensor_activity * 100,
    10: lambda gpu: gpu.memory_utilization * 100,
}
"""What GPM counts, by number (nvml.h, NVML_GPM_METRIC_*)."""

GOOD_LINK = VirtualLink()
PORTS_PER_GPU = 9

_BOTH, _HOPPER, _BLACKWELL = (4, 5), (4,), (5,)
_LINK_FIELDS: dict[int, tuple[tuple[int, ...], Callable[[VirtualLink], int]]] = {
    161: (_HOPPER, lambda link: link.errors),
    162: (_HOPPER, lambda link: link.recoveries),
    163: (_HOPPER, lambda link: 0),
    **{field: (_BLACKWELL, lambda link: 0) for field in range(206, 211)},
    211: (_BLACKWELL, lambda link: link.errors),
    212: (_BLACKWELL, lambda link: link.discards),
    213: (_BLACKWELL, lambda link: link.recoveries),
    214: (_BOTH, lambda link: link.recovery_failures),
    215: (_BLACKWELL, lambda link: link.recoveries + link.recovery_failures),
    219: (_BLACKWELL, lambda link: 0),
    221: (_BLACKWELL, lambda link: link.symbol_errors),
    **{field: (_BLACKWELL, lambda link: _encoded_ber(link)) for field in (220, 222, 291, 292, 293)},
    **{
        235 + step: (_BLACKWELL, partial(lambda link, step: int(step <= link.repaired_symbols), step=step))
        for step in range(16)
    },
    289: (_BLACKWELL, lambda link: link.raw_errors),
    290: (_BLACKWELL, lambda link: 0),
}
"""Fields of one link by number: the NVLink versions that offer it, and its value."""


class VirtualNvml:
    """Replacement of ``pynvml.nvmlLib``, with one method per C function that pynvml looks up."""

    def __init__(self, machine: VirtualMachine, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._pending: list[tuple[int, int]] = []
        self._frozen_mj: dict[str, int] = {}
        for name, number in _SCALARS.items():
            setattr(self, name, partial(self._answer, number=number))
        for name, text in _STRINGS.items():
            setattr(self, name, partial(self._fill_string, text))
        for name, members in _STRUCTS.items():
            setattr(self, name, partial(self._fill_struct, members))
        for name, modes in _MODES.items():
            setattr(self, name, partial(self._fill_modes, modes))
        self._gpm_samples: dict[int, int] = {}
        of_gpus = ("nvmlDevice", "nvmlGpmQuery", "nvmlGpmSampleGet")
        for name in [name for name in dir(self) if name.startswith(of_gpus) and name not in _LOOKUPS]:
            setattr(self, name, partial(self._run_call, name, getattr(self, name)))

    # Library

    def nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802 - NVML's name
        return self._machine.nvml_error

    def nvmlShutdown(self) -> int:  # noqa: N802
        return OK

    def nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:  # noqa: N802
        buffer.value = self._machine.driver_version.encode()
        return OK

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._listed())
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        listed = self._listed()
        if index.value >= len(listed):
            return INVALID_ARGUMENT
        return self._give_handle("nvmlDeviceGetHandleByIndex_v2", listed[index.value], handle)

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> int:  # noqa: N802
        wanted = (bus_id.value or b"").decode().lower().rpartition(".")[0]
        for number in self._listed():
            if self._machine.gpus[number].pci_bus_id == wanted:
                return self._give_handle("nvmlDeviceGetHandleByPciBusId_v2", number, handle)
        return NOT_FOUND

    # Device

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, result: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: gpu.temperature_c)

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, which: Any, result: Any) -> int:  # noqa: N802
        memory = which.value == pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX
        return self._answer(handle, result, lambda gpu: gpu.memory_limit_c if memory else gpu.slowdown_c)

    def nvmlDeviceGetClockInfo(self, handle: Any, which: Any, result: Any) -> int:  # noqa: N802
        memory = which.value == pynvml.NVML_CLOCK_MEM
        return self._answer(handle, result, lambda gpu: gpu.memory_clock_mhz if memory else gpu.sm_clock_mhz)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, result: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: _ecc(gpu, kind.value, counter.value))

    def nvmlDeviceGetMemoryErrorCounter(  # noqa: N802
        self, handle: Any, kind: Any, counter: Any, location: Any, result: Any
    ) -> int:
        in_dram = location.value == pynvml.NVML_MEMORY_LOCATION_DRAM
        if kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
            return self._answer(handle, result, lambda gpu: gpu.ecc_corrected if in_dram else gpu.ecc_sram_corrected)
        return self._answer(handle, result, lambda gpu: gpu.ecc_uncorrected if in_dram else gpu.ecc_sram_uncorrected)

    def nvmlDeviceGetRetiredPages_v2(self, handle: Any, cause: Any, count: Any, *buffers: Any) -> int:  # noqa: N802
        def share(gpu: VirtualGpu) -> int | None:
            return None if gpu.retired_pages is None else (gpu.retired_pages + (not cause.value)) // 2

        return self._answer(handle, count, share)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, result: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK and link >= gpu.nvlinks:
            return INVALID_ARGUMENT
        if code == OK:
            result._obj.value = int(link >= gpu.nvlinks_down and _link(gpu, link).up)
        return code

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, result: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK and link >= gpu.nvlinks:
            return INVALID_ARGUMENT
        if code == OK:
            result._obj.busId = f"00000000:{SWITCH_BUSES[link % len(SWITCH_BUSES)]}:00.0".encode()
        return code

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, result: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK and link >= gpu.nvlinks:
            return INVALID_ARGUMENT
        if code == OK:
            result._obj.value = gpu.nvlink_far_device
        return code

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, result: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK and gpu.fabric_state is None:
            return NOT_SUPPORTED
        if code == OK:
            info = result._obj
            info.state, info.status = gpu.fabric_state if gpu.nvlinks else 0, gpu.fabric_status
            info.cliqueId, info.healthMask = gpu.fabric_clique, gpu.fabric_health
        return code

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, index: int, result: Any) -> int:  # noqa: N802
        code, _ = self._check_gpu(handle)
        if code == OK:
            ends = [(cast(each, c_void_p).value or 0) - 1 for each in (handle, other)]
            lists = [self._machine.gpus[end].unreachable_gpus for end in ends]
            is_cut = ends[1] in lists[0] or ends[0] in lists[1]
            result._obj.value = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED if is_cut else pynvml.NVML_P2P_STATUS_OK
        return code

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        return self._count_processes(handle, count, lambda gpu: gpu.processes)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        return self._count_processes(handle, count, lambda gpu: gpu.graphics_processes)

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK:
            for value in values._obj:
                self._fill(gpu, value)
        return code

    def nvmlDeviceGetEncoderUtilization(self, handle: Any, result: Any, period_us: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: round(gpu.encoder_utilization * 100))

    def nvmlDeviceGetDecoderUtilization(self, handle: Any, result: Any, period_us: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: 0)

    # GPM

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:  # noqa: N802
        number = max(self._gpm_samples, default=0) + 1
        self._gpm_samples[number] = 0
        c_void_p.from_buffer(sample._obj).value = number
        return OK

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code != OK or not gpu.gpm:
            return code or NOT_SUPPORTED
        self._gpm_samples[cast(sample, c_void_p).value or 0] = self._machine.gpus.index(gpu)
        return OK

    def nvmlGpmMetricsGet(self, query: Any) -> int:  # noqa: N802
        asked = query._obj
        gpu = self._machine.gpus[self._gpm_samples[cast(asked.sample2, c_void_p).value or 0]]
        for metric in asked.metrics[: asked.numMetrics]:
            read = _GPM.get(metric.metricId)
            metric.value, metric.nvmlReturn = read(gpu) if read else 0.0, OK
        return OK

    def nvmlGpmSampleFree(self, sample: Any) -> int:  # noqa: N802
        del self._gpm_samples[cast(sample, c_void_p).value or 0]
        return OK

    # Events

    def nvmlEventSetCreate(self, events: Any) -> int:  # noqa: N802
        c_void_p.from_buffer(events._obj).value = 1
        return OK

    def nvmlEventSetFree(self, events: Any) -> int:  # noqa: N802
        return OK

    def nvmlDeviceRegisterEvents(self, handle: Any, types: Any, events: Any) -> int:  # noqa: N802
        return self._check_gpu(handle)[0]

    def nvmlEventSetWait_v2(self, events: Any, result: Any, timeout_ms: Any) -> int:  # noqa: N802
        deadline = self._clock.monotonic() + timeout_ms.value / 1000
        while True:
            self._machine.reload_control()
            self._pending += self._machine.take_events()
            if self._pending:
                index, xid = self._pending.pop(0)
                event = result._obj
                c_void_p.from_buffer(event, type(event).device.offset).value = index + 1
                event.eventType, event.eventData = pynvml.nvmlEventTypeXidCriticalError, xid
                return OK
            remaining_s = deadline - self._clock.monotonic()
            if remaining_s <= 0:
                return TIMEOUT
            time.sleep(min(remaining_s, EVENT_POLL_S))

    # Helpers

    def _listed(self) -> list[int]:
        return [
            index
            for index, gpu in enumerate(self._machine.gpus)
            if not gpu.missing and not gpu.hidden and gpu.driver == NVIDIA_DRIVER
        ]

    def _give_handle(self, name: str, number: int, handle: Any) -> int:
        gpu = self._machine.gpus[number]
        code = self._wait_for(name, number) or (GPU_IS_LOST if gpu.lost else OK)
        if code == OK:
            c_void_p.from_buffer(handle._obj).value = number + 1
        return code

    def _run_call(self, name: str, function: Callable[..., int], handle: Any, *arguments: Any) -> int:
        """Run a call on a GPU, unless the scenario gives it an error."""
        return self._wait_for(name, (cast(handle, c_void_p).value or 0) - 1) or function(handle, *arguments)

    def _wait_for(self, name: str, number: int) -> int:
        """Delay or hang as the scenario demands of this call. Returns the error code that it demands."""
        while (call := self._machine.gpus[number].calls.get(name, GOOD_CALL)).hang:
            time.sleep(HANG_POLL_S)
            self._machine.reload_control()
        if call.delay_s:
            time.sleep(call.delay_s)
        return call.error

    def _check_gpu(self, handle: Any) -> tuple[int, VirtualGpu]:
        """Begin a call on this GPU: block while it hangs, and return its error code."""
        index = (cast(handle, c_void_p).value or 0) - 1
        while (gpu := self._machine.gpus[index]).hang:
            time.sleep(HANG_POLL_S)
            self._machine.reload_control()
        return GPU_IS_LOST if gpu.lost or gpu.missing else gpu.error, gpu

    def _answer(self, handle: Any, result: Any, number: Callable[[VirtualGpu], int | None]) -> int:
        code, gpu = self._check_gpu(handle)
        if code != OK:
            return code
        value = number(gpu)
        if value is None:
            return NOT_SUPPORTED
        result._obj.value = value
        return OK

    def _count_processes(self, handle: Any, count: Any, number: Callable[[VirtualGpu], int]) -> int:
        code, gpu = self._check_gpu(handle)
        if code != OK:
            return code
        room, count._obj.value = count._obj.value, number(gpu)
        return INSUFFICIENT_SIZE if number(gpu) > room else OK

    def _fill_modes(
        self, modes: Callable[[VirtualGpu], tuple[int, int] | None], handle: Any, current: Any, pending: Any
    ) -> int:
        code, gpu = self._check_gpu(handle)
        if code != OK:
            return code
        if (found := modes(gpu)) is None:
            return NOT_SUPPORTED
        current._obj.value, pending._obj.value = found
        return OK

    def _fill_string(self, text: Callable[[VirtualGpu], str], handle: Any, buffer: Any, length: Any) -> int:
        code, gpu = self._check_gpu(handle)
        if code == OK:
            buffer.value = text(gpu).encode()
        return code

    def _fill_struct(self, members: Callable[[VirtualGpu], dict[str, Any]], handle: Any, result: Any) -> int:
        code, gpu = self._check_gpu(handle)
        if code == OK:
            for name, value in members(gpu).items():
                setattr(result._obj, name, value)
        return code

    def _fill(self, gpu: VirtualGpu, value: Any) -> None:
        name = f"field {value.fieldId}"
        planned = gpu.calls.get(f"{name} link {value.scopeId}") or gpu.calls.get(name, GOOD_CALL)
        if planned.error:
            value.nvmlReturn = planned.error
            return
        if value.fieldId == _ENERGY_FIELD:
            value.value.ullVal = self._energy_mj(gpu)
            value.valueType, value.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, OK
            return
        if value.fieldId == _REMOTE_LINK_FIELD:
            known = self._remote_link(gpu, value.scopeId)
        elif value.fieldId in _NVLINK_TRAFFIC_FIELDS:
            known = gpu.nvlink_kib if gpu.nvlinks else None
        elif value.fieldId == _C2C_STATUS_FIELD:
            known = int(value.scopeId >= gpu.c2c_links_down) if value.scopeId < gpu.c2c_links else None
        elif value.fieldId in _LINK_FIELDS:
            known = _link_field(gpu, value.fieldId, value.scopeId)
        else:
            number = _FIELDS.get(value.fieldId)
            known = None if number is None else number(gpu)
        if known is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return
        value.value.uiVal = known
        value.valueType, value.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, OK

    def _remote_link(self, gpu: VirtualGpu, link: int) -> int | None:
        """Return the switch's port at the far end of a link: each switch has ``PORTS_PER_GPU`` of them for each GPU."""
        port = self._machine.gpus.index(gpu) * PORTS_PER_GPU + link // len(SWITCH_BUSES)
        return port if link < gpu.nvlinks else None

    def _energy_mj(self, gpu: VirtualGpu) -> int:
        energy = int(max(0.0, self._clock.wall() - (gpu.reset_at or ENERGY_EPOCH)) * ENERGY_W * 1000)
        if gpu.frozen:
            return self._frozen_mj.setdefault(gpu.uuid, energy)
        self._frozen_mj.pop(gpu.uuid, None)
        return energy


def _link(gpu: VirtualGpu, link: int) -> VirtualLink:
    return gpu.links.get(str(link), GOOD_LINK)


def _link_field(gpu: VirtualGpu, field: int, number: int) -> int | None:
    """Return what a link counts, or None if the GPU has no such link or, by its generation, no such counter."""
    versions, read = _LINK_FIELDS[field]
    if number >= gpu.nvlinks or gpu.nvlink_version not in versions:
        return None
    first = number == 0
    link = _link(gpu, number)
    return read(
        msgspec.structs.replace(
            link,
            errors=link.errors + gpu.nvlink_errors * first,
            recovery_failures=link.recovery_failures + gpu.nvlink_recovery_failures * first,
        )
    )


def _encoded_ber(link: VirtualLink) -> int:
    factor, exponent = link.ber
    return factor << 8 | -exponent


def _ecc(gpu: VirtualGpu, kind: int, counter: int) -> int:
    if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
        return gpu.ecc_corrected + gpu.ecc_sram_corrected
    if counter == pynvml.NVML_AGGREGATE_ECC:
        return gpu.ecc_uncorrected_lifetime
    return gpu.ecc_uncorrected + gpu.ecc_sram_uncorrected


def install(machine: VirtualMachine, clock: Clock) -> VirtualNvml:
    """Install a virtual library behind pynvml, in place of the present one."""
    library = VirtualNvml(machine, clock)
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    return library


def uninstall() -> None:
    """Let pynvml look for the real library again."""
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
