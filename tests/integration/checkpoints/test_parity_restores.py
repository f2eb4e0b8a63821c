"""Four nodes, and two that copy each other gone at once with their memory: the others restore what parity keeps, to
the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.ids import Version
from examples.demo.world import wait_for
from tests.integration.checkpoints.sharded_job import DEADLINE_S, NODES, ShardedJob
from tests.support.processes.warm_programs import WarmWorld

pytestmark = pytest.mark.slow


@pytest.mark.promise("parity")
@pytest.mark.timeout(400)
def test_parity_restores_after_loss_of_node_and_replica(tmp_path: Path) -> None:
    with WarmWorld(tmp_path / "out", NODES) as world:
        job = ShardedJob(world, 64, 96, 64, options=("--parity-group-size", "2"))
        wait_for(lambda: bool(_kept(job)), "a version that parity keeps", DEADLINE_S)
        first = _kept(job)[0]
        wait_for(lambda: max(_kept(job), default=first) > first, "a second one", DEADLINE_S)
        spec = job.spec()
        job.kill("n1", *spec.replica_nodes["n1"])
        wait_for(lambda: job.newest_generation("stepped") > spec.number, "they go on", DEADLINE_S)
        lines = list(job.lines())
    after = {(line.step, line.digest) for line in lines if line.generation > spec.number and line.did == "restored"}
    assert len(after) == 1, "all ranks restored the same"
    ((step, digest),) = after
    assert step >= first.step
    stepped = [line for line in lines if line.generation <= spec.number and (line.step, line.did) == (step, "stepped")]
    newest = max(line.generation for line in stepped)
    assert {line.digest for line in stepped if line.generation == newest} == {digest}, "what they had then, to the bit"


def _kept(job: ShardedJob) -> list[Version]:
    """Return the complete versions stored as parity, the newest first."""
    return [copy.version for copy in job.versions() if copy.storage_tier == "parity" and copy.state == "complete"]
