"""Ranks that wait for cores are told from ranks that do not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep_trainer.base.core_contention import CROWDED_SHARE, CoreContention
from tests.support.ranks.scheduler_statistics import SchedulerStatistics


@pytest.fixture
def kernel(tmp_path: Path) -> SchedulerStatistics:
    return SchedulerStatistics(tmp_path)


def test_cores_are_full_while_the_thread_waits_for_them(kernel: SchedulerStatistics) -> None:
    contention = CoreContention(4, kernel.clock, cores=64, statistics=kernel.path)
    for share in (0.0, CROWDED_SHARE / 2, 2 * CROWDED_SHARE, 0.5, 0.0):
        kernel.pass_time(10.0, share)
        assert contention.is_crowded() == (share > CROWDED_SHARE)


@pytest.mark.parametrize(("ranks", "cores", "crowded"), [(4, 2, True), (1, 1, True), (4, 8, False), (1, 64, False)])
def test_cores_are_counted_without_the_kernels_account(ranks: int, cores: int, crowded: bool, tmp_path: Path) -> None:
    contention = CoreContention(ranks, ManualClock(), cores=cores, statistics=tmp_path / "missing")
    assert contention.is_crowded() is crowded


def test_another_threads_wait_is_not_compared(kernel: SchedulerStatistics) -> None:
    made: list[CoreContention] = []
    maker = threading.Thread(
        target=lambda: made.append(CoreContention(1, kernel.clock, cores=64, statistics=kernel.path))
    )
    maker.start()
    maker.join()
    kernel.pass_time(10.0, 0.5)
    assert not made[0].is_crowded()
    kernel.pass_time(10.0, 0.5)
    assert made[0].is_crowded()
