"""Values of a GPU that dashboards of DCGM show and no rule judges: video engines, NVLink traffic, and activity by GPM.

GPM (GPU performance monitoring) counts on Hopper and later, between two of its samples. It has never been run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pynvml

from everstep_agent.drivers.nvml import FUNCTION_NOT_FOUND, SUCCESS, GpuDevice, NvmlError, call
from everstep_agent.sensors.nvlinks import total

MEMORY_INFO_V2 = 0x2000028
"""nvmlMemory_v2: the version of nvmlMemory_v2_t, which tells reserved memory apart (nvml.h)."""
NVLINK_SENT, NVLINK_RECEIVED = 138, 139
"""Numbers of nvml.h: NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*, in KiB."""
ALL_LINKS = 0xFFFFFFFF

GPM_METRICS = {
    "graphics_activity": (1, 0.01),
    "tensor_activity": (5, 0.01),
    "dram_activity": (10, 0.01),
    "pcie_sent_bytes_per_s": (20, 1 << 20),
    "pcie_received_bytes_per_s": (21, 1 << 20),
}
"""Numbers of nvml.h, NVML_GPM_METRIC_*, and the factor to a ratio or to bytes: they count percents and MiB/s."""
_GPM_VERSION = 1


def read_video_utilization(device: GpuDevice) -> dict[str, float | None]:
    """Return values of a ``GpuUtilization``: those of the video engines."""
    encoder = device.read("nvmlDeviceGetEncoderUtilization")
    decoder = device.read("nvmlDeviceGetDecoderUtilization")
    return {
        "encoder_utilization": None if encoder is None else encoder[0] / 100,
        "decoder_utilization": None if decoder is None else decoder[0] / 100,
    }


def read_reserved_bytes(device: GpuDevice) -> int | None:
    """Return the memory that the driver reserves."""
    memory = device.read("nvmlDeviceGetMemoryInfo", MEMORY_INFO_V2)
    return None if memory is None else int(memory.reserved)


def read_nvlink_bytes(device: GpuDevice) -> int | None:
    """Return the bytes that all links have sent and received."""
    kibibytes = total(device.read_fields([(NVLINK_SENT, ALL_LINKS), (NVLINK_RECEIVED, ALL_LINKS)]))
    return None if kibibytes is None else kibibytes << 10


def read_vgpu_licence(device: GpuDevice) -> int | None:
    """Return 1 if a feature of vGPU is licensed, 0 if none is, as on a machine without vGPU."""
    features = device.read("nvmlDeviceGetGridLicensableFeatures")
    if features is None:
        return None
    known = features.gridLicensableFeatures[: features.licensableFeaturesCount]
    return int(any(feature.featureState for feature in known))


@dataclass(eq=False)
class GpuActivity:
    """The activity of one open GPU, counted by GPM between two readings."""

    device: GpuDevice
    _samples: list[Any] = field(default_factory=list)  # two of NVML's, the older one first
    _has_older: bool = False
    _is_supported: bool | None = None

    def read(self) -> dict[str, float]:
        """Return values of a ``GpuUtilization`` since the last reading; nothing at the first, and without GPM."""
        if self._is_supported is None:
            support = self.device.read("nvmlGpmQueryDeviceSupport")
            self._is_supported = support is not None and bool(support.isSupportedDevice)
        if not self._is_supported:
            return {}
        # With an argument, "invalid argument" ends the asking: a GPU that is divided by MIG may answer so.
        found: dict[str, float] | None = self.device.attempt("nvmlGpmSampleGet", self._read, ("whole GPU",))
        return found or {}

    def close(self) -> None:
        """Give NVML's memory back. Call it before the library is closed."""
        for sample in self._samples:
            try:
                call("nvmlGpmSampleFree", sample)
            except NvmlError:
                pass
        self._samples, self._has_older = [], False

    def _read(self) -> dict[str, float]:
        while len(self._samples) < 2:
            self._samples.append(call("nvmlGpmSampleAlloc"))
        older, newer = self._samples
        has_older, self._has_older = self._has_older, False
        call("nvmlGpmSampleGet", self.device.handle, newer)
        self._samples, self._has_older = [newer, older], True
        return _difference(older, newer) if has_older else {}


def _difference(older: Any, newer: Any) -> dict[str, float]:
    kind = getattr(pynvml, "c_nvmlGpmMetricsGet_t", None)
    if kind is None:
        raise NvmlError("nvmlGpmMetricsGet", FUNCTION_NOT_FOUND)
    query = kind()
    query.version, query.numMetrics = _GPM_VERSION, len(GPM_METRICS)
    query.sample1, query.sample2 = older, newer
    for place, (number, _) in enumerate(GPM_METRICS.values()):
        query.metrics[place].metricId = number
    call("nvmlGpmMetricsGet", query)
    answers = zip(GPM_METRICS.items(), query.metrics, strict=False)
    return {name: answer.value * factor for (name, (_, factor)), answer in answers if answer.nvmlReturn == SUCCESS}
