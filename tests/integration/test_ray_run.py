"""Ray Train's workers as nodes of an Everstep job: a real Ray, whose ranks and actors are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_training import Fault, reached, read_diaries
from tests.support.launched import ROOT, launched
from tests.support.processes import comm, is_running, parents_of_all
from tests.support.waiting import until

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(600)]

STEPS, DEADLINE_S = 24, 300.0


class Driver:
    """A driver process with its own Ray; its output goes to a file."""

    def __init__(self, folder: Path, kind: str, workers: int, ranks: int, *faults: Fault, **options: int) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.support.ray_training", str(folder), kind, str(STEPS)]
        command += map(str, (workers, ranks, options.get("min_workers", workers), *faults))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "RAY_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"HOME": str(folder), "MAX_FAILURES": str(options.get("max_failures", 0))}
        self._out = folder / "driver.out"
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, cwd=folder, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    def wait(self) -> dict[str, Any]:
        """What ``fit`` returned."""
        assert self._process.wait(DEADLINE_S) == 0, self.out
        found: dict[str, Any] = json.loads((self.folder / "driver.json").read_text())
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            assert self._process.poll() is None, self.out
            return condition()

        until(met, what, DEADLINE_S)

    def below(self, pid: int | None = None) -> list[int]:
        """Everything below a process, by default the driver, the nearest first."""
        parents = parents_of_all()
        found = [self._process.pid if pid is None else pid]
        for one in found:
            found += [child for child, parent in parents.items() if parent == one]
        return found[1:]

    def actors(self) -> dict[int, int]:
        """The pid of each Ray worker that hosts a rank 0 to 9, by the rank's process."""
        workers = [pid for pid in self.below() if comm(pid).startswith("ray::RayTrain")]
        return {rank: pid for pid in workers for rank in self.below(pid) if comm(rank).startswith("everstep-rank")}

    def end(self) -> None:
        below = self.below()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        for pid in filter(is_running, below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def started(short_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers, each in the test's folder; whatever is left of them is killed at the end."""
    drivers: list[Driver] = []

    def start(*arguments: Any, **options: int) -> Driver:
        drivers.append(Driver(short_path, *arguments, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """What two ranks of one launcher compute, without Ray."""
    folder = tmp_path_factory.mktemp("calm")
    argv = ["--nproc-per-node", "2", "-m", "tests.support.exact_training", str(folder), str(STEPS)]
    with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    return last(folder)


def last(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """What each rank computed in each step, the last time."""
    rows = sorted(read_diaries(folder), key=lambda row: int(row["generation"]))
    return {(row["rank"], row["step"]): {k: v for k, v in row.items() if k != "generation"} for row in rows}


def test_lost_ranks_are_replaced_without_ray(started: Callable[..., Driver], undisturbed: Any) -> None:
    driver = started("exact", 2, 1, Fault(1, 7, "backward"), Fault(0, 14, "updated"), max_failures=0)
    driver.wait()
    rows = read_diaries(driver.folder)
    assert {row["generation"] for row in rows} == {1, 2, 3}, driver.out
    found = last(driver.folder)
    assert found == {place: undisturbed[place] for place in found}
    assert {(rank, STEPS) for rank in (0, 1)} <= found.keys()


def test_lost_actor_returns_beside_living_ranks(started: Callable[..., Driver], undisturbed: Any) -> None:
    (driver := started("exact", 2, 1, max_failures=1)).folder.joinpath("gate").write_text("12")
    driver.until(lambda: reached(driver.folder, 1, 12, ranks=2), "both ranks at the gate")
    survivor, victim = driver.actors()
    os.kill(driver.actors()[victim], signal.SIGKILL)
    driver.until(lambda: not is_running(victim), "the end of the rank below the killed actor")
    (driver.folder / "gate").unlink()
    driver.until(lambda: is_running(survivor), "the survivor")
    driver.wait()
    assert f"diary-{survivor}.jsonl" in os.listdir(driver.folder)
    of_survivor = [json.loads(line) for line in (driver.folder / f"diary-{survivor}.jsonl").read_text().splitlines()]
    assert [row["step"] for row in of_survivor][-1] == STEPS, "the same process from the first step to the last"
    found = last(driver.folder)
    assert found == {place: undisturbed[place] for place in found}
    assert {(rank, STEPS) for rank in (0, 1)} <= found.keys()
