"""A training in which the GPU of one node computes NaN from a step on.

    FAULTY=1 everstep-launch ... -m tests.integration.training.faulty_gpu_training FOLDER

Each rank writes the sum of the parameters after the last step into the folder.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import everstep

RANKS, STEPS, FAULTY_FROM = 3, 120, 61
PACE_S = 0.01
AUDITS = {"gradient_norm": {"interval": 4}}
"""NaN reaches all ranks before norms are read again, as none are due in the first faulty step."""


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 1000 + rank))
    result: torch.Tensor = model(samples).square().mean()
    return result


def train(run: everstep.Run, folder: str) -> None:
    torch.set_num_threads(1)
    model = run.replicate(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer, sdc_audits=AUDITS)
    for step in run.steps(until=STEPS):
        time.sleep(PACE_S)
        optimizer.zero_grad()
        loss = loss_of(model, run.rank, step)
        if "FAULTY" in os.environ and step >= FAULTY_FROM:
            loss = loss * math.nan
        loss.backward()
        optimizer.step()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    Path(folder, f"sum-{run.rank}").write_text(repr(total))


def main(argv: Sequence[str]) -> None:
    (folder,) = argv
    everstep.main(partial(train, folder=folder), settings=everstep.HookSettings(backend="gloo"))


if __name__ == "__main__":
    main(sys.argv[1:])
