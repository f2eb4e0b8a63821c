"""The worker pool decides from plain data, so the tests compare lists of actions."""

from __future__ import annotations

import os
import signal

import pytest

from everstep.wire.v1.local import RankExited
from everstep_trainer.launch.worker_pool import (
    GiveUp,
    PoolAction,
    PromoteWorker,
    RestartScript,
    ScheduleStandby,
    ScriptEnded,
    StartWorker,
    WorkerPool,
)

KILL = int(signal.SIGKILL)


def started_pool(nproc: int = 2, standbys: int = 1, max_deaths: int = 3) -> WorkerPool:
    """Return a pool in generation 1 whose workers (serials 1..nproc, pids 101..) and standbys have all arrived."""
    pool = WorkerPool(nproc, standbys=standbys, max_deaths=max_deaths)
    serials = [action.serial for action in pool.start() if isinstance(action, StartWorker)]
    for serial in serials:
        pool.handle_forked(serial, 100 + serial)
    due = [action for serial in serials for action in pool.handle_reached_main(serial)]
    for _ in due:
        for action in pool.handle_standby_due():
            assert isinstance(action, StartWorker)
            pool.handle_forked(action.serial, 100 + action.serial)
            pool.handle_reached_main(action.serial)
    pool.handle_generation(1, frozenset(range(nproc)), 0.0)
    return pool


def exited(local_rank: int, pid: int, code: int | None, number: int | None, replaced: bool, gen: int = 1) -> RankExited:
    return RankExited(
        local_rank=local_rank, pid=pid, exit_code=code, signal=number, has_replacement=replaced, generation=gen
    )


def kill(pool: WorkerPool, serial: int, now: float = 0.0) -> list[PoolAction]:
    return pool.handle_exit(serial, 100 + serial, None, KILL, now)


def test_standbys_never_arriving_are_given_up() -> None:
    pool = WorkerPool(1, standbys=1)
    pool.start()
    pool.handle_reached_main(1)
    for _ in range(2):
        (started,) = pool.handle_standby_due()
        assert isinstance(started, StartWorker)
        assert pool.handle_exit(started.serial, 9, 1, None, 0.0) == [ScheduleStandby(1.0)]
    (started,) = pool.handle_standby_due()
    assert isinstance(started, StartWorker)
    assert pool.handle_exit(started.serial, 9, 1, None, 0.0) == []


def test_deaths_outside_the_window_are_forgotten() -> None:
    pool = started_pool(nproc=1, standbys=0, max_deaths=1)
    assert kill(pool, 1, now=0.0) == [exited(0, 101, None, KILL, True), StartWorker(2, 0)]
    assert kill(pool, 2, now=61.0) == [exited(0, 102, None, KILL, True), StartWorker(3, 0)]


def test_script_killed_before_main_fails_with_shell_status() -> None:
    pool = WorkerPool(1)
    pool.start()
    (failed,) = pool.handle_exit(1, 101, None, int(signal.SIGSEGV), 0.0)
    assert isinstance(failed, ScriptEnded)
    assert failed.exit_status == 128 + signal.SIGSEGV


def test_plain_script_restarts_once_all_ranks_have_ended() -> None:
    pool = WorkerPool(3, max_script_restarts=1)
    pool.start()
    pool.handle_exit(3, 103, 0, None, 0.0)  # finished before the failure: torchrun starts it again too
    (restart,) = pool.handle_exit(2, 102, None, KILL, 0.0)
    assert isinstance(restart, RestartScript)
    assert restart.serials == (1,)
    assert "local rank 1 (pid 102) ended with SIGKILL" in restart.sentence
    assert "restart 1 of 1" in restart.sentence
    assert pool.workers_to_end_before(1) == [1]
    assert pool.handle_exit(1, 101, None, int(signal.SIGTERM), 0.0) == [
        StartWorker(4, 0),
        StartWorker(5, 1),
        StartWorker(6, 2),
    ]
    assert pool.script_restarts == 1
    assert pool.workers_to_end_before(1) == []


def test_plain_script_ends_when_its_restarts_are_spent() -> None:
    pool = WorkerPool(1, max_script_restarts=1)
    pool.start()
    pool.handle_exit(1, 101, 1, None, 0.0)
    (ended,) = pool.handle_exit(2, 102, 7, None, 0.0)
    assert isinstance(ended, ScriptEnded)
    assert ended.exit_status == 7
    assert "it was started again 1 times (--max-restarts 1)" in ended.sentence


def test_worker_that_was_never_forked_starts_again() -> None:
    pool = WorkerPool(2)
    pool.start()
    assert pool.handle_never_forked(2) == [StartWorker(3, 1)]
    assert pool.active_workers() == {1: 0, 3: 1}


def test_kill_order_hits_only_members_of_its_generation() -> None:
    pool = started_pool()
    assert pool.handle_kill_order(1, generation=1) == 2
    kill(pool, 2)
    assert pool.handle_kill_order(1, generation=1) is None
    pool.handle_generation(2, frozenset({0, 1}), 0.0)
    assert pool.handle_kill_order(1, generation=2) == 3


def test_generation_fills_vacant_local_ranks() -> None:
    pool = started_pool()
    assert pool.handle_generation(2, frozenset({1}), 0.0) == []
    pool.remove_worker(1)
    assert pool.handle_generation(2, frozenset({0, 1}), 0.0) == [PromoteWorker(3, 0), ScheduleStandby(1.0)]


def test_clean_exit_before_a_newer_generation_counts_as_death() -> None:
    pool = started_pool()
    pool.handle_exit(2, 102, 0, None, 0.0)
    died = [exited(1, 102, 0, None, True, 2), PromoteWorker(3, 1), ScheduleStandby(1.0)]
    assert pool.handle_generation(2, frozenset({0, 1}), 0.0) == died
    assert pool.handle_early_exit(1, 102, 0.0) == [], "once"


def test_repeated_clean_exits_are_given_up() -> None:
    pool = started_pool(nproc=1, standbys=0, max_deaths=2)
    for serial in (1, 2, 3):
        pool.handle_exit(serial, 100 + serial, 0, None, 0.0)
        actions = pool.handle_generation(1 + serial, frozenset({0}), 0.0)
    report, given_up = actions
    assert report == exited(0, 103, 0, None, False, 4)
    assert isinstance(given_up, GiveUp)
    assert "the last time with exit status 0 before the job was over" in given_up.sentence


def test_an_unknown_process_changes_nothing() -> None:
    pool = started_pool()
    assert kill(pool, 99) == []
    assert pool.handle_reached_main(99) == []
    assert pool.remove_worker(99) is None


@pytest.mark.parametrize("code", [None, os.EX_TEMPFAIL])
def test_deaths_that_everstep_ordered_do_not_count(code: int | None) -> None:
    pool = WorkerPool(1, standbys=0, max_deaths=1)
    pool.start()
    pool.handle_reached_main(1)
    for generation in range(1, 6):
        (serial,) = pool.active_workers()
        pool.handle_generation(generation, frozenset({0}), 0.0)
        if code is None:
            assert pool.handle_kill_order(0, generation) == serial
        actions = pool.handle_exit(serial, 100 + serial, code, KILL if code is None else None, 0.0)
        assert isinstance(actions[1], StartWorker)
    (serial,) = pool.active_workers()
    assert isinstance(kill(pool, serial)[1], StartWorker)
    (serial,) = pool.active_workers()
    assert isinstance(kill(pool, serial)[1], GiveUp)
