"""Updates of tracked state while it is copied: who waits for the copy, and what becomes of one that was overtaken."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.lone_rank import LoneRank, lone_rank
from trainer_hooks.interrupt import Regroup
from trainer_hooks.keeper import IdleKeeper
from trainer_hooks.place import Place
from trainer_hooks.restore import Restoration
from trainer_hooks.run import Run
from trainer_hooks.snapshot import snapshotter as module
from trainer_hooks.snapshot.choices import Choices
from trainer_hooks.snapshot.snapshotter import Snapshotter
from trainer_hooks.state import TrackedState


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


class CopyingKeeper(IdleKeeper):
    """Snapshots whose copier stands still until somebody has waited for it, or let it go on."""

    def __init__(self, rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self.go_on = threading.Event()
        self.begun = threading.Event()
        copy = module.Sources.copy

        def late_copy(*arguments: object, **more: object) -> object:
            self.begun.set()
            assert self.go_on.wait(10), "nobody waits for the copy"
            return copy(*arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(module.Sources, "copy", late_copy)

    def track(self, objects: Mapping[str, object], choices: Choices) -> int:
        spec = generation(1)
        state = TrackedState(objects)
        self.snapshots = Snapshotter(
            self._rank.client, state, spec, spec.roster[0], dist.HashStore(), lambda _: None, choices=choices
        )
        return 0

    def before_update(self) -> None:
        self.go_on.set()
        self.snapshots.wait()

    def step_finished(self, step: int) -> None:
        self.snapshots.begin(step)


def restored(rank: LoneRank, objects: Mapping[str, object]) -> Version | None:
    spec = generation(2, restore=RestoreRule())
    return Restoration(rank.client, spec, spec.roster[0], dist.HashStore()).fill(TrackedState(objects)).version


def test_every_one_of_listed_optimizers_waits_for_the_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
    keeper = CopyingKeeper(rank, monkeypatch)
    run = Run(Place(), keeper)
    run.track(model=stages, optimizer=optimizers)
    run.step_finished()
    stood = stages[1]["stage1"].weight.detach().clone()
    for parameter in stages[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()
    keeper.go_on.set()
    keeper.snapshots.close(finish=True)
    again = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    assert restored(rank, {"model": again}) == Version(1, 1)
    assert torch.equal(again[1]["stage1"].weight, stood)


def test_an_optimizer_that_outlives_a_generation_asks_only_the_run_that_goes_on() -> None:
    class Over(IdleKeeper):
        def before_update(self) -> None:
            raise Regroup

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    first = Run(Place(), Over())
    first.track(model=model, optimizer=[optimizer])
    with pytest.raises(Regroup):
        optimizer.step()
    first.close()
    Run(Place(), IdleKeeper()).track(model=model, optimizer=[optimizer])
    optimizer.step()
