"""The run object, and its behaviour in scripts that Everstep does not run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import everstep
from everstep_trainer.base.progress import CollectiveTimer, StepProgress, WorkSection
from everstep_trainer.data.rng import stream_seed
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.worker.rank_worker import reset_thread_state
from tests.support.processes.fork_pool import ForkPool, torchrun

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.unit.trainer_hooks.test_run"


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_run_without_everstep_has_one_rank_and_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "EVERSTEP_WORKER_PID"):
        monkeypatch.delenv(name, raising=False)
    seen: list[int] = []

    def train(run: Run) -> None:
        model = run.replicate(torch.nn.Linear(2, 2))
        run.track(model=model)
        assert (run.rank, run.world_size, run.distributed, run.generation) == (0, 1, False, 0)
        assert isinstance(model, torch.nn.Linear)
        with pytest.raises(RuntimeError, match=r"run\.distributed"):
            run.mesh  # noqa: B018 - the access is the test
        for step in run.steps(until=4):
            with run.atomic():
                run.report(loss=torch.tensor(1.0))
            with run.alone("validation", limit_s=60):
                pass
            seen.append(step)
        assert run.last_finished_step == 4

    everstep.main(train)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "limit_s", "message"), [(" ", None, "name"), ("save", 0.0, "positive")])
def test_alone_refuses_useless_arguments(name: str, limit_s: float | None, message: str) -> None:
    run = Run(RankContext(), TrainingSession())
    with pytest.raises(ValueError, match=message):
        run.alone(name, limit_s=limit_s)


def section_of(progress: StepProgress) -> WorkSection:
    assert progress.current_section is not None
    return progress.current_section


def test_sections_are_nested_and_end_with_their_block() -> None:
    progress = StepProgress(window=3)
    with progress.section("saving", 5.0):
        with progress.section("checking"):
            assert section_of(progress).name == "checking"
        assert (section_of(progress).name, section_of(progress).limit_s) == ("saving", 5.0)
    assert progress.current_section is None


def untracked_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "nothing is tracked" in record.getMessage()]


def test_untracked_run_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(RankContext(generation=1), TrainingSession())
    for _ in run.steps(until=3):
        pass
    (warning,) = untracked_warnings(caplog)
    assert "from scratch" in warning
    assert "run.track(" in warning


@pytest.mark.parametrize(
    "place", [RankContext(generation=1, rank=1), RankContext()], ids=["other_rank", "without_everstep"]
)
def test_only_the_first_rank_of_a_kept_run_is_warned(caplog: pytest.LogCaptureFixture, place: RankContext) -> None:
    run = Run(place, TrainingSession())
    run.step_finished()
    assert untracked_warnings(caplog) == []


def test_run_with_its_own_checkpoints_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    """``everstep_trainer.memory_tier.dcp`` keeps its checkpoints in the memory tier, without ``track``."""
    tier: Any = SimpleNamespace(is_over=False)
    run = Run(RankContext(generation=1, tier=lambda: tier), TrainingSession())
    assert run.tier is not None
    run.step_finished()
    assert untracked_warnings(caplog) == []


def test_slow_rank_is_busy_and_waiting_ranks_are_not() -> None:
    """Two ranks step side by side, 50 ms each; one of them waits for the other for 40 of these."""
    ranks = [StepProgress(window=8), StepProgress(window=8)]
    for progress in ranks:
        progress.enter(1, lambda: 0)
        assert progress.median_busy_s is None
    for step in (1, 2, 3):
        for progress, waited in zip(ranks, (0.04, 0.001), strict=True):
            progress._step_began -= 0.05
            progress.record_wait(waited / 2)
            progress.record_wait(waited / 2)
            progress.finish_step(step)
    waiting, slow = (progress.median_busy_s for progress in ranks)
    assert waiting is not None
    assert slow is not None
    assert slow > 1.5 * waiting
    ranks[0].enter(2, lambda: 0)
    assert ranks[0].median_busy_s is None, "another generation, another rank"


def test_cpu_waits_are_counted_unless_the_collective_raises() -> None:
    waits_s: list[float] = []
    waits = CollectiveTimer(waits_s.append)
    with waits.measure(torch.device("cpu")):
        pass
    with pytest.raises(RuntimeError), waits.measure(torch.device("cpu")):
        raise RuntimeError("peer is gone")
    assert len(waits_s) == 1
    assert waits_s[0] >= 0.0


def test_random_streams_depend_on_seed_step_and_rank_only() -> None:
    def streams(rank: int, seed: int) -> list[tuple[float, float, float]]:
        run = Run(RankContext(rank=rank, world_size=2), TrainingSession())
        return [draws() for _ in run.steps(until=3, seed=seed)]

    assert streams(0, 1) == streams(0, 1)
    values = [v for rank in (0, 1) for seed in (1, 2) for v in streams(rank, seed)]
    assert len(set(values)) == len(values)
    assert 0 <= stream_seed(1, 2, 3) < 1 << 63


def test_custom_loop_has_the_same_random_streams() -> None:
    run, others = Run(RankContext(rank=1, world_size=2), TrainingSession()), []
    for step in (1, 2, 3):
        run.seed_step(step, seed=4)
        others.append(draws())
        run.step_finished()
    run = Run(RankContext(rank=1, world_size=2), TrainingSession())
    assert [draws() for _ in run.steps(until=3, seed=4)] == others


def test_optimizer_calls_before_update_each_time() -> None:
    class Counting(TrainingSession):
        asked = 0

        def before_update(self) -> None:
            self.asked += 1

    keeper = Counting()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    Run(RankContext(), keeper).track(model=model, optimizer=optimizer)
    optimizer.step()
    optimizer.step()
    assert keeper.asked == 2


def test_steps_resume_after_the_restored_step() -> None:
    class Restored(TrainingSession):
        def track(self, objects: object, options: object) -> int:
            return 41

    run = Run(RankContext(), Restored())
    run.track(model=torch.nn.Linear(1, 1))
    assert list(run.steps(until=43)) == [42, 43]


def test_thread_torch_state_is_reset() -> None:
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
    reset_thread_state()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def steps_under_torchrun() -> list[int]:
    steps: list[int] = []

    def train(run: Run) -> None:
        assert run.distributed
        assert run.mesh.size() == 2
        assert run.mean(torch.tensor(float(run.rank))) == 0.5
        steps.extend(run.steps(until=2))

    everstep.main(train, settings=everstep.HookSettings(backend="gloo"))
    return steps


def test_under_torchrun_the_group_comes_from_the_environment(forks: ForkPool) -> None:
    assert torchrun(forks, 2, steps_under_torchrun) == [[1, 2]] * 2


@pytest.mark.slow
@pytest.mark.nightly
def test_torchrun_itself_starts_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", MODULE]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


def take_existing_group(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def train(run: Run) -> None:
        assert (run.rank, run.world_size, run.device.type) == (rank, 2, "cpu")
        assert run.distributed
        assert run.mesh.size() == 2
        assert run.mean(torch.tensor(float(run.rank))) == 0.5

    everstep.main(train, settings=everstep.HookSettings(backend="gloo"))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_existing_process_group_is_used_and_left_alone(
    forks: ForkPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray or the script makes such a group, without RANK in the environment."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    changed = forks.environment_changes()
    ranks = [forks.start(take_existing_group, n, str(tmp_path / "store"), environment=changed) for n in (0, 1)]
    assert [rank.result() for rank in ranks] == [None, None]


if __name__ == "__main__":
    assert steps_under_torchrun() == [1, 2]


def test_progress_keeps_the_median_of_its_window() -> None:
    progress = StepProgress(window=3)
    assert progress.median_step_s == 0.0
    progress.resume_from(41)
    progress.finish_step(42)
    assert (progress.finished_step, progress.finished_steps_here) == (42, 1)
    assert progress.median_step_s > 0


@pytest.mark.parametrize("loss", [1.5, torch.tensor(1.5, requires_grad=True)], ids=["number", "tensor"])
def test_reported_loss_is_read_when_asked_for(loss: float | torch.Tensor) -> None:
    progress = StepProgress(window=3)
    assert progress.loss.value() is None
    progress.loss.update(loss)
    assert progress.loss.value() == 1.5
