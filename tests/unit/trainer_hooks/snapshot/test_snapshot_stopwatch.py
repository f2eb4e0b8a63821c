"""For how long snapshots hold up training: in the thread's time on the host, in the stream's on a GPU."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.sdc.digests.digest import WeightedDigest, to_unsigned
from everstep_trainer.snapshot.copy import DeviceMover, SlotTargets
from everstep_trainer.snapshot.pace import StepStopwatch, target_interval

from everstep.clock import ManualClock
from tests.support.pretended_gpu import Event, PretendedCuda, Stream, on_gpu, pretend

GPU = torch.device("cuda", 1)
STEP_S, WAIT_S = 0.5, 0.375

Told = list[tuple[float, float | None]]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return pretend(monkeypatch)


def work(cuda: PretendedCuda, seconds: float) -> None:
    """Enqueues a kernel that takes so long."""

    def run() -> None:
        cuda.now += seconds

    cuda.stream().enqueue(run)


def test_cpu_thread_is_blocked_for_its_whole_wait() -> None:
    clock, told = ManualClock(), Told()
    watch = StepStopwatch(lambda *step: told.append(step), clock)
    for stored in (True, True, False, True):
        watch.end_step(())
        if stored:
            with watch.blocked(has_snapshot=True):
                clock.advance(0.25)
        clock.advance(STEP_S)
        with watch.blocked():
            clock.advance(0.5)
    watch.end_step(())
    assert told == [(STEP_S, 0.75), (STEP_S, 0.75), (STEP_S, None), (STEP_S, 0.75)]


def test_wait_with_a_busy_gpu_counts_as_no_delay(cuda: PretendedCuda) -> None:
    """The thread is ahead of the stream all the time: it waits for longer than its own part of a step takes."""
    clock, told = ManualClock(), Told()
    watch = StepStopwatch(lambda *step: told.append(step), clock)
    for _ in range(6):
        work(cuda, STEP_S)  # enqueued in no time
        watch.end_step((GPU,))
        with watch.blocked(has_snapshot=True):
            clock.advance(WAIT_S)
        with watch.blocked():
            clock.advance(0.05)
    cuda.training.drain()
    work(cuda, STEP_S)
    watch.end_step((GPU,))
    assert told == [(STEP_S, 0.0)] * 5
    assert target_interval(0.0, STEP_S, 1) == 1
    assert target_interval(WAIT_S, 0.0, 1) > 1, "what the thread's own time would have said"


def test_wait_with_an_idle_gpu_counts_whole(cuda: PretendedCuda) -> None:
    """A loop that reads its loss in each step has nothing enqueued when it waits."""
    told = Told()
    watch = StepStopwatch(lambda *step: told.append(step), ManualClock())
    for _ in range(5):
        work(cuda, STEP_S)
        watch.end_step((GPU,))
        cuda.training.drain()
        with watch.blocked(has_snapshot=True):
            cuda.training.drain()
            cuda.now += WAIT_S
        cuda.training.drain()
    assert told == [(STEP_S, WAIT_S)] * 3


def test_update_delayed_by_the_copy_stream_is_counted(cuda: PretendedCuda) -> None:
    told, copies = Told(), Stream(cuda)
    watch = StepStopwatch(lambda *step: told.append(step), ManualClock())
    for _ in range(4):
        work(cuda, STEP_S)
        watch.end_step((GPU,))
        with watch.blocked(has_snapshot=True), cuda.on_stream(copies):
            work(cuda, 0.125)  # nobody waits for it but the training stream
            copied = Event()
            copied.record()
        with watch.blocked():
            cuda.stream().wait_event(copied)
        cuda.training.drain()
    assert told == [(STEP_S, 0.125)] * 2


def test_state_moving_to_another_device_is_measured_again(cuda: PretendedCuda) -> None:
    clock, told = ManualClock(), Told()
    watch = StepStopwatch(lambda *step: told.append(step), clock)
    watch.end_step(())
    clock.advance(1.0)
    watch.end_step((GPU,))
    with watch.blocked(has_snapshot=True):
        pass
    watch.end_step(())
    clock.advance(2.0)
    watch.end_step(())
    assert told == [(2.0, None)]


def test_fixed_snapshot_interval_disables_the_measurement(cuda: PretendedCuda) -> None:
    watch = StepStopwatch(None, ManualClock())
    for _ in range(2):
        watch.end_step((GPU,))
        with watch.blocked(has_snapshot=True):
            pass
    marks: list[str] = []
    cuda.training.enqueue(lambda: marks.append("the only work"))
    cuda.training.drain()
    assert marks == ["the only work"]


def test_digests_arrive_with_the_copy_without_extra_waiting(cuda: PretendedCuda) -> None:
    class Digest(WeightedDigest):
        def __init__(self) -> None:
            pass

        def enqueue(self) -> torch.Tensor:
            return on_gpu(torch.tensor(5))

    mover = DeviceMover((GPU,))
    mover.mark_ready()
    digests = mover.run(SlotTargets([]), [], lambda: {"replicated": Digest()}).digests
    work(cuda, STEP_S)  # the next step, already enqueued
    mover.finish()
    assert to_unsigned(digests["replicated"]) == 5
    assert cuda.now == 0.0, "the next step was waited for"
