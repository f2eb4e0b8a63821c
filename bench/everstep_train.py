"""The workload under Everstep: ``BENCH_LAYOUT`` is ddp, fsdp2, or plain (the same loop without the hooks)."""

from __future__ import annotations

import os

import torch
from torch import nn

import trainer_hooks as everstep
from bench.workload import Fault, StepLog, batch, build_model


def sharded(model: nn.Module, run: everstep.Run) -> nn.Module:
    """Each layer and the whole, sharded over all ranks."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        fully_shard(layer, mesh=run.mesh)
    return fully_shard(model, mesh=run.mesh)


def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    layout, steps = os.environ["BENCH_LAYOUT"], int(os.environ["BENCH_STEPS"])
    model = build_model()
    whole: nn.Module = sharded(model, run) if layout == "fsdp2" else run.replicate(model, exact=layout != "inexact")
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    log = StepLog(os.environ["BENCH_FOLDER"], f"rank{run.rank}")
    fault = Fault(run.rank, log, model)
    for step in run.steps(until=steps):
        fault.before_step(step)
        optimizer.zero_grad()
        whole(batch(step, run.rank)).square().mean().backward()
        optimizer.step()
        log.write("step", step, world=run.world_size, generation=run.generation)


if __name__ == "__main__":
    everstep.main(train)
