"""Restored tensors that a script overwrites with other values before its first step are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.base.interrupt import Interrupter
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.restore.overwrites import RestoredValues
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import GenerationSession
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import LoneRank, lone_rank


class Training:
    """A model and an optimizer with the state of some steps."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()
        self.older = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.step()
        self.newest = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer})
        self.restored = RestoredValues(self.state)

    def step(self) -> None:
        self.model(torch.randn(8, 40)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def load_older(training: Training) -> None:
    training.model.load_state_dict(training.older[0])
    training.optimizer.load_state_dict(training.older[1])


def load_older_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(training.older[1])


def copy_older_by_data(training: Training) -> None:
    for name, parameter in training.model.named_parameters():
        parameter.data.copy_(training.older[0][name])


def reset_head(training: Training) -> None:
    training.model[2].reset_parameters()  # type: ignore[operator]


@pytest.mark.promise("overwritten-restore")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (load_older, "model.0.weight"),
        (load_older_optimizer, "optimizer.model.0.weight."),
        (copy_older_by_data, "model.0.weight"),
        (reset_head, "model.2.weight"),
    ],
)
def test_overwritten_tensors_are_named(
    change: Callable[[Training], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    change(training)
    training.restored.warn_if_overwritten(17, {"rank": 0})
    assert caplog.text.count("changed after run.track had restored step 17") == 1
    assert name in caplog.text
    assert "Load a checkpoint of your own before run.track" in caplog.text


@pytest.mark.promise("overwritten-restore")
def test_only_a_restored_session_warns_and_only_once(program_forks: ForkPool, caplog: pytest.LogCaptureFixture) -> None:
    with lone_rank(program_forks) as rank:
        for number in (1, 2):
            session = session_of(rank, number)
            training = Training()
            run = Run(RankContext(rank=0, world_size=1), session)
            run.track(model=training.model, optimizer=training.optimizer)
            load_older(training)
            for _ in run.steps(until=run.last_finished_step + 3):
                training.step()
            session.close()  # after the last step, which is then computed again
            assert caplog.text.count("changed after run.track had restored step 2") == number - 1


def session_of(rank: LoneRank, number: int) -> GenerationSession:
    spec = generation(number, restore=None if number == 1 else RestoreRule())
    group = SimpleNamespace(spec=spec, member=spec.roster[0], store=HashStore(), device=torch.device("cpu"))
    return GenerationSession(
        group,  # type: ignore[arg-type]
        directives=SimpleNamespace(is_generation_over=lambda *_: False),  # type: ignore[arg-type]
        progress=MagicMock(),
        interrupter=Interrupter(),
        connect_vault=lambda: rank.client,
        send=lambda _: None,
        timeline=None,
        clock=SYSTEM_CLOCK,
    )
