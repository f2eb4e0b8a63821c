"""Samples of a healthy node, a virtual machine with its control file, and a sensor process that tests can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from everstep_agent.findings.assessment import AssessorState, FindingAssessor, Instant
from everstep_agent.findings.rules import FindingPolicy, load_policy
from everstep_agent.sensors.monitor import SensorMonitor, SensorSettings
from everstep_agent.sensors.samples import GpuSample, HostSample
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport

from everstep.clock import ManualClock
from everstep.system_clock import SYSTEM_CLOCK

BUS = "0000:1b:00"
FELL_OFF = f"NVRM: Xid (PCI:{BUS}): 79, pid=1234, GPU has fallen off the bus."
DEADLINE_S = 60.0


def gpu(**values: Any) -> GpuSample:
    """One healthy GPU, but for ``values``."""
    return GpuSample(**{"index": 0, "pci_bus_id": BUS, "uuid": "GPU-a", "recovery_action": 0, **values})


def poll(*gpus: GpuSample, **values: Any) -> PollResult:
    """A full poll of a node that has been up for a day."""
    host = HostSample(uptime_s=86_400.0)
    return PollResult(
        **{"is_full": True, "boot_id": "boot-1", "host": host, "pci_gpu_count": len(gpus), "gpus": gpus, **values}
    )


class Judge:
    """An assessor with a clock of its own, one second a poll."""

    def __init__(
        self, policy: FindingPolicy | None = None, memory: AssessorState | None = None, expected: int | None = None
    ) -> None:
        self.clock = ManualClock()
        self.assessor = FindingAssessor(policy or load_policy(), "n1", expected, memory or AssessorState(), self.now())

    def now(self) -> Instant:
        return Instant(self.clock.wall(), self.clock.monotonic())

    def polls(self, count: int, *gpus: GpuSample, **values: Any) -> set[str]:
        """The keys of what stands after ``count`` equal polls; the energy counters move meanwhile."""
        for _ in range(count):
            self.clock.advance(1.0)
            moving = [_moving(each, self.clock.monotonic()) for each in gpus]
            self.assessor.process_poll(poll(*moving, **values), None, self.now())
        return self.keys()

    def lines(self, *lines: str) -> set[str]:
        self.assessor.process_kernel_lines(lines, self.now())
        return self.keys()

    def keys(self) -> set[str]:
        return {finding.key for finding in self.assessor.findings}


def _moving(sample: GpuSample, seconds: float) -> GpuSample:
    import msgspec

    if sample.energy_j is not None or sample.lost or sample.error:
        return sample
    return msgspec.structs.replace(sample, energy_j=1000.0 + seconds)


class Control:
    """The control file of a virtual machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **content: Any) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content))
        os.replace(draft, self.path)


class Watched:
    """A running SensorProcess, and waiting for what it shows."""

    def __init__(self, settings: SensorSettings) -> None:
        self._news = asyncio.Event()
        self.pictures: list[SensorReport] = []
        self.process = SensorMonitor(settings, SYSTEM_CLOCK, self._take)

    def _take(self, picture: SensorReport) -> None:
        self.pictures.append(picture)
        self._news.set()

    async def until(self, holds: Callable[[SensorReport], bool]) -> SensorReport:
        """The next picture for which ``holds``. Raises TimeoutError after half a minute."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._news.clear()
                if self.pictures and holds(self.pictures[-1]):
                    return self.pictures[-1]
                await self._news.wait()

    async def until_finding(self, key: str) -> SensorReport:
        return await self.until(lambda picture: key in {finding.key for finding in picture.findings})

    async def until_no_finding(self, key: str) -> SensorReport:
        return await self.until(lambda picture: key not in {finding.key for finding in picture.findings})


@contextlib.asynccontextmanager
async def watched(settings: SensorSettings) -> AsyncIterator[Watched]:
    """A sensor process that ends with the block, whatever happens in it."""
    sensing = Watched(settings)
    task = asyncio.create_task(sensing.process.run())
    try:
        yield sensing
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
