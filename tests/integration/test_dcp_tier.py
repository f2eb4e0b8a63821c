"""A program that keeps its own checkpoints, by torch.distributed.checkpoint, in the memory of its vaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import launched

TRAIN = """
import os, signal, torch
import torch.distributed.checkpoint as dcp
import trainer_hooks as everstep
from torch.distributed.fsdp import fully_shard
from trainer_hooks.dcp import VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter

def train(run):
    model = fully_shard(torch.nn.Linear(8, 8), mesh=run.mesh)
    state = {"model": model.state_dict(), "step": 0}
    if run.generation > 1:
        dcp.load(state, storage_reader=VaultReader(run.tier), planner=VaultLoadPlanner())
        value = model.weight.full_tensor()
        if run.rank == 0:
            os.write(1, f"loaded step {state['step']}, weights {value.min()} to {value.max()}{chr(10)}".encode())
        return
    for step in range(1, 13):
        with torch.no_grad():
            model.weight._local_tensor.fill_(step)
        if step % 5 == 0:
            state["step"] = step
            dcp.save(state, storage_writer=VaultWriter(run.tier, step), planner=VaultSavePlanner())
        run.step_finished()
    torch.distributed.barrier()
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()

everstep.main(train)
"""


@pytest.mark.slow
def test_the_generation_after_a_loss_loads_the_last_checkpoint(short_path: Path) -> None:
    (short_path / "train.py").write_text(TRAIN)
    with launched(short_path, "--nproc-per-node", "2", "--state-dir", str(short_path / "s"), "train.py") as launcher:
        assert launcher.wait() == 0, launcher.err
        assert "loaded step 10, weights 10.0 to 10.0" in launcher.out
