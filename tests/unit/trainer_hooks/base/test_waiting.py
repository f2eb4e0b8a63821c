"""A rank waits for a message from another rank until it arrives or the generation ends."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from everstep_trainer.base import interrupt
from everstep_trainer.base.interrupt import Regroup
from tests.support.processes.fork_pool import ForkPool

LATE_S = 5 * interrupt.WAIT_SLICE.total_seconds()


def exchange(port: int, rank: int) -> list[float | str]:
    """Rank 0 sends two late messages; rank 1 waits for a third one, which never comes, until the generation ends."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    interrupt.install_sliced_waits()
    dist.init_process_group("gloo", store=PrefixStore("g", store), rank=rank, world_size=2)
    number, many = torch.ones(1), torch.ones(1 << 22)
    if rank == 0:
        time.sleep(LATE_S)
        dist.send(number * 7, 1)
        dist.send(many * 8, 1)
        store.wait(["over"], timedelta(seconds=30))
        return []
    dist.recv(number, 0)
    time.sleep(LATE_S)
    dist.recv(many, 0)
    received: list[float | str] = [number.item(), many.mean().item()]
    interrupt.set_wait_callbacks(lambda: True, lambda _: None)
    try:
        dist.recv(number, 0)
    except Regroup:
        received.append("left")
    store.set("over", "")
    return received


@pytest.mark.promise("pipeline-recovery")
def test_late_message_arrives_and_a_missing_one_is_given_up(forks: ForkPool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.start(exchange, store.port, rank) for rank in range(2)]
    assert [rank.result() for rank in ranks] == [[], [7.0, 8.0, "left"]]


class OnGpu(dist.Work):
    """A collective that completes at the third query, and counts queries and timeouts."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.timeouts: list[timedelta] = []

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.timeouts.append(timeout)
        return True


def test_gpu_work_is_polled_without_a_timeout() -> None:
    work = OnGpu()
    interrupt.poll_or_regroup(work, lambda: False)
    assert work.looks == 3
    assert work.timeouts == [timedelta(0)]  # a zero timeout means no timeout to torch


def test_polled_gpu_work_is_left_once_over() -> None:
    work = OnGpu()
    with pytest.raises(Regroup):
        interrupt.poll_or_regroup(work, lambda: work.looks == 2)
    assert work.timeouts == []
