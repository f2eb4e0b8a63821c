"""What the demonstration's ranks run: the training of ``examples/train_ddp.py`` or ``train_fsdp2.py``, with a log.

Every rank writes a line before it adds its gradients (with the samples it saw itself, so that what stands at the end
can be counted) and another when its step is finished. SIGUSR1 flips one bit of one parameter, as a failing GPU would.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from examples.corpus import Windows, standard_library
from examples.gpt import GPT, GPTConfig, next_byte_loss, warm_up_and_cosine

SEED, LEARNING_RATE = 17, 1e-3


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    return parser.parse_args(argv)


class StepLog:
    """JSON lines in ``DEMO_STEPS``/``DEMO_NODE``-pid.jsonl."""

    def __init__(self, run: everstep.Run) -> None:
        self._run = run
        path = Path(os.environ["DEMO_STEPS"], f"{os.environ['DEMO_NODE']}-{os.getpid()}.jsonl")
        self._file = path.open("a", buffering=1)

    def samples(self, step: int, loss: float, samples: list[int]) -> None:
        """The rank is about to add these samples' gradients: if the step is ever applied, they were seen."""
        self._write(step, event="samples", loss=loss, samples=samples)

    def finished(self, step: int) -> None:
        self._write(step, event="finished")

    def _write(self, step: int, **more: object) -> None:
        run = self._run
        row = {"generation": run.generation, "step": step, "rank": run.rank, "world": run.world_size}
        at = time.clock_gettime(time.CLOCK_REALTIME)
        self._file.write(json.dumps({**row, "at": at, **more}) + "\n")


def flip_on_sigusr1(model: nn.Module) -> None:
    """The next SIGUSR1 flips the lowest exponent bit of one weight in the middle of the model."""

    def flip(_signal: int, _frame: FrameType | None) -> None:
        parameters = [p for p in model.parameters() if p.dim() == 2]
        weight = parameters[len(parameters) // 2].detach()
        weight.view(torch.int32).flatten()[12345] ^= 1 << 23

    signal.signal(signal.SIGUSR1, flip)


OPTIONS = parse(sys.argv[1:])
CONFIG = GPTConfig(layers=3, width=128, context=64) if OPTIONS.fast else GPTConfig()
BATCH = 8 if OPTIONS.fast else 16
DATASET = Windows(standard_library(), CONFIG.context)


def logged(run: everstep.Run, log: StepLog) -> Iterator[int]:
    """The steps, at ``--pace``, with a line for each one that is finished: when the loop asks for the next."""
    before, due = None, 0.0
    for step in run.steps(until=OPTIONS.steps, seed=SEED):
        if before is not None:
            log.finished(before)
        time.sleep(max(0.0, due - time.perf_counter()))
        due = time.perf_counter() + OPTIONS.pace
        yield step
        before = step
    if before is not None:
        log.finished(before)


def train(run: everstep.Run) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = GPT(CONFIG).to(run.device)
    if OPTIONS.layout == "ddp":
        whole = run.replicate(model)
        flip_on_sigusr1(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=run.mesh)
        whole = fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(OPTIONS.steps))
    sampler = run.sampler(len(DATASET), global_batch=BATCH, seed=SEED)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    log = StepLog(run)
    for step in logged(run, log):
        indices = sampler.indices(step)
        inputs, targets = (part.to(run.device) for part in DATASET[indices])
        loss = next_byte_loss(whole(inputs), targets)
        log.samples(step, loss.item(), indices.tolist())
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)


if __name__ == "__main__":
    everstep.main(train)
