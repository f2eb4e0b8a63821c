"""Ranks are killed at each point of a step, and all go on from one version that is nobody's torn step: what each step
leaves behind is, to the last bit, what it leaves in a run that nobody was killed in.

Every suite kills one combination of ranks at each point; the nightly tests kill every combination at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule, Resumed
from tests.support import injections
from tests.support.exact_training import read_diaries
from tests.support.forked import ForkPool
from tests.support.generations import JOB
from tests.support.injections import POINTS, Kill
from tests.support.stage import Stage, stage
from tests.support.vaults import vaults
from tests.support.waiting import until

WORLD, FIRST, APART = 3, 5, 4
SUBSETS = [ranks for count in range(1, WORLD + 1) for ranks in combinations(range(WORLD), count)]
AT_EACH_POINT = [Kill(FIRST + APART * n, point, SUBSETS[n % len(SUBSETS)]) for n, point in enumerate(POINTS)]
STEPS = FIRST + APART * max(len(AT_EACH_POINT), len(SUBSETS))

pytestmark = pytest.mark.slow


def of_every_combination(point: str) -> list[Kill]:
    return [Kill(FIRST + APART * n, point, ranks) for n, ranks in enumerate(SUBSETS)]


def run_through(forks: ForkPool, folder: Path, kills: Sequence[Kill], *, sharded: bool = False) -> list[dict[str, Any]]:
    """A whole run on one node; a generation after each kill. What the ranks wrote down."""
    train = partial(injections.train, folder=str(folder), until=STEPS, kills=kills, sharded=sharded)
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with stage(forks, train, vault.run_dir) as scene:
            scene.start(*range(WORLD))
            form(scene, 1)
            for number, kill in enumerate(kills, start=2):
                for rank in kill.ranks:
                    scene.ranks.pop(rank).wait()
                survivors = set(range(WORLD)) - set(kill.ranks)
                marks = [folder / f"finished-{kill.step}-{rank}" for rank in survivors]
                until(lambda marks=marks: all(mark.exists() for mark in marks), f"survivors of {kill} finish the step")
                scene.start(*kill.ranks)
                form(scene, number)
                (version,) = {m.restored for m in resumed(scene, number)}
                assert version is not None, kill
                is_lost = not is_kept(kill, sharded)
                assert version.step >= kill.step - is_lost, f"a finished step was lost after {kill}"
            scene.heard(RankFinished, WORLD, where=lambda m: m.generation == len(kills) + 1)
            assert scene.finish() == [0] * WORLD
    return read_diaries(folder)


def is_kept(kill: Kill, sharded: bool) -> bool:
    """Whether the step must survive: all ranks have come to its end, and enough of its bytes are stored."""
    is_ended, is_stored = (POINTS.index(kill.point) >= POINTS.index(point) for point in ("copying", "marked"))
    return is_stored if sharded else is_ended and len(kill.ranks) == 1


def form(scene: Stage, number: int) -> None:
    spec = JobSpec(job=JOB, replicas=2, nproc_per_node=WORLD)
    scene.form(number, *range(WORLD), spec=spec, restore=RestoreRule(from_scratch=number == 1))


def resumed(scene: Stage, generation: int) -> list[Resumed]:
    return scene.heard(Resumed, WORLD, where=lambda m: m.generation == generation)


@pytest.fixture(scope="module")
def calm(session_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What each step leaves behind where nobody is killed."""
    rows = run_through(session_forks, tmp_path_factory.mktemp("calm"), ())
    states = {(row["step"], row["state"]) for row in rows}
    assert len(states) == STEPS, "the same on all ranks"
    return dict(states)


@pytest.mark.promise("no-torn-step")
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(AT_EACH_POINT, id="each-point"),
        *(pytest.param(of_every_combination(point), id=point, marks=pytest.mark.nightly) for point in POINTS),
    ],
)
def test_kill_at_any_point_ends_in_one_consistent_version(forks, tmp_path, calm, kills):
    rows = run_through(forks, tmp_path, kills)
    assert len(list(tmp_path.glob("died-*"))) == sum(len(kill.ranks) for kill in kills)
    torn = [(row["generation"], row["step"], row["rank"]) for row in rows if row["state"] != calm[row["step"]]]
    assert not torn
    assert {row["step"] for row in rows} == calm.keys()


@pytest.mark.promise("no-torn-step")
@pytest.mark.nightly
def test_kill_of_exclusive_shard_holders_ends_consistently(forks, tmp_path):
    """Who was not killed has gone on to a step that the others never finished, and goes back by one."""
    for folder in (alone := tmp_path / "calm", killed := tmp_path / "killed"):
        folder.mkdir()
    calm = {(row["step"], row["rank"]): row["state"] for row in run_through(forks, alone, (), sharded=True)}
    assert len(calm) == WORLD * STEPS == len(set(calm.values())), "each rank has its own"
    rows = run_through(forks, killed, AT_EACH_POINT, sharded=True)
    assert len(list(killed.glob("died-*"))) == sum(len(kill.ranks) for kill in AT_EACH_POINT)
    torn = [(r["generation"], r["step"], r["rank"]) for r in rows if r["state"] != calm[r["step"], r["rank"]]]
    assert not torn
    assert {(row["step"], row["rank"]) for row in rows} == calm.keys()
