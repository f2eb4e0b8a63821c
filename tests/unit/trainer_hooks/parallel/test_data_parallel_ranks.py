"""Real ranks, two to a replica: kills and changed numbers of replicas skip or repeat no sample and change no loss."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule
from everstep_trainer.data.sampler import ElasticSampler
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.exact_training import Fault, is_computed, read_step_logs
from tests.support.ranks.node_ranks import NodeRanks, node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.parallel.tensor_parallel_training import (
    BATCH,
    SAMPLES,
    SEED,
    SPLIT,
    train_alone,
    training,
)

STEPS = 20
Row = dict[str, Any]


def form(scene: NodeRanks, number: int, *ranks: int) -> None:
    spec = JobSpec(job=JOB, replicas=1, nproc_per_node=len(ranks))
    scene.form_generation(number, *ranks, spec=spec, restore=RestoreRule(from_scratch=number == 1))


@pytest.mark.promise("replica-groups")
@pytest.mark.slow
def test_replicas_of_two_ranks_match_a_single_process(forks: ForkPool, tmp_path: Path) -> None:
    train = training(tmp_path, STEPS, Fault(3, 7, "forward"), last_steps={2: 13})
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, train, vault.run_dir) as scene:
            scene.start(0, 1, 2, 3)
            form(scene, 1, 0, 1, 2, 3)
            scene.ranks.pop(3).wait()
            form(scene, 2, 0, 1)
            until(lambda: is_computed(tmp_path, 2, 13, ranks=2), "step 13")
            scene.start(3)
            form(scene, 3, 0, 1, 2, 3)
            scene.wait_for_messages(RankFinished, 4, where=lambda m: m.generation == 3)
            assert scene.finish() == [0, 0, 0, 0]
    steps = final_rows(read_step_logs(tmp_path))
    assert steps.keys() == set(range(1, STEPS + 1))
    counts = {step: rows[0]["replicas"] for step, rows in steps.items()}
    assert set(counts.values()) == {1, 2}, "the number of replicas changed under way"
    sampler = ElasticSampler(SAMPLES, global_batch=BATCH, seed=SEED)
    seen: list[int] = []
    for step, rows in sorted(steps.items()):
        by_replica: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_replica[row["replica"]].append(row)
        assert sorted(by_replica) == list(range(counts[step]))
        assert all(len(peers) == SPLIT for peers in by_replica.values())
        for peers in by_replica.values():
            assert peers[0]["samples"] == peers[1]["samples"], f"ranks of one replica, in step {step}"
            assert peers[0]["own_loss"] == peers[1]["own_loss"], f"ranks of one replica, in step {step}"
        samples = [index for replica in sorted(by_replica) for index in by_replica[replica][0]["samples"]]
        assert samples == sampler.global_indices(step).tolist()
        seen += samples
    for epoch in range(STEPS * BATCH // SAMPLES):
        assert sorted(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES)), "each sample once"
    expected = train_alone(counts)
    for step, rows in steps.items():
        assert [row["loss"] for row in rows] == pytest.approx([expected[step]] * len(rows), rel=1e-4), f"step {step}"


def final_rows(rows: list[Row]) -> dict[int, list[Row]]:
    """Return the rows of each step from the last generation that computed it."""
    last: dict[int, int] = {}
    for row in rows:
        last[row["step"]] = max(row["generation"], last.get(row["step"], 0))
    final: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row["generation"] == last[row["step"]]:
            final[row["step"]].append(row)
    return final
