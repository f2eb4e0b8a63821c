"""A run that lost ranks three times is, to the last bit, the run that nothing happened to."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.fork_pool import ForkPool, torchrun
from tests.support.processes.launcher import launched
from tests.support.ranks import exact_training
from tests.support.ranks.exact_training import BATCH, OVERFLOW_EVERY, POINTS, SAMPLES, Fault, read_step_logs

pytestmark = pytest.mark.slow

STEPS, WORLD, KILLS = 60, 3, 3
Row = dict[str, Any]


def random_faults(seed: int) -> list[Fault]:
    """One in each third of the run, at any point of any rank."""
    chance = random.Random(seed)
    third = STEPS // KILLS
    return [
        Fault(chance.randrange(WORLD), chance.randint(n * third + 5, (n + 1) * third), chance.choice(POINTS))
        for n in range(KILLS)
    ]


def run_under_launcher(*faults: Fault) -> list[Row]:
    """What the ranks wrote down of a whole run with services of its own."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as name:  # short: a socket's path has 107 bytes at most
        folder = Path(name)
        argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
        argv += [
            "--state-dir",
            f"{name}/state",
            "-m",
            "tests.support.ranks.exact_training",
            name,
            str(STEPS),
            *map(str, faults),
        ]
        with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as launcher:
            assert launcher.wait() == 0, launcher.err
        assert len(list(folder.glob("struck-*"))) == len(faults), "every fault has struck"
        return read_step_logs(folder)


@pytest.fixture(scope="module")
def calm(session_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """A run that nothing happens to, without Everstep."""
    folder = tmp_path_factory.mktemp("calm")
    torchrun(session_forks, WORLD, exact_training.main, exact_training.train, [str(folder), str(STEPS)])
    return read_step_logs(folder)


def computed(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("generation", "rank", "step")}


@pytest.mark.promise("exact-recovery")
@pytest.mark.parametrize("seed", [5, pytest.param(12, marks=pytest.mark.nightly)])
def test_run_after_three_kills_is_bit_identical(calm: list[Row], seed: int) -> None:
    undisturbed = {(row["rank"], row["step"]): computed(row) for row in calm}
    assert undisturbed.keys() == {(rank, step) for rank in range(WORLD) for step in range(1, STEPS + 1)}
    faults = random_faults(seed)
    rows = run_under_launcher(*faults)
    assert {row["generation"] for row in rows} >= set(range(1, KILLS + 2))
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    missing = {step for _, step in undisturbed.keys() - {(row["rank"], row["step"]) for row in rows}}
    assert missing <= {f.step - n for f in faults for n in (0, 1)}, "a step that others finished is not made again"
    differ = sorted(
        (row["step"], row["rank"], row["generation"])
        for row in rows
        if computed(row) != undisturbed[row["rank"], row["step"]]
    )
    assert not differ, f"after {', '.join(map(str, faults))}; steps that were computed again count too"


def test_compared_run_covers_every_source_of_divergence(calm: list[Row]) -> None:
    by_step = {row["step"]: row for row in calm if row["rank"] == 0}
    scales = [by_step[step]["scale"] for step in sorted(by_step)]
    assert scales[OVERFLOW_EVERY - 1] < scales[OVERFLOW_EVERY - 2], "the scaler met an overflow"
    assert by_step[OVERFLOW_EVERY]["state"] == by_step[OVERFLOW_EVERY - 1]["state"], "and skipped its step"
    assert max(scales) > scales[0], "it grew"
    assert any(float.fromhex(row["norm"]) > 0.5 for row in by_step.values()), "gradients were clipped"
    assert len({row["rate"] for row in by_step.values()}) > STEPS // 2
    for step in by_step:
        assert sum(len(row["samples"]) for row in calm if row["step"] == step) == BATCH
    assert STEPS * BATCH > 2 * SAMPLES, "several epochs"
