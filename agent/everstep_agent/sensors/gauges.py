"""Choose the gauges, modes and versions of a poll that the controller shows to people."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.wire.v1.agent import (
    MAX_ADAPTER_KINDS,
    MAX_GAUGED_GPUS,
    MAX_HARDWARE_TEXT,
    GpuGauges,
    GpuModes,
    NetworkAdapter,
)
from everstep_agent.drivers.gpu_samples import THROTTLE_REASONS, GpuSample
from everstep_agent.drivers.samples import FABRIC_ROLES, HardwareSamples, HostSample, PortSample
from everstep_agent.sensors.sensor_messages import SensorReport

MAX_POLL_AGE_S = 10.0
"""Seconds after which a poll is too old to be sent: the sensors hang, and the controller shows when it heard last."""

_LEAST_IMPLAUSIBLE = 1 << 53  # of ``SafeInt``


def fresh_report(report: SensorReport, now: float) -> SensorReport:
    """Return the report, without its samples if they are too old to be exported; ``now`` in wall seconds.

    GPUs stay listed, as ones that cannot be read: an alert on ``everstep_gpu_up`` must not lose its series.
    """
    if now - report.polled_at <= MAX_POLL_AGE_S:
        return report
    silent = tuple(
        GpuSample(index=gpu.index, pci_bus_id=gpu.pci_bus_id, uuid=gpu.uuid, error="the sensors hang")
        for gpu in report.poll.gpus
    )
    poll = msgspec.structs.replace(
        report.poll, gpus=silent, ports=(), paths=(), host=HostSample(), hardware=HardwareSamples()
    )
    return msgspec.structs.replace(report, poll=poll)


def gpu_gauges(report: SensorReport, now: float) -> tuple[GpuGauges, ...]:
    """Return the gauges of the newest poll, or none if it is too old; ``now`` in wall seconds."""
    if now - report.polled_at > MAX_POLL_AGE_S:
        return ()
    return tuple(_gauges(sample) for sample in report.poll.gpus[:MAX_GAUGED_GPUS])


def _gauges(sample: GpuSample) -> GpuGauges:
    reasons = sample.clocks.throttle_reasons or 0
    return GpuGauges(
        index=sample.index,
        is_lost=sample.lost,
        temperature_c=sample.temperatures.temperature_c,
        memory_temperature_c=sample.temperatures.memory_temperature_c,
        power_w=_rounded(sample.power.power_w, 1),
        power_limit_w=_rounded(sample.power.power_limit_w, 1),
        utilization=_rounded(sample.utilization.gpu_utilization, 3),
        memory_used_bytes=_plausible(sample.memory.memory_used_bytes),
        sm_clock_mhz=sample.clocks.sm_clock_mhz,
        memory_clock_mhz=sample.clocks.memory_clock_mhz,
        throttled_by=tuple(name for name, bits in THROTTLE_REASONS.items() if reasons & bits),
        ecc_corrected=_plausible(sample.memory_errors.ecc_corrected),
        ecc_uncorrected=_plausible(sample.memory_errors.ecc_uncorrected),
    )


def _plausible(value: int | None) -> int | None:
    """Return a number of 64 bits, or None if a heartbeat cannot have it: a broken GPU may answer with all bits set."""
    return value if value is not None and value < _LEAST_IMPLAUSIBLE else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def gpu_modes(gpus: Iterable[GpuSample]) -> GpuModes:
    """Return the modes of the GPUs that can be read."""
    samples = tuple(gpus)
    return GpuModes(
        ecc=_modes(sample.modes.ecc_mode for sample in samples),
        mig=_modes(sample.modes.mig_mode for sample in samples),
        persistence=_modes(sample.modes.persistence_mode for sample in samples),
    )


def _modes(modes: Iterable[int | None]) -> str:
    return ", ".join(sorted({"on" if mode else "off" for mode in modes if mode is not None}))


def network_adapters(ports: Iterable[PortSample]) -> tuple[NetworkAdapter, ...]:
    """Return the kinds of RDMA adapters whose board and firmware are known, without those made for containers."""
    kinds = {
        (board[:MAX_HARDWARE_TEXT], firmware[:MAX_HARDWARE_TEXT])
        for port in ports
        if port.role in FABRIC_ROLES
        and (board := port.identity.get("board"))
        and (firmware := port.identity.get("firmware"))
    }
    return tuple(
        NetworkAdapter(board=board, firmware=firmware) for board, firmware in sorted(kinds)[:MAX_ADAPTER_KINDS]
    )
