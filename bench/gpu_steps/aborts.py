"""Leaving a collective that cannot finish: NCCL with a peer that never comes or stands still, and gloo beside it.

NCCL has one rank per GPU. With one GPU a communicator of two ranks can be begun, and its set-up be aborted; a
collective that is under way and loses its peer takes two GPUs. Over gloo two ranks share a GPU, or the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.gpu_steps.sheet import NotRun, Sheet, not_run, require_gpus
from bench.table import Row
from everstep_trainer.runtime.abort import GlooBackend, NcclBackend

FLOOR_S, AIM_S = 2.0, 0.5
"""After 2 s (``HookSettings.leave_timeout_s``) a process that has not left its generation is replaced."""
ANSWER_S, STORE_S = 60.0, timedelta(seconds=60)
LOCKED_S = 5
"""What torch is told to wait for a set-up at most, where a collective was called too early."""


def step(sheet: Sheet, device: str) -> None:
    context = multiprocessing.get_context("spawn")
    if device == "cuda":
        seconds, alive = _one(context, missing_peer)
        against = "rank 1 never calls; the device computes afterwards, and in a new group"
        sheet.add(Row("NCCL: set-up with a missing peer aborted", seconds, "s", FLOOR_S, AIM_S, against))
        sheet.add(Row("NCCL: device usable after it", alive, "", 1, 1, smaller_is_better=False))
        sheet.add(locked_row(context))
    sheet.add(lost_row(context, "gloo", device))
    if device == "cpu":
        sheet.add(not_run("NCCL", "it takes a CUDA device"))
        return
    try:
        require_gpus(2)
    except NotRun as error:
        sheet.add(not_run("NCCL: collective under way with a stopped peer left", str(error)))
    else:
        sheet.add(lost_row(context, "nccl", device))


def locked_row(context: Any) -> Row:
    """torch waits for the set-up under a lock once a collective is called; told, not judged: the hooks do not do it."""
    name = "NCCL: the same where a collective was called before"
    try:
        seconds, _ = _one(context, missing_peer_in_a_collective)
    except RuntimeError as error:
        return Row(name, None, "s", against=str(error).strip().splitlines()[-1])
    return Row(name, seconds, "s", against=f"torch holds a lock until its own limit, here {LOCKED_S} s")


def lost_row(context: Any, backend: str, device: str) -> Row:
    """Seconds from the abort until a rank is out of an all-reduce whose other member stands still."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where, name = ("CPU" if device == "cpu" else "CUDA"), backend.upper() if backend == "nccl" else backend
    ranks = [_start(context, stopped_peer, backend, device, store.port, rank) for rank in range(2)]
    try:
        store.wait(["ready/1"], STORE_S)
        assert ranks[1][0].pid is not None
        os.kill(ranks[1][0].pid, signal.SIGSTOP)
        store.set("stopped", b"")  # type: ignore[arg-type]  # bytes are taken, too
        seconds = _answer(ranks[0][1])[0]
    finally:
        _end(ranks)
    what = f"{name}: collective on {where} tensors with a stopped peer left"
    return Row(what, seconds, "s", FLOOR_S, AIM_S, "from the abort to the error in the waiting thread")


# --- in processes of their own -----------------------------------------------------------------------------------


def missing_peer() -> tuple[float, float]:
    """Seconds to abort a communicator that is being set up, and whether the device can be used afterwards (1)."""
    backend, device = _joined_alone(NcclBackend())
    backend.connect(device)
    time.sleep(1.0)  # so that the set-up is under way in NCCL's own thread
    began = time.perf_counter()
    backend.abort()
    settled = backend.wait_aborted(ANSWER_S)
    seconds = time.perf_counter() - began
    assert settled, f"the abort was not done within {ANSWER_S:.0f} s"
    dist.destroy_process_group()
    whole = float(torch.ones(8, device=device).sum()) == 8.0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("cuda:nccl", store=store, rank=0, world_size=1)
    alone = torch.ones(1, device=device)
    dist.all_reduce(alone)
    return seconds, float(whole and alone.item() == 1.0)


def missing_peer_in_a_collective() -> tuple[float, float]:
    """Seconds from the abort until a thread is free that waits for the set-up within a collective."""
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(LOCKED_S)
    backend, device = _joined_alone(NcclBackend())
    began: list[float] = []

    def abort() -> None:
        began.append(time.perf_counter())
        backend.abort()

    timer = threading.Timer(1.0, abort)
    timer.start()
    try:
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # it is the time that is looked at
    timer.join()
    return time.perf_counter() - began[0], 1.0


def _joined_alone(backend: NcclBackend) -> tuple[NcclBackend, torch.device]:
    """The first of two ranks, of which the other never comes."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    backend.prepare()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("cuda:nccl", store=store, rank=0, world_size=2)
    return backend, device


def stopped_peer(name: str, device: str, port: int, rank: int) -> tuple[float, float]:
    """Rank 0 waits in an all-reduce that rank 1, which is stopped, never enters."""
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
    store.set(f"ready/{rank}", b"")  # type: ignore[arg-type]  # bytes are taken, too
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
    return seconds, 1.0


# --- processes ---------------------------------------------------------------------------------------------------


def _start(context: Any, function: Any, *arguments: Any) -> tuple[Any, Connection]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_say, args=(there, function, arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def _say(answer: Connection, function: Any, arguments: tuple[Any, ...]) -> None:
    answer.send(function(*arguments))
    os._exit(0)  # destructors of groups with a missing peer would wait for it


def _answer(answer: Connection) -> tuple[float, float]:
    if not answer.poll(ANSWER_S):
        raise RuntimeError(f"not out of it within {ANSWER_S:.0f} s")
    try:
        seconds, alive = answer.recv()
    except EOFError:
        raise RuntimeError("the process ended without an answer") from None
    return seconds, alive


def _one(context: Any, function: Any) -> tuple[float, float]:
    process = _start(context, function)
    try:
        return _answer(process[1])
    finally:
        _end([process])


def _end(processes: list[tuple[Any, Connection]]) -> None:
    for process, answer in processes:
        process.kill()
        process.join()
        answer.close()
