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


def new_lane(group: dist.ProcessGroup | None = None) -> ThreadLane:
    lane = make_lane(group, torch.device("cpu"), CollectiveTimer(lambda _: None))
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


def failing_job(rank: int, world: int) -> tuple[list[tuple[str, list[str]]], bool, int]:
    """Return what each use of a lane raises after a job's error, with the errors that then count as a collective's;
    whether the lane's thread ends; and how many later jobs ran."""
    lane, raised, later = new_lane(), list[tuple[str, list[str]]](), list[str]()
    threads = lane_threads()

    def fail(communicator: Communicator) -> Iterator[None]:
        raise RuntimeError("connection closed by peer")

    lane.submit(fail)
    submit_another = partial(lane.submit, partial(exchange, torch.zeros(2), torch.zeros(2), later))
    for attempt in (lane.wait, lane.wait, submit_another):
        recorded: list[BaseException] = []
        interrupt.set_wait_callbacks(bool, recorded.append)
        try:
            attempt()
        except RuntimeError as error:
            raised.append((str(error), list(dict.fromkeys(map(str, recorded)))))
        finally:
            interrupt.set_wait_callbacks(bool, bool)
    return raised, has_ended(threads), len(later)


@pytest.mark.promise("caught-errors")
def test_error_of_job_is_raised_where_it_is_awaited(kept_ranks: KeptRanks) -> None:
    error = "connection closed by peer"
    assert kept_ranks.call(2, failing_job) == [([(error, [error])] * 3, True, 0)] * 2


def late_lane(rank: int, world: int) -> list[float]:
    """Return what rank 0, which makes its lane early, and rank 1, which does so late, receive in a job."""
    if rank == 1:
        dist.barrier()
    lane, received = new_lane(), torch.empty(world)
    if rank == 0:
        dist.barrier()
    lane.submit(partial(exchange, torch.full((world,), float(rank)), received, []))
    lane.wait()
    lane.close()
    return received.tolist()


def test_lane_is_made_without_a_wait_for_others(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, late_lane) == [[0.0, 1.0], [0.0, 1.0]]


def lane_of_one_rank(rank: int, world: int) -> tuple[str, bool]:
    """Return what a job of rank 0 raises, whose generation ends before rank 1 has made a lane."""
    group, outcome = dist.new_group(), ""
    if rank == 1:
        return outcome, True
    before = lane_threads()
    lane = new_lane(group)
    threads, ended = [thread for thread in lane_threads() if thread not in before], False
    interrupt.set_wait_callbacks(lambda: True, bool)
    try:
        lane.submit(partial(exchange, torch.zeros(world), torch.zeros(world), []))
        lane.wait()
    except (Regroup, dist.DistStoreError) as error:
        outcome = type(error).__name__
        lane.close()
        ended = has_ended(threads)
    finally:
        interrupt.set_wait_callbacks(bool, bool)
    return outcome, ended


def test_lane_that_never_connects_ends(kept_ranks: KeptRanks) -> None:
    (outcome, has_thread_ended), _ = kept_ranks.call(2, lane_of_one_rank)
    assert has_thread_ended
    assert outcome in ("Regroup", "DistStoreError")


def lonely_job(rank: int, world: int) -> tuple[str, bool]:
    """Return what rank 0 raises from a wait for a peer that sends nothing, once its generation is over."""
    lane, threads = new_lane(), lane_threads()
    lane.submit(partial(exchange, torch.zeros(world), torch.zeros(world), []))
    lane.wait()  # both are connected
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
    before = lane_threads()
    model = replicate(nn.Linear(8, 8), exact=True, equal_already=True, bucket_cap_mb=0.0001)
    threads = [thread for thread in lane_threads() if thread not in before]
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
    before = lane_threads()
    replicate(nn.Linear(2, 2), exact=True, equal_already=True, process_group=dist.new_subgroups(1)[0])
    return [thread.name for thread in lane_threads() if thread not in before]


def test_single_replica_makes_no_lane(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, group_of_one) == [[], []]


@pytest.mark.parametrize(("count", "ways", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1, 0, 0])])
def test_slices_cover_all_elements(count: int, ways: int, sizes: list[int]) -> None:
    assert slice_sizes(count, ways) == sizes
