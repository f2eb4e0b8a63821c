"""Every participant of the commit protocol dies at every point of it, alone and together with another one.

Each restore must yield one whole version of all ranks: the state after each step is bit-identical to that of a run
without deaths.

Each of two nodes has a vault with copies of the other node's ranks. With each death both ranks are killed as well, so
that the vaults provide the whole restore. Every run draws a few rounds by ``EVERSTEP_PROTOCOL_SEED``. The nightly tests
try every point alone, and ``EVERSTEP_PROTOCOL_PAIRS`` pairs of points (``all`` for all of them).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from examples.demo.world import Node, World, wait_for
from tests.integration.checkpoints import replicated_training
from tests.integration.checkpoints.torture import Progress
from tests.support.processes.fork_pool import ForkPool, fork_pool, torchrun
from tests.support.processes.kill_points import FOLDER, POINTS, Point, file_name, is_installed
from tests.support.processes.process_table import comm
from tests.support.processes.warm_programs import WarmWorld
from tests.support.ranks.exact_training import read_step_logs

ROOT = Path(__file__).resolve().parents[3]
NODES = ["n1", "n2"]
STEPS_AHEAD, STEPS_AFTER_DEATH = 20, 3
"""Steps that the job may run ahead, and steps that must follow a death."""
STEPS_PER_WAIT = 200
"""Steps per wait, so that each wait has its own timeout."""
SEED = int(os.environ.get("EVERSTEP_PROTOCOL_SEED", "7"))
PAIRS = os.environ.get("EVERSTEP_PROTOCOL_PAIRS", "20")
Round = tuple[tuple[Point, str], ...]

pytestmark = pytest.mark.slow


def draw(seed: int, deaths: int, wanted: str) -> list[Round]:
    """Rounds of ``deaths`` simultaneous deaths, each at a random node."""
    rng = random.Random(seed)
    every = list(combinations(POINTS, deaths))
    chosen = every if wanted == "all" else rng.sample(every, int(wanted))
    return [tuple((point, rng.choice(NODES)) for point in points) for points in chosen]


class Run:
    """The two nodes and their controller; dead processes are restarted as by a service manager."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.world = world
        self.allowed = 0
        self.progress = Progress(folder, len(NODES))
        self._allow(0)
        world.start_controller()
        world.boot_nodes(vaults_outlive=True)
        for node in world.nodes.values():
            node.join(self._launch(node))

    def _launch(self, node: Node) -> list[str]:
        command = ["-m", "everstep_trainer.launch", "--nnodes", "2", "--job", "protocol", "--standby-delay-s", "0.1"]
        command += ["--max-restarts", "1000", "--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket)]
        command += ["--hang-threshold-s", "60", "--die-with-parent"]
        return [*command, "-m", "tests.integration.checkpoints.replicated_training", str(self.folder)]

    def strike(self, victims: Round) -> None:
        """Kill all victims at their points, and the ranks with the last one; then wait for further steps."""
        files = [self.folder / file_name(point, node) for point, node in victims]
        for file in files:
            file.touch()
        names = ", ".join(file.name for file in files)
        self._wait_until(lambda: not any(map(Path.exists, files)), f"the deaths of {names}")
        self._kill_ranks()
        self.reach(self.progress.finished() + STEPS_AFTER_DEATH, f"steps after the deaths of {names}")

    def reach(self, step: int, expected: str) -> None:
        """Wait for the step; every few hundred steps have a timeout of their own."""
        while (finished := self.progress.finished()) < step:
            near = min(step, finished + STEPS_PER_WAIT)
            self._wait_until(lambda near=near: self.progress.finished() >= near, f"{expected}, up to {near}")

    def finish(self) -> list[dict[str, Any]]:
        """End the job after the last step that is allowed so far."""
        draft = self.folder / "last.draft"
        draft.write_text(str(self.allowed))
        draft.rename(self.folder / "last")  # ranks poll for this file
        self._allow(self.allowed + 1)
        launchers = [node.launcher for node in self.world.nodes.values()]
        self._wait_until(
            lambda: all(launcher is not None and launcher.poll() is not None for launcher in launchers), "the job's end"
        )
        assert [launcher.returncode for launcher in launchers if launcher is not None] == [0, 0], self.logs()
        return read_step_logs(self.folder)

    def _kill_ranks(self) -> None:
        for node in self.world.nodes.values():
            for pid in node.processes():
                if comm(pid).startswith("everstep-rank"):
                    _kill(pid)

    def _wait_until(self, condition: Any, expected: str) -> None:
        def holds() -> bool:
            self._restart_dead()
            if not (self.folder / "last").exists():
                self._allow(self.progress.finished() + STEPS_AHEAD)
            return bool(condition())

        try:
            wait_for(holds, expected)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def _restart_dead(self) -> None:
        if self.world.controller is None or self.world.controller.poll() is not None:
            self.world.spawn_controller()
        for node in self.world.nodes.values():
            if node.agent is None or node.agent.poll() is not None:
                node.start_agent(vault_outlives=True)

    def _allow(self, step: int) -> None:
        self.allowed = max(step, self.allowed)
        draft = self.folder / "draft"
        draft.write_text(str(self.allowed))
        draft.rename(self.folder / "gate")

    def logs(self) -> str:
        logs = sorted(self.world.logs.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def without_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean the environment, so that processes under test install the points, and this process does not."""
    for name in [name for name in os.environ if name.startswith(("EVERSTEP_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT / 'tests' / 'support' / 'processes' / 'kill_points_site'}:{ROOT}"
    )  # for processes that are not forked


def test_fork_server_started_here_passes_no_points(
    tmp_path: Path, without_points: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with fork_pool(["tests.support.processes.kill_points"]) as pool:
        assert pool.start(is_installed, environment={FOLDER: None}).result() is False


def run_through(rounds: Sequence[Round], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run the rounds; return the records that the ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as name, WarmWorld(Path(name) / "out", NODES) as world:
        monkeypatch.setenv(FOLDER, name)
        world.settings = "[policy.regroups]\nrank_flap_count = 1000\n"  # here the ranks of one node die every second
        run = Run(Path(name), world)
        for victims in rounds:
            run.strike(victims)
        return run.finish()


FEW = draw(SEED, 1, "2") + draw(SEED, 2, "1")
MANY = draw(SEED, 1, "all") + draw(SEED, 2, PAIRS)


@pytest.mark.promise("commit-protocol")
@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(FEW, marks=pytest.mark.timeout(300 + 60 * len(FEW))),
        pytest.param(MANY, marks=[pytest.mark.nightly, pytest.mark.timeout(300 + 60 * len(MANY))]),
    ],
    ids=["few", "many"],
)
def test_restore_yields_one_whole_version_after_any_death(
    without_points: None, monkeypatch: pytest.MonkeyPatch, forks: ForkPool, tmp_path: Path, rounds: list[Round]
) -> None:
    rows = run_through(rounds, monkeypatch)
    steps = {row["step"] for row in rows}
    assert steps == set(range(1, max(steps) + 1))
    assert len({row["generation"] for row in rows}) > len(rounds)
    (tmp_path / "last").write_text(str(max(steps)))
    torchrun(forks, len(NODES), replicated_training.main, [str(tmp_path)])  # without Everstep
    uninterrupted = {(row["rank"], row["step"]): (row["state"], row["samples"]) for row in read_step_logs(tmp_path)}
    torn = [
        (row["generation"], row["step"], row["rank"])
        for row in rows
        if (row["state"], row["samples"]) != uninterrupted[row["rank"], row["step"]]
    ]
    assert not torn
