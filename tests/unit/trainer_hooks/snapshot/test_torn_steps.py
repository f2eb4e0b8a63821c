"""Ranks are killed at each point of a step, and all ranks continue from one version that holds a whole step.

The state after each step is bit-identical to that of a run without kills.

Every run of the suite kills one combination of ranks at each point; the nightly tests kill every combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule, Resumed
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.exact_training import read_step_logs
from tests.support.ranks.node_ranks import NodeRanks, node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.snapshot import step_kills
from tests.unit.trainer_hooks.snapshot.step_kills import POINTS, Kill

WORLD, FIRST, APART = 3, 5, 4
SUBSETS = [ranks for count in range(1, WORLD + 1) for ranks in combinations(range(WORLD), count)]
AT_EACH_POINT = [Kill(FIRST + APART * n, point, SUBSETS[n % len(SUBSETS)]) for n, point in enumerate(POINTS)]
STEPS = FIRST + APART * max(len(AT_EACH_POINT), len(SUBSETS))

pytestmark = pytest.mark.slow


def kills_at(point: str) -> list[Kill]:
    return [Kill(FIRST + APART * n, point, ranks) for n, ranks in enumerate(SUBSETS)]


def all_exist(paths: Sequence[Path]) -> bool:
    return all(path.exists() for path in paths)


def run_through(forks: ForkPool, folder: Path, kills: Sequence[Kill], *, sharded: bool = False) -> list[dict[str, Any]]:
    """Run to the end on one node, with a new generation after each kill; return the records that the ranks wrote."""
    train = partial(step_kills.train, folder=str(folder), until=STEPS, kills=kills, sharded=sharded)
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, train, vault.run_dir) as scene:
            scene.start(*range(WORLD))
            form(scene, 1)
            for number, kill in enumerate(kills, start=2):
                for rank in kill.ranks:
                    scene.ranks.pop(rank).wait()
                survivors = set(range(WORLD)) - set(kill.ranks)
                marks = [folder / f"finished-{kill.step}-{rank}" for rank in survivors]
                until(partial(all_exist, marks), f"survivors of {kill} finish the step")
                scene.start(*kill.ranks)
                form(scene, number)
                (version,) = {m.restored for m in resumed(scene, number)}
                assert version is not None, kill
                is_lost = not must_survive(kill, sharded)
                assert version.step >= kill.step - is_lost, f"a finished step was lost after {kill}"
            scene.wait_for_messages(RankFinished, WORLD, where=lambda m: m.generation == len(kills) + 1)
            assert scene.finish() == [0] * WORLD
    return read_step_logs(folder)


def must_survive(kill: Kill, sharded: bool) -> bool:
    """Tell whether the step must survive: all ranks have reached its end, and its bytes are stored or held live."""
    is_ended, is_stored = (POINTS.index(kill.point) >= POINTS.index(point) for point in ("copying", "marked"))
    return is_stored or (is_ended and not sharded and len(kill.ranks) < WORLD)


def form(scene: NodeRanks, number: int) -> None:
    spec = JobSpec(job=JOB, replicas=2, nproc_per_node=WORLD)
    scene.form_generation(number, *range(WORLD), spec=spec, restore=RestoreRule(from_scratch=number == 1))


def resumed(scene: NodeRanks, generation: int) -> list[Resumed]:
    return scene.wait_for_messages(Resumed, WORLD, where=lambda m: m.generation == generation)


@pytest.fixture(scope="module")
def undisturbed(session_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The state after each step of a run without kills."""
    rows = run_through(session_forks, tmp_path_factory.mktemp("calm"), ())
    states = {(row["step"], row["state"]) for row in rows}
    assert len(states) == STEPS, "the state is the same on all ranks"
    return dict(states)


@pytest.mark.promise("no-torn-step")
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(AT_EACH_POINT, id="each-point"),
        *(pytest.param(kills_at(point), id=point, marks=pytest.mark.nightly) for point in POINTS),
    ],
)
def test_kill_at_any_point_ends_in_one_consistent_version(
    forks: ForkPool, tmp_path: Path, undisturbed: dict[int, str], kills: list[Kill]
) -> None:
    rows = run_through(forks, tmp_path, kills)
    assert len(list(tmp_path.glob("died-*"))) == sum(len(kill.ranks) for kill in kills)
    torn = [(row["generation"], row["step"], row["rank"]) for row in rows if row["state"] != undisturbed[row["step"]]]
    assert not torn
    assert {row["step"] for row in rows} == undisturbed.keys()


@pytest.mark.promise("no-torn-step")
@pytest.mark.nightly
def test_kill_of_exclusive_shard_holders_ends_consistently(forks: ForkPool, tmp_path: Path) -> None:
    """The surviving ranks have entered a step that the others never finished, and go back by one step."""
    for folder in (alone := tmp_path / "calm", killed := tmp_path / "killed"):
        folder.mkdir()
    undisturbed = {(row["step"], row["rank"]): row["state"] for row in run_through(forks, alone, (), sharded=True)}
    assert len(undisturbed) == WORLD * STEPS == len(set(undisturbed.values())), "each rank has its own shard"
    rows = run_through(forks, killed, AT_EACH_POINT, sharded=True)
    assert len(list(killed.glob("died-*"))) == sum(len(kill.ranks) for kill in AT_EACH_POINT)
    torn = [(r["generation"], r["step"], r["rank"]) for r in rows if r["state"] != undisturbed[r["step"], r["rank"]]]
    assert not torn
    assert {(row["step"], row["rank"]) for row in rows} == undisturbed.keys()
