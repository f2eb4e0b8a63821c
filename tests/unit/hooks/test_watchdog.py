"""A hang is found by the rank's own measure, said once, and not mistaken for a process that was stopped."""

from __future__ import annotations

import threading

import pytest

from everstep.clock import ManualClock
from trainer_hooks.config import HookSettings
from trainer_hooks.progress import Progress
from trainer_hooks.watchdog import Watchdog, all_stacks

SETTINGS = HookSettings(hang_floor_s=1.0, hang_factor=20.0, first_step_allowance_s=30.0, hang_warmup_steps=3)


class Scene:
    """A rank whose steps and looks are played by the test."""

    def __init__(self, configured_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.progress = Progress(SETTINGS.step_window)
        self.progress.enter(1, 0, lambda: 0)
        self.watchdog = Watchdog(SETTINGS, self.clock)
        self.watchdog.enter(configured_s)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.progress.finish(self.progress.step + 1)
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


def test_a_threshold_that_the_job_gives_holds_after_one_step():
    scene = Scene(configured_s=2.0)
    scene.steps(1)
    stall = scene.look(5.0)
    assert stall is not None
    assert stall.threshold_s == 2.0


def test_slow_steps_raise_the_threshold(monkeypatch):
    scene = Scene()
    scene.steps(5)
    monkeypatch.setattr(Progress, "step_s", property(lambda _: 0.5))
    assert scene.watchdog.threshold_s(scene.progress) == 10.0


def test_a_stall_is_said_once_and_the_next_one_again():
    scene = Scene()
    scene.steps(5)
    assert scene.look(3.0) is not None
    assert scene.look(10.0) is None
    scene.steps(1)
    assert scene.look(3.0) is not None


def test_a_process_that_was_stopped_does_not_accuse_itself():
    scene = Scene()
    scene.steps(5)
    scene.clock.advance(60.0)
    assert scene.watchdog.check(scene.progress) is None
    assert scene.look(0.5) is None
    assert scene.look(1.0) is not None


def test_a_new_generation_begins_anew():
    scene = Scene()
    scene.steps(5)
    scene.clock.advance(0.4)
    scene.progress.enter(2, 0, lambda: 0)
    scene.watchdog.enter(None)
    assert scene.look(20.0) is None


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
    progress = Progress(window=3)
    assert progress.step_s == 0.0
    progress.resume_from(41)
    progress.finish(42)
    assert (progress.step, progress.finished_here) == (42, 1)
    assert progress.step_s > 0


@pytest.mark.parametrize("loss", [1.5, "tensor"])
def test_a_reported_loss_is_read_when_asked_for(loss):
    import torch

    progress = Progress(window=3)
    assert progress.loss.value() is None
    progress.loss.offer(torch.tensor(1.5, requires_grad=True) if loss == "tensor" else loss)
    assert progress.loss.value() == 1.5
