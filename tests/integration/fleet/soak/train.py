"""The training that is disturbed: a small regression whose every step is logged by every rank.

Numbers are double: where the world has another size sums round otherwise, and only by 1e-16, so that a sample too
many, or an update too few, cannot hide behind it. The last step is announced in the file ``SOAK_GOAL`` while it runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from examples.demo.train import StepLog

SEED, SAMPLES, WIDTH, BATCH = 29, 4096, 48, 14
"""14 samples a step divide evenly among neither four ranks nor three: the weights of shares count."""
FOR_EVER = 1 << 40


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """``[SAMPLES, WIDTH]`` inputs, and what a fixed function makes of them."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    mix = torch.randn(WIDTH, 1, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs @ mix)


def build() -> nn.Sequential:
    torch.manual_seed(SEED)
    layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return nn.Sequential(*layers).double()


def goal(path: Path) -> int:
    """The last step, once it is announced."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return FOR_EVER


def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    inputs, targets = data()
    model = build()
    whole: nn.Module = model
    if os.environ["SOAK_LAYOUT"] == "ddp":
        whole = run.replicate(model)
    else:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=run.mesh)
        fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, optimizer=optimizer)
    log, announced = StepLog(run), Path(os.environ["SOAK_GOAL"])
    pace_s = float(os.environ.get("SOAK_PACE_S", "0"))
    for step in run.steps(until=FOR_EVER, seed=SEED):
        if step > goal(announced):
            break
        time.sleep(pace_s)  # leaves the machine's few cores to what is being tested
        indices = sampler.indices(step)
        loss = (whole(inputs[indices]) - targets[indices]).square().mean()
        log.samples(step, loss.item(), indices.tolist())
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        log.finished(step)


if __name__ == "__main__":
    everstep.main(train)
