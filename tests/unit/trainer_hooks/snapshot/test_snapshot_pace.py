"""The number of steps between snapshots: as small as the budget allows, and equal on all ranks at every step."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.snapshot.job import OneShotSignal
from everstep_trainer.snapshot.pace import (
    MAX_INTERVAL,
    PACE_WINDOW,
    SnapshotPace,
    StepTimes,
    target_interval,
)
from tests.support.ranks.scheduler_statistics import SchedulerStatistics


class Lockstep:
    """Ranks that take part in every step; each one's copier is behind its training by at most one snapshot.

    ``blocked_s``: for how long each rank's snapshot holds up its training.
    """

    def __init__(self, world: int, budget: float = 0.1, contention: CoreContention | None = None) -> None:
        store = HashStore()
        self.paces = [SnapshotPace(store, rank, None, budget, contention) for rank in range(world)]
        self.last: list[int | None] = [None] * world

    def step(self, step: int, order: list[int], blocked_s: list[float], copiers: list[bool], step_s: float) -> None:
        """Finish ``step`` on all ranks. ``copiers``: ranks whose snapshot ends before the next rank continues."""
        due = [self.rank(rank, step, blocked_s[rank], copiers[rank], step_s) for rank in order]
        assert len(set(due)) == 1, f"ranks differ about step {step}"

    def rank(self, rank: int, step: int, blocked_s: float, copier: bool, step_s: float) -> bool:
        pace = self.paces[rank]
        pace.end_step(step)
        if not pace.is_due(step):
            pace.record_step(StepTimes(step_s))
            return False
        self.catch_up(rank)  # the last snapshot is over before the next one begins
        pace.record_step(StepTimes(step_s, blocked_s))
        self.last[rank] = step
        if copier:
            self.catch_up(rank)
        return True

    def catch_up(self, rank: int) -> None:
        last, self.last[rank] = self.last[rank], None
        if last is not None:
            self.paces[rank].agree(last)

    def run(self, first: int, last: int, blocked_s: list[float], step_s: float = 1.0) -> list[int]:
        """Run plain steps; return those that were stored."""
        ranks = list(range(len(self.paces)))
        for step in range(first, last):
            self.step(step, ranks, blocked_s, [True] * len(ranks), step_s)
        return [step for step in range(first, last) if self.paces[0].is_due(step)]


@given(
    st.floats(0, 10, allow_nan=False),
    st.floats(0, 10, allow_nan=False),
    st.integers(1, MAX_INTERVAL),
    st.floats(0.001, 0.9),
)
def test_cost_stays_within_its_share(cost_s: float, step_s: float, now: int, share: float) -> None:
    every = target_interval(cost_s, step_s, now, share)
    assert 1 <= every <= MAX_INTERVAL
    if every < MAX_INTERVAL:
        assert cost_s <= share * (cost_s + every * max(step_s, 1e-6)) * 1.0001
    if every > now:
        assert cost_s > share * (cost_s + (every - 1) * step_s) * 0.9999, "no more than it takes"


def test_pace_follows_the_slowest_rank_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Lockstep(3)
    with caplog.at_level(logging.INFO):
        assert ranks.run(1, 2 * PACE_WINDOW, [0.01, 0.01, 0.3]) == list(range(1, 2 * PACE_WINDOW))
        third = ranks.run(2 * PACE_WINDOW, 4 * PACE_WINDOW, [0.01, 0.01, 0.3])
        assert third == [step for step in range(2 * PACE_WINDOW, 4 * PACE_WINDOW) if step % 3 == 0]
        ranks.run(4 * PACE_WINDOW, 6 * PACE_WINDOW, [0.01, 0.01, 0.01])
        assert ranks.run(6 * PACE_WINDOW, 7 * PACE_WINDOW, [0.01, 0.01, 0.01]) == list(
            range(6 * PACE_WINDOW, 7 * PACE_WINDOW)
        )
    assert [record.getMessage() for record in caplog.records] == [
        f"a snapshot every 3 steps from step {2 * PACE_WINDOW}: with one of each step, snapshots and the other work of "
        "the hooks would take over 10 % of the time. The loss of a node, or of a rank during an update, may then "
        "repeat up to 2 finished steps; run.track(snapshot_every=1) stores each step, snapshot_budget= is the share of "
        "the time",
        f"a snapshot of each step again, from step {6 * PACE_WINDOW}",
    ]


def test_a_later_pace_is_no_warning_again(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Lockstep(2)
    with caplog.at_level(logging.INFO):
        for window, blocked_s in enumerate((0.3, 0.3, 0.5, 0.5, 0.5)):
            ranks.run(max(1, window * PACE_WINDOW), (window + 1) * PACE_WINDOW, [0.01, blocked_s])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


# ---- full cores


@pytest.fixture
def kernel(tmp_path: Path) -> SchedulerStatistics:
    return SchedulerStatistics(tmp_path)


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_full_cores_are_known_with_a_fixed_interval(kernel: SchedulerStatistics, waited: float) -> None:
    contention = CoreContention(4, kernel.clock, cores=2, statistics=kernel.path)
    pace = SnapshotPace(HashStore(), 0, 1, contention=contention)
    for step in range(1, 2 * PACE_WINDOW):
        kernel.pass_time(1.0, waited)
        pace.end_step(step)
    assert pace.are_cores_full is (waited > 0)


def stored_steps(
    kernel: SchedulerStatistics, waited: float, ranks: int, cpu_s: float, blocked_s: float, hooks_s: float = 0.0
) -> int:
    """Return the steps between snapshots after some windows of steps of a second, on two cores, within 2 %."""
    contention = CoreContention(ranks, kernel.clock, cores=2, statistics=kernel.path)
    pace = SnapshotPace(HashStore(), 0, None, 0.02, contention)
    for step in range(1, 5 * PACE_WINDOW):
        kernel.pass_time(1.0, waited)
        pace.end_step(step)
        pace.record_hook_cpu(hooks_s)
        if pace.is_due(step):
            pace.record_hook_cpu(cpu_s / 4)
            pace.record_step(StepTimes(1.0, blocked_s, cpu_s / 4))
            pace.record_copy(cpu_s * 3 / 4)
            pace.agree(step)
        else:
            pace.record_step(StepTimes(1.0))
    return pace.interval_at(step)


@pytest.mark.parametrize(
    ("waited", "ranks", "cpu_s", "blocked_s", "every"),
    [
        (0.0, 1, 0.5, 0.001, 1),  # idle cores copy for nothing
        (0.0, 1, 0.0, 0.05, 3),  # the block is 5 % of a step
        (0.3, 2, 0.05, 0.001, 3),  # the CPU time is taken from training
        (0.3, 4, 0.05, 0.001, 5),  # from two ranks on each core
        (0.3, 4, 0.001, 0.015, 1),  # a wait for a core
        (0.3, 2, 0.001, 0.25, 3),  # a wait for more than a tenth of the time is too much in any case
    ],
)
def test_snapshots_cost_time_or_cpu(
    waited: float, ranks: int, cpu_s: float, blocked_s: float, every: int, kernel: SchedulerStatistics
) -> None:
    assert stored_steps(kernel, waited, ranks, cpu_s, blocked_s) == every


@pytest.mark.parametrize(
    ("waited", "hooks_s", "every"), [(0.0, 0.005, 1), (0.3, 0.0, 3), (0.3, 0.005, 4), (0.3, 0.1, 8)]
)
def test_snapshots_get_what_other_hooks_leave_of_full_cores(
    waited: float, hooks_s: float, every: int, kernel: SchedulerStatistics
) -> None:
    assert stored_steps(kernel, waited, 2, 0.05, 0.001, hooks_s) == every


# ---- agreement


def test_pace_fixed_by_the_user_stays() -> None:
    pace = SnapshotPace(HashStore(), 0, 5)
    for step in range(1, 4 * PACE_WINDOW):
        pace.end_step(step)
        pace.record_step(StepTimes(1.0, 1.0))
        pace.agree(step)
    assert [step for step in range(1, 21) if pace.is_due(step)] == [5, 10, 15, 20]


def test_latch_releases_all_waiting_threads() -> None:
    latch, gone = OneShotSignal(), []
    threads = [threading.Thread(target=lambda: gone.append(latch.wait(60.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(60.0)
    assert gone == [True] * 4


def test_latch_set_by_several_threads_is_set_once() -> None:
    latch, failed = OneShotSignal(), []

    def set_it() -> None:
        try:
            latch.set()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=set_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed
    assert latch.is_set()
