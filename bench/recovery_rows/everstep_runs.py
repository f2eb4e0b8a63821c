"""Runs the workload under Everstep on this machine: one controller, one agent, four ranks, faults one after another."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.recovery_rows.recoveries import Recovered, read, recoveries, step_seconds
from everstep.client import Client
from everstep.wire.v1.operator import GenerationRecovery
from examples.demo.world import World, wait_for

JOB, WORLD, FIRST, APART = "bench", 4, 30, 20
PATIENCE_S = 120.0
SCRIPTS = {"lightning": "bench.recovery_rows.lightning_train", "transformers": "bench.recovery_rows.transformers_train"}
"""Of layouts that have a script of their own; all others are those of ``bench.recovery_rows.everstep_train``."""


@dataclass(frozen=True)
class Outcome:
    """What a run left: a recovery per fault, the controller's own account of each with its phases, and the median
    seconds of a step of rank 0."""

    recovered: list[Recovered]
    accounts: list[GenerationRecovery]
    step_s: float


@dataclass(frozen=True)
class Place:
    """Where ranks compute, and what: how many, on which device, over which backend they meet, and a model of
    ``layers`` x ``Linear(width, width)``. ``first``: the step of the first fault. ``apart``: steps between two faults,
    enough for a new standby to be there."""

    world: int = WORLD
    device: str = "cpu"
    backend: str = "auto"
    apart: int = APART
    first: int = FIRST
    layers: int = 8
    width: int = 512


HERE = Place()


def fault_steps(count: int, apart: int = APART, first: int = FIRST) -> list[int]:
    """The steps at which ``count`` faults strike."""
    return [first + apart * index for index in range(count)]


def _environment(folder: Path, layout: str, steps: int, fault: str, place: Place) -> dict[str, str]:
    return {
        "BENCH_DEVICE": place.device,
        "BENCH_BACKEND": place.backend,
        "BENCH_LAYERS": str(place.layers),
        "BENCH_WIDTH": str(place.width),
        "BENCH_FOLDER": str(folder),
        "BENCH_LAYOUT": layout,
        "BENCH_STEPS": str(steps),
        "BENCH_FAULT": fault,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


class Fleet:
    """A controller, an agent and one launcher with the workload's ranks; a context manager."""

    def __init__(self, layout: str, steps: int, fault: str, place: Place = HERE) -> None:
        self._place = place
        self._out = tempfile.TemporaryDirectory(prefix="everstep-bench-")
        self.folder = Path(self._out.name)
        self.world = World(self.folder, ["n1"])
        self._script = SCRIPTS.get(layout, "bench.recovery_rows.everstep_train")
        self._environment = _environment(self.folder / "steps", layout, steps, fault, place)
        self.steps = steps

    def __enter__(self) -> Fleet:
        self.world.start_controller()
        self.world.boot_nodes()
        node = self.world.nodes["n1"]
        command = [
            "-m",
            "everstep_trainer.launch",
            "--nproc-per-node",
            str(self._place.world),
            "--job",
            JOB,
            "--die-with-parent",
        ]
        command += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket)]
        command += ["--standbys", "1", "--standby-delay-s", "0.3", "--max-restarts", "1000"]
        command += ["--state-dir", str(self.folder / "state")]  # so that no run finds what another has compiled
        command += ["--hang-threshold-s", "1.0", *os.environ.get("BENCH_FLAGS", "").split(), "-m", self._script]
        node.launcher = self.world.start("train", command, self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()
        self._out.cleanup()

    def step(self) -> int:
        """The newest step that is in a log."""
        rows = [row["step"] for log in read(self.folder / "steps").values() for row in log if row["event"] == "step"]
        return max(rows, default=0)

    def finish(self, deadline_s: float = PATIENCE_S) -> Outcome:
        """Waits for the launcher to end, and reads what happened."""
        launcher = self.world.nodes["n1"].launcher
        assert launcher is not None
        wait_for(lambda: launcher.poll() is not None, f"the workload ends (logs in {self.world.logs})", deadline_s)
        job = Client(self.world.url, self.world.operator_token).job(JOB)
        logs = self.folder / "steps"
        step_s = statistics.median(step_seconds(logs, 2))
        return Outcome(recoveries(logs, self._place.world - 1), list(job.recoveries), step_s)


def faults(
    layout: str,
    victim: int,
    where: str,
    signal_name: str,
    count: int,
    place: Place = HERE,
    deadline_s: float = PATIENCE_S,
) -> Outcome:
    """``count`` faults of one kind, one after another, in one run."""
    at = fault_steps(count, place.apart, place.first)
    fault = f"{victim}:{','.join(map(str, at))}:{where}:{signal_name}"
    with Fleet(layout, at[-1] + place.apart, fault, place) as fleet:
        return fleet.finish(deadline_s)


@dataclass(frozen=True)
class ControllerAway:
    """The controller dead for ``away_s``: the longest step meanwhile, and a rank's recovery after its return."""

    longest_step_s: float
    median_step_s: float
    recovery_after_return_s: float | None


def controller_away(away_s: float, kill_rank: bool) -> ControllerAway:
    """SIGKILL to the controller; where asked, a rank is killed while it is away."""
    with Fleet("ddp", 100_000, "-1::between:KILL") as fleet:
        wait_for(lambda: fleet.step() > 60, "the workload steps", PATIENCE_S)
        assert fleet.world.controller is not None
        fleet.world.controller.kill()
        fleet.world.controller.wait()
        died = time.clock_gettime(time.CLOCK_MONOTONIC)
        time.sleep(away_s / 2)
        if kill_rank:
            os.kill(_rank_pid(fleet, 3), signal.SIGKILL)
        time.sleep(away_s / 2)
        fleet.world.start_controller()
        back = time.clock_gettime(time.CLOCK_MONOTONIC)
        goal = fleet.step() + 20
        wait_for(lambda: fleet.step() > goal, "the workload steps after the return", PATIENCE_S)
        return _away(read(fleet.folder / "steps"), died, back, kill_rank)


def _away(logs: dict[str, list[dict[str, float]]], died: float, back: float, kill_rank: bool) -> ControllerAway:
    survivor = next(rows for name, rows in logs.items() if name.startswith("rank0-"))
    at = [row["at"] for row in survivor]
    gaps = [(earlier, later - earlier) for earlier, later in itertools.pairwise(at)]
    median = statistics.median(gap for moment, gap in gaps if moment < died)
    longest = max(gap for moment, gap in gaps if died <= moment < back)
    after = next((moment - back for moment in at if moment > back), None) if kill_rank else None
    return ControllerAway(longest, median, after)


def _rank_pid(fleet: Fleet, rank: int) -> int:
    newest = max((fleet.folder / "steps").glob(f"rank{rank}-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return int(newest.stem.rpartition("-")[2])
