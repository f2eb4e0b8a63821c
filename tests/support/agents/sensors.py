"""Samples of a healthy node, a virtual machine with its control file, and a sensor process that tests can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from everstep.clock import ManualClock
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import HostSample, NvmlState, PciGpuCounts, value_hints
from everstep_agent.findings.assessment import AssessorState, FindingAssessor, Instant
from everstep_agent.findings.monitor import SensorMonitor, SensorSettings
from everstep_agent.policy.rules import FindingPolicy, load_policy
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport

BUS = "0000:1b:00"
FELL_OFF = f"NVRM: Xid (PCI:{BUS}): 79, pid=1234, GPU has fallen off the bus."
DEADLINE_S = 60.0


@cache
def built_in_policy() -> FindingPolicy:
    """Return the built-in rules, parsed once."""
    return load_policy()


def gpu(**values: Any) -> GpuSample:
    """Return a sample of a healthy GPU. ``values``: other values, named as in rules."""
    return with_values(GpuSample(index=0, pci_bus_id=BUS, uuid="GPU-a", recovery_action=0), **values)


def with_values(sample: GpuSample, **values: Any) -> GpuSample:
    """Return the sample with other values, which are named as in rules: ``remap_pending``."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        part, _, field = value_hints(GpuSample)[name][0].rpartition(".")
        if part:
            before = changes.get(part, getattr(sample, part))
            changes[part] = msgspec.structs.replace(before, **{field: value})
        else:
            changes[field] = value
    return msgspec.structs.replace(sample, **changes)


def poll(*gpus: GpuSample, **values: Any) -> PollResult:
    """Return a full poll of a node with an uptime of one day.

    Args:
        gpus: Its GPUs, all of which are on the PCI bus.
        values: Other values of fields. Those of the fields ``nvml`` and ``pci_gpus`` begin with ``nvml_`` and
            ``pci_gpus_``.
    """

    def taken(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): values.pop(name) for name in list(values) if name.startswith(prefix)}

    counts = PciGpuCounts(**{"usable": len(gpus)} | taken("pci_gpus_"))
    fields: dict[str, Any] = {"boot_id": "boot-1", "host": HostSample(uptime_s=86_400.0), "pci_gpus": counts}
    return PollResult(is_full=True, gpus=gpus, nvml=NvmlState(**taken("nvml_")), **fields | values)


class TimedAssessor:
    """A finding assessor with a manual clock, which advances one second for each poll."""

    def __init__(
        self, policy: FindingPolicy | None = None, memory: AssessorState | None = None, expected: int | None = None
    ) -> None:
        self.clock = ManualClock()
        self.assessor = FindingAssessor(
            policy or built_in_policy(), "n1", expected, memory or AssessorState(), self.now()
        )

    def now(self) -> Instant:
        return Instant(self.clock.wall(), self.clock.monotonic())

    def polls(self, count: int, *gpus: GpuSample, **values: Any) -> set[str]:
        """Process ``count`` equal polls with rising energy counters, and return the keys of all findings."""
        for _ in range(count):
            self.clock.advance(1.0)
            counting = [_with_energy(gpu, self.clock.monotonic()) for gpu in gpus]
            self.assessor.process_poll(poll(*counting, **values), None, self.now())
        return self.keys()

    def lines(self, *lines: str) -> set[str]:
        """Process lines of the kernel log, and return the keys of all findings."""
        self.assessor.process_kernel_lines(lines, self.now())
        return self.keys()

    def keys(self) -> set[str]:
        """Return the keys of all findings."""
        return {finding.key for finding in self.assessor.findings}


def _with_energy(sample: GpuSample, seconds: float) -> GpuSample:
    if sample.power.energy_j is not None or sample.lost or sample.error:
        return sample
    return with_values(sample, energy_j=1000.0 + seconds)


class Control:
    """The control file of a virtual machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **content: Any) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content))
        os.replace(draft, self.path)


class RunningMonitor:
    """A running sensor monitor with its reports."""

    def __init__(self, settings: SensorSettings) -> None:
        self._changed = asyncio.Event()
        self.reports: list[SensorReport] = []
        self.process = SensorMonitor(settings, SYSTEM_CLOCK, self._take)

    def _take(self, report: SensorReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, condition: Callable[[SensorReport], bool]) -> SensorReport:
        """Wait for a last report that meets the condition, and return it. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._changed.clear()
                if self.reports and condition(self.reports[-1]):
                    return self.reports[-1]
                await self._changed.wait()

    async def until_finding(self, key: str) -> SensorReport:
        return await self.until(lambda report: key in {finding.key for finding in report.findings})

    async def until_no_finding(self, key: str) -> SensorReport:
        return await self.until(lambda report: key not in {finding.key for finding in report.findings})


@contextlib.asynccontextmanager
async def running_monitor(settings: SensorSettings) -> AsyncIterator[RunningMonitor]:
    """Yield a running sensor monitor, and end its process with the block."""
    monitor = RunningMonitor(settings)
    task = asyncio.create_task(monitor.process.run())
    try:
        yield monitor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
