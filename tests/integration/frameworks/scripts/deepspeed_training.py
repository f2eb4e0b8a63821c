"""A DeepSpeed engine in a training function, whose ranks log each step.

    everstep-launch ... -m tests.integration.frameworks.scripts.deepspeed_training FOLDER UNTIL [RANK:STEP:POINT ...]

DEEPSPEED_CONFIG: JSON, merged over the configuration below. A STEP is an update, of two micro-batches by default.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import everstep
from everstep_trainer.integrations.deepspeed import EngineState, micro_batches, reset_deepspeed, track_engine
from tests.support.ranks.exact_training import (
    SAMPLES,
    SEED,
    WIDTH,
    Fault,
    FaultInjector,
    StepLog,
    data,
    fingerprint,
    main,
    wait_at_gate,
)

BATCH = 11
CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 30}},
    "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 60},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": None,
} | json.loads(os.environ.get("DEEPSPEED_CONFIG", "{}"))


class Net(nn.Module):
    """Two layers with dropout between, a frozen part and a buffer; no size divides by three."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(WIDTH, 50)
        self.norm = nn.LayerNorm(50)
        self.second = nn.Linear(50, 1)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x.to(self.frozen.weight.dtype)) + self.offset
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(x.to(self.first.bias.dtype)))), 0.2, True)
        out: torch.Tensor = self.second(hidden)
        return out


def fingerprint_of_state(engine: Any, state: EngineState) -> str:
    """Return a digest of full parameters, master weights and optimizer state, equal on every rank and world size."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        whole = fingerprint(parameter.detach().float() for parameter in parameters)
    mine = [(shard.name, shard.box.offset[0], shard.local.float().tolist()) for shard in state.shards()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for name, start, elements in (shard for of_rank in every for shard in of_rank):
        values[name].update(enumerate(elements, start))
    held = [torch.tensor([of[at] for at in range(len(of))]) for _, of in sorted(values.items())]
    return whole + fingerprint(held)


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if "fp16" in CONFIG:  # torch computes it on a CPU, but DeepSpeed refuses to
        get_accelerator().is_fp16_supported = lambda: True
    config = reset_deepspeed(run, CONFIG, global_batch=BATCH)
    model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    data_set = torch.utils.data.TensorDataset(*data(), torch.arange(SAMPLES))
    loader = run.loader(data_set, global_batch=BATCH, seed=SEED)
    track_engine(run, engine)
    state, step_log, injector = (
        EngineState(engine),
        StepLog(Path(folder), run),
        FaultInjector(faults, Path(folder), run.rank),
    )
    if run.last_finished_step:
        step_log.write(run.last_finished_step, restored=fingerprint_of_state(engine, state), world=run.world_size)
    for step in run.steps(until=until, seed=SEED):
        wait_at_gate(Path(folder), step)
        injector.step = step
        injector.at("begun")
        losses, seen = [], []
        for micro, ((inputs, targets, samples), weight) in enumerate(micro_batches(engine, loader, step)):
            loss = (engine(inputs).float() - targets).square().mean()
            if micro:
                injector.at("forward")
            engine.backward(loss * weight)
            if micro:
                injector.at("reduced")
            engine.step()
            losses.append(float(run.mean(loss, weight)).hex())
            seen += samples.tolist()
        injector.at("updated")
        step_log.write(
            step,
            losses=losses,
            samples=seen,
            rate=engine.get_lr()[0].hex(),
            scale=engine.optimizer.loss_scale if engine.fp16_enabled() and engine.zero_optimization() else None,
            counters=[engine.global_steps, engine.micro_steps, engine.skipped_steps],
            state=fingerprint_of_state(engine, state),
        )


if __name__ == "__main__":
    main(train, sys.argv[1:])
