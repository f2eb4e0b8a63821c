"""JAX's processes that are killed: the others regroup in place and go on from memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demo.world import wait_for
from tests.support.exact_training import Fault, read_diaries
from tests.support.launched import PATIENT, launched
from tests.support.sharded_job import DEADLINE_S, ShardedJob
from tests.support.warm_launcher import WarmWorld

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("jax")]

STEPS, WORLD = 14, 2
ENDLESS = 1_000_000
Steps = dict[int, dict[str, Any]]


def trained(folder: Path, *faults: Fault) -> list[dict[str, Any]]:
    """The diaries of ranks in a folder of their own."""
    folder.mkdir()
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += ["--state-dir", str(folder / "s"), "-m", "tests.support.jax_training", str(folder), str(STEPS)]
    with launched(folder, *argv, *map(str, faults), OMP_NUM_THREADS="1", **PATIENT) as launcher:
        assert launcher.wait() == 0, launcher.err
    rows = read_diaries(folder)
    assert {row["generation"] for row in rows} == {*range(1, len(faults) + 2)}, launcher.err
    return rows


def by_step(rows: list[dict[str, Any]]) -> Steps:
    """Rank 0's results, which all other ranks and generations must have too."""
    steps: Steps = {}
    for row in (row for row in rows if "loss" in row):
        result = {key: row[key] for key in ("loss", "state", "note")}
        assert steps.setdefault(row["step"], result) == result
    return steps


def restored(rows: list[dict[str, Any]], generation: int) -> set[tuple[int, str]]:
    """The steps that ranks of a generation began from, with the state."""
    return {(row["step"], row["restored"]) for row in rows if "restored" in row and row["generation"] == generation}


@pytest.mark.promise("jax")
def test_jax_survives_kills_bit_for_bit(short_path: Path) -> None:
    undisturbed = by_step(trained(short_path / "u"))
    assert sorted(undisturbed) == [*range(1, STEPS + 1)]
    rows = trained(short_path / "k", Fault(1, 5, "begun"), Fault(0, 10, "updated"))
    assert by_step(rows) == undisturbed
    for generation in (2, 3):
        ((step, state),) = restored(rows, generation)
        assert state == undisturbed[step]["state"]
    assert len({path.name for path in (short_path / "k").glob("diary-*")}) == WORLD + 2, "survivors went on"


@pytest.mark.timeout(400)
def test_jax_restores_on_fewer_nodes(short_path: Path, tmp_path: Path) -> None:
    with WarmWorld(tmp_path / "out", ["n1", "n2", "n3"]) as world:
        job = ShardedJob(world, str(short_path), ENDLESS, script="tests.support.jax_training")
        wait_for(lambda: any(one.state == "complete" for one in job.versions()), "a version on two nodes", DEADLINE_S)
        world.nodes["n1"].kill()
        wait_for(
            lambda: any("loss" in row and row["generation"] > 1 for row in read_diaries(short_path)),
            "the others go on",
            DEADLINE_S,
        )
        rows = read_diaries(short_path)
        assert {row["rank"] for row in rows if row["generation"] == job.generation()} == {0, 1}
    ((step, state),) = restored(rows, max(row["generation"] for row in rows))
    assert step >= 1
    assert {row["state"] for row in rows if row["generation"] == 1 and row["step"] == step} == {state}
