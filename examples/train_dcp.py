"""Keeps checkpoints of torch.distributed.checkpoint in the memory of the nodes.

    python -m everstep_trainer.launch --nproc-per-node 2 examples/train_dcp.py

The script saves and loads by itself, as it would to a folder, and tracks nothing. Lines that Everstep needs are marked.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import everstep
from everstep_trainer.memory_tier.dcp import VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--steps", type=int, default=300)
PARSER.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
ARGS = PARSER.parse_args()

torch.manual_seed(17)
INPUTS = torch.randn(4096, 16)
TARGETS = INPUTS.sum(dim=1, keepdim=True)


def train(run: everstep.Run) -> None:  # everstep
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(run.device)
    model = fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = run.sampler(len(INPUTS), global_batch=64)
    loss = torch.zeros(())

    first = 1
    reader, writer = VaultReader(run.tier), VaultWriter(run.tier)  # everstep
    newest = reader.newest_step()
    if newest is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, storage_reader=reader, planner=VaultLoadPlanner(), checkpoint_id=f"step-{newest}")  # everstep
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"] + 1

    for step in range(first, ARGS.steps + 1):
        indices = sampler.indices(step)
        loss = torch.nn.functional.mse_loss(model(INPUTS[indices].to(run.device)), TARGETS[indices].to(run.device))
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(ARGS.pace)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(state, storage_writer=writer, planner=VaultSavePlanner(), checkpoint_id=f"step-{step}")  # everstep
        run.step_finished()  # everstep

    digest = xxhash.xxh64()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.full_tensor().cpu().numpy().tobytes())
    mean = run.mean(loss)
    if run.rank == 0:
        print(f"final step={ARGS.steps} loss={mean.item():.9g} parameters={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    everstep.main(train)  # everstep
