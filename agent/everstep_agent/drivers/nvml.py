"""NVML through pynvml: every value answers or fails by itself.

Numbers are those of ``nvml.h``, which never change. Functions are looked up by name when they are called, so that a
release of nvidia-ml-py (or a driver) without one lacks that value and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p, cast
from dataclasses import dataclass, field
from typing import Any

import pynvml

from everstep.wire.v1.agent import Gpu

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIBRARY_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

UNSUPPORTED_ERRORS = frozenset(
    {NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)
"""Errors that will not change while the driver stays loaded: the value is not read again."""

EVENT_XID = 0x8
_EVENTS = EVENT_XID
"""Only XIDs are waited for: polls read the values behind the other events."""

_VALUE_BY_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

MAX_NVLINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvml.h, driver 580 and later; 18 before."""


class NvmlError(Exception):
    """An NVML call failed. ``is_gpu_lost``: gone from the bus; ``is_reset_required``: needs a reset before it
    answers."""

    def __init__(self, operation: str, code: int) -> None:
        text = getattr(pynvml.NVMLError, "_errcode_to_string", {}).get(code) or "unknown error"
        super().__init__(f"{operation}: {text} (NVML error {code})")
        self.code = code

    @property
    def is_gpu_lost(self) -> bool:
        return self.code == GPU_IS_LOST

    @property
    def is_reset_required(self) -> bool:
        return self.code == RESET_REQUIRED


def kernel_bus_id(nvml: str) -> str:
    """Convert NVML's ``00000000:1B:00.0`` to the kernel log's ``0000:1b:00``. A domain of more than four digits stays
    whole: ``10000:01:00``."""
    domain, bus, device = nvml.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device.partition('.')[0]}"


def call(name: str, *arguments: Any) -> Any:
    """Return the result of pynvml's function of that name. Raises NvmlError."""
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlError(name, error.value) from None
    except (AttributeError, TypeError):  # a release of nvidia-ml-py without the function, or without these arguments
        raise NvmlError(name, FUNCTION_NOT_FOUND) from None
    except ValueError:  # such as text that is not UTF-8
        raise NvmlError(name, UNKNOWN) from None


@dataclass
class Outcome:
    """How the calls of one pass over a GPU ended. Values that are not offered count on neither side."""

    answers: int = 0
    errors: list[NvmlError] = field(default_factory=list)

    @property
    def is_unreadable(self) -> bool:
        """Whether most values failed."""
        return len(self.errors) > self.answers

    @property
    def is_lost(self) -> bool:
        """Whether most values failed and NVML calls the GPU lost."""
        return self.is_unreadable and any(error.is_gpu_lost for error in self.errors)

    @property
    def is_reset_required(self) -> bool:
        return self.is_unreadable and any(error.is_reset_required for error in self.errors)

    @property
    def summary(self) -> str:
        """The first error, and the number of the others; a lost GPU's loss first."""
        ordered = sorted(self.errors, key=lambda error: not (error.is_gpu_lost or error.is_reset_required))
        others = f", and {len(ordered) - 1} more" if len(ordered) > 1 else ""
        return f"{ordered[0]}{others}" if ordered else ""


class GpuDevice:
    """One GPU's handle. A value that the device does not offer is None and is not read again; a value that fails is
    None too, and is an error of the running pass (``outcome``)."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.outcome = Outcome()
        self._unsupported: set[object] = set()

    def start_pass(self) -> Outcome:
        """Begin a pass, and return its outcome, which the next reads fill."""
        self.outcome = Outcome()
        return self.outcome

    def identify(self, index: int) -> Gpu:
        """Return the identity. A value that is not offered or fails is empty."""
        pci = self.read("nvmlDeviceGetPciInfo")
        memory = self.read("nvmlDeviceGetMemoryInfo")
        return Gpu(
            index=index,
            pci_bus_id="" if pci is None else kernel_bus_id(_text(pci.busId)),
            uuid=_text(self.read("nvmlDeviceGetUUID")),
            memory_bytes=0 if memory is None else memory.total,
            name=_text(self.read("nvmlDeviceGetName")),
            serial=_text(self.read("nvmlDeviceGetSerial")),
            part_number=_text(self.read("nvmlDeviceGetBoardPartNumber")),
            vbios=_text(self.read("nvmlDeviceGetVbiosVersion")),
            inforom=_text(self.read("nvmlDeviceGetInforomImageVersion")),
        )

    def read(self, name: str, *arguments: Any) -> Any:
        """Return the value of pynvml's function ``name``, or None if it is not offered or fails."""
        return self.attempt(name, lambda: call(name, self.handle, *arguments), arguments)

    def read_fields(self, fields: Sequence[int | tuple[int, int]]) -> list[Any]:
        """Return field values in the order of ``fields``: all numbers, or all pairs of a number and a scope (a link).

        None stands for a value that is not offered or fails.
        """
        wanted = [each for each in fields if each not in self._unsupported]
        is_scoped = any(isinstance(each, tuple) for each in wanted)
        before = self.outcome.answers, len(self.outcome.errors)
        values = self.attempt(
            "nvmlDeviceGetFieldValues",
            lambda: call("nvmlDeviceGetFieldValues", self.handle, wanted) if wanted else None,
            ("scoped",) if is_scoped else (),
        )
        self.outcome.answers = before[0]
        if values is None:
            self.outcome.errors += self.outcome.errors[before[1] :] * (len(wanted) - 1)
            return [None] * len(fields)
        found = {each: self._field(each, value) for each, value in zip(wanted, values, strict=True)}
        return [found.get(each) for each in fields]

    def attempt(self, name: str, read: Callable[[], Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Return ``read()``, which raises NvmlError; None if the value is not offered or fails."""
        if (name, arguments) in self._unsupported:
            return None
        try:
            result = read()
        except NvmlError as error:
            # Without arguments, an invalid one can only be the handle: no reason to stop asking.
            if error.code in UNSUPPORTED_ERRORS or (arguments and error.code == INVALID_ARGUMENT):
                self._unsupported.add((name, arguments))
            else:
                self.outcome.errors.append(error)
            return None
        self.outcome.answers += 1
        return result

    def _field(self, which: int | tuple[int, int], value: Any) -> Any:
        code = value.nvmlReturn
        if code == SUCCESS:
            self.outcome.answers += 1
            kind = value.valueType
            return getattr(value.value, _VALUE_BY_TYPE[kind]) if 0 <= kind < len(_VALUE_BY_TYPE) else None
        if code in UNSUPPORTED_ERRORS or code == INVALID_ARGUMENT:
            self._unsupported.add(which)
        else:
            self.outcome.errors.append(NvmlError(f"field {which}", code))
        return None

    def register_events(self, event_set: Any) -> bool:
        """Register with an event set. Returns False if the device offers no events, or refuses."""
        try:
            offered = call("nvmlDeviceGetSupportedEventTypes", self.handle) & _EVENTS
            if offered:
                call("nvmlDeviceRegisterEvents", self.handle, offered, event_set)
        except NvmlError:
            return False
        return bool(offered)

    def sram_status(self) -> Any:
        """Return NVML's structure of SRAM errors (nvmlEccSramErrorStatus_t), or None if unknown."""
        return self.attempt(_SRAM_STATUS, lambda: _sram_status(self.handle))

    def fabric_info(self) -> Any:
        """Return NVML's struct about the NVLink fabric, without a health mask from older drivers; None if unknown."""
        info = self.attempt(_FABRIC_INFO, lambda: _fabric_info(_FABRIC_INFO, "c_nvmlGpuFabricInfo_v2_t", self.handle))
        if (_FABRIC_INFO, ()) not in self._unsupported:
            return info
        older = _FABRIC_INFO.removesuffix("V")
        return self.attempt(older, lambda: _fabric_info(older, "c_nvmlGpuFabricInfo_t", self.handle))

    def retired_pages(self) -> int | None:
        """Return the pages retired for either cause (before Ampere), or None if unknown."""
        pages = [self.read("nvmlDeviceGetRetiredPages_v2", cause) for cause in _RETIREMENT_CAUSES]
        return None if None in pages else sum(map(len, pages))


_SRAM_STATUS = "nvmlDeviceGetSramEccErrorStatus"
_FABRIC_INFO = "nvmlDeviceGetGpuFabricInfoV"
_RETIREMENT_CAUSES = (0, 1)
"""Several correctable errors, or one uncorrectable one (nvml.h, nvmlPageRetirementCause_t)."""


def _sram_status(handle: Any) -> Any:
    kind = getattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t", None)
    if kind is None:
        raise NvmlError(_SRAM_STATUS, FUNCTION_NOT_FOUND)
    status = kind()
    # pynvml's wrapper passes the struct by value, so its result is lost
    call(_SRAM_STATUS, handle, byref(status))
    return status


def _fabric_info(name: str, struct: str, handle: Any) -> Any:
    kind = getattr(pynvml, struct, None)
    if kind is None:
        raise NvmlError(name, FUNCTION_NOT_FOUND)
    info = kind()
    call(name, handle, byref(info))
    return info


def _text(value: str | bytes | None) -> str:
    """Return NVML's text. Some releases of nvidia-ml-py return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _address(handle: Any) -> int:
    return cast(handle, c_void_p).value or 0


class Nvml:
    """The opened library: the number of its devices, and its events. Every method raises NvmlError."""

    def __init__(self) -> None:
        call("nvmlInitWithFlags", 0)
        try:
            self.driver_version = _driver_version()
            self.count: int = call("nvmlDeviceGetCount")
        except NvmlError:
            self.close()
            raise
        self._events: Any = None
        self._devices: list[GpuDevice] = []

    def register_events(self, devices: Sequence[GpuDevice]) -> None:
        """Wait for events of these devices from now on, as far as they offer any."""
        try:
            events = call("nvmlEventSetCreate")
        except NvmlError:
            return
        self._devices = [device for device in devices if device.register_events(events)]
        self._events = events if self._devices else None

    @property
    def has_events(self) -> bool:
        return self._events is not None

    def wait_event(self, timeout_ms: int) -> tuple[GpuDevice | None, int, int] | None:
        """Return the next event as (device, type, data), or None after the time-out. Raises NvmlError."""
        try:
            event = call("nvmlEventSetWait_v2", self._events, timeout_ms)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        address = _address(event.device)
        device = next((each for each in self._devices if _address(each.handle) == address), None)
        return device, event.eventType, event.eventData

    def close(self) -> None:
        """Close the library; errors of a broken driver are ignored."""
        try:
            call("nvmlShutdown")
        except NvmlError:
            pass


def handle_of(index: int) -> Any:
    """Return the handle of the GPU with an index, or the NvmlError."""
    return _handle("nvmlDeviceGetHandleByIndex", index)


def handle_at(bus_id: str) -> Any:
    """Return the handle of the GPU at a PCI address, or the NvmlError."""
    return _handle("nvmlDeviceGetHandleByPciBusId", f"{bus_id}.0".encode())


def _handle(name: str, which: int | bytes) -> Any:
    try:
        return call(name, which)
    except NvmlError as error:
        return error


def _driver_version() -> str:
    try:
        return _text(call("nvmlSystemGetDriverVersion"))
    except NvmlError:
        return ""
