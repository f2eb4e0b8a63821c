"""A send to a dead peer ends, however late gloo notices the death."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from everstep_trainer.runtime.abort import GlooBackend
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.node_ranks import host_store

ENOUGH = timedelta(seconds=30)
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
WALL = 0x40000000  # waitpid: threads too


def send_to_the_dead(port: int, rank: int) -> bool:
    """On request, rank 0 sends a tensor for which rank 1 waits. Return whether the send ended."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=ENOUGH, wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    GlooBackend().prepare()
    dist.init_process_group("gloo", store=PrefixStore("g", store), rank=rank, world_size=2, timeout=ENOUGH)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        receiving = dist.irecv(torch.ones(64), 0)
        dist.send(torch.ones(1), 0)  # arrives after the word that this rank is ready to receive
        assert receiving is not None
        receiving.wait()
    dist.recv(torch.ones(1), 1)
    store.set("ready", "")
    store.wait(["die"], ENOUGH)
    work = dist.isend(torch.ones(64), 1)
    store.set("sent", "")
    assert work is not None
    return work.wait(ENOUGH / 2)


@contextmanager
def stopped_thread(thread_id: int) -> Iterator[None]:
    """Stop one thread of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(PTRACE_ATTACH, thread_id, 0, 0):
        pytest.skip("processes may not be traced here")
    os.waitpid(thread_id, WALL)
    try:
        yield
    finally:
        libc.ptrace(PTRACE_DETACH, thread_id, 0, 0)


def gloo_thread(pid: int) -> int:
    (found,) = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if _name(task) == "gloo_tcp_loop\n"]
    return found


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # another thread, which has just ended
        return ""


def test_send_begun_before_gloo_notices_a_peer_death_ends(forks: ForkPool) -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        port_file = Path(folder) / "port"
        forks.start(host_store, str(port_file))
        port = int(until(lambda: port_file.read_text() if port_file.exists() else "", "the store serves"))
        ranks = [forks.start(send_to_the_dead, port, rank) for rank in range(2)]
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=ENOUGH, wait_for_workers=False)
        store.wait(["ready"])
        with stopped_thread(gloo_thread(ranks[0].pid)):
            ranks[1].kill()
            store.set("die", "")
            store.wait(["sent"])
        assert ranks[0].result()
