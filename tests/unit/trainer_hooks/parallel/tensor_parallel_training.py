"""A training with replicas of two ranks each, and dropout before the split layers. Its ranks log each step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from everstep_trainer.data.rng import seed_step
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.run import Run
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, data, wait_for_next_generation

SEED, SAMPLES, BATCH, SPLIT = 47, 60, 9, 2
"""Epochs end inside steps, and two replicas have unequal shares of a batch."""


class Net(nn.Module):
    """A model whose layers ``up`` and ``down`` are split. Every rank of a replica computes the other layers in full."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, training=True)
        out: torch.Tensor = self.down(torch.tanh(self.up(hidden)))
        return out


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    inputs, targets = data()
    loss: torch.Tensor = (model(inputs[samples]) - targets[samples]).square().mean()
    return loss


def train(run: Run, folder: str, until: int, faults: tuple[Fault, ...], last_steps: Mapping[int, int]) -> None:
    """Train with one replica for each pair of ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    mesh = init_device_mesh("cpu", (run.world_size // SPLIT, SPLIT), mesh_dim_names=("dp", "tp"))
    replica = run.data_parallel(mesh["dp"])
    model: nn.Module = Net()
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, optimizer=optimizer)
    injector, step_log = FaultInjector(faults, Path(folder), run.rank), StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        injector.step = step
        wait_for_next_generation(run, step, last_steps)
        loss = loss_of(model, sampler.indices(step))
        injector.at("forward")
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_log.write(
            step,
            replica=replica.index,
            replicas=replica.count,
            samples=sampler.indices(step).tolist(),
            own_loss=loss.item(),
            loss=run.mean(loss, sampler.loss_weight(step)).item(),
        )


def train_alone(replicas_of_step: Mapping[int, int]) -> dict[int, float]:
    """Return the loss of each step, with all replicas computed by one process in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ElasticSampler(SAMPLES, global_batch=BATCH, seed=SEED)
    losses = {}
    for step, count in sorted(replicas_of_step.items()):
        optimizer.zero_grad()
        total = 0.0
        for index in range(count):
            share = sampler.for_rank(index, count)
            seed_step(SEED, step, index)
            loss = loss_of(model, share.indices(step)) * share.loss_weight(step) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses[step] = total
    return losses


def training(folder: Path, until: int, *faults: Fault, last_steps: Mapping[int, int]) -> partial[None]:
    return partial(train, folder=str(folder), until=until, faults=faults, last_steps=last_steps)
