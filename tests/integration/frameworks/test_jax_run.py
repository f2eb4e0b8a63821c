"""JAX's processes that are killed: the others regroup in place and go on from memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demo.world import wait_for
from tests.integration.checkpoints.sharded_job import DEADLINE_S, ShardedJob
from tests.integration.frameworks.framework_run import run_training
from tests.support.processes.launcher import SLOW_RANKS
from tests.support.processes.warm_programs import WarmWorld
from tests.support.ranks.exact_training import Fault, read_step_logs

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("jax")]

STEPS, WORLD = 14, 2
ENDLESS = 1_000_000
Steps = dict[int, dict[str, Any]]


def trained(folder: Path, *faults: Fault) -> list[dict[str, Any]]:
    """Return the step logs of ranks in an own folder."""
    return run_training(folder, "jax_training", STEPS, *faults, ranks=WORLD, OMP_NUM_THREADS="1", **SLOW_RANKS)[0]


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
    assert len({path.name for path in (short_path / "k").glob("steps-*")}) == WORLD + 2, "survivors went on"


@pytest.mark.timeout(400)
def test_jax_restores_on_fewer_nodes(short_path: Path, tmp_path: Path) -> None:
    with WarmWorld(tmp_path / "out", ["n1", "n2", "n3"]) as world:
        job = ShardedJob(world, str(short_path), ENDLESS, script="tests.integration.frameworks.scripts.jax_training")
        wait_for(lambda: any(copy.state == "complete" for copy in job.versions()), "a version on two nodes", DEADLINE_S)
        world.nodes["n1"].kill()
        wait_for(
            lambda: any("loss" in row and row["generation"] > 1 for row in read_step_logs(short_path)),
            "the others go on",
            DEADLINE_S,
        )
        rows = read_step_logs(short_path)
        assert {row["rank"] for row in rows if row["generation"] == job.generation()} == {0, 1}
    ((step, state),) = restored(rows, max(row["generation"] for row in rows))
    assert step >= 1
    assert {row["state"] for row in rows if row["generation"] == 1 and row["step"] == step} == {state}
