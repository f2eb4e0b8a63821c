"""A training with every feature that could change a bit, whose ranks log each step and die at requested points.

    everstep-launch ... -m tests.support.ranks.exact_training FOLDER UNTIL [RANK:STEP:POINT ...]

Dropout, gradient accumulation, clipping, a schedule, a loss scaler that meets overflows, and bfloat16 autocast.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep

SEED, SAMPLES, WIDTH, BATCH, OVERFLOW_EVERY = 23, 500, 24, 22, 37
POINTS = ("begun", "forward", "backward", "reduced", "updated")
"""Points of a step at which a rank can die. ``forward`` and ``backward`` are in the second of two micro-batches."""


@dataclass(frozen=True)
class Fault:
    """Kill rank ``rank`` by SIGKILL in ``step``, only once even if the step is computed again."""

    rank: int
    step: int
    point: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        rank, step, point = text.split(":")
        return cls(int(rank), int(step), point)

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.point}"


class FaultInjector:
    """Kill one rank at its faults, once each. Files in ``folder`` record the faults that have struck."""

    def __init__(self, faults: Iterable[Fault], folder: Path, rank: int) -> None:
        self._due = {(fault.step, fault.point): fault for fault in faults if fault.rank == rank}
        self._folder = folder
        self.step = 0

    def at(self, point: str) -> None:
        """Kill this process if a fault is due at this point of ``step``."""
        fault = self._due.get((self.step, point))
        if fault is None or (mark := self._folder / f"struck-{fault}").exists():
            return
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_next_generation(run: everstep.Run, step: int, last_steps: Mapping[int, int]) -> None:
    """Wait for the next generation after this one's last step, if ``last_steps`` names it."""
    while step > last_steps.get(run.generation, step):
        time.sleep(0.005)


def wait_at_gate(folder: Path, step: int) -> None:
    """Wait at the step that the folder's file ``gate`` names, until it names a later one."""
    while (gate := folder / "gate").exists() and step > int(gate.read_text()):
        time.sleep(0.005)


class StepLog:
    """A file with one JSON line for each step that this process has finished."""

    def __init__(self, folder: Path, run: everstep.Run) -> None:
        self._path = folder / f"steps-{os.getpid()}.jsonl"
        self._run = run

    def write(self, step: int, **values: Any) -> None:
        row = {"generation": self._run.generation, "rank": self._run.rank, "step": step, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_step_logs(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all ranks, without lines that a SIGKILL cut short."""
    lines = [line for path in folder.glob("steps-*.jsonl") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def computed(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows by step and rank without those of a restore. The later row of a repeated step counts."""
    return {
        (row["step"], row["rank"]): {key: value for key, value in row.items() if key != "generation"}
        for row in rows
        if "restored" not in row
    }


def is_computed(folder: Path, generation: int, step: int, ranks: int) -> bool:
    """Return whether ``ranks`` ranks of the generation have computed the step."""
    rows = (row for row in read_step_logs(folder) if (row["generation"], row["step"]) == (generation, step))
    return len({row["rank"] for row in rows}) == ranks


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the tensors' bytes, in this order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class Net(nn.Module):
    """Two layers with dropout between; ``WIDTH`` does not divide by three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 50)
        self.norm = nn.LayerNorm(50)
        self.second = nn.Linear(50, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.2, training=True)
        out: torch.Tensor = self.second(hidden)
        return out


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[SAMPLES, WIDTH]`` inputs, and targets by a fixed function of them."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.sin(inputs.sum(1, keepdim=True))


def overflowing_loss(loss: torch.Tensor, step: int) -> torch.Tensor:
    """Return a loss that overflows every few steps, which the scaler skips."""
    return loss * 1e38 if step % OVERFLOW_EVERY == 0 else loss


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault] = ()) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    inputs, targets = data()
    model = Net()
    replicas: Any = run.replicate(model, bucket_cap_mb=0.0005)  # several buckets: a kill may come between two
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=until + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=15)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
    injector = FaultInjector(faults, Path(folder), run.rank)
    micro = 0
    model.second.register_forward_pre_hook(lambda *_: injector.at("forward") if micro else None)
    model.norm.weight.register_hook(lambda _: injector.at("backward") if micro else None)
    run.track(model=replicas, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    step_log = StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        wait_at_gate(Path(folder), step)
        injector.step = step
        injector.at("begun")
        indices = sampler.indices(step)
        losses = []
        for micro, part in enumerate(indices.chunk(2)):
            with replicas.no_sync() if micro == 0 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = (replicas(inputs[part]) - targets[part]).square().sum() / len(indices)
                losses.append(loss.item().hex())
                scaler.scale(overflowing_loss(loss, step) * sampler.loss_weight(step)).backward()
        injector.at("reduced")
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        injector.at("updated")
        scheduler.step()
        optimizer.zero_grad()
        moments = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        step_log.write(
            step,
            losses=losses,
            norm=float(norm.item()).hex(),
            scale=scaler.get_scale(),
            rate=float(scheduler.get_last_lr()[0]).hex(),
            samples=indices.tolist(),
            state=fingerprint([*model.parameters(), *moments]),
        )


def main(train: Callable[..., None], argv: Sequence[str]) -> None:
    """Run a training by its command line: FOLDER UNTIL [RANK:STEP:POINT ...]."""
    folder, until, *faults = argv
    train_here = partial(train, folder=folder, until=int(until), faults=[*map(Fault.parse, faults)])
    everstep.main(train_here, settings=everstep.HookSettings(backend="gloo"))


if __name__ == "__main__":
    main(train, sys.argv[1:])
