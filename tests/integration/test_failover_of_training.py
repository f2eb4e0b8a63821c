"""Controllers over PostgreSQL, an agent, a launcher and two ranks: leaders are killed, and ranks; training goes on."""

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
from tests.support import step_log
from tests.support.agents import agent_process
from tests.support.controllers import PATIENT, SECRET, VIEWER, ControllerProcess
from tests.support.forked import ForkPool
from tests.support.launched import Launched, launched
from tests.support.postgres import postgres, postgres_server
from tests.support.processes import is_running
from tests.support.report_stream import events

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
    """A job of two ranks on one node, its agent, and the controllers that they all hang on."""

    def __init__(self, folder: Path, controllers: list[ControllerProcess], launcher: Launched) -> None:
        self.folder = folder
        self.controllers = controllers
        self.launcher = launcher

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.launcher.eventually(condition, what)

    # --- ranks ---------------------------------------------------------------------------------------------------

    def made(self) -> list[tuple[int, int, int, int]]:
        """(rank, generation, step, pid) of every step that any rank made, in the order of time."""
        return [(rank, generation, step, pid) for rank, generation, step, pid in step_log.rows(self.folder)]

    def newest(self, generation: int) -> int:
        """The last step of rank 0 in ``generation``; 0 before it has one."""
        return max((step for rank, number, step, _ in self.made() if (rank, number) == (0, generation)), default=0)

    def go_on(self, generation: int) -> None:
        """Waits for more steps of ``generation``."""
        first = self.newest(generation)
        self.until(lambda: self.newest(generation) >= max(first, 1) + MORE_STEPS, f"steps of generation {generation}")

    def kill_rank(self, rank: int) -> None:
        pid = next(pid for number, _, _, pid in reversed(self.made()) if number == rank)
        os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """Lets the job come to its end; its last step."""
        last = max(step for _, _, step, _ in self.made()) + MORE_STEPS
        step_log.set_goal(self.folder, last)
        assert self.launcher.wait() == 0, self.launcher.err
        return last

    # --- controllers ---------------------------------------------------------------------------------------------

    def leader(self) -> ControllerProcess:
        self.until(lambda: any(one.leads() for one in self.controllers), "a controller that leads")
        return next(one for one in self.controllers if one.leads())

    def generations(self) -> tuple[GenerationSpec, ...]:
        """All of the job's, as whoever leads knows them."""
        status, body = self.leader().ask("GET", "/v1/generations?job=j", None, VIEWER)
        assert status == 200, body
        return msgspec.json.decode(body, type=op.GenerationList).generations


@pytest.fixture
def controllers(program_forks: ForkPool, short_path: Path, postgres: str) -> Iterator[list[ControllerProcess]]:
    settings = short_path / "settings.toml"
    settings.write_text(f"{SHORT_LEASE}[policy]\n{PATIENT}")
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
    with agent_process(",".join(one.url for one in controllers)) as agent:
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
    training.go_on(generation=1)

    first = training.leader()
    first.kill()
    training.go_on(generation=1)  # nothing fails, and nobody waits for a controller
    second = training.leader()
    assert second is not first
    training.kill_rank(1)
    training.go_on(generation=2)
    assert [spec.number for spec in training.generations()] == [1, 2]

    second.kill()
    training.kill_rank(1)  # while nobody leads
    training.go_on(generation=3)
    third = training.leader()
    assert third not in (first, second)
    reasons = [GenerationReason.FORMED, GenerationReason.RANK_LOST, GenerationReason.RANK_LOST]
    generations = training.generations()
    assert [spec.reason for spec in generations] == reasons, [spec.sentence for spec in generations]
    below = training.launcher.descendants()
    last = training.end()

    steps = [step for rank, _, step, _ in training.made() if rank == 0]
    assert sorted(set(steps)) == list(range(1, last + 1))
    assert len(steps) - len(set(steps)) <= 2, "but for the step in which a rank was killed, none was made twice"
    assert len({pid for rank, _, _, pid in training.made() if rank == 0}) == 1, "rank 0 regrouped where it was"
    assert len({pid for rank, _, _, pid in training.made() if rank == 1}) == 3
    assert events(third, "node.lost") == []
    assert not any(map(is_running, below))
    said = training.launcher.err
    assert "2 ranks on 1 node" in said
    assert re.search(r"job j finished at step \d+: [12] recover", said), (
        said
    )  # the first one's end may die with a leader
    assert "receipt as a page: everstep job receipt j --html FILE" in said
