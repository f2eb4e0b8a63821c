"""The time that snapshots block training: measured in the thread on a CPU, and in the stream on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from everstep.clock import ManualClock
from everstep_trainer.digests.digest import WeightedDigest, to_unsigned
from everstep_trainer.slots.copy import DeviceMover, SlotTargets
from everstep_trainer.snapshot.pace import StepStopwatch, StepTimes
from tests.support.ranks.simulated_gpu import SimulatedCuda, on_gpu, simulate_cuda

GPU = torch.device("cuda", 1)
STEP_S, WAIT_S = 0.5, 0.375

Measurements = list[tuple[float, float | None]]


def recorder(measured: Measurements) -> Callable[[StepTimes], None]:
    """Return a function that adds the durations of steps, without CPU times, to ``measured``."""
    return lambda times: measured.append((times.step_s, times.blocked_s))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    return simulate_cuda(monkeypatch)


def work(cuda: SimulatedCuda, seconds: float) -> None:
    """Enqueue a kernel that takes `seconds`."""

    def run() -> None:
        cuda.now += seconds

    cuda.stream().enqueue(run)


def test_cpu_thread_is_blocked_for_its_whole_wait() -> None:
    clock, measured = ManualClock(), Measurements()
    watch = StepStopwatch(recorder(measured), clock)
    for stored in (True, True, False, True):
        watch.end_step(())
        if stored:
            with watch.blocked(has_snapshot=True):
                clock.advance(0.25)
        clock.advance(STEP_S)
        with watch.blocked():
            clock.advance(0.5)
    watch.end_step(())
    assert measured == [(STEP_S, 0.75), (STEP_S, 0.75), (STEP_S, None), (STEP_S, 0.75)]


def test_cpu_time_of_blocks_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = iter([1.0, 1.25, 5.0, 5.5])  # at the begin and end of two blocks
    monkeypatch.setattr("everstep_trainer.snapshot.pace.thread_time", lambda: next(cpu_s))
    measured: list[StepTimes] = []
    watch = StepStopwatch(measured.append, ManualClock())
    watch.end_step(())
    with watch.blocked(has_snapshot=True):
        pass
    with watch.blocked():
        pass
    watch.end_step(())
    assert [times.cpu_s for times in measured] == [0.75]


def test_wait_with_a_busy_gpu_counts_as_no_delay(cuda: SimulatedCuda) -> None:
    """The thread runs ahead of the stream, so its wait is longer than its own part of a step."""
    clock, measured = ManualClock(), Measurements()
    watch = StepStopwatch(recorder(measured), clock)
    for _ in range(6):
        work(cuda, STEP_S)  # the thread enqueues it in no time
        watch.end_step((GPU,))
        with watch.blocked(has_snapshot=True):
            clock.advance(WAIT_S)
        with watch.blocked():
            clock.advance(0.05)
    cuda.training.drain()
    work(cuda, STEP_S)
    watch.end_step((GPU,))
    assert measured == [(STEP_S, 0.0)] * 5


def test_state_moving_to_another_device_is_measured_again(cuda: SimulatedCuda) -> None:
    clock, measured = ManualClock(), Measurements()
    watch = StepStopwatch(recorder(measured), clock)
    watch.end_step(())
    clock.advance(1.0)
    watch.end_step((GPU,))
    with watch.blocked(has_snapshot=True):
        pass
    watch.end_step(())
    clock.advance(2.0)
    watch.end_step(())
    assert measured == [(2.0, None)]


def test_fixed_snapshot_interval_disables_the_measurement(cuda: SimulatedCuda) -> None:
    watch = StepStopwatch(None, ManualClock())
    for _ in range(2):
        watch.end_step((GPU,))
        with watch.blocked(has_snapshot=True):
            pass
    marks: list[str] = []
    cuda.training.enqueue(lambda: marks.append("the only work"))
    cuda.training.drain()
    assert marks == ["the only work"]


def test_digests_arrive_with_the_copy_without_extra_waiting(cuda: SimulatedCuda) -> None:
    class Digest(WeightedDigest):
        def __init__(self) -> None:
            pass

        def enqueue(self) -> torch.Tensor:
            return on_gpu(torch.tensor(5))

    mover = DeviceMover((GPU,))
    mover.mark_ready()
    digests = mover.run(SlotTargets([]), [], lambda: {"replicated": Digest()}).digests
    work(cuda, STEP_S)  # the next step is already enqueued
    mover.finish()
    assert to_unsigned(digests["replicated"]) == 5
    assert cuda.now == 0.0, "the call waited for the next step"
