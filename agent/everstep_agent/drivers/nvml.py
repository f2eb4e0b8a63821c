"""NVML through pynvml, with classified errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p, cast
from typing import Any

import pynvml

from everstep.wire.v1.agent import Gpu

UNSUPPORTED_ERRORS = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""Errors that will not change while the driver stays loaded: the value is not read again."""

_VALUE_BY_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_EVENTS = (
    pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventTypeDramRetirementEvent
    | pynvml.nvmlEventTypeDramRetirementFailure
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)

MAX_NVLINKS = 18


class NvmlError(Exception):
    """An NVML call failed. ``is_gpu_lost``: gone from the bus; ``is_reset_required``: needs a reset before it
    answers."""

    def __init__(self, operation: str, code: int) -> None:
        text = pynvml.NVMLError._errcode_to_string.get(code) or "unknown error"
        super().__init__(f"{operation}: {text} (NVML error {code})")
        self.code = code

    @property
    def is_gpu_lost(self) -> bool:
        return self.code in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND)

    @property
    def is_reset_required(self) -> bool:
        return bool(self.code == pynvml.NVML_ERROR_RESET_REQUIRED)


def kernel_bus_id(nvml: str) -> str:
    """Convert NVML's ``00000000:1B:00.0`` to the kernel log's ``0000:1b:00``. A domain of more than four digits stays
    whole: ``10000:01:00``."""
    domain, bus, device = nvml.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device.partition('.')[0]}"


class GpuDevice:
    """One GPU's handle. Values that the device does not offer are None, and are not read again.

    ``nvlinks_seen_up`` has the NVLinks of each GPU that were ever up; it outlives the library, and is extended here.
    """

    def __init__(self, index: int, nvlinks_seen_up: dict[str, set[int]]) -> None:
        self.handle = _call("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
        self._unsupported: set[object] = set()
        self.identity = self._identify(index)
        self._links_seen_up = nvlinks_seen_up.setdefault(self.identity.uuid, set())

    def _identify(self, index: int) -> Gpu:
        memory = self.read(pynvml.nvmlDeviceGetMemoryInfo)
        return Gpu(
            index=index,
            pci_bus_id=kernel_bus_id(_call("PCI address", pynvml.nvmlDeviceGetPciInfo, self.handle).busId),
            uuid=_call("UUID", pynvml.nvmlDeviceGetUUID, self.handle),
            memory_bytes=0 if memory is None else memory.total,
            name=self.read(pynvml.nvmlDeviceGetName) or "",
            serial=self.read(pynvml.nvmlDeviceGetSerial) or "",
            part_number=self.read(pynvml.nvmlDeviceGetBoardPartNumber) or "",
            vbios=self.read(pynvml.nvmlDeviceGetVbiosVersion) or "",
            inforom=self.read(pynvml.nvmlDeviceGetInforomImageVersion) or "",
        )

    def read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(handle, *arguments)``, or None if it is not offered. Raises NvmlError."""
        if (function, arguments) in self._unsupported:
            return None
        try:
            return function(self.handle, *arguments)
        except pynvml.NVMLError as error:
            # Without arguments, an invalid one can only be the handle: no reason to stop asking.
            if error.value in UNSUPPORTED_ERRORS or (arguments and error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT):
                self._unsupported.add((function, arguments))
                return None
            raise NvmlError(function.__name__, error.value) from None

    def read_fields(self, ids: Sequence[int]) -> list[Any]:
        """Return field values in the order of ``ids``; None for one that is not offered. Raises NvmlError."""
        values = self.read(pynvml.nvmlDeviceGetFieldValues, tuple(ids))
        return [None] * len(ids) if values is None else [_field(value) for value in values]

    def register_events(self, event_set: Any) -> bool:
        """Register with an event set. Returns False if the device offers no events, or refuses."""
        try:
            offered = pynvml.nvmlDeviceGetSupportedEventTypes(self.handle) & _EVENTS
            if offered:
                pynvml.nvmlDeviceRegisterEvents(self.handle, offered, event_set)
        except pynvml.NVMLError:
            return False
        return bool(offered)

    def count_nvlinks(self) -> tuple[int, int]:
        """Return the number of links ever seen up, and of those now down. Raises NvmlError."""
        up = {link for link in range(MAX_NVLINKS) if self.read(pynvml.nvmlDeviceGetNvLinkState, link)}
        self._links_seen_up.update(up)
        return len(self._links_seen_up), len(self._links_seen_up - up)


def sram_threshold_exceeded(handle: Any) -> int:
    """Return 1 if the GPU has passed its limit of SRAM errors; for ``GpuDevice.read``."""
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    # pynvml's wrapper passes the struct by value, so its result is lost
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return int(status.bThresholdExceeded)


def retired_pages(handle: Any) -> int:
    """Return the pages retired for either cause (before Ampere); for ``GpuDevice.read``."""
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(pynvml.nvmlDeviceGetRetiredPages_v2(handle, cause)) for cause in causes)


def _field(value: Any) -> Any:
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    kind = value.valueType
    return getattr(value.value, _VALUE_BY_TYPE[kind]) if 0 <= kind < len(_VALUE_BY_TYPE) else None


def _address(handle: Any) -> int:
    return cast(handle, c_void_p).value or 0


def _call(operation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlError(operation, error.value) from None


class Nvml:
    """The opened library: its devices and its events. Every method raises NvmlError."""

    def __init__(self, nvlinks_seen_up: dict[str, set[int]]) -> None:
        _call("initialization", pynvml.nvmlInitWithFlags, 0)
        try:
            self.driver_version: str = _call("driver version", pynvml.nvmlSystemGetDriverVersion)
            self.devices: list[GpuDevice] = []
            self.failed_devices: list[tuple[int, NvmlError]] = []
            for index in range(_call("count", pynvml.nvmlDeviceGetCount)):
                try:
                    self.devices.append(GpuDevice(index, nvlinks_seen_up))
                except NvmlError as error:
                    self.failed_devices.append((index, error))
            self._events = self._register()
        except NvmlError:
            self.close()
            raise

    def _register(self) -> Any:
        """Return an event set of all devices that offer events, or None."""
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return None
        registered = [device.register_events(events) for device in self.devices]
        return events if any(registered) else None

    @property
    def has_events(self) -> bool:
        return self._events is not None

    def wait_event(self, timeout_ms: int) -> tuple[GpuDevice | None, int, int] | None:
        """Return the next event as (device, type, data), or None after the time-out. Raises NvmlError."""
        try:
            event = pynvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise NvmlError("event wait", error.value) from None
        address = _address(event.device)
        device = next((each for each in self.devices if _address(each.handle) == address), None)
        return device, event.eventType, event.eventData

    def close(self) -> None:
        """Close the library; errors of a broken driver are ignored."""
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass
