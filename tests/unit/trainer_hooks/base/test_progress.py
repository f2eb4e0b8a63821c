"""The steps that a rank has finished, its loss, and the cost of recording a step."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from everstep_trainer.base import progress
from everstep_trainer.base.progress import LatestLoss, StepProgress


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
    assert noted.median_step_s == 3.0, "the step time is kept through a generation without a step"


@pytest.mark.parametrize(
    ("until", "planned"), [(300, 300), (np.int64(300), 300), (0, 0), (-5, 0), (sys.maxsize, 0), (1 << 80, 0)]
)
def test_last_step_is_a_number_that_heartbeats_can_carry(until: int, planned: int) -> None:
    steps = StepProgress(5)
    steps.plan(until)
    assert msgspec.json.encode(steps.until_step) == str(planned).encode()


def test_work_after_last_step_is_a_section() -> None:
    steps = StepProgress(5)

    def section() -> progress.WorkSection | None:
        return steps.current_section

    steps.enter(1, int)
    steps.plan(1)
    steps.begin_step(1)
    steps.finish_step(1)
    assert section() is None
    steps.end_steps(1)
    assert section() == progress.AFTER_LAST_STEP
    with steps.section("export"):
        assert section() == progress.WorkSection("export")
    steps.plan(2)  # a second loop
    assert section() is None
    steps.end_steps(1)
    steps.enter(2, int)
    assert section() is None
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
    assert not steps.had_no_step_left, "the training loop has not started"
    steps.plan(1)
    steps.end_steps(1)
    assert steps.had_no_step_left


def test_numbers_of_every_kind_are_read() -> None:
    reading = LatestLoss()
    assert reading.value() is None
    for loss in (
        2.5,
        torch.tensor(2.5),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
        torch.tensor(2.5).requires_grad_(),
    ):
        reading.update(loss)
        assert reading.value() == 2.5


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(0), torch.tensor(1j)])
def test_non_scalar_loss_is_refused_when_reported(loss: torch.Tensor) -> None:
    reading = LatestLoss()
    reading.update(1.5)
    with pytest.raises(ValueError, match=r"run\.report takes one real number"):
        reading.update(loss)
    assert reading.value() == 1.5


def test_distributed_loss_is_read_without_a_collective(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    reading = LatestLoss()
    reading.update(distribute_tensor(torch.tensor(0.5), mesh, [Replicate()]))
    assert reading.value() == 0.5
    with pytest.raises(ValueError, match="full_tensor"):
        reading.update(distribute_tensor(torch.ones(1), mesh, [Shard(0)]))
