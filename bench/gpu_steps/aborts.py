"""Leaving a collective that cannot finish, because its other member stands still: over gloo, and over NCCL on two GPUs.

Over gloo two ranks share a GPU, or the CPU. A test marked gpu leaves a set-up of NCCL whose peer never comes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.gpu_steps.sheet import NotRun, Sheet, not_run, require_gpus
from bench.processes import ProcessPool, gather
from bench.table import Row
from everstep_trainer.runtime.abort import GlooBackend, NcclBackend

FLOOR_S, AIM_S = 2.0, 0.5
"""After 2 s (``HookSettings.leave_timeout_s``) a process that has not left its generation is replaced."""
ANSWER_S, STORE_S = 60.0, timedelta(seconds=60)


def step(sheet: Sheet, device: str) -> None:
    sheet.add(lost_row("gloo", device))
    try:
        require_gpus(2)
    except NotRun as error:
        sheet.add(not_run("NCCL: collective under way with a stopped peer left", str(error)))
    else:
        sheet.add(lost_row("nccl", device))


def lost_row(backend: str, device: str) -> Row:
    """Seconds from the abort until a rank is out of an all-reduce whose other member stands still."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPool([__name__]) as pool:
        answers = [pool.start(stopped_peer, backend, device, store.port, rank) for rank in range(2)]
        store.wait(["ready/1"], STORE_S)
        os.kill(int(store.get("ready/1")), signal.SIGSTOP)
        store.set("stopped", "")
        seconds = gather(answers[:1], ANSWER_S)[0]
    name = "NCCL" if backend == "nccl" else backend
    what = f"{name}: collective on {'CPU' if device == 'cpu' else 'CUDA'} tensors with a stopped peer left"
    return Row(what, seconds, "s", FLOOR_S, AIM_S, "from the abort to the error in the waiting thread")


def stopped_peer(name: str, device: str, port: int, rank: int) -> float:
    """Rank 0 waits in an all-reduce that rank 1, which is stopped, never enters; in a process of its own."""
    backend: GlooBackend = NcclBackend() if name == "nccl" else GlooBackend()
    where = torch.device(device) if device == "cpu" else torch.device("cuda", rank if name == "nccl" else 0)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    backend.prepare()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_S, wait_for_workers=False)
    dist.init_process_group(backend.name, store=PrefixStore("g", store), rank=rank, world_size=2)
    here = torch.ones(1, device=where)
    dist.all_reduce(here)
    assert here.item() == 2.0
    store.set(f"ready/{rank}", str(os.getpid()))
    if rank == 1:
        signal.pause()
    store.wait(["stopped"], STORE_S)
    began: list[float] = []

    def abort() -> None:
        began.append(time.perf_counter())
        backend.abort()

    timer = threading.Timer(0.5, abort)
    timer.start()
    try:
        dist.all_reduce(here)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    except RuntimeError:
        pass
    seconds = time.perf_counter() - began[0]
    timer.join()
    assert float(torch.ones(8, device=where).sum()) == 8.0
    return seconds
