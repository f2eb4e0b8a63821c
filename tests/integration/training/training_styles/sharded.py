"""Loops whose ranks hold parts of one model, and a loop with checkpoints of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from everstep_trainer.memory_tier.dcp import VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter
from tests.integration.training.training_styles.loops import BATCH, FEATURES, SAMPLES, Training, data, small_model
from tests.integration.training.training_styles.style import Work, style

HIDDEN, MICRO_BATCHES = 64, 4


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@style()
def fsdp2(work: Work) -> None:
    """FSDP2."""
    Training(work, lambda model: _shard(model, work.run.mesh)).train()


@style(ranks=4)
def hsdp(work: Work) -> None:
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    work.run.data_parallel(mesh["replicate", "shard"])
    Training(work, lambda model: _shard(model, mesh)).train()


class _Columns(nn.Module):
    """Two layers that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, features]`` to ``[batch, 1]``."""
        out: torch.Tensor = self.down(nn.functional.relu(self.up(x)))
        return out


@style(ranks=4)
def tensor_parallel(work: Work) -> None:
    """Tensor parallelism: two replicas of two ranks, sharded by FSDP2."""
    run = work.run
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    run.data_parallel(mesh["dp"])
    torch.manual_seed(0)
    model = parallelize_module(_Columns(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
    run.track(model=model, optimizer=optimizer)
    inputs, targets = data()
    for step in run.steps(until=work.steps, seed=1):
        work.pause()
        indices = sampler.indices(step)
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    work.finish(model.state_dict(), optimizer.state_dict())


class _Stage(nn.Module):
    """One of two stages of a pipeline."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.add_module(f"layer{number}", nn.Linear(FEATURES, HIDDEN) if number == 0 else nn.Linear(HIDDEN, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, features]`` to the hidden width, or from it to ``[batch, 1]``."""
        out: torch.Tensor = self.get_submodule(f"layer{self.number}")(x)
        return nn.functional.relu(out) if self.number == 0 else out


@style()
def pipeline(work: Work) -> None:
    """A pipeline of two stages, with a schedule of four micro-batches."""
    run = work.run
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    run.data_parallel(mesh["dp"], stage=mesh["pp"])
    number = mesh["pp"].get_local_rank()
    part = run.replicate(_Stage(number))
    rows, widths = BATCH // MICRO_BATCHES, (FEATURES, HIDDEN, 1)
    takes, gives = (torch.empty(rows, widths[n], requires_grad=n > 0) for n in (number, number + 1))
    group = mesh["pp"].get_group()
    stage = PipelineStage(part, number, 2, run.device, input_args=takes, output_args=gives, group=group)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters())
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
    run.track(model=part, optimizer=optimizer)
    inputs, targets = data()
    for step in run.steps(until=work.steps, seed=1):
        work.pause()
        indices = sampler.indices(step)
        if number == 0:
            schedule.step(inputs[indices])
        else:
            schedule.step(target=targets[indices], losses=[])
        optimizer.step()
        optimizer.zero_grad()
    work.finish(part.state_dict(), optimizer.state_dict())


@style()
def own_checkpoints(work: Work) -> None:
    """Checkpoints of the script's own by torch.distributed.checkpoint, kept in memory after every step."""
    run = work.run
    model = _shard(small_model(), run.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
    reader, writer = VaultReader(run.tier), VaultWriter(run.tier)
    newest, first = reader.newest_step(), 1
    if newest is not None:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        load(state, storage_reader=reader, planner=VaultLoadPlanner(), checkpoint_id=f"step-{newest}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"] + 1
    inputs, targets = data()
    for step in range(first, work.steps + 1):
        run.seed_step(step, seed=1)
        work.pause(step=step)
        indices = sampler.indices(step)
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        save(state, storage_writer=writer, planner=VaultSavePlanner(), checkpoint_id=f"step-{step}")
        run.step_finished()
    run.end_steps()
    work.finish(*get_state_dict(model, optimizer), step=work.steps)
