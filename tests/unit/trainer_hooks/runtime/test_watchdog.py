"""A hang is found by the rank's own measure, said once, and not mistaken for a process that was stopped."""

from __future__ import annotations

import threading

import pytest
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.progress import HangWatchdog, StepProgress, all_stacks

from everstep.clock import ManualClock

SETTINGS = HookSettings(min_hang_threshold_s=1.0, hang_factor=20.0, first_step_allowance_s=30.0, hang_warmup_steps=3)


class Scene:
    """A rank whose steps and looks are played by the test."""

    def __init__(self, configured_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.progress = StepProgress(SETTINGS.step_window)
        self.progress.enter(1, lambda: 0)
        self.watchdog = HangWatchdog(SETTINGS, self.clock)
        self.watchdog.enter(configured_s)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.progress.finish_step(self.progress.finished_step + 1)
            self.look(0.1)

    def look(self, seconds: float):
        """Time passes in looks of 0.1 s; returns the first stall that was said."""
        stalls = []
        for _ in range(round(seconds / 0.1)):
            self.clock.advance(0.1)
            stalls.append(self.watchdog.check(self.progress))
        return next((s for s in stalls if s is not None), None)


def test_the_first_steps_have_a_larger_allowance():
    scene = Scene()
    scene.steps(2)
    assert scene.look(29.0) is None
    assert scene.look(2.0) is not None


def test_after_the_warm_up_the_floor_holds_for_fast_steps():
    scene = Scene()
    scene.steps(5)
    stall = scene.look(3.0)
    assert stall is not None
    assert stall.threshold_s == 1.0
    assert 1.0 <= stall.stalled_s < 1.2


def test_threshold_of_the_job_applies_after_one_step():
    scene = Scene(configured_s=2.0)
    scene.steps(1)
    stall = scene.look(5.0)
    assert stall is not None
    assert stall.threshold_s == 2.0


def test_slow_steps_raise_the_threshold(monkeypatch):
    scene = Scene()
    scene.steps(5)
    monkeypatch.setattr(StepProgress, "median_step_s", property(lambda _: 0.5))
    assert scene.watchdog.threshold_s(scene.progress) == 10.0


@pytest.mark.parametrize("configured_s", [None, 1.0])
def test_stall_is_reported_again_at_twice_its_length(configured_s):
    scene = Scene(configured_s)
    scene.steps(5)
    assert scene.look(1.5) is not None
    assert scene.look(0.4) is None
    assert scene.look(0.2) is not None
    assert scene.look(1.7) is None
    assert scene.look(0.3) is not None
    scene.steps(1)
    assert scene.look(10.0) is not None


def test_stopped_process_does_not_report_itself_as_hung():
    scene = Scene()
    scene.steps(5)
    scene.clock.advance(60.0)
    assert scene.watchdog.check(scene.progress) is None
    assert scene.look(0.5) is None
    assert scene.look(1.0) is not None


def test_new_generation_resets_the_watchdog():
    scene = Scene()
    scene.steps(5)
    scene.clock.advance(0.4)
    scene.progress.enter(2, lambda: 0)
    scene.watchdog.enter(None)
    assert scene.look(20.0) is None


def test_begun_collectives_count_as_progress():
    scene = Scene()
    begun = 0
    scene.progress.enter(1, lambda: begun)
    scene.steps(5)
    for begun in range(1, 10):  # noqa: B007 - the progress reads it
        assert scene.look(0.9) is None
    assert scene.look(1.2) is not None


def again(scene: Scene, generation: int) -> None:
    """The next generation, restored to the step that there was."""
    scene.progress.enter(generation, lambda: 0)
    scene.watchdog.enter(None)


@pytest.mark.promise("long-steps")
def test_equally_slow_retry_is_no_longer_a_hang():
    """As is a validation of 20 s after every tenth step."""
    scene = Scene()
    scene.steps(10)
    assert scene.look(20.0) is not None
    again(scene, 2)
    assert scene.look(20.0) is None
    scene.progress.finish_step(11)  # both between two looks
    scene.progress.finish_step(12)
    scene.steps(10)
    assert scene.look(20.0) is None
    assert scene.look(25.0) is not None, "twice as long is one again"


@pytest.mark.promise("long-steps")
def test_thresholds_rise_until_a_long_step_completes():
    scene = Scene()
    scene.steps(10)
    said = []
    for generation, seconds in enumerate((1.5, 31.0, 61.0, 100.0), start=2):
        stall = scene.look(seconds)
        said.append(stall.threshold_s if stall is not None else None)
        again(scene, generation)
    assert said == [1.0, 30.0, 60.0, None]


def test_hang_cured_by_the_next_generation_is_a_hang_again():
    scene = Scene()
    scene.steps(10)
    assert scene.look(20.0) is not None
    again(scene, 2)
    scene.steps(10)
    stall = scene.look(20.0)
    assert stall is not None
    assert stall.threshold_s == 1.0


def test_stacks_show_every_thread_main_first_within_the_limit():
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


def test_progress_keeps_the_median_of_its_window():
    progress = StepProgress(window=3)
    assert progress.median_step_s == 0.0
    progress.resume_from(41)
    progress.finish_step(42)
    assert (progress.finished_step, progress.finished_steps_here) == (42, 1)
    assert progress.median_step_s > 0


@pytest.mark.parametrize("loss", [1.5, "tensor"])
def test_a_reported_loss_is_read_when_asked_for(loss):
    import torch

    progress = StepProgress(window=3)
    assert progress.loss.value() is None
    progress.loss.update(torch.tensor(1.5, requires_grad=True) if loss == "tensor" else loss)
    assert progress.loss.value() == 1.5
