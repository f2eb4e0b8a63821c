"""The workload under torchrun: restart all ranks on a failure, ``torch.save`` every ten steps to the bench's folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.hook_models import batch, chosen_model
from bench.recovery_rows.workload import Fault, StepLog


def main() -> None:
    steps, folder = int(os.environ["BENCH_STEPS"]), os.environ["BENCH_FOLDER"]
    checkpoint, every = Path(folder, "checkpoint.pt"), int(os.environ.get("BENCH_SAVE_EVERY", "10"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = chosen_model().build()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    log = StepLog(folder, f"rank{rank}")
    fault, first = Fault(rank, log, model), 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, steps):
        fault.before_step(step)
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().mean().backward()
        optimizer.step()
        log.write("step", step, world=dist.get_world_size())
        log.write_cpu(step)
        if rank == 0 and step % every == every - 1:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
