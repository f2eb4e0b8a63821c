"""Loops over accelerate and Fabric: the batches and the updates after a restore at each step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("accelerate", "lightning_fabric")]

SAMPLES, BATCH, EPOCHS, ACCUMULATES = 22, 4, 3, 4
Trace = list[Any]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
    data = TensorDataset(torch.arange(SAMPLES)[:, None] / SAMPLES)
    return model, optimizer, schedule, DataLoader(data, batch_size=BATCH, shuffle=True)


def loop_over_accelerate(run: Run) -> Trace:
    from accelerate import Accelerator

    from everstep_trainer.integrations.accelerate import reset_accelerate, track

    reset_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATES)
    model, optimizer, schedule, loader = accelerator.prepare(*made())
    loader = track(accelerator, run, loader, seed=5, model=model, optimizer=optimizer, schedule=schedule)
    trace: Trace = []
    for epoch in loader.epochs(EPOCHS):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                trace.append((epoch, inputs.flatten().tolist(), float(torch.rand(()))))
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    trace.append(("updated", schedule.get_last_lr()))
        trace.append(("end of", epoch))
    return [*trace, *(parameter.tolist() for parameter in model.parameters())]


def loop_over_fabric(run: Run) -> Trace:
    from lightning_fabric import Fabric

    from everstep_trainer.integrations.fabric import everstep_strategy, track

    fabric = Fabric(strategy=everstep_strategy(run))
    fabric.launch()
    module, optimizer, schedule, batches = made()
    model, optimizer = fabric.setup(module, optimizer)
    batches = fabric.setup_dataloaders(batches)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    loader = track(fabric, run, batches, seed=5, accumulates=ACCUMULATES, **objects)
    trace: Trace = []
    for epoch in loader.epochs(EPOCHS):
        for number, (inputs,) in enumerate(loader, 1):
            trace.append((epoch, inputs.flatten().tolist(), float(torch.rand(()))))
            updates = number % ACCUMULATES == 0 or loader.is_last_batch
            with fabric.no_backward_sync(model, enabled=not updates):
                fabric.backward(model(inputs).square().mean())
            if updates:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                trace.append(("updated", schedule.get_last_lr()))
        trace.append(("end of", epoch))
    torch.distributed.destroy_process_group()
    return [*trace, *(parameter.tolist() for parameter in module.parameters())]


def differences(loop: Any) -> dict[str, Any]:
    """Return what differs between an undisturbed run and runs restored at its steps."""
    warnings.simplefilter("ignore")
    session = RecordedSession()
    whole = loop(Run(RankContext(), session))
    ends = [place for place, event in enumerate(whole) if event[0] == "end of"]
    places = [place for place, event in enumerate(whole) if event[0] == "updated"]
    found: dict[str, Any] = {"steps": len(session.versions), "updates": len(places), "epochs": len(ends)}
    for step in session.versions:
        trace = loop(Run(RankContext(), RecordedSession(session.versions, step)))
        begin = places[step - 1] + 1
        expected = whole[begin + 1 if begin in ends else begin :]
        if trace != expected:
            found[str(step)] = (trace, expected)
    return found


@pytest.mark.parametrize("loop", [loop_over_accelerate, loop_over_fabric])
def test_loop_continues_at_next_update(forks: ForkPool, loop: Any) -> None:
    assert forks.start(differences, loop).result() == {"steps": 6, "updates": 6, "epochs": 3}
