"""Ray Train's workers as nodes of an Everstep job: a real Ray, whose ranks and actors are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.launcher import ROOT, SLOW_RANKS, launched
from tests.support.processes.process_table import comm, is_running, parents_of_all
from tests.support.processes.waiting import until
from tests.support.ranks.exact_training import Fault, is_computed, read_step_logs

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("ray"), pytest.mark.timeout(600)]

STEPS, DEADLINE_S = 24, 300.0


class Driver:
    """A driver process with its own Ray; its output goes to a file."""

    def __init__(self, folder: Path, kind: str, workers: int, ranks: int, /, *faults: Fault, **options: int) -> None:
        self.folder = folder
        steps = str(options.get("steps", STEPS))
        command = [sys.executable, "-m", "tests.integration.frameworks.scripts.ray_training", str(folder), kind, steps]
        command += map(str, (workers, ranks, options.get("min_workers", workers), *faults))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "RAY_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **SLOW_RANKS}
        environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {
            "HOME": str(folder),
            "TMPDIR": str(folder / "t"),
            "MAX_FAILURES": str(options.get("max_failures", 0)),
        }
        (folder / "t").mkdir()
        self._out = folder / "driver.out"
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, cwd=folder, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    def wait(self) -> dict[str, Any]:
        """Return the result of ``fit``, and check that no process or file of the job is left."""
        assert self._process.wait(DEADLINE_S) == 0, self.out
        left = [path for pattern in ("s/*/run-*", "s/ray/*-*", "t/everstep-*") for path in self.folder.glob(pattern)]
        assert left == []
        found: dict[str, Any] = json.loads((self.folder / "driver.json").read_text())
        return found

    def until(self, condition: Callable[[], object], expected: str) -> None:
        def met() -> object:
            assert self._process.poll() is None, self.out
            return condition()

        until(met, expected, DEADLINE_S)

    def set_gate(self, step: int) -> None:
        """Lets no rank begin a later step."""
        draft = self.folder / "draft"
        draft.write_text(str(step))
        draft.rename(self.folder / "gate")

    def below(self, pid: int | None = None) -> list[int]:
        """Everything below a process, by default the driver, the nearest first."""
        parents = parents_of_all()
        found = [self._process.pid if pid is None else pid]
        for ancestor in found:
            found += [child for child, parent in parents.items() if parent == ancestor]
        return found[1:]

    def actors(self) -> dict[int, int]:
        """The pid of the Ray worker above each process of a rank, by the rank's own."""
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
    """Return the results of two ranks of one launcher, without Ray."""
    folder = tmp_path_factory.mktemp("calm")
    argv = ["--nproc-per-node", "2", "-m", "tests.support.ranks.exact_training", str(folder), str(STEPS)]
    with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **SLOW_RANKS) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    return last(folder)


def last(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the last result of each rank in each step."""
    rows = sorted(read_step_logs(folder), key=lambda row: int(row["generation"]))
    return {(row["rank"], row["step"]): {k: v for k, v in row.items() if k != "generation"} for row in rows}


def test_lost_ranks_are_replaced_without_ray(started: Callable[..., Driver], undisturbed: Any) -> None:
    driver = started("exact", 2, 1, Fault(1, 7, "backward"), Fault(0, 14, "updated"), max_failures=0)
    driver.wait()
    rows = read_step_logs(driver.folder)
    assert {row["generation"] for row in rows} == {1, 2, 3}, driver.out
    found = last(driver.folder)
    assert found == {place: undisturbed[place] for place in found}
    assert {(rank, STEPS) for rank in (0, 1)} <= found.keys()


def test_lost_actor_returns_beside_living_ranks(started: Callable[..., Driver], undisturbed: Any) -> None:
    driver = started("exact", 2, 1, max_failures=1)
    driver.set_gate(12)
    driver.until(lambda: is_computed(driver.folder, 1, 12, ranks=2), "both ranks at the gate")
    survivor, victim = driver.actors()
    os.kill(driver.actors()[victim], signal.SIGKILL)
    driver.until(lambda: not is_running(victim), "the end of the rank below the killed actor")
    (driver.folder / "gate").unlink()
    driver.until(lambda: is_running(survivor), "the survivor")
    driver.wait()
    assert f"steps-{survivor}.jsonl" in os.listdir(driver.folder)
    of_survivor = [json.loads(line) for line in (driver.folder / f"steps-{survivor}.jsonl").read_text().splitlines()]
    assert [row["step"] for row in of_survivor][-1] == STEPS, "the same process from the first step to the last"
    found = last(driver.folder)
    assert found == {place: undisturbed[place] for place in found}
    assert {(rank, STEPS) for rank in (0, 1)} <= found.keys()


def test_all_actors_lost_at_once_continue_in_memory(started: Callable[..., Driver], undisturbed: Any) -> None:
    driver = started("exact", 2, 1, max_failures=2)
    driver.set_gate(12)
    driver.until(lambda: is_computed(driver.folder, 1, 12, ranks=2), "both ranks at the gate")
    for actor in set(driver.actors().values()):
        os.kill(actor, signal.SIGKILL)
    (driver.folder / "gate").unlink()
    driver.wait()
    later = {row["step"] for row in read_step_logs(driver.folder) if row["generation"] > 1}
    assert min(later) > 1, "from the killed launchers' vaults"
    found = last(driver.folder)
    assert found == {place: undisturbed[place] for place in found}


def test_survivor_goes_on_alone_until_actor_returns(started: Callable[..., Driver]) -> None:
    steps, opened_at = 600, 0.0
    driver = started("exact", 2, 1, max_failures=1, min_workers=1, steps=steps)
    driver.set_gate(4)
    driver.until(lambda: is_computed(driver.folder, 1, 4, ranks=2), "both ranks at the gate")
    _, victim = driver.actors()
    os.kill(driver.actors()[victim], signal.SIGKILL)

    def is_complete_again() -> bool:
        """Lets the survivor make a few steps in a second, since the actor's return takes many."""
        nonlocal opened_at
        newest: dict[tuple[int, int], set[int]] = {}
        for row in read_step_logs(driver.folder):
            newest.setdefault((row["generation"], row["step"]), set()).add(row["rank"])
        if time.perf_counter() > opened_at + 0.2:
            driver.set_gate(max(step for _, step in newest) + 1)
            opened_at = time.perf_counter()
        return any(generation > 1 and ranks == {0, 1} for (generation, _), ranks in newest.items())

    driver.until(is_complete_again, "a later generation with both ranks")
    (driver.folder / "gate").unlink()
    driver.wait()
    rows = read_step_logs(driver.folder)
    assert {row["rank"] for row in rows if row["generation"] == 2} == {0}, "the survivor alone"
    assert {row["rank"] for row in rows if row["step"] == steps} == {0, 1}
    assert {row["step"] for row in rows if row["rank"] == 0} == set(range(1, steps + 1))


def test_reports_of_rank_zero_reach_ray(started: Callable[..., Driver]) -> None:
    driver = started("reporting", 1, 2, Fault(0, 15, "begun"), max_failures=0)
    found = driver.wait()
    assert found["metrics"]["step"] == STEPS
    assert found["state"] == found["metrics"]["state"], "of the reported checkpoint"
    reported = [n for n in (10, 20) if f"metrics={{'step': {n}, 'rank': 0}}" in driver.out]
    assert reported == [10, 20], driver.out
