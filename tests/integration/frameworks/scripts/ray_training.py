"""A TorchTrainer of Ray Train on a Ray of its own, whose workers are nodes of an Everstep job.

    python -m tests.integration.frameworks.scripts.ray_training FOLDER KIND UNTIL WORKERS RANKS MIN_WORKERS [FAULT ...]

FAULT: RANK:STEP:POINT. KIND ``exact``: run tests.support.ranks.exact_training in each rank. KIND ``reporting``: run a
loop as in Ray's documentation, which reports each step, and a checkpoint at the end. FOLDER/driver.json gets the result
of ``fit``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import everstep
from everstep_trainer.integrations.ray import EverstepConfig
from tests.support.ranks import exact_training
from tests.support.ranks.exact_training import Fault, FaultInjector, fingerprint


def reporting(config: dict[str, Any]) -> None:
    """A training loop as in Ray's documentation."""
    folder, until, faults = Path(config["folder"]), config["until"], config["faults"]

    def train(run: everstep.Run) -> None:
        torch.manual_seed(3)
        model = torch.nn.Linear(8, 8)
        replicas = run.replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=replicas, optimizer=optimizer)
        injector = FaultInjector(faults, folder, run.rank)
        context = ray.train.get_context()
        assert (context.get_world_rank(), context.get_world_size()) == (run.rank, run.world_size)
        for step in run.steps(until=until):
            injector.step = step
            injector.at("begun")
            optimizer.zero_grad()
            replicas(torch.full((2, 8), float(run.rank))).square().mean().backward()
            optimizer.step()
            if step % 10 == 0:
                ray.train.report({"step": step, "rank": run.rank})
        with tempfile.TemporaryDirectory() as local:
            torch.save(model.state_dict(), Path(local) / "model.pt")
            state = fingerprint(model.parameters())
            ray.train.report({"step": until, "state": state}, checkpoint=ray.train.Checkpoint(local))

    everstep.main(train)


def main(folder: str, kind: str, until: str, workers: str, ranks: str, min_workers: str, *faults: str) -> None:
    """Start Ray, train, and write the result."""
    parsed: Sequence[Fault] = [*map(Fault.parse, faults)]
    loop: Any = reporting
    if kind == "exact":
        loop = partial(exact_training.train, folder=folder, until=int(until), faults=parsed)
    settings = {"state_dir": f"{folder}/s", "standby_delay_s": 0.1, "hang_threshold_s": 60}
    ray.init(num_cpus=int(workers), include_dashboard=False, object_store_memory=100 << 20, _temp_dir=f"{folder}/r")
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "until": int(until), "faults": parsed},
        torch_config=EverstepConfig(ranks_per_worker=int(ranks), min_workers=int(min_workers), settings=settings),
        scaling_config=ray.train.ScalingConfig(num_workers=int(workers)),
        run_config=ray.train.RunConfig(
            name="test",
            storage_path=f"{folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=int(os.environ["MAX_FAILURES"])),
        ),
    )
    result = trainer.fit()
    found: dict[str, Any] = {"metrics": result.metrics}
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as local:
            found["state"] = fingerprint(torch.load(Path(local) / "model.pt").values())
    (Path(folder) / "driver.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
