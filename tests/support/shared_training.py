"""A training whose state is sharded, so that copies of each rank's go to another node's vault.

    python -m everstep_trainer.launch ... -m tests.support.shared_training FOLDER

Its ranks write down what each step left; they go no further than the step that the folder's ``gate`` names, and end
after the one that its file ``last`` names.
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
from tests.support.exact_training import Diary, fingerprint, wait_at_gate

SEED, WIDTH, BATCH, SAMPLES = 41, 16, 12, 200
FOR_EVER = 1 << 40
PACE_S = 0.005
"""Leaves the machine's few cores to what is being tested."""


def train(run: everstep.Run, folder: str) -> None:
    """FSDP2; of two ranks' gradients the sum does not depend on their order."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, optimizer=optimizer)
    diary = Diary(Path(folder), run)
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
        diary.write(step, samples=indices.tolist(), state=fingerprint(shards))


def main(argv: Sequence[str]) -> None:
    (folder,) = argv
    everstep.main(partial(train, folder=folder), settings=everstep.HookSettings(backend="gloo"))


if __name__ == "__main__":
    main(sys.argv[1:])
