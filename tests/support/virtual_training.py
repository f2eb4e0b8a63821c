"""A training in exact mode, whose ranks write down what they computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from tests.support.exact_training import BATCH, SAMPLES, SEED, Diary, Fault, Faults, Net, data, fingerprint, hold
from trainer_hooks.run import Run


def train(
    run: Run,
    folder: str,
    until: int,
    virtual_ranks: int,
    faults: tuple[Fault, ...] = (),
    last_steps: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Two models under one optimizer each, clipping, a schedule and dropout; unequal parts."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED + run.rank)  # replicas are made equal by whoever is rank 0 at the start
    inputs, targets = data()
    model, other = Net(), nn.Linear(1, 1, dtype=torch.float64)
    run.replicate(model, virtual_ranks=virtual_ranks)
    run.replicate(other, virtual_ranks=virtual_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=until + 1)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    run.track(model=model, other=other, optimizer=optimizer, second=second, scheduler=scheduler)
    dying, diary = Faults(faults, Path(folder), run.rank), Diary(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        dying.step = step
        hold(run, step, last_steps)
        samples, losses = [], []
        for part in run.parts(sampler, step):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(inputs[part.indices])
            loss = (other(out.double()) - targets[part.indices]).square().mean() * part.weight
            dying.at("forward")
            loss.backward()
            losses.append(loss)
            samples += part.indices.tolist()
        dying.at("reduced")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        second.step()
        scheduler.step()
        noise = torch.rand(1).item().hex()
        mean = run.mean(losses).item().hex()
        state = fingerprint([*model.parameters(), *other.parameters()])
        diary.write(step, loss=mean, norm=norm.item().hex(), noise=noise, samples=samples, state=state)


def train_alone(folder: str, until: int, virtual_ranks: int) -> None:
    """The same in this process, without a process group."""
    from trainer_hooks.keeper import IdleKeeper
    from trainer_hooks.place import Place

    train(Run(Place(), IdleKeeper()), folder, until, virtual_ranks)
