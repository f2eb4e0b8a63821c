"""A training that reports recoveries to all trackers, to a failing one and to a hanging one. Its ranks can be killed.

    everstep-launch ... -m tests.integration.frameworks.scripts.tracked_training FOLDER UNTIL [RANK:STEP:POINT ...]

TRACKED=0: no tracker.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import everstep
from everstep_trainer.integrations import trackers
from everstep_trainer.integrations.trackers import (
    MlflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    track_recoveries,
)
from tests.support.ranks.exact_training import (
    BATCH,
    SAMPLES,
    SEED,
    Fault,
    FaultInjector,
    Net,
    StepLog,
    data,
    fingerprint,
    main,
)

FIRST_FAULT = 5


class FailingTracker(Tracker):
    """A tracker that fails at its first number."""

    def log(self, *_: object) -> None:
        raise RuntimeError("the disk of this tracker is full")


def mlflow_uri(folder: Path) -> str:
    """Return the address of the database in ``folder``."""
    return f"sqlite:///{folder}/mlflow.db"


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    inputs, targets = data()
    model = Net()
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    place = Path(folder)
    injector, step_log = FaultInjector(faults, place, run.rank), StepLog(place, run)
    if os.environ.get("TRACKED") != "0":
        track_recoveries(
            run,
            WandbTracker(project="tracked", dir=folder, mode="offline"),
            MlflowTracker(mlflow_uri(place), "tracked"),
            TensorBoardTracker(place / "tensorboard"),
            FailingTracker(),
        )
    run.track(model=replicas, optimizer=optimizer)
    for step in run.steps(until=until, seed=SEED):
        while step == FIRST_FAULT and not all(thread.is_idle for thread in trackers._threads.values()):
            time.sleep(0.01)  # rank 0 is killed when its trackers have begun
        injector.step = step
        injector.at("begun")
        indices = sampler.indices(step)
        loss = (replicas(inputs[indices]) - targets[indices]).square().mean()
        (loss * sampler.loss_weight(step)).backward()
        mean = run.mean(loss, sampler.loss_weight(step))
        optimizer.step()
        optimizer.zero_grad()
        injector.at("updated")
        run.report(loss=mean)
        step_log.write(step, loss=mean.item(), state=fingerprint(model.parameters()))


if __name__ == "__main__":
    main(train, sys.argv[1:])
