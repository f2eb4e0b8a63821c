"""A program that keeps its own checkpoints, by torch.distributed.checkpoint, in the memory of its vaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes.launcher import launched

TRAIN = """
import os, signal, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import everstep
from torch.distributed.fsdp import fully_shard
from everstep_trainer.memory_tier.dcp import VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter

class Dying(VaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)

def train(run):
    model = fully_shard(torch.nn.Linear(8, 8), mesh=run.mesh)
    state = {"model": model.state_dict(), "step": 0}
    own_group = dist.new_group(backend="gloo")
    reader = VaultReader(run.tier)
    newest = reader.newest_step()
    if newest is not None:
        dcp.load(state, storage_reader=reader, planner=VaultLoadPlanner(), checkpoint_id=f"out/step-{newest}")
        value = model.weight.full_tensor()
        if run.rank == 0:
            loaded = f"step {state['step']}, weights {value.min()} to {value.max()}"
            os.write(1, f"process {os.getpid()} loaded {loaded}{chr(10)}".encode())
        return
    if run.rank == 0:
        os.write(1, f"process {os.getpid()} begins{chr(10)}".encode())
    writer, saving = VaultWriter(run.tier), None
    for step in range(1, 16):
        with torch.no_grad():
            model.weight._local_tensor.fill_(step)
        state["step"] = step
        where = {"storage_writer": writer, "planner": VaultSavePlanner(), "checkpoint_id": f"out/step-{step}"}
        if step == 5:
            dcp.save(state, **where)
        if step == 10:
            saving = dcp.async_save(state, process_group=own_group, **where)
        run.step_finished()
    saving.result()
    where["planner"] = Dying()
    dcp.async_save(state, process_group=own_group, **where).result()

everstep.main(train)
"""


@pytest.mark.promise("memory-tier")
@pytest.mark.slow
def test_the_generation_after_a_loss_loads_the_last_checkpoint(short_path: Path) -> None:
    """Saved by a thread of torch's, when a rank dies in the middle of the next one, which the other waits for."""
    (short_path / "train.py").write_text(TRAIN)
    argv = ["--nproc-per-node", "2", "--hang-threshold-s", "60", "--state-dir", str(short_path / "s"), "train.py"]
    with launched(short_path, *argv) as launcher:
        assert launcher.wait() == 0, launcher.err
        (first,) = re.findall(r"process (\d+) begins", launcher.out)
        assert f"process {first} loaded step 10, weights 10.0 to 10.0" in launcher.out, "in the same process"
