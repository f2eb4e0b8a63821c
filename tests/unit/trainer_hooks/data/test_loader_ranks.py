"""Real ranks with loader workers: kills and changed world sizes neither skip nor repeat a sample."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule, Resumed
from everstep_trainer.data.sampler import ElasticSampler, pack
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.process_table import parents_of_all
from tests.support.processes.waiting import until
from tests.support.ranks.exact_training import Fault, is_computed, read_step_logs
from tests.support.ranks.node_ranks import NodeRanks, node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.data import loader_training
from tests.unit.trainer_hooks.data.loader_datasets import SIZE
from tests.unit.trainer_hooks.data.loader_training import BATCH, LENGTHS, SEED

STEPS = 40
NIGHTLY = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("stream with seek", "packed")]
pytestmark = pytest.mark.slow


def form(scene: NodeRanks, number: int, *ranks: int, **more: Any) -> None:
    rule = RestoreRule(from_scratch=number == 1)
    scene.form_generation(
        number, *ranks, spec=JobSpec(job=JOB, replicas=1, nproc_per_node=len(ranks)), restore=rule, **more
    )


def samples_of_steps(kind: str) -> list[list[int]]:
    """The expected samples of each step, in order."""
    if kind.startswith("stream"):
        return [[n % SIZE for n in range((step - 1) * BATCH, step * BATCH)] for step in range(1, STEPS + 1)]
    rows = pack(LENGTHS, 20, seed=SEED) if kind == "packed" else [(n,) for n in range(SIZE)]
    sampler = ElasticSampler(len(rows), global_batch=BATCH, seed=SEED)
    return [[i for row in sampler.indices(step).tolist() for i in rows[row]] for step in range(1, STEPS + 1)]


@pytest.mark.promise("loader-deterministic")
@pytest.mark.parametrize("kind", ["map-style", "stream", *NIGHTLY])
def test_kills_and_resizes_skip_and_repeat_no_sample(forks: ForkPool, tmp_path: Path, kind: str) -> None:
    faults = (Fault(2, 9, "forward"), Fault(0, 17, "reduced"))
    train = partial(
        loader_training.train, folder=str(tmp_path), until=STEPS, kind=kind, faults=faults, last_steps={3: 30}
    )
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, train, vault.run_dir) as scene:
            scene.start(0, 1, 2)
            form(scene, 1, 0, 1, 2)
            scene.ranks.pop(2).wait()
            form(scene, 2, 0, 1)
            scene.ranks.pop(0).wait()
            scene.start(0, 2)
            form(scene, 3, 0, 1, 2)
            until(lambda: is_computed(tmp_path, 3, 30, ranks=3), "step 30")
            form(scene, 4, 0, 1)
            scene.wait_for_messages(RankFinished, 2, where=lambda m: m.generation == 4)
            assert scene.finish() == [0, 0, 0]
    rows = read_step_logs(tmp_path)
    assert {row["generation"] for row in rows} == {1, 2, 3, 4}
    committed = final_steps(rows)
    assert committed.keys() == set(range(1, STEPS + 1))
    expected = samples_of_steps(kind)
    for step, seen in committed.items():
        assert seen["states"] == 1, f"all ranks have the same parameters after step {step}"
        assert not Counter(seen["samples"]) - Counter(expected[step - 1]), f"step {step} repeats no sample"
        if seen["whole"]:
            assert seen["samples"] == expected[step - 1], f"none is skipped in step {step}"
    assert {step for step, seen in committed.items() if not seen["whole"]} <= {8, 9, 16, 17}, (
        "only steps with a kill may lack records"
    )
    if kind != "packed":
        check_random_draws_per_sample(rows, expected)


def check_random_draws_per_sample(rows: list[dict[str, Any]], expected: list[list[int]]) -> None:
    """Check that a sample has the same random draws on every load; a step across two epochs may have a sample twice."""
    drawn: dict[tuple[int, int], set[float]] = {}
    for row in rows:
        for index, noise in zip(row["samples"], row["noise"], strict=True):
            drawn.setdefault((row["step"], index), set()).add(noise)
    assert all(len(values) <= expected[step - 1].count(index) for (step, index), values in drawn.items())


def final_steps(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """For each step, the samples of the last generation that finished it, and whether all ranks recorded theirs."""
    worlds = {1: 3, 2: 2, 3: 3, 4: 2}
    steps = {}
    for step in range(1, STEPS + 1):
        last = max((row["generation"] for row in rows if row["step"] == step), default=0)
        of_it = sorted((r for r in rows if (r["step"], r["generation"]) == (step, last)), key=lambda r: r["rank"])
        if of_it:
            steps[step] = {
                "samples": [index for row in of_it for index in row["samples"]],
                "states": len({row["state"] for row in of_it}),
                "whole": len(of_it) == worlds[last],
            }
    return steps


def test_rank_waiting_for_data_leaves_at_once(forks: ForkPool, tmp_path: Path) -> None:
    train = partial(loader_training.wait_for_data, folder=str(tmp_path))
    with node_ranks(forks, train) as scene:
        scene.start(0, 1)
        form(scene, 1, 0, 1)
        pids = [rank.pid for rank in scene.ranks.values()]
        until(lambda: all(Path(tmp_path, f"waits-{pid}").exists() and children(pid) for pid in pids), "both wait")
        stuck = [child for pid in pids for child in children(pid)]
        form(scene, 2, 0, 1)
        scene.wait_for_messages(Resumed, 2, where=lambda m: m.generation == 2)
        assert [rank.pid for rank in scene.ranks.values()] == pids, "the ranks must keep their processes"
        until(lambda: not any(child in children(pid) for pid in pids for child in stuck), "the end of their workers")
        assert scene.finish() == [0, 0]


def children(pid: int) -> list[int]:
    return [child for child, parent in parents_of_all().items() if parent == pid]
