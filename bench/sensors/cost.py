"""What sensing costs: CPU and memory of a real agent and its sensor process, and memory over a month."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import tracemalloc
from pathlib import Path

from bench.sensors.events import load_machine
from bench.sensors.node import MEMORY_FOLDER, BenchNode
from bench.table import Row
from everstep_agent.policy.rules import load_policy
from everstep_agent.virtual.scenario import DGX_BUS_IDS
from examples.demo.world import World, wait_for

GPUS = 8
WARM_UP_S = 10.0
HANG_S = 12.0
"""Seconds after which a hung GPU's thread was left behind, and a new one reads the others."""

POLL_EVERY_S = 900.0
"""Seconds between two polls of the month; polls at 1 Hz would take two hours of CPU."""
POLLS_A_DAY = 96
FIRST_DAYS, DAYS = 5, 30
LINES_AN_HOUR = 20
XIDS = 29
FAULTS: tuple[dict[str, object], ...] = (
    {"gpus": {"3": {"temperature_c": 88}}},
    {"ports": {"mlx5_1": {"up": False}}},
    {"gpus": {"5": {"ecc_uncorrected": 2, "recovery_action": 1}}},
    {"host": {"free_fraction": 0.01, "zombies": 400}},
    {"gpus": {"6": {"missing": True}}},
    {},
)
"""Changes that take turns, one a day of the month, so that findings come and go."""


def measure_processes(seconds: float) -> list[Row]:
    """Return CPU and memory of an agent and its sensor process. Raises OSError, TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as out, World(Path(out), ["n0"]) as world:
        world.start_controller()
        node = world.nodes["n0"]
        node.virtual = f"default:{GPUS}"
        node.boot()
        wait_for(lambda: node.booted, "the agent is up")
        pids = json.loads((node.folder / "agent.json").read_text())
        time.sleep(WARM_UP_S)
        share = {name: _cpu_share(pids[name], seconds) for name in ("sensor_pid", "pid")}
        memory = {name: _pss(pids[name]) for name in share}
        node.set_gpu(hang=True)
        time.sleep(HANG_S)
        hung = _pss(pids["sensor_pid"])
        node.set_gpu()
    simulated = "the virtual NVML answers in Python"
    return [
        Row("CPU of the sensor process, 8 GPUs at 1 Hz", share["sensor_pid"], "% of a core", 1.5, 0.7, simulated),
        Row("CPU of the agent's main process beside it", share["pid"], "% of a core"),
        Row("memory of the sensor process", memory["sensor_pid"], "MiB (PSS)", against=simulated),
        Row("memory of the agent's main process", memory["pid"], "MiB (PSS)"),
        Row("memory that a hung GPU adds", hung - memory["sensor_pid"], "MiB", 30, 15),
    ]


def measure_month() -> list[Row]:
    """Return how the memory in use grows in a month of a troubled node: sensors and assessment, in this process."""
    tracemalloc.start()
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=MEMORY_FOLDER) as folder,
        BenchNode(load_machine("dgx"), load_policy(), Path(folder)) as node,
    ):
        at_days = {}
        for day in range(1, DAYS + 1):
            node.change(FAULTS[day % len(FAULTS)])
            _live_a_day(node, day)
            if day in (FIRST_DAYS, DAYS):
                gc.collect()
                at_days[day] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    growth = (at_days[DAYS] - at_days[FIRST_DAYS]) / 1024
    return [Row(f"memory in use: growth from day {FIRST_DAYS} to {DAYS} of a troubled node", growth, "KiB", 256, 64)]


def _live_a_day(node: BenchNode, day: int) -> None:
    for poll in range(POLLS_A_DAY):
        if poll % (POLLS_A_DAY // 24) == 0:
            numbers = (13 + (day * 24 + poll + line) % XIDS for line in range(LINES_AN_HOUR))
            bus = DGX_BUS_IDS[day % GPUS]
            node.write_lines(f"NVRM: Xid (PCI:0000:{bus}): {xid}, pid={day}, Ch {poll:08x}" for xid in numbers)
        node.poll(POLL_EVERY_S)


def _cpu_share(pid: int, seconds: float) -> float:
    """Return the percentage of a core that the process uses over some seconds."""
    before = _cpu_s(pid)
    started = time.perf_counter()
    time.sleep(seconds)
    return 100.0 * (_cpu_s(pid) - before) / (time.perf_counter() - started)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads that live, to a nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _pss(pid: int) -> float:
    """Return MiB, with shared pages divided among their users."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"process {pid} has no Pss line")
