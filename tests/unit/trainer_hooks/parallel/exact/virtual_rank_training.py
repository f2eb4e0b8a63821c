"""A training in exact mode whose ranks log their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from everstep_trainer.run import Run
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
    wait_for_next_generation,
)
from tests.unit.trainer_hooks.parallel.exact.virtual_shards import full_tensor


def train(
    run: Run,
    folder: str,
    until: int,
    virtual_ranks: int,
    faults: tuple[Fault, ...] = (),
    last_steps: Mapping[int, int] = MappingProxyType({}),
    sharded: bool = False,
) -> None:
    """Train two models with an optimizer each, clipping, a schedule and dropout, in unequal parts and shards."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED if sharded else SEED + run.rank)  # rank 0 makes replicas equal at the start
    inputs, targets = data()
    model, other = Net(), nn.Linear(1, 1, dtype=torch.float64)
    if sharded and run.distributed:
        mesh = run.mesh
        for module in (model.first, model, other):
            fully_shard(module, mesh=mesh)
    run.replicate(model, virtual_ranks=virtual_ranks)
    run.replicate(other, virtual_ranks=virtual_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=until + 1)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, other=other, optimizer=optimizer, second=second, scheduler=scheduler)
    injector, step_log = FaultInjector(faults, Path(folder), run.rank), StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        injector.step = step
        wait_for_next_generation(run, step, last_steps)
        samples, losses = [], []
        for part in run.parts(sampler, step):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(inputs[part.indices])
            loss = (other(out.double()) - targets[part.indices]).square().mean() * part.loss_weight
            injector.at("forward")
            loss.backward()
            losses.append(loss)
            samples += [] if part.is_repeat else [(part.rank, part.indices.tolist())]
        injector.at("reduced")
        clip = run.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        second.step()
        scheduler.step()
        noise = float(torch.rand(1)).hex()
        mean = float(run.mean(losses)).hex()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        state = fingerprint(map(full_tensor, [*model.parameters(), *other.parameters(), *moments]))
        step_log.write(step, loss=mean, norm=float(norm).hex(), noise=noise, samples=samples, state=state)


def train_alone(folder: str, until: int, virtual_ranks: int, sharded: bool) -> None:
    """Run the same training in this process without a process group."""
    from everstep_trainer.parallel.replicas import RankContext
    from everstep_trainer.session.generation_session import TrainingSession

    train(Run(RankContext(), TrainingSession()), folder, until, virtual_ranks, sharded=sharded)
