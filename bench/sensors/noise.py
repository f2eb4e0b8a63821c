"""A month of ordinary life of a healthy fleet, judged by the real assessment.

Polls at 1 Hz of a thousand nodes for 30 days are 2.6e9, so only those that can change a judgement are made:

- An event (a harmless row, a job, a boot) is played once through the real sensors at 1 Hz, from ten seconds before its
  change to 64 s after its end: the longest distance between two looks of a sensor is 60 polls. Equal polls in a row are
  kept as one poll and a duration.
- Every node has an assessment of its own. It judges the first poll of each such run, and goes on at 1 Hz for as long as
  a rule's history holds a bad result without being active. Once no history does, each further equal poll changes
  nothing: a bad constant value has made its finding, a good one makes none, counters do not rise, and lines of the
  kernel log count when they come. The clock is then set to the run's end.
- The node's profile is compared every ten seconds, so a run that lasts longer is judged after ten seconds, too.
- Sensors read slow values at each poll instead of every tenth, so that N-of-M rules on them fill ten times as fast.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from bench.sensors.events import EVICTING, EventRow, load_machine, load_rows
from bench.sensors.node import MEMORY_FOLDER, START_WALL, BenchNode
from bench.table import Row
from everstep.vocabulary import Finding, Mode, Severity
from everstep_agent.drivers.gpu_samples import GpuSample, LinkSample
from everstep_agent.drivers.samples import PortSample
from everstep_agent.findings.assessment import PROFILE_INTERVAL_S, AssessorState, FindingAssessor, Instant
from everstep_agent.node_profile.profile import NodeProfile, SavedProfile
from everstep_agent.policy.rules import FindingPolicy
from everstep_agent.sensors.sensor_messages import PollResult

DAY_S = 86_400.0
AFTERMATH_POLLS = 64
"""Polls recorded after an event: the PCI bus is looked at by every 60th."""
BOOT_S = 120
"""Seconds after the agent's start for which ports and links of a node that boots are down."""
SETTLED_POLLS = 3

ROW_PER_DAY = 0.003
"""Events of a row on a node and day, unless ``ROWS_PER_DAY`` names it."""
ROWS_PER_DAY = {
    "user-program-segfaults": 0.5,
    "user-program-traps": 0.3,
    "containers-come-and-go": 8.0,
    "file-systems-are-mounted": 1.0,
    "busy-machine-lines": 3.0,
    "security-lines": 10.0,
    "power-management-lines": 1.0,
    "nfs-answers": 0.5,
    "unsupported-discard": 0.2,
    "corrected-pcie-error": 0.3,
    "corrected-memory-error": 0.02,
    "driver-upgrade-by-order": 0.02,
    "reset-by-order": 0.02,
    "driver-modules-reloaded": 0.03,
    "infiniband-port-disabled": 0.03,
    "storage-port-disabled": 0.02,
    "port-moves-into-container": 0.1,
    "virtual-function-removed": 0.05,
    "management-cable-pulled": 0.01,
    "bmc-port-vanishes": 0.05,
    "network-card-firmware-reset": 0.01,
    "subnet-manager-restarts": 0.03,
    "short-heat": 0.1,
    "short-memory-heat": 0.05,
    "short-hardware-slowdown": 0.1,
    "checkpoint-writers-wait": 0.05,
    "storage-pauses": 0.05,
    "clock-off-by-a-second": 0.05,
    "high-load": 0.05,
    "values-fail-for-two-seconds": 0.05,
    "gpu-given-to-a-virtual-machine": 0.005,
}
SLOW_ROWS = frozenset(("fabric-joins-anew", "fabric-rack-manager-upgraded", "fabric-route-recovers"))
"""Rows left out: they last nearly as long as rules allow for values that are read at every tenth poll, and here all
values are read at each poll."""
JOBS_PER_DAY = 0.5
BOOTS_PER_DAY = 1 / 14
AGENT_RESTARTS_PER_DAY = 0.1
CLOCK_DRIFT_S = 0.8
"""Most by which a node's clock differs from the controller's in the month."""

COUNTERS: tuple[tuple[str, str, float, int], ...] = (
    ("gpu", "memory_errors.ecc_corrected", 0.2, 3),
    ("gpu", "memory_errors.remapped_corrected", 0.005, 1),
    ("gpu", "pcie.pcie_replays", 0.3, 15),
    ("link", "errors", 0.2, 8),
    ("link", "recoveries", 0.05, 1),
    ("counter", "symbol_error", 0.3, 12),
    ("port", "link_downs", 0.01, 1),
)
"""Counters that move on a healthy node: of what, field, events on a node and day, and most by which one rises.

"counter" is one that a port's device has.
"""

Runs = list[tuple[PollResult, float]]
"""Polls, and the seconds for which nothing changes after each."""


@dataclass
class Recording:
    """What the sensors show of the life of a node, played once."""

    bases: tuple[PollResult, PollResult]  # an idle node, and one that trains
    events: dict[str, tuple[Runs, Runs]]  # by row: on an idle node, and on one that trains
    boot: Runs


@dataclass
class Totals:
    """What happened in the month, and what was found."""

    events: Counter[str] = field(default_factory=Counter)
    polls: int = 0
    simulated_s: float = 0.0
    found: Counter[Severity] = field(default_factory=Counter)
    above_info: Counter[str] = field(default_factory=Counter)  # by rule and the event before
    evictions: int = 0


# Recording


def record(rows: Sequence[EventRow], policy: FindingPolicy) -> Recording:
    """Play each event once through the real sensors."""
    training = {"gpus": {"*": {"gpu_utilization": 0.95, "power_w": 660.0, "temperature_c": 66, "processes": 1}}}
    bases = [_play(policy, change, {}, 0)[0][0][0] for change in ({}, training)]
    events = {}
    for row in rows:
        if row.change or row.hold_nvml or row.clock_skew_s:
            while_training = _play_row(row, training, policy)
            is_frequent = row.name in ROWS_PER_DAY
            events[row.name] = (_play_row(row, {}, policy) if is_frequent else while_training), while_training
    booting = {"gpus": {"*": {"nvlinks_down": 2}}, "ports": {"*": {"up": False}}}
    down, up = _play(policy, booting, {}, BOOT_S, is_fresh=True)
    return Recording((bases[0], bases[1]), events, [*down, *up])


def _play_row(row: EventRow, base: Mapping[str, Any], policy: FindingPolicy) -> Runs:
    during, after = _play(policy, base, row.change, row.for_s, is_held=row.hold_nvml)
    return [*during, *after]


def _play(
    policy: FindingPolicy,
    base: Mapping[str, Any],
    change: Mapping[str, Any],
    for_s: int,
    *,
    is_held: bool = False,
    is_fresh: bool = False,
) -> tuple[Runs, Runs]:
    """Return what the sensors show of a change, and after it; if ``is_fresh``, they start with the base, which ends."""
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=MEMORY_FOLDER) as folder,
        BenchNode(load_machine("noise"), policy, Path(folder), slow_every=1) as node,
    ):
        node.change(base)
        if not is_fresh:
            for _ in range(SETTLED_POLLS):
                node.sense()
            node.change(_merged(base, change), is_held)
        during = _compressed(node.sense() for _ in range(max(1, for_s)))
        node.change({} if is_fresh else base)
        return during, _compressed(node.sense() for _ in range(AFTERMATH_POLLS if for_s else 1))


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return both changes; of a part that both have, the values of ``change`` go first."""
    result: dict[str, Any] = dict(base)
    for part, values in change.items():
        known = result.get(part)
        if isinstance(known, dict) and isinstance(values, dict):
            shared = {name: {**known.get(name, {}), **values.get(name, {})} for name in known.keys() | values.keys()}
            result[part] = shared
        else:
            result[part] = values
    return result


def _compressed(polls: Iterable[PollResult]) -> Runs:
    runs: Runs = []
    for poll in polls:
        bare = _without_time(poll)
        if runs and runs[-1][0] == bare:
            runs[-1] = (bare, runs[-1][1] + 1.0)
        else:
            runs.append((bare, 1.0))
    return runs


def _without_time(poll: PollResult) -> PollResult:
    """Return the poll without the values that change at every poll; ``SimulatedNode`` sets them."""
    gpus = tuple(_with_changes(gpu, {"power": {"energy_j": gpu.power.energy_j and 0.0}}) for gpu in poll.gpus)
    nvml = msgspec.structs.replace(poll.nvml, paused_s=poll.nvml.paused_s and 1.0)
    return msgspec.structs.replace(poll, gpus=gpus, poll_s=0.0, nvml=nvml)


def _with_changes(gpu: GpuSample, changes: Mapping[str, Mapping[str, Any]]) -> GpuSample:
    """Return the sample with other values, which are given by part and name."""
    parts = {part: msgspec.structs.replace(getattr(gpu, part), **values) for part, values in changes.items()}
    return msgspec.structs.replace(gpu, **parts)


# Replay


class SimulatedNode:
    """One node's month: its clock, counters and assessment."""

    def __init__(self, name: str, recording: Recording, policy: FindingPolicy, totals: Totals, seed: str) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._recording, self._policy, self._totals = recording, policy, totals
        self._name = name
        self._counters: Counter[tuple[str, int, str]] = Counter()
        self._boots, self._booted_at = 1, -DAY_S
        self._is_training = False
        self._skew_s = 0.0
        self._known: set[tuple[str, float]] = set()
        self._cause = "start"
        self._assessor = self._start_assessor(AssessorState(), SavedProfile())
        self._play([(self._base, 1.0)])

    @property
    def _base(self) -> PollResult:
        return self._recording.bases[self._is_training]

    def live(self, until_s: float, schedule: Sequence[tuple[float, str, Callable[[SimulatedNode], None]]]) -> None:
        """Let the scheduled events happen, each when the one before is over, and then time pass until the end."""
        for at_s, name, happen in schedule:
            self.now_s = max(self.now_s, at_s)
            self._cause = name
            self._totals.events[name] += 1
            self._skew_s = self.random.uniform(-CLOCK_DRIFT_S, CLOCK_DRIFT_S)
            happen(self)
        self.now_s = max(self.now_s, until_s)
        self._cause = "the end"
        self._play([(self._base, 1.0)])
        self._totals.simulated_s += self.now_s

    # Events

    def start_or_end_job(self) -> None:
        self._is_training = not self._is_training
        self._play([(self._base, 60.0)])

    def boot(self) -> None:
        """Boot: counters begin anew, ports and links come up later, and so does the agent."""
        self._counters.clear()
        self._is_training = False
        self._boots, self._booted_at = self._boots + 1, self.now_s - 40.0
        self.restart_agent()
        self._play(self._recording.boot)
        self._play([(self._base, 60.0)])

    def restart_agent(self) -> None:
        self._assessor = self._start_assessor(self._assessor.export_state(), self._assessor.profile.export())
        self._play([(self._base, 1.0)])

    def count(self, scope: str, name: str, most: int) -> None:
        """Let a counter of one GPU or port rise."""
        self._counters[scope, self.random.randrange(8), name] += self.random.randint(1, most)
        self._play([(self._base, 1.0)])

    def play_row(self, row: EventRow) -> None:
        """Let a harmless event happen."""
        if row.kernel_lines:
            self._assessor.process_kernel_lines(row.kernel_lines, self._instant())
            self._note_findings()
        if row.name in self._recording.events:
            self._skew_s += row.clock_skew_s
            self._play(self._recording.events[row.name][self._is_training])

    # Polls

    def _start_assessor(self, state: AssessorState, profile: SavedProfile) -> FindingAssessor:
        return FindingAssessor(self._policy, self._name, None, state, self._instant(), NodeProfile(profile))

    def _instant(self) -> Instant:
        return Instant(START_WALL + self.now_s, self.now_s)

    def _play(self, runs: Runs) -> None:
        for poll, seconds in runs:
            end_s = self.now_s + seconds
            self._poll(poll)
            if seconds > PROFILE_INTERVAL_S:  # the first poll may have come too early to be compared with the profile
                self.now_s += PROFILE_INTERVAL_S - 1.0
                self._poll(poll)
            while self.now_s < end_s and self._is_stirred():
                self._poll(poll)
            self.now_s = max(self.now_s, end_s)

    def _poll(self, poll: PollResult) -> None:
        self.now_s += 1.0
        self._totals.polls += 1
        if self._assessor.process_poll(self._own(poll), self._skew_s, self._instant()):
            self._note_findings()

    def _is_stirred(self) -> bool:
        """Return whether a rule has seen bad values that made no finding yet."""
        histories = self._assessor._histories.values()
        return any(not each.is_active and True in each._recent_results for each in histories)

    def _own(self, poll: PollResult) -> PollResult:
        """Return the poll with this node's times and counters."""
        uptime_s = self.now_s - self._booted_at
        return msgspec.structs.replace(
            poll,
            boot_id=f"boot-{self._boots}",
            gpus=tuple(map(self._own_gpu, poll.gpus)),
            ports=tuple(self._own_port(index, port) for index, port in enumerate(poll.ports)),
            host=msgspec.structs.replace(poll.host, uptime_s=uptime_s),
        )

    def _own_gpu(self, gpu: GpuSample) -> GpuSample:
        changes: dict[str, dict[str, Any]] = {}
        if gpu.power.energy_j == 0.0:
            changes["power"] = {"energy_j": (self.now_s - self._booted_at) * 100.0}
        link, *others = gpu.nvlink.links or (LinkSample(link=0),)
        for (scope, index, name), count in self._counters.items():
            if index != gpu.index or scope in ("port", "counter"):
                continue
            if scope == "gpu" and (known := attrgetter(name)(gpu)) is not None:
                part, _, value = name.partition(".")
                changes.setdefault(part, {})[value] = known + count
            elif scope == "link" and gpu.nvlink.links and (known := getattr(link, name)) is not None:
                link = msgspec.structs.replace(link, **{name: known + count})
                changes["nvlink"] = {"links": (link, *others)}
        return _with_changes(gpu, changes)

    def _own_port(self, index: int, port: PortSample) -> PortSample:
        changes: dict[str, Any] = {}
        for (scope, at, name), count in self._counters.items():
            if at != index:
                continue
            if scope == "counter" and name in port.counters:
                changes["counters"] = port.counters | {name: port.counters[name] + count}
            elif scope == "port" and (known := getattr(port, name)) is not None:
                changes[name] = known + count
        return msgspec.structs.replace(port, **changes) if changes else port

    def _note_findings(self) -> None:
        for finding in self._assessor.findings:
            if (finding.key, finding.since) not in self._known:
                self._known.add((finding.key, finding.since))
                self._note(finding)

    def _note(self, finding: Finding) -> None:
        self._totals.found[finding.severity] += 1
        if finding.severity is not Severity.INFO:
            self._totals.above_info[f"{finding.rule} after {self._cause}"] += 1
        self._totals.evictions += finding.mode is Mode.ENFORCE and finding.action in EVICTING


def _schedule(
    node: SimulatedNode, days: float, rows: Sequence[EventRow]
) -> list[tuple[float, str, Callable[[SimulatedNode], None]]]:
    """Draw when what happens on a node: each event is a Poisson process of its rate."""
    processes: list[tuple[str, float, Callable[[SimulatedNode], None]]] = [
        ("job starts or ends", 2 * JOBS_PER_DAY, SimulatedNode.start_or_end_job),
        ("boot", BOOTS_PER_DAY, SimulatedNode.boot),
        ("agent restarts", AGENT_RESTARTS_PER_DAY, SimulatedNode.restart_agent),
    ]
    for scope, name, per_day, most in COUNTERS:
        processes.append((f"{scope}.{name} rises", per_day, _counting(scope, name, most)))
    processes += [(row.name, ROWS_PER_DAY.get(row.name, ROW_PER_DAY), _playing(row)) for row in rows]
    found = []
    for name, per_day, happen in processes:
        at_s = node.random.expovariate(per_day) * DAY_S
        while at_s < days * DAY_S:
            found.append((at_s, name, happen))
            at_s += node.random.expovariate(per_day) * DAY_S
    return sorted(found, key=lambda each: each[:2])


def _counting(scope: str, name: str, most: int) -> Callable[[SimulatedNode], None]:
    return lambda node: node.count(scope, name, most)


def _playing(row: EventRow) -> Callable[[SimulatedNode], None]:
    return lambda node: node.play_row(row)


def noise_rows() -> list[EventRow]:
    """Return the harmless rows that happen to a node like that of the month while its agent runs."""
    rows = [row for row in load_rows() if not row.fault and not row.at_start and row.machine == "dgx"]
    return [row for row in rows if "boot_id" not in row.change and row.name not in SLOW_ROWS]


def simulate(nodes: int, days: float, policy: FindingPolicy, every: int = 1, seed: int = 1) -> Totals:
    """Let a healthy fleet live, and return what was found; of the harmless rows, one in ``every`` takes part."""
    rows, totals = noise_rows()[::every], Totals()
    recording = record(rows, policy)
    for number in range(nodes):
        node = SimulatedNode(f"n{number}", recording, policy, totals, f"{seed}/{number}")
        node.live(days * DAY_S, _schedule(node, days, rows))
    return totals


def figures(totals: Totals, nodes: int, days: float) -> list[Row]:
    """Return the figures that are judged."""
    above = sum(totals.above_info.values())
    return [
        Row("nodes", nodes, ""),
        Row("days", days, ""),
        Row("events", sum(totals.events.values()), ""),
        Row("polls judged", totals.polls, ""),
        Row("polls at 1 Hz that they stand for", totals.simulated_s, ""),
        Row("findings of severity info", totals.found[Severity.INFO], "findings"),
        Row("findings above info", above, "findings", None, 0),
        Row("evictions", totals.evictions, "evictions", 0, 0),
    ]
