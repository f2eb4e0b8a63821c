"""How far a rank is, and what a step costs to note."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
from everstep_trainer.runtime import progress
from everstep_trainer.runtime.progress import StepProgress


def test_finish_sorts_no_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median is for whoever asks, a few times a second; the training thread does not make it with every step."""
    sorted_: list[object] = []
    monkeypatch.setattr(progress, "median", lambda values: sorted_.append(values) or 1.0)
    noted = StepProgress(64)
    noted.enter(1, int)
    for step in range(1, 10):
        noted.record_wait(0.1)
        noted.finish_step(step)
    assert sorted_ == []
    assert (noted.median_step_s, noted.median_busy_s) == (1.0, 1.0)
    assert len(sorted_) == 2


def test_step_time_of_the_previous_generation_is_used_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 2.0, 5.0, 8.0])
    monkeypatch.setattr(progress, "perf_counter", lambda: next(moments))
    noted = StepProgress(64)
    assert noted.median_step_s == 0.0
    noted.enter(1, int)
    for step in (1, 2, 3):
        noted.finish_step(step)
    assert noted.median_step_s == 3.0
    assert noted.median_busy_s is None
    noted.enter(2, int)
    assert noted.median_step_s == 3.0
    noted.enter(3, int)
    assert noted.median_step_s == 3.0, "also after a generation without a step"


@pytest.mark.parametrize(
    ("until", "planned"), [(300, 300), (np.int64(300), 300), (0, 0), (-5, 0), (sys.maxsize, 0), (1 << 80, 0)]
)
def test_last_step_is_a_number_that_heartbeats_can_carry(until: int, planned: int) -> None:
    steps = StepProgress(5)
    steps.plan(until)
    assert msgspec.json.encode(steps.until_step) == str(planned).encode()


def test_work_after_last_step_is_a_section() -> None:
    steps = StepProgress(5)
    steps.enter(1, int)
    steps.plan(1)
    steps.begin_step(1)
    steps.finish_step(1)
    assert steps.current_section is None
    steps.end_steps(1)
    assert steps.current_section == progress.AFTER_LAST_STEP
    with steps.section("export"):
        assert steps.current_section == progress.WorkSection("export")
    steps.plan(2)  # a second loop
    assert steps.current_section is None
    steps.end_steps(1)
    steps.enter(2, int)
    assert steps.current_section is None
    assert steps.until_step == 0


def test_generation_without_step_left_is_recognized() -> None:
    steps = StepProgress(5)
    steps.enter(1, int)
    steps.plan(1)
    steps.finish_step(1)
    steps.end_steps(1)
    assert not steps.had_no_step_left
    steps.enter(2, int)
    steps.resume_from(1)
    assert not steps.had_no_step_left, "the loop has not begun"
    steps.plan(1)
    steps.end_steps(1)
    assert steps.had_no_step_left
