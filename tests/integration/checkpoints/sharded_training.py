"""A training with FSDP2 whose ranks log a digest of the restored state and of each step.

everstep-launch ... -m tests.integration.checkpoints.sharded_training WIDTH WIDTH [WIDTH ...]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everstep


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all parameters, equal on all ranks. This is a collective."""
    parameters = (cast(DTensor, parameter) for parameter in model.parameters())
    whole = (parameter.full_tensor().detach().numpy().tobytes() for parameter in parameters)
    return hashlib.sha256(b"".join(whole)).hexdigest()


def train(run: everstep.Run, widths: Sequence[int]) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = (torch.nn.Linear(wide, next_wide) for wide, next_wide in itertools.pairwise(widths))
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    restored = digest(model)
    with (Path(os.environ["DEMO_STEPS"]) / f"{os.environ['DEMO_NODE']}-{os.getpid()}.jsonl").open("a") as log:
        for step in run.steps(until=100_000):
            if restored:
                print(json.dumps([run.generation, step - 1, restored, "restored"]), file=log, flush=True)
                restored = ""
            optimizer.zero_grad()
            model(torch.ones(4, widths[0])).pow(2).mean().backward()
            optimizer.step()
            print(json.dumps([run.generation, step, digest(model), "stepped"]), file=log, flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    sizes = [int(width) for width in sys.argv[1:]]
    everstep.main(lambda run: train(run, sizes))
