"""The workload under torchft 0.2.0: DDP replica groups of one rank, tuned as its documentation allows.

Runs in an environment of its own (torch, numpy, torchft). Process ``BENCH_RANK`` of ``BENCH_WORLD``.

With torch 2.13, torchft's own communication hook asserts when a collective fails inside backward, and the process ends.
So that there is a figure to compare with, the hook is replaced here by one that hands torchft's manager the error and
goes on, as its design intends.
"""

import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import GradBucket, TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.recovery_rows.workload import Fault, StepLog, batch, build_model


class MendedDataParallel(DistributedDataParallel):  # type: ignore[misc]  # only installed for peers
    """torchft's wrapper with a hook that survives a failed collective."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    rank, steps = int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_STEPS"])
    torch.set_num_threads(1)
    model = build_model()
    inner = torch.optim.AdamW(model.parameters())
    log = StepLog(os.environ["BENCH_FOLDER"], f"rank{rank}")
    fault = Fault(rank, log, model)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=250)),
        min_replica_size=2,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"replica{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["BENCH_LIGHTHOUSE"],
        heartbeat_interval=timedelta(milliseconds=20),
        hostname="127.0.0.1",
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=30),
    )
    ddp = MendedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        step = manager.current_step()
        fault.before_step(step)
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            log.write("step", step, world=manager.num_participants())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
