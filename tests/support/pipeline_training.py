"""A training of two replicas that are pipelines of two stages each, on torch's own schedule; ranks write down what they
had, first of a training that nothing happens to and that nobody keeps, then of one that is tracked.

Stages are told what they take and give. torch otherwise finds out by a forward pass before the first micro-batch of a
generation, which leaves DistributedDataParallel waiting for a backward pass: the first micro-batch's gradients are then
added over replicas apart from the others, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from everstep_trainer.data.rng import seed_step
from everstep_trainer.run import Run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.support.exact_training import WIDTH, Diary, Fault, Faults, data, fingerprint, hold

SEED, SAMPLES, BATCH, STAGES, MICRO = 59, 100, 12, 2, 3


class Net(nn.Module):
    """A stage has some of its layers, under the names that they have in the whole model."""

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
        self.dying = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dying()
        for layer in self.layers.values():
            x = torch.tanh(nn.functional.dropout(layer(x), 0.1, training=True))
        return x


def takes(stage: int) -> torch.Tensor:
    """Like a micro-batch of what this stage takes, and the one before it gives."""
    return torch.empty(BATCH // 2 // MICRO, (WIDTH, 16, 1)[stage], requires_grad=stage > 0)


class Training:
    """A stage of a replica, with its schedule and optimizer."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        self.run = run
        self.stage = mesh["pp"].get_local_rank()
        self.net = Net(self.stage)
        self.model = run.replicate(self.net)
        group = mesh["pp"].get_group()
        known = {"input_args": takes(self.stage), "output_args": takes(self.stage + 1)}
        stage = PipelineStage(self.model, self.stage, STAGES, torch.device("cpu"), group=group, **known)
        self.schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda out, want: (out - want).square().mean())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)

    def step(self, step: int, dying: Faults) -> dict[str, Any]:
        """What is written down of it."""
        inputs, targets = data()
        samples = self.sampler.indices(step)
        losses: list[torch.Tensor] = []
        if self.stage == 0:
            self.schedule.step(inputs[samples])
        else:
            self.schedule.step(target=targets[samples], losses=losses)
        dying.at("reduced")
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = self.run.mean(torch.stack(losses).mean() if losses else None, self.sampler.loss_weight(step))
        state = [*self.model.parameters(), *(m for s in self.optimizer.state.values() for m in s.values())]
        return {"samples": samples.tolist(), "loss": loss.item().hex(), "state": fingerprint(state)}


def train(run: Run, folder: str, until: int, faults: Sequence[Fault], last_steps: Mapping[int, int]) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (STAGES, run.world_size // STAGES), mesh_dim_names=("pp", "dp"))
    replica = run.data_parallel(mesh["dp"], stage=mesh["pp"])
    diary = Diary(Path(folder), run)
    if run.generation == 1:
        undisturbed, nobody = Training(run, mesh), Faults((), Path(folder), run.rank)
        for step in range(1, until + 1):
            seed_step(SEED, step, replica.index, replica.stage)
            diary.write(step, calm=True, **undisturbed.step(step, nobody))
    training, dying = Training(run, mesh), Faults(faults, Path(folder), run.rank)
    micro = iter(())

    def at_micro_batch() -> None:
        if next(micro, 0) == 1:
            dying.at("forward")

    training.net.dying = at_micro_batch
    run.track(model=training.model, optimizer=training.optimizer)
    for step in run.steps(until=until, seed=SEED):
        dying.step = step
        hold(run, step, last_steps)
        micro = iter(range(MICRO))
        diary.write(step, calm=False, **training.step(step, dying))


def training(folder: Path, until: int, faults: Iterable[Fault], last_steps: Mapping[int, int]) -> partial[None]:
    return partial(train, folder=str(folder), until=until, faults=[*faults], last_steps=last_steps)
