"""Every participant of the commit protocol dies at every point of it, alone and with another; what is restored then is
whole, and one version of all ranks: each step leaves behind, to the last bit, what it leaves where nobody dies.

Two nodes, whose vaults hold copies of each other's ranks. In the moment of each death both ranks are killed as well, so
that everything comes from the vaults. Every suite draws a few rounds by ``EVERSTEP_PROTOCOL_SEED``. The nightly tests
try every point alone, and ``EVERSTEP_PROTOCOL_PAIRS`` pairs (``all`` of them if so asked).
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
from tests.support import shared_training
from tests.support.dying import FOLDER, POINTS, Point, file_name, is_installed
from tests.support.exact_training import read_diaries
from tests.support.forked import ForkPool, fork_pool, torchrun
from tests.support.processes import comm
from tests.support.torture import Progress
from tests.support.warm_launcher import WarmWorld

ROOT = Path(__file__).resolve().parents[2]
NODES = ["n1", "n2"]
AHEAD, ON = 20, 3
"""How many steps are allowed at a time, and how many have to follow upon a death."""
STRETCH = 200
"""How many are waited for at a time."""
SEED = int(os.environ.get("EVERSTEP_PROTOCOL_SEED", "7"))
PAIRS = os.environ.get("EVERSTEP_PROTOCOL_PAIRS", "20")
Round = tuple[tuple[Point, str], ...]

pytestmark = pytest.mark.slow


def draw(seed: int, together: int, wanted: str) -> list[Round]:
    """Rounds in which so many die ``together``, each at a node that is drawn."""
    chance = random.Random(seed)
    every = list(combinations(POINTS, together))
    chosen = every if wanted == "all" else chance.sample(every, int(wanted))
    return [tuple((point, chance.choice(NODES)) for point in points) for points in chosen]


class Run:
    """The two nodes and their controller; who dies is started again as a service manager would."""

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
        return [*command, "-m", "tests.support.shared_training", str(self.folder)]

    def strike(self, victims: Round) -> None:
        """All of them die, each at its point, and the ranks with the last; then the run goes on."""
        files = [self.folder / file_name(point, node) for point, node in victims]
        for file in files:
            file.touch()
        names = ", ".join(file.name for file in files)
        self._until(lambda: not any(map(Path.exists, files)), f"the deaths of {names}")
        self._kill_ranks()
        self.reach(self.progress.finished() + ON, f"steps after the deaths of {names}")

    def reach(self, step: int, what: str) -> None:
        """However many steps that are, some hundreds at a time must come in time."""
        while (finished := self.progress.finished()) < step:
            near = min(step, finished + STRETCH)
            self._until(lambda near=near: self.progress.finished() >= near, f"{what}, up to {near}")

    def finish(self) -> list[dict[str, Any]]:
        """Ends the job after the step that nobody may go beyond yet."""
        draft = self.folder / "last.draft"
        draft.write_text(str(self.allowed))
        draft.rename(self.folder / "last")  # ranks look for it all the time
        self._allow(self.allowed + 1)
        launchers = [node.launcher for node in self.world.nodes.values()]
        self._until(lambda: all(one is not None and one.poll() is not None for one in launchers), "the job's end")
        assert [one.returncode for one in launchers if one is not None] == [0, 0], self.said()
        return read_diaries(self.folder)

    def _kill_ranks(self) -> None:
        for node in self.world.nodes.values():
            for pid in node.processes():
                if comm(pid).startswith("everstep-rank"):
                    _kill(pid)

    def _until(self, condition: Any, what: str) -> None:
        def holds() -> bool:
            self._start_again()
            if not (self.folder / "last").exists():
                self._allow(self.progress.finished() + AHEAD)
            return bool(condition())

        try:
            wait_for(holds, what)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.said()}") from error

    def _start_again(self) -> None:
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

    def said(self) -> str:
        logs = sorted(self.world.logs.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes under test find the points; this one is none of them."""
    for name in [name for name in os.environ if name.startswith(("EVERSTEP_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT / 'tests' / 'support' / 'dying_processes'}:{ROOT}"
    )  # of what is not forked


def test_fork_server_started_here_passes_no_points(
    tmp_path: Path, undisturbed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with fork_pool(["tests.support.dying"]) as pool:
        assert pool.start(is_installed, environment={FOLDER: None}).result() is False


def run_through(rounds: Sequence[Round], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the ranks wrote down of a run."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as name, WarmWorld(Path(name) / "out", NODES) as world:
        monkeypatch.setenv(FOLDER, name)
        world.settings = "[policy]\nrank_flap_count = 1000\n"  # ranks of one node die every second here
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
    undisturbed: None, monkeypatch: pytest.MonkeyPatch, forks: ForkPool, tmp_path: Path, rounds: list[Round]
) -> None:
    rows = run_through(rounds, monkeypatch)
    steps = {row["step"] for row in rows}
    assert steps == set(range(1, max(steps) + 1))
    assert len({row["generation"] for row in rows}) > len(rounds)
    (tmp_path / "last").write_text(str(max(steps)))
    torchrun(forks, len(NODES), shared_training.main, [str(tmp_path)])  # without Everstep
    calm = {(row["rank"], row["step"]): (row["state"], row["samples"]) for row in read_diaries(tmp_path)}
    torn = [
        (row["generation"], row["step"], row["rank"])
        for row in rows
        if (row["state"], row["samples"]) != calm[row["rank"], row["step"]]
    ]
    assert not torn
