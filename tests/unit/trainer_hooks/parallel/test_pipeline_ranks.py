"""Real ranks in torch's own pipeline schedule continue after a loss with the same bits as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.exact_training import Fault, read_step_logs
from tests.support.ranks.node_ranks import node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.parallel.pipeline_training import BATCH, training

STEPS, WORLD = 14, 4
SPEC = JobSpec(job=JOB, replicas=1, nproc_per_node=WORLD)


def numbers(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["samples"], row["loss"], row["state"]


@pytest.mark.promise("pipeline-recovery")
@pytest.mark.slow
def test_pipelines_continue_exactly_after_losing_a_stage(forks: ForkPool, tmp_path: Path) -> None:
    """A first stage dies between two micro-batches, and a last stage before its update."""
    faults = (Fault(1, 5, "forward"), Fault(2, 10, "reduced"))
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, training(tmp_path, STEPS, faults, last_steps={}), vault.run_dir) as scene:
            scene.start(0, 1, 2, 3)
            scene.form_generation(1, 0, 1, 2, 3, spec=SPEC, restore=RestoreRule(from_scratch=True))
            for number, fault in enumerate(faults, 2):
                scene.ranks.pop(fault.rank).wait()
                scene.start(fault.rank)
                scene.form_generation(number, 0, 1, 2, 3, spec=SPEC, restore=RestoreRule())
            scene.wait_for_messages(RankFinished, WORLD, where=lambda m: m.generation == 3)
            assert scene.finish() == [0, 0, 0, 0]
    rows = read_step_logs(tmp_path)
    calm = {(row["rank"], row["step"]): numbers(row) for row in rows if row["calm"]}
    lived = [row for row in rows if not row["calm"]]
    assert {row["generation"] for row in lived} == {1, 2, 3}
    differ = [(row["step"], row["rank"]) for row in lived if numbers(row) != calm[row["rank"], row["step"]]]
    assert not differ, "of all ranks, in every generation"
    again = calm.keys() - {(row["rank"], row["step"]) for row in lived}
    assert again <= {(fault.rank, fault.step - n) for fault in faults for n in (0, 1)}, "every step was made"
    for step in range(1, STEPS + 1):
        first, second = (set(calm[rank, step][0]) for rank in (0, 1))
        assert len(first | second) == BATCH, "two replicas have different samples"
        assert calm[2, step][0] == calm[0, step][0], "stages of one have the same"
        assert len({calm[rank, step][1] for rank in range(WORLD)}) == 1, "and all ranks the mean of both losses"
