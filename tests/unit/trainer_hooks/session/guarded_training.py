"""A training under a loss guard, with bad data at chosen steps."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from everstep_trainer.run import Run
from everstep_trainer.session.loss_guard import LossGuard
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, fingerprint

SEED, BATCH, WIDTH = 41, 8, 6


class BadData:
    """Data steps whose inputs or gradients are ``value`` in one row, always or only the first ``times``."""

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
    bad: BadData | None = None,
    gradients: BadData | None = None,
    faults: tuple[Fault, ...] = (),
    **options: Any,
) -> LossGuard:
    """Train until the last of the data steps ``updates``."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 1))
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    sampler = run.sampler(200, global_batch=BATCH, seed=SEED)
    guard = run.guard(**options)
    run.track(model=replicas, optimizer=optimizer, scheduler=scheduler)
    injector, step_log = FaultInjector(faults, Path(folder), run.rank), StepLog(Path(folder), run)
    for step in run.steps(until=10_000):
        data_step = guard.data_step
        if data_step > max(updates):
            break
        injector.step = step
        inputs = torch.sin(torch.outer(sampler.indices(data_step) + 1.0, torch.arange(1.0, WIDTH + 1)))
        if bad is not None:
            bad.spoil(data_step, inputs)
        loss = (replicas(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if gradients is not None:
            gradient = model.get_parameter("0.weight").grad
            assert gradient is not None
            gradients.spoil(data_step, gradient)
        injector.at("reduced")
        allowed = guard.allows(loss, sampler.loss_weight(data_step))
        if allowed:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        moments = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        rate = float(scheduler.get_last_lr()[0]).hex()
        step_log.write(
            step,
            data_step=data_step,
            allowed=allowed,
            records=guard.records,
            parameters=fingerprint(model.parameters()),
            state=fingerprint([*model.parameters(), *model.buffers(), *moments]) + rate,
        )
    return guard


def train_on(run: Run, folder: str, faults: tuple[Fault, ...]) -> None:
    """Train in a generation in which data step 23 is always bad."""
    train(run, folder, range(1, 41), BadData([23], float("nan")), faults=faults, rollback_copies=2, copy_every=4)
