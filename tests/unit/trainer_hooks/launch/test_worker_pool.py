"""The crew decides from plain data, so its promises are checked by comparing lists."""

from __future__ import annotations

import os
import signal

import pytest
from everstep_trainer.launch.worker_pool import (
    AwaitJobEnd,
    GiveUp,
    PoolAction,
    PromoteWorker,
    RestartScript,
    ScheduleStandby,
    ScriptEnded,
    StartWorker,
    WorkerPool,
)

from everstep.wire.v1.local import RankExited

KILL = int(signal.SIGKILL)


def staffed(nproc: int = 2, standbys: int = 1, max_deaths: int = 3) -> WorkerPool:
    """A crew in generation 1 whose workers (serials 1..nproc, pids 101..) and standbys have all arrived."""
    crew = WorkerPool(nproc, standbys=standbys, max_deaths=max_deaths)
    serials = [action.serial for action in crew.start() if isinstance(action, StartWorker)]
    for serial in serials:
        crew.handle_forked(serial, 100 + serial)
    due = [action for serial in serials for action in crew.handle_reached_main(serial)]
    for _ in due:
        for action in crew.handle_standby_due():
            assert isinstance(action, StartWorker)
            crew.handle_forked(action.serial, 100 + action.serial)
            crew.handle_reached_main(action.serial)
    crew.handle_generation(1, frozenset(range(nproc)), 0.0)
    return crew


def exited(local_rank: int, pid: int, code: int | None, number: int | None, replaced: bool, gen: int = 1) -> RankExited:
    return RankExited(
        local_rank=local_rank, pid=pid, exit_code=code, signal=number, has_replacement=replaced, generation=gen
    )


def killed(crew: WorkerPool, serial: int, now: float = 0.0) -> list[PoolAction]:
    return crew.handle_exit(serial, 100 + serial, None, KILL, now)


def test_pool_starts_one_worker_for_each_local_rank() -> None:
    crew = WorkerPool(3)
    assert crew.start() == [StartWorker(1, 0), StartWorker(2, 1), StartWorker(3, 2)]


def test_standbys_start_only_after_a_worker_reaches_main() -> None:
    crew = WorkerPool(2, standbys=2, standby_delay_s=0.5)
    crew.start()
    assert crew.handle_reached_main(1) == [ScheduleStandby(0.5), ScheduleStandby(0.5)]
    assert crew.handle_reached_main(2) == []
    assert crew.handle_standby_due() == [StartWorker(3, None)]


def test_standby_is_promoted_before_another_is_started() -> None:
    crew = staffed()
    assert killed(crew, 2) == [exited(1, 102, None, KILL, True), PromoteWorker(3, 1), ScheduleStandby(1.0)]
    assert crew.active_workers() == {1: 0, 3: 1}


def test_without_a_standby_a_worker_is_forked_in_the_same_place() -> None:
    crew = staffed(standbys=0)
    assert killed(crew, 1) == [exited(0, 101, None, KILL, True), StartWorker(3, 0)]


def test_second_of_two_deaths_gets_a_new_process() -> None:
    crew = staffed()
    assert killed(crew, 1)[1:] == [PromoteWorker(3, 0), ScheduleStandby(1.0)]
    assert killed(crew, 2)[1:] == [StartWorker(4, 1)]


def test_warm_standby_is_preferred_to_an_importing_one() -> None:
    crew = WorkerPool(1, standbys=2)
    crew.start()
    crew.handle_reached_main(1)
    crew.handle_standby_due()
    crew.handle_standby_due()
    crew.handle_reached_main(3)
    assert PromoteWorker(3, 0) in killed(crew, 1)


def test_dead_standby_is_replaced_but_not_reported() -> None:
    crew = staffed()
    assert killed(crew, 3) == [ScheduleStandby(1.0)]


def test_standbys_never_arriving_are_given_up() -> None:
    crew = WorkerPool(1, standbys=1)
    crew.start()
    crew.handle_reached_main(1)
    for _ in range(2):
        (hired,) = crew.handle_standby_due()
        assert isinstance(hired, StartWorker)
        assert crew.handle_exit(hired.serial, 9, 1, None, 0.0) == [ScheduleStandby(1.0)]
    (hired,) = crew.handle_standby_due()
    assert isinstance(hired, StartWorker)
    assert crew.handle_exit(hired.serial, 9, 1, None, 0.0) == []


def test_deaths_above_the_limit_are_not_replaced() -> None:
    crew = staffed(nproc=1, standbys=0, max_deaths=2)
    killed(crew, 1, now=0.0)
    killed(crew, 2, now=1.0)
    report, given_up = killed(crew, 3, now=2.0)
    assert report == exited(0, 103, None, KILL, False)
    assert isinstance(given_up, GiveUp)
    assert "died 3 times" in given_up.sentence
    assert crew.handle_generation(2, frozenset({0}), 3.0) == []


def test_deaths_outside_the_window_are_forgotten() -> None:
    crew = staffed(nproc=1, standbys=0, max_deaths=1)
    assert killed(crew, 1, now=0.0) == [exited(0, 101, None, KILL, True), StartWorker(2, 0)]
    assert killed(crew, 2, now=61.0) == [exited(0, 102, None, KILL, True), StartWorker(3, 0)]


def test_clean_exit_is_no_death() -> None:
    crew = staffed()
    assert crew.handle_exit(1, 101, 0, None, 0.0) == [AwaitJobEnd(0, 101)]
    assert not crew.is_finished
    assert crew.handle_exit(2, 102, 0, None, 0.0) == [AwaitJobEnd(1, 102)]
    assert crew.is_finished
    assert crew.handle_generation(1, frozenset({0, 1}), 0.0) == []


def test_plain_script_finishes_once_all_processes_exit() -> None:
    crew = WorkerPool(1)
    crew.start()
    assert crew.handle_exit(1, 101, 0, None, 0.0) == [ScriptEnded(0, "the script ended without calling everstep.main")]


def test_script_failing_before_main_is_not_retried() -> None:
    crew = WorkerPool(2)
    crew.start()
    (failed,) = crew.handle_exit(2, 102, 3, None, 0.0)
    assert isinstance(failed, ScriptEnded)
    assert failed.exit_status == 3
    assert "local rank 1" in failed.sentence


def test_script_killed_before_main_fails_with_shell_status() -> None:
    crew = WorkerPool(1)
    crew.start()
    (failed,) = crew.handle_exit(1, 101, None, int(signal.SIGSEGV), 0.0)
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


def test_plain_script_of_one_rank_restarts_at_once() -> None:
    pool = WorkerPool(1, max_script_restarts=3)
    pool.start()
    restart, again = pool.handle_exit(1, 101, 1, None, 0.0)
    assert isinstance(restart, RestartScript)
    assert again == StartWorker(2, 0)


def test_plain_script_ends_when_its_restarts_are_spent() -> None:
    pool = WorkerPool(1, max_script_restarts=1)
    pool.start()
    pool.handle_exit(1, 101, 1, None, 0.0)
    (ended,) = pool.handle_exit(2, 102, 7, None, 0.0)
    assert isinstance(ended, ScriptEnded)
    assert ended.exit_status == 7
    assert "it was started again 1 times (--max-restarts 1)" in ended.sentence


def test_plain_script_is_not_restarted_unless_asked() -> None:
    """A script that does not resume by itself would overwrite what it saved."""
    pool = WorkerPool(2)
    pool.start()
    (ended,) = pool.handle_exit(1, 101, None, KILL, 0.0)
    assert isinstance(ended, ScriptEnded)
    assert "--max-restarts N starts all ranks of such a script again" in ended.sentence


def test_worker_that_was_never_forked_starts_again() -> None:
    pool = WorkerPool(2)
    pool.start()
    assert pool.handle_never_forked(2) == [StartWorker(3, 1)]
    assert pool.active_workers() == {1: 0, 3: 1}


def test_kill_order_hits_only_members_of_its_generation() -> None:
    crew = staffed()
    assert crew.handle_kill_order(1, generation=1) == 2
    killed(crew, 2)
    assert crew.handle_kill_order(1, generation=1) is None
    crew.handle_generation(2, frozenset({0, 1}), 0.0)
    assert crew.handle_kill_order(1, generation=2) == 3


def test_worker_that_was_asked_to_end_is_replaced() -> None:
    """A handler of SIGTERM that saves and ends with status 0 does not end the training."""
    crew = staffed()
    assert crew.handle_kill_order(1, generation=1, has_grace=True) == 2
    actions = crew.handle_exit(2, 102, 0, None, 0.0)
    assert actions == [exited(1, 102, 0, None, True, 1), PromoteWorker(3, 1), ScheduleStandby(1.0)]


def test_generation_fills_vacant_local_ranks() -> None:
    crew = staffed()
    assert crew.handle_generation(2, frozenset({1}), 0.0) == []
    crew.remove_worker(1)
    assert crew.handle_generation(2, frozenset({0, 1}), 0.0) == [PromoteWorker(3, 0), ScheduleStandby(1.0)]


def test_clean_exit_before_a_newer_generation_counts_as_death() -> None:
    crew = staffed()
    crew.handle_exit(2, 102, 0, None, 0.0)
    died = [exited(1, 102, 0, None, True, 2), PromoteWorker(3, 1), ScheduleStandby(1.0)]
    assert crew.handle_generation(2, frozenset({0, 1}), 0.0) == died
    assert crew.handle_early_exit(1, 102, 0.0) == [], "once"


def test_clean_exit_in_a_running_job_counts_as_death() -> None:
    """As where its end is heard of only after the generation that was made for another in its place."""
    crew = staffed()
    crew.handle_generation(2, frozenset({0, 1}), 0.0)
    crew.handle_exit(2, 102, 0, None, 0.0)
    died = [exited(1, 102, 0, None, True, 2), PromoteWorker(3, 1), ScheduleStandby(1.0)]
    assert crew.handle_early_exit(1, 102, 0.0) == died


def test_repeated_clean_exits_are_given_up() -> None:
    crew = staffed(nproc=1, standbys=0, max_deaths=2)
    for serial in (1, 2, 3):
        crew.handle_exit(serial, 100 + serial, 0, None, 0.0)
        actions = crew.handle_generation(1 + serial, frozenset({0}), 0.0)
    report, given_up = actions
    assert report == exited(0, 103, 0, None, False, 4)
    assert isinstance(given_up, GiveUp)
    assert "the last time with exit status 0 before the job was over" in given_up.sentence


def test_an_unknown_process_changes_nothing() -> None:
    crew = staffed()
    assert killed(crew, 99) == []
    assert crew.handle_reached_main(99) == []
    assert crew.remove_worker(99) is None


@pytest.mark.parametrize("code", [None, os.EX_TEMPFAIL])
def test_deaths_that_everstep_ordered_do_not_count(code: int | None) -> None:
    crew = WorkerPool(1, standbys=0, max_deaths=1)
    crew.start()
    crew.handle_reached_main(1)
    for generation in range(1, 6):
        (serial,) = crew.active_workers()
        crew.handle_generation(generation, frozenset({0}), 0.0)
        if code is None:
            assert crew.handle_kill_order(0, generation) == serial
        actions = crew.handle_exit(serial, 100 + serial, code, KILL if code is None else None, 0.0)
        assert isinstance(actions[1], StartWorker)
    (serial,) = crew.active_workers()
    assert isinstance(killed(crew, serial)[1], StartWorker)
    (serial,) = crew.active_workers()
    assert isinstance(killed(crew, serial)[1], GiveUp)
