"""A sound training whose audits differ on all ranks: a library quantises all linear layers from some step on.

    python -m everstep_trainer.launch ... -m tests.support.honest_training FOLDER

Each rank writes the parameters' sum after the last step into the folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import everstep

RANKS, STEPS, QUANTISED_FROM = 4, 120, 41
PACE_S = 0.02
AUDITS = {"matmul": {"interval": 4}}
LINEAR = torch.nn.functional.linear


def train(run: everstep.Run, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = run.replicate(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer, sdc_links=AUDITS)
    for step in run.steps(until=STEPS):
        time.sleep(PACE_S)
        if step >= QUANTISED_FROM:
            torch.nn.functional.linear = _quantised
        optimizer.zero_grad()
        samples = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * 1000 + run.rank))
        model(samples).square().mean().backward()
        optimizer.step()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    Path(folder, f"sum-{run.rank}").write_text(repr(total))


def _quantised(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rounded = [tensor + ((tensor * 16).round() / 16 - tensor).detach() for tensor in (values, weight)]
    return LINEAR(*rounded, bias)


def main(argv: Sequence[str]) -> None:
    (folder,) = argv
    everstep.main(partial(train, folder=folder), settings=everstep.HookSettings(backend="gloo"))


if __name__ == "__main__":
    main(sys.argv[1:])
