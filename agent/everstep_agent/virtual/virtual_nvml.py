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

import pynvml

from everstep.clock import Clock
from everstep_agent.virtual.scenario import VirtualGpu, VirtualMachine

OK: int = pynvml.NVML_SUCCESS
INVALID_ARGUMENT: int = pynvml.NVML_ERROR_INVALID_ARGUMENT
NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
INSUFFICIENT_SIZE: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
GPU_IS_LOST: int = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT: int = pynvml.NVML_ERROR_TIMEOUT
HANG_POLL_S = 0.05
EVENT_POLL_S = 0.1
ENERGY_W = 100.0
"""Watts by which energy counters grow, whatever the power, so that they go back only at an intended reset."""

ENERGY_EPOCH = 1_600_000_000.0

_SCALARS: dict[str, Callable[[VirtualGpu], int | None]] = {
    "nvmlDeviceGetPowerUsage": lambda gpu: int(gpu.power_w * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: int(gpu.power_limit_w * 1000),
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
    "nvmlDeviceGetSramEccErrorStatus": lambda gpu: {"bThresholdExceeded": int(gpu.sram_threshold_exceeded)},
}
"""Calls of the form (handle, pointer to a struct), and the members of the struct."""

_FIELDS: dict[int, Callable[[VirtualGpu], int | None]] = {
    pynvml.NVML_FI_DEV_MEMORY_TEMP: lambda gpu: gpu.memory_temperature_c,
    pynvml.NVML_FI_DEV_REMAPPED_COR: lambda gpu: gpu.remapped_corrected,
    pynvml.NVML_FI_DEV_REMAPPED_UNC: lambda gpu: gpu.remapped_uncorrected,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING: lambda gpu: int(gpu.remap_pending),
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE: lambda gpu: int(gpu.remap_failure),
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY: lambda gpu: gpu.nvlink_errors,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY: lambda gpu: 0,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC: lambda gpu: 0,
    pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR: lambda gpu: gpu.pcie_fatal_errors,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS: lambda gpu: gpu.nvlink_recovery_failures,
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: lambda gpu: gpu.recovery_action,
}


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
        c_void_p.from_buffer(handle._obj).value = listed[index.value] + 1
        return OK

    # Device

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, result: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: gpu.temperature_c)

    def nvmlDeviceGetClockInfo(self, handle: Any, which: Any, result: Any) -> int:  # noqa: N802
        memory = which.value == pynvml.NVML_CLOCK_MEM
        return self._answer(handle, result, lambda gpu: gpu.memory_clock_mhz if memory else gpu.sm_clock_mhz)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, result: Any) -> int:  # noqa: N802
        return self._answer(handle, result, lambda gpu: _ecc(gpu, kind.value, counter.value))

    def nvmlDeviceGetRetiredPages_v2(self, handle: Any, cause: Any, count: Any, *buffers: Any) -> int:  # noqa: N802
        def share(gpu: VirtualGpu) -> int | None:
            return None if gpu.retired_pages is None else (gpu.retired_pages + (not cause.value)) // 2

        return self._answer(handle, count, share)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, result: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK and link >= gpu.nvlinks:
            return INVALID_ARGUMENT
        if code == OK:
            result._obj.value = int(link >= gpu.nvlinks_down)
        return code

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code != OK:
            return code
        room, count._obj.value = count._obj.value, gpu.processes
        return INSUFFICIENT_SIZE if gpu.processes > room else OK

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:  # noqa: N802
        code, gpu = self._check_gpu(handle)
        if code == OK:
            for value in values._obj:
                self._fill(gpu, value)
        return code

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
        return [index for index, gpu in enumerate(self._machine.gpus) if not gpu.missing]

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
        if value.fieldId == pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
            value.value.ullVal = self._energy_mj(gpu)
            value.valueType, value.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, OK
            return
        number = _FIELDS.get(value.fieldId)
        known = None if number is None else number(gpu)
        if known is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return
        value.value.uiVal = known
        value.valueType, value.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, OK

    def _energy_mj(self, gpu: VirtualGpu) -> int:
        energy = int(max(0.0, self._clock.wall() - (gpu.reset_at or ENERGY_EPOCH)) * ENERGY_W * 1000)
        if gpu.frozen:
            return self._frozen_mj.setdefault(gpu.uuid, energy)
        self._frozen_mj.pop(gpu.uuid, None)
        return energy


def _ecc(gpu: VirtualGpu, kind: int, counter: int) -> int:
    if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
        return gpu.ecc_corrected
    return gpu.ecc_uncorrected_lifetime if counter == pynvml.NVML_AGGREGATE_ECC else gpu.ecc_uncorrected


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
