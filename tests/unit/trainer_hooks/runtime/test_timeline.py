"""Where the time of a recovery went, by phase."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
from everstep_trainer.config import HookSettings
from everstep_trainer.run import Run
from everstep_trainer.runtime import assignment, worker
from everstep_trainer.runtime.generation_session import PhaseTimeline
from everstep_trainer.runtime.progress import total_compile_s

from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import Resumed
from tests.support import training
from tests.support.forked import ForkPool
from tests.support.generations import JOB
from tests.support.stage import Stage, stage


def test_timeline_separates_a_part_of_a_phase() -> None:
    timeline = PhaseTimeline(perf_counter() - 10.0)
    timeline.end("first_step")
    whole = timeline.phases_s["first_step"]
    timeline.split_off("compile", "first_step", 4.0)
    assert timeline.phases_s == {"first_step": whole - 4.0, "compile": 4.0}
    timeline.split_off("compile", "first_step", 100.0)
    assert timeline.phases_s == {"first_step": 0.0, "compile": pytest.approx(whole)}


def test_timeline_leaves_out_a_part_of_no_length() -> None:
    timeline = PhaseTimeline()
    timeline.end("first_step")
    timeline.split_off("compile", "first_step", 0.0)
    assert timeline.phases_s.keys() == {"first_step"}


@pytest.mark.slow
def test_compilations_are_counted_in_seconds() -> None:
    before = total_compile_s()
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert total_compile_s() > before
    torch.compiler.reset()


def compile_a_step(run: Run) -> None:
    """Each step computes what was compiled in the first of its generation."""
    torch.compiler.reset()
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    for _ in run.steps(until=training.STEPS):
        model(torch.ones(1, 2)).sum().backward()


def play_one_without_a_standby(socket_path: str, began: float) -> None:
    """In a process of its own: a rank that was forked at ``began`` in place of one that died."""
    worker.REPLACEMENT_WAIT_S = 60.0
    mine = assignment.WorkerAssignment(job=JOB, agent_socket=socket_path, local_rank=0, started_at=began)
    worker.Worker(mine, HookSettings(backend="gloo"), SYSTEM_CLOCK).run(compile_a_step)


def play_alone(scene: Stage, forks: ForkPool, began: float) -> None:
    scene.ranks[0] = forks.start(play_one_without_a_standby, str(scene.agent.path), began)
    scene.peer(0)


def test_resumed_separates_start_and_compile_time(forks: ForkPool) -> None:
    with stage(forks, compile_a_step) as scene:
        play_alone(scene, forks, perf_counter() - 100.0)
        scene.tell(NewGeneration(spec=scene.generation(1, 0)))
        (first,) = scene.heard(Resumed, 1, where=lambda m: m.generation == 1)
        assert first.phases_s["start"] >= 100.0
        assert first.phases_s["compile"] > 0.0
        assert {"wait", "rendezvous", "first_step"} <= first.phases_s.keys()
        scene.form(2, 0)
        (second,) = scene.heard(Resumed, 1, where=lambda m: m.generation == 2)
        assert "start" not in second.phases_s, "the process was there"
        assert second.phases_s["compile"] > 0.0


def finish_without_step(run: Run) -> None:
    """A training function whose last step was finished by an earlier generation."""
    assert list(run.steps(until=0)) == []


def test_generation_without_step_left_resumes(forks: ForkPool) -> None:
    with stage(forks, finish_without_step) as scene:
        scene.start(0)
        scene.form(1, 0)
        (resumed,) = scene.heard(Resumed, 1, where=lambda m: m.generation == 1)
        assert resumed.step == 0
        assert "first_step" in resumed.phases_s
