"""One node in this process: the real sensors on a virtual machine's files, and the real assessment, at 1 Hz."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from everstep.vocabulary import Finding
from everstep_agent.drivers.kmsg import KernelLog
from everstep_agent.findings.assessment import AssessorState, FindingAssessor, Instant
from everstep_agent.node_profile.profile import NodeProfile, SavedProfile
from everstep_agent.policy.rules import FindingPolicy
from everstep_agent.sensors.sampler import NodeSensors
from everstep_agent.sensors.sensor_messages import ACTIVITY_BYTES, PollResult, SensorConfig
from everstep_agent.virtual import virtual_nvml
from everstep_agent.virtual.scenario import Scenario

MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where nodes keep their files: a node's tree has hundreds, as those of /sys are in memory, too."""

START_WALL = 1_800_000_000.0
POLL_S = 1.0
EVENT_WAIT_S = 0.001
"""Seconds of real time for which a poll waits for NVML events."""


class SteppedClock:
    """A clock that moves by steps, and between them by real time, for code that waits for threads."""

    def __init__(self) -> None:
        self._now = 0.0
        self._stepped_at = time.monotonic()

    def monotonic(self) -> float:
        return self._now + time.monotonic() - self._stepped_at

    def wall(self) -> float:
        return START_WALL + self.monotonic()

    def step(self, seconds: float) -> None:
        """Move to ``seconds`` after the last step; further, if real time has passed that."""
        self._now = max(self._now + seconds, self.monotonic())
        self._stepped_at = time.monotonic()


class BenchNode:
    """A virtual machine, its sensors and the assessment of their polls.

    All that the sensor process does runs here, but sockets. Lines of the kernel log go through a named pipe. Use it as
    a context: it replaces the process's NVML.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: FindingPolicy,
        folder: Path,
        slow_every: int = 10,
        profile: SavedProfile | None = None,
    ) -> None:
        self.clock = SteppedClock()
        self.skew_s: float | None = 0.0
        self.polls = 0
        self._control, self._hold = folder / "control.json", folder / "hold"
        self._log_path = folder / "kmsg"
        os.mkfifo(self._log_path)
        self._log = KernelLog(str(self._log_path))
        self._log.open()
        config = SensorConfig(
            interval_s=POLL_S,
            slow_every=slow_every,
            sysfs_root="/sys",
            proc_root="/proc",
            disk_paths=("/",),
            scenario=scenario,
            control_file=str(self._control),
            pause_file=str(self._hold),
            machine_folder=str(folder / "machine"),
        )
        self._config, self.scenario = config, scenario
        self._page = mmap.mmap(-1, ACTIVITY_BYTES)
        self._sensors: NodeSensors | None = None
        self.assessor = FindingAssessor(policy, "bench", None, AssessorState(), self.now(), NodeProfile(profile))

    def __enter__(self) -> BenchNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.change({})  # calls that hang read it, and end, and with them their threads
        virtual_nvml.uninstall()
        self._log.close()

    def now(self) -> Instant:
        return Instant(self.clock.wall(), self.clock.monotonic())

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.assessor.findings

    def change(self, changes: Mapping[str, Any], is_held: bool = False) -> None:
        """Replace the differences from the scenario, from the next poll on."""
        new = self._control.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._expanded(changes)))
        os.replace(new, self._control)
        if is_held:
            self._hold.touch()
            os.utime(self._hold, (self.clock.wall(), self.clock.wall()))
        else:
            self._hold.unlink(missing_ok=True)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines to the kernel log, and process them."""
        with open(self._log_path, "w", encoding="utf-8") as pipe:
            for line in lines:
                pipe.write(f"{line}\n")
        while read := self._log.read():
            self.assessor.process_kernel_lines(read, self.now())

    def restart_sensors(self) -> None:
        """Begin with new sensors at the next poll, as after a boot."""
        self._sensors = None

    def poll(self, after_s: float = POLL_S) -> None:
        """Poll once, ``after_s`` seconds after the last poll, and judge the result."""
        poll = self.sense(after_s)
        self.assessor.process_poll(poll, self.skew_s, self.now())
        sensors = self._sensors
        if sensors is not None and (events := sensors.wait_xid_events(self.clock.monotonic() + EVENT_WAIT_S)):
            self.assessor.process_xid_events(events.xids, self.now())

    def sense(self, after_s: float = POLL_S) -> PollResult:
        """Return a poll, ``after_s`` seconds after the last one."""
        self.clock.step(after_s)
        if self._sensors is None:
            self._sensors = NodeSensors(self._config, self._page, self.clock)
        urgent = self._sensors.poll_urgent()
        if urgent is not None:
            self.assessor.process_kernel_lines(urgent.kernel_lines, self.now())
        self.polls += 1
        return self._sensors.poll()

    def _expanded(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes, with those of GPU or port ``*`` for each that exists."""
        names = {"gpus": [str(index) for index in range(len(self.scenario.gpu))], "ports": list(self.scenario.port)}
        result = dict(changes)
        for part, known in names.items():
            if part in result:
                shared = result[part].get("*", {})
                own = {name: values for name, values in result[part].items() if name != "*"}
                result[part] = {name: shared | own.get(name, {}) for name in (known if shared else own)}
        return result
