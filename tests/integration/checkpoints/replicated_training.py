"""A training with FSDP2, so that each rank's shards are copied to another node's vault.

    everstep-launch ... -m tests.integration.checkpoints.replicated_training FOLDER

Each rank logs a digest of each step. FOLDER/gate names the step at which the ranks wait, and FOLDER/last the step after
which they end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everstep
from tests.support.ranks.exact_training import StepLog, fingerprint, wait_at_gate

SEED, WIDTH, BATCH, SAMPLES = 41, 16, 12, 200
FOR_EVER = 1 << 40
PACE_S = 0.005
"""Seconds between steps, which leave CPU time to the code under test."""


def train(run: everstep.Run, folder: str) -> None:
    """Train with FSDP2 on two ranks, since the sum of two gradients does not depend on their order."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, optimizer=optimizer)
    step_log = StepLog(Path(folder), run)
    for step in run.steps(until=FOR_EVER, seed=SEED):
        wait_at_gate(Path(folder), step)
        if (last := Path(folder, "last")).exists() and step > int(last.read_text()):
            break
        time.sleep(PACE_S)
        indices = sampler.indices(step)
        inputs = torch.sin(torch.outer(indices + 1.0, torch.arange(1.0, WIDTH + 1)))
        (model(inputs).square().mean() * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        moments = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in [*model.parameters(), *moments]]
        step_log.write(step, samples=indices.tolist(), state=fingerprint(shards))


def main(argv: Sequence[str]) -> None:
    (folder,) = argv
    everstep.main(partial(train, folder=folder), settings=everstep.HookSettings(backend="gloo"))


if __name__ == "__main__":
    main(sys.argv[1:])
