"""Leaders and ranks are killed, while training continues: controllers over PostgreSQL, an agent and two ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.vocabulary import GenerationReason
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import GenerationSpec
from tests.integration import step_log
from tests.support.agents.agent_process import agent_process
from tests.support.fleet.controllers import LONG_SILENCES, SECRET, VIEWER, ControllerProcess
from tests.support.fleet.report_stream import events
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.launcher import LauncherProcess, launched
from tests.support.processes.process_table import is_running
from tests.support.services.postgres import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]
pytestmark = pytest.mark.slow

SHORT_LEASE = "lease_s = 1.5\nlease_renew_s = 0.3\n"
MORE_STEPS = 20
TRAIN = """
import os, pathlib, time, torch
import everstep

HERE = pathlib.Path(__file__).parent

def is_over(step):
    return (HERE / "goal").exists() and step >= int((HERE / "goal").read_text())

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100_000):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        with (HERE / "steps").open("a") as file:
            file.write(f"{run.rank} {run.generation} {step} {os.getpid()}\\n")
        if is_over(step):
            break

everstep.main(train)
"""


class Training:
    """A job of two ranks on one node, with its agent and the controllers."""

    def __init__(self, folder: Path, controllers: list[ControllerProcess], launcher: LauncherProcess) -> None:
        self.folder = folder
        self.controllers = controllers
        self.launcher = launcher

    def until(self, condition: Callable[[], object], expected: str) -> None:
        self.launcher.eventually(condition, expected)

    def finished_steps(self) -> list[tuple[int, int, int, int]]:
        """(rank, generation, step, pid) of every finished step, in the order of time."""
        return [(rank, generation, step, pid) for rank, generation, step, pid in step_log.rows(self.folder)]

    def last_step(self, generation: int) -> int:
        """The last step of rank 0 in ``generation``; 0 before its first step."""
        return max(
            (step for rank, number, step, _ in self.finished_steps() if (rank, number) == (0, generation)), default=0
        )

    def wait_for_steps(self, generation: int) -> None:
        """Wait for more steps of ``generation``."""
        first = self.last_step(generation)
        self.until(
            lambda: self.last_step(generation) >= max(first, 1) + MORE_STEPS, f"steps of generation {generation}"
        )

    def kill_rank(self, rank: int) -> None:
        pid = next(pid for number, _, _, pid in reversed(self.finished_steps()) if number == rank)
        os.kill(pid, signal.SIGKILL)

    def finish(self) -> int:
        """Let the job finish; return its last step."""
        last = max(step for _, _, step, _ in self.finished_steps()) + MORE_STEPS
        step_log.set_goal(self.folder, last)
        assert self.launcher.wait() == 0, self.launcher.err
        return last

    def leader(self) -> ControllerProcess:
        self.until(lambda: any(controller.leads() for controller in self.controllers), "a controller that leads")
        return next(controller for controller in self.controllers if controller.leads())

    def generations(self) -> tuple[GenerationSpec, ...]:
        """All generations of the job, as the leader lists them."""
        status, body = self.leader().ask("GET", "/v1/generations?job=j", None, VIEWER)
        assert status == 200, body
        return msgspec.json.decode(body, type=op.GenerationList).generations


@pytest.fixture
def controllers(program_forks: ForkPool, short_path: Path, postgres: str) -> Iterator[list[ControllerProcess]]:
    settings = short_path / "settings.toml"
    settings.write_text(f"{SHORT_LEASE}{LONG_SILENCES}")
    made = []
    for name in "abc":
        (short_path / name).mkdir()
        made.append(
            ControllerProcess(
                short_path / name, program_forks, database=postgres, arguments=("--settings", str(settings))
            )
        )
    try:
        yield [controller.start() for controller in made]
    finally:
        for controller in made:
            controller.end()


@pytest.fixture
def training(short_path: Path, controllers: list[ControllerProcess]) -> Iterator[Training]:
    (short_path / "train.py").write_text(TRAIN)
    with agent_process(",".join(controller.url for controller in controllers)) as agent:
        agent.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        agent.start()
        argv = ["--agent-socket", str(agent.run_dir / "agent.sock"), "--job", "j", "--nproc-per-node", "2"]
        with launched(
            short_path, *argv, "--standby-delay-s", "0.1", "--progress-interval-s", "1", "train.py"
        ) as launcher:
            yield Training(short_path, controllers, launcher)


@pytest.mark.promise("single-leader")
@pytest.mark.timeout(500)
def test_training_loses_no_step_across_leader_failovers(training: Training) -> None:
    training.wait_for_steps(generation=1)

    first = training.leader()
    first.kill()
    training.wait_for_steps(generation=1)  # training needs no controller while no rank is lost
    second = training.leader()
    assert second is not first
    training.kill_rank(1)
    training.wait_for_steps(generation=2)
    assert [spec.number for spec in training.generations()] == [1, 2]

    second.kill()
    training.kill_rank(1)  # while no controller leads
    training.wait_for_steps(generation=3)
    third = training.leader()
    assert third not in (first, second)
    reasons = [GenerationReason.FORMED, GenerationReason.RANK_LOST, GenerationReason.RANK_LOST]
    generations = training.generations()
    assert [spec.reason for spec in generations] == reasons, [spec.sentence for spec in generations]
    below = training.launcher.descendants()
    last = training.finish()

    steps = [step for rank, _, step, _ in training.finished_steps() if rank == 0]
    assert sorted(set(steps)) == list(range(1, last + 1))
    assert len(steps) - len(set(steps)) <= 2, "only steps with a killed rank may be repeated"
    assert len({pid for rank, _, _, pid in training.finished_steps() if rank == 0}) == 1, (
        "rank 0 must regroup within its process"
    )
    assert len({pid for rank, _, _, pid in training.finished_steps() if rank == 1}) == 3
    assert events(third, "node.lost") == []
    assert not any(map(is_running, below))
    output = training.launcher.err
    assert "2 ranks on 1 node" in output
    assert re.search(r"job j finished at step \d+: [12] recover", output), (
        output
    )  # a killed leader may lose the end of the first recovery
    assert "receipt as a page: everstep job receipt j --html FILE" in output
