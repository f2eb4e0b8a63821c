"""A rank without progress is reported with its activity, again if that changes, and once more when it continues."""

from __future__ import annotations

import threading

import msgspec

from everstep.clock import ManualClock
from everstep.vocabulary import RankActivity
from everstep_trainer.base.progress import StepProgress, WorkSection
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadState
from everstep_trainer.runtime.stalls import Stall, StallWatch, all_stacks

SETTINGS = HookSettings(
    stall_report_s=1.0, min_hang_threshold_s=1.0, hang_factor=20.0, first_step_allowance_s=30.0, hang_warmup_steps=3
)
STILL = MainThreadState(activity=RankActivity.STILL, place="train.py:16")
WORKING = MainThreadState(activity=RankActivity.WORKING, place="train.py:16", doing="computes")


class FakeObserver:
    """An observer whose answers the test sets."""

    def __init__(self) -> None:
        self.state, self.longest_still_s = STILL, 0.0

    def observe(self) -> MainThreadState:
        return self.state

    def reset(self) -> None:
        self.longest_still_s = 0.0


class WatchedRank:
    """A rank whose steps and checks the test controls."""

    def __init__(self, configured_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.progress = StepProgress(SETTINGS.step_window)
        self.progress.enter(1, lambda: 0)
        self.observer = FakeObserver()
        self.watch = StallWatch(SETTINGS, self.clock, self.progress, self.observer)
        self.watch.enter(configured_s)

    def steps(self, count: int) -> list[Stall]:
        reports = []
        for _ in range(count):
            self.progress.finish_step(self.progress.finished_step + 1)
            reports += self.check_for(0.1)
        return reports

    def check_for(self, seconds: float) -> list[Stall]:
        """Check every 0.1 s for so many seconds, and return the reports."""
        reports = []
        for _ in range(round(seconds / 0.1)):
            self.clock.advance(0.1)
            reports.append(self.watch.check())
        return [report for report in reports if report is not None]


def test_stall_is_reported_after_a_second_with_its_state() -> None:
    rank = WatchedRank()
    rank.steps(5)
    (stall,) = rank.check_for(1.5)
    assert (stall.state, stall.threshold_s) == (STILL, 1.0)
    assert 1.0 <= stall.stalled_s < 1.2


def test_threshold_of_the_job_applies_after_one_step() -> None:
    rank = WatchedRank(configured_s=2.0)
    rank.steps(1)
    assert rank.check_for(1.5)[0].threshold_s == 2.0


def test_unknown_state_is_awaited_for_a_second() -> None:
    rank = WatchedRank()
    rank.steps(5)
    rank.observer.state = MainThreadState()
    assert rank.check_for(1.7) == []
    assert rank.check_for(0.5)[0].state.activity is None


def test_change_of_activity_is_reported() -> None:
    rank = WatchedRank()
    rank.steps(5)
    rank.check_for(1.5)
    rank.observer.state = WORKING
    assert [stall.state for stall in rank.check_for(1.5)] == [WORKING]
    rank.observer.state = msgspec.structs.replace(WORKING, place="train.py:17")
    assert rank.check_for(0.5) == [], "a line is no change"
    rank.observer.state = msgspec.structs.replace(WORKING, section=WorkSection("validation", 60.0))
    section = rank.check_for(1.5)[0].state.section
    assert section is not None
    assert section.limit_s == 60.0


def test_stopped_process_does_not_report_itself() -> None:
    rank = WatchedRank()
    rank.steps(5)
    rank.clock.advance(60.0)
    assert rank.watch.check() is None
    assert rank.check_for(0.5) == []
    assert rank.check_for(1.0) != []


def test_new_generation_resets_the_watch() -> None:
    rank = WatchedRank()
    rank.steps(5)
    rank.check_for(3.0)
    rank.progress.enter(2, lambda: 0)
    rank.watch.enter(None)
    assert rank.check_for(0.8) == []


def test_stacks_show_every_thread_main_first_within_the_limit() -> None:
    release = threading.Event()
    waiting = threading.Thread(target=release.wait, name="the-other-one")
    waiting.start()
    try:
        text = all_stacks(100_000)
        assert text.startswith("thread MainThread")
        assert "the-other-one" in text
        assert "release.wait" in text or "threading.py" in text
        assert len(all_stacks(200).encode()) <= 200
    finally:
        release.set()
        waiting.join()
