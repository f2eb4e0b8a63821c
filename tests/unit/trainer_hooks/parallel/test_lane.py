"""A lane of gloo: the order of its jobs, errors and interrupts, and the end of its thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep_trainer.base import interrupt
from everstep_trainer.base.interrupt import Regroup
from everstep_trainer.base.progress import CollectiveTimer, StepProgress
from everstep_trainer.parallel.lane import Communicator, ThreadLane, make_lane, slice_sizes
from everstep_trainer.parallel.ordered_gradients import replicate
from tests.support.ranks.kept_ranks import KeptRanks

THREAD = "everstep-exchange"
DEADLINE_S = 30.0


def new_lane(on_wait: list[float] | None = None) -> ThreadLane:
    waits = [] if on_wait is None else on_wait
    lane = make_lane(None, torch.device("cpu"), CollectiveTimer(waits.append))
    assert isinstance(lane, ThreadLane)
    return lane


def has_ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(DEADLINE_S)
    return not any(thread.is_alive() for thread in threads)


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def exchange(sent: torch.Tensor, received: torch.Tensor, log: list[str], communicator: Communicator) -> Iterator[None]:
    ones = [1] * len(sent)
    communicator.all_to_all(received, sent, ones, ones)
    log.append("begun")
    yield
    log.append("ended")


def two_jobs(rank: int, world: int) -> tuple[list[float], list[str], int]:
    """Return what a lane received in two jobs, when each began and ended, and how many collectives were counted."""
    progress = StepProgress(window=4)
    progress.enter(1, int)
    lane, log = new_lane(), list[str]()
    sent = [torch.arange(world, dtype=torch.float32) + 10 * rank, torch.full((world,), float(rank))]
    received = [torch.empty(world), torch.empty(world)]
    for one, other in zip(sent, received, strict=True):
        lane.submit(partial(exchange, one, other, log))
    lane.wait()
    lane.close()
    return torch.cat(received).tolist(), log, progress.collective_count


def test_jobs_run_in_order_and_are_counted(kept_ranks: KeptRanks) -> None:
    for rank, (received, log, count) in enumerate(kept_ranks.call(3, two_jobs)):
        assert received == [rank, 10 + rank, 20 + rank, 0, 1, 2]
        assert log[0] == "begun"
        assert sorted(log) == ["begun", "begun", "ended", "ended"]
        assert count == 2


def failing_job(rank: int, world: int) -> tuple[list[str], bool, int]:
    """Return what a lane raises after a job's error, whether its thread ends, and how many later jobs ran."""
    lane, raised, later = new_lane(), list[str](), list[str]()
    threads = lane_threads()

    def fail(communicator: Communicator) -> Iterator[None]:
        raise RuntimeError("connection closed by peer")

    lane.submit(fail)
    for attempt in (
        lane.wait,
        lane.wait,
        partial(lane.submit, partial(exchange, torch.zeros(2), torch.zeros(2), later)),
    ):
        try:
            attempt()
        except RuntimeError as error:
            raised.append(str(error))
    return raised, has_ended(threads), len(later)


def test_error_of_job_is_raised_where_it_is_awaited(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, failing_job) == [(["connection closed by peer"] * 3, True, 0)] * 2


def lonely_job(rank: int, world: int) -> tuple[str, bool]:
    """Return what rank 0 raises from a wait for a peer that sends nothing, once its generation is over."""
    lane, threads = new_lane(), lane_threads()
    outcome = ""
    interrupt.set_wait_callbacks(lambda: True, bool)
    try:
        if rank == 0:
            lane.submit(partial(exchange, torch.zeros(world), torch.zeros(world), []))
            lane.wait()
    except Regroup:
        outcome = "Regroup"
    finally:
        interrupt.set_wait_callbacks(bool, bool)
    dist.barrier()  # until then rank 0 waits for a peer that is connected
    lane.close()
    return outcome, has_ended(threads)


def test_interrupt_leaves_no_thread_waiting(kept_ranks: KeptRanks) -> None:
    outcomes = kept_ranks.call(2, lonely_job)
    assert outcomes == [("Regroup", True), ("", True)]


def dropped_model(rank: int, world: int) -> bool:
    """Return whether the threads of a replicated model end with it, although rank 1 never runs a backward pass."""
    model = replicate(nn.Linear(8, 8), exact=True, equal_already=True, bucket_cap_mb=0.0001)
    threads = lane_threads()
    hook_ran = threading.Event()

    def stop(gradient: torch.Tensor) -> None:
        hook_ran.set()
        raise ValueError("left in the middle of the backward pass")

    if rank == 0:
        model.module.weight.register_hook(stop)
        with pytest.raises(ValueError, match="in the middle"):
            model(torch.ones(2, 8)).sum().backward()
        assert hook_ran.is_set()
    del model
    gc.collect()
    return len(threads) == 1 and has_ended(threads)


def test_dropped_model_leaves_no_thread(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, dropped_model) == [True, True]


def group_of_one(rank: int, world: int) -> list[str]:
    replicate(nn.Linear(2, 2), exact=True, equal_already=True, process_group=dist.new_subgroups(1)[0])
    return [thread.name for thread in lane_threads()]


def test_single_replica_makes_no_lane(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, group_of_one) == [[], []]


@pytest.mark.parametrize(("count", "ways", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1, 0, 0])])
def test_slices_cover_all_elements(count: int, ways: int, sizes: list[int]) -> None:
    assert slice_sizes(count, ways) == sizes
