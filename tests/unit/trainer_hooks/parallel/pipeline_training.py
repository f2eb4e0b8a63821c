"""A training of two replicas, which are pipelines of two stages by a schedule of torch.

Ranks log each step, first of a training without tracking and faults, then of a tracked training.

The stages get the shapes of their inputs and outputs. Otherwise torch infers them by a forward pass before the first
micro-batch of a generation. DistributedDataParallel then waits for a backward pass, and reduces the gradients of the
first micro-batch separately, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from everstep_trainer.data.rng import seed_step
from everstep_trainer.run import Run
from tests.support.ranks.exact_training import (
    WIDTH,
    Fault,
    FaultInjector,
    StepLog,
    data,
    fingerprint,
    wait_for_next_generation,
)

SEED, SAMPLES, BATCH, STAGES, MICRO = 59, 100, 12, 2, 3


class Net(nn.Module):
    """The layers of one stage, under their names in the whole model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        whole = {
            "in": nn.Linear(WIDTH, 16),
            "mid": nn.Linear(16, 16),
            "norm": nn.LayerNorm(16),
            "out": nn.Linear(16, 1),
        }
        names = ("in", "mid") if stage == 0 else ("norm", "out")
        self.layers = nn.ModuleDict({name: whole[name] for name in names})
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before_forward()
        for layer in self.layers.values():
            x = torch.tanh(nn.functional.dropout(layer(x), 0.1, training=True))
        return x


def takes(stage: int) -> torch.Tensor:
    """Return a micro-batch with the shape of this stage's input, which is the output of the stage before."""
    return torch.empty(BATCH // 2 // MICRO, (WIDTH, 16, 1)[stage], requires_grad=stage > 0)


class Training:
    """A stage of a replica, with its schedule and optimizer."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        self.run = run
        self.stage = mesh["pp"].get_local_rank()
        self.net = Net(self.stage)
        self.model = run.replicate(self.net)
        group = mesh["pp"].get_group()
        stage = PipelineStage(
            self.model,
            self.stage,
            STAGES,
            torch.device("cpu"),
            input_args=takes(self.stage),
            output_args=takes(self.stage + 1),
            group=group,
        )
        self.schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda out, want: (out - want).square().mean())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)

    def step(self, step: int, injector: FaultInjector) -> dict[str, Any]:
        """Run a step, and return the row to log."""
        inputs, targets = data()
        samples = self.sampler.indices(step)
        losses: list[torch.Tensor] = []
        if self.stage == 0:
            self.schedule.step(inputs[samples])
        else:
            self.schedule.step(target=targets[samples], losses=losses)
        injector.at("reduced")
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = self.run.mean(torch.stack(losses).mean() if losses else None, self.sampler.loss_weight(step))
        state = [*self.model.parameters(), *(m for s in self.optimizer.state.values() for m in s.values())]
        return {"samples": samples.tolist(), "loss": float(loss).hex(), "state": fingerprint(state)}


def train(run: Run, folder: str, until: int, faults: Sequence[Fault], last_steps: Mapping[int, int]) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (STAGES, run.world_size // STAGES), mesh_dim_names=("pp", "dp"))
    replica = run.data_parallel(mesh["dp"], stage=mesh["pp"])
    step_log = StepLog(Path(folder), run)
    if run.generation == 1:
        undisturbed, no_faults = Training(run, mesh), FaultInjector((), Path(folder), run.rank)
        for step in range(1, until + 1):
            seed_step(SEED, step, replica.index, replica.stage)
            step_log.write(step, calm=True, **undisturbed.step(step, no_faults))
    training, injector = Training(run, mesh), FaultInjector(faults, Path(folder), run.rank)
    micro: Iterator[int] = iter(())

    def at_micro_batch() -> None:
        if next(micro, 0) == 1:
            injector.at("forward")

    training.net.before_forward = at_micro_batch
    run.track(model=training.model, optimizer=training.optimizer)
    for step in run.steps(until=until, seed=SEED):
        injector.step = step
        wait_for_next_generation(run, step, last_steps)
        micro = iter(range(MICRO))
        step_log.write(step, calm=False, **training.step(step, injector))


def training(folder: Path, until: int, faults: Iterable[Fault], last_steps: Mapping[int, int]) -> partial[None]:
    return partial(train, folder=str(folder), until=until, faults=[*faults], last_steps=last_steps)
