"""A training with a guard, whose data are bad where it is told."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from everstep_trainer.loss_guard import LossGuard
from everstep_trainer.run import Run

from tests.support.exact_training import Diary, Fault, Faults, fingerprint

SEED, BATCH, WIDTH = 41, 8, 6


class Bad:
    """Data steps whose inputs (or gradients) are ``value`` in one row: always, or only the first ``times``."""

    def __init__(self, steps: Collection[int], value: float, times: int = 1_000_000) -> None:
        self._left = dict.fromkeys(steps, times)
        self._value = value

    def spoil(self, step: int, rows: torch.Tensor) -> None:
        if self._left.get(step, 0) > 0:
            self._left[step] -= 1
            rows[0] = self._value


def train(
    run: Run,
    folder: str,
    updates: Collection[int],
    bad: Bad | None = None,
    gradients: Bad | None = None,
    faults: tuple[Fault, ...] = (),
    **options: Any,
) -> LossGuard:
    """Until the last of the data steps ``updates`` is behind."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 1))
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    sampler = run.sampler(200, global_batch=BATCH, seed=SEED)
    guard = run.guard(**options)
    run.track(model=replicas, optimizer=optimizer, scheduler=scheduler)
    dying, diary = Faults(faults, Path(folder), run.rank), Diary(Path(folder), run)
    for step in run.steps(until=10_000):
        data_step = guard.data_step
        if data_step > max(updates):
            break
        dying.step = step
        inputs = torch.sin(torch.outer(sampler.indices(data_step) + 1.0, torch.arange(1.0, WIDTH + 1)))
        if bad is not None:
            bad.spoil(data_step, inputs)
        loss = (replicas(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if gradients is not None:
            gradients.spoil(data_step, model[0].weight.grad)
        dying.at("reduced")
        allowed = guard.allows(loss, sampler.loss_weight(data_step))
        if allowed:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        moments = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        diary.write(
            step,
            data_step=data_step,
            allowed=allowed,
            records=guard.records,
            parameters=fingerprint(model.parameters()),
            state=fingerprint([*model.parameters(), *model.buffers(), *moments]) + scheduler.get_last_lr()[0].hex(),
        )
    return guard


def train_on(run: Run, folder: str, faults: tuple[Fault, ...]) -> None:
    """In a generation: data step 23 is bad for good."""
    train(run, folder, range(1, 41), Bad([23], float("nan")), faults=faults, rollback_copies=2, copy_every=4)
