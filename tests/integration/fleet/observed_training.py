"""A training with shards, replicas that wait for each other and a loss, for the dashboards.

everstep-launch ... -m tests.integration.fleet.observed_training WIDTH WIDTH [WIDTH ...]
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import everstep


def train(run: everstep.Run, widths: Sequence[int]) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    sharded = torch.nn.Sequential(*(torch.nn.Linear(wide, after) for wide, after in itertools.pairwise(widths)))
    fully_shard(sharded, mesh=run.mesh)
    head = torch.nn.Linear(widths[-1], 1)
    replicated = run.replicate(head)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (sharded, head)]
    run.track(sharded=sharded, head=head, first=optimizers[0], second=optimizers[1])
    with (Path(os.environ["DEMO_STEPS"]) / f"{os.environ['DEMO_NODE']}-{os.getpid()}.jsonl").open("a") as log:
        for step in run.steps(until=100_000):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = replicated(sharded(torch.ones(4, widths[0]))).pow(2).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            run.report(loss=loss)
            print(json.dumps([run.generation, step, "", "stepped"]), file=log, flush=True)
            time.sleep(0.02)


if __name__ == "__main__":
    sizes = [int(width) for width in sys.argv[1:]]
    everstep.main(lambda run: train(run, sizes))
