"""Messages between two ranks are waited for as long as they take, and given up when the generation is over."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.runtime import interrupt
from everstep_trainer.runtime.interrupt import Regroup

LATE_S = 5 * interrupt.WAIT_SLICE.total_seconds()


def exchange(port: int, rank: int) -> list[float | str]:
    """Rank 0 sends one message that is late, and one that nobody takes until it is told; rank 1 gives up the third."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    interrupt.install_sliced_waits()
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=2)
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
    said: list[float | str] = [number.item(), many.mean().item()]
    interrupt.set_wait_callbacks(lambda: True)
    try:
        dist.recv(number, 0)
    except Regroup:
        said.append("left")
    store.set("over", b"")
    return said


@pytest.mark.promise("pipeline-recovery")
def test_late_message_arrives_and_a_missing_one_is_given_up(forks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.start(exchange, store.port, rank) for rank in range(2)]
    assert [rank.result() for rank in ranks] == [[], [7.0, 8.0, "left"]]


class OnGpu(dist.Work):
    """A collective that is done at the third look, and that a time-out would break, as one of NCCL's."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.timeouts: list[timedelta] = []

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self, timeout: timedelta) -> bool:
        self.timeouts.append(timeout)
        return True


def test_gpu_work_is_polled_without_a_timeout():
    work = OnGpu()
    interrupt.poll_or_regroup(work, lambda: False)
    assert work.looks == 3
    assert work.timeouts == [timedelta(0)]  # torch's word for none


def test_polled_gpu_work_is_left_once_over():
    work = OnGpu()
    with pytest.raises(Regroup):
        interrupt.poll_or_regroup(work, lambda: work.looks == 2)
    assert work.timeouts == []
