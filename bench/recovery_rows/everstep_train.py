"""Train the workload under Everstep.

``BENCH_LAYOUT`` is ddp, inexact (DDP with its own all-reduce), fsdp2, hsdp or compile (DDP, compiled). ``BENCH_DEVICE``
cuda puts the model on a GPU, which ranks share where there are more of them than GPUs: then ``BENCH_BACKEND`` is gloo.
``BENCH_MODEL`` takes another of ``bench.hook_models``.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import everstep
from bench.hook_models import batch, chosen_model
from bench.recovery_rows.workload import Fault, StepLog
from everstep_trainer.config import HookSettings


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer and the whole model over ``mesh``."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parallel(model: nn.Module, layout: str, run: everstep.Run) -> nn.Module:
    """Return ``model`` as ``layout`` distributes it. HSDP keeps two replicas of two shards each."""
    if layout == "fsdp2":
        return sharded(model, run.mesh)
    if layout == "hsdp":
        shape = (run.world_size // 2, 2)
        return sharded(model, init_device_mesh(run.device.type, shape, mesh_dim_names=("replicate", "shard")))
    replicas = run.replicate(model, exact=layout != "inexact")
    compiled: Any = torch.compile(replicas) if layout == "compile" else replicas
    return cast(nn.Module, compiled)


def device_of(run: everstep.Run) -> torch.device:
    """The run's own, or a GPU where the run computes on CPUs and GPUs are asked for."""
    if os.environ.get("BENCH_DEVICE") != "cuda" or run.device.type == "cuda":
        return run.device
    device = torch.device("cuda", run.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    layout, steps = os.environ["BENCH_LAYOUT"], int(os.environ["BENCH_STEPS"])
    device = device_of(run)
    model = chosen_model().build().to(device)
    whole = parallel(model, layout, run)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    log = StepLog(os.environ["BENCH_FOLDER"], f"rank{run.rank}")
    fault = Fault(run.rank, log, model)
    for step in run.steps(until=steps):
        fault.before_step(step)
        optimizer.zero_grad()
        whole(batch(step, run.rank).to(device)).square().mean().backward()
        optimizer.step()
        log.write("step", step, world=run.world_size, generation=run.generation)
        log.write_cpu(step)


if __name__ == "__main__":
    everstep.main(train, settings=HookSettings(backend=os.environ.get("BENCH_BACKEND", "auto")))
