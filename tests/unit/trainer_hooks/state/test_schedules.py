"""A schedule knows its optimizer's groups by their places, which are others where a rank has other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.unit.trainer_hooks.state.test_snapshot_state import load

RATES = {"weight": 0.1, "bias": 0.2}
SCHEDULES: dict[str, Callable[[SGD], Any]] = {
    "lambda": lambda of: LambdaLR(of, lambda epoch: 0.9**epoch),
    "in sequence": lambda of: SequentialLR(of, [LambdaLR(of, lambda e: 0.9**e), ExponentialLR(of, 0.5)], [6]),
    "chained": lambda of: ChainedScheduler([LambdaLR(of, lambda e: 0.9**e), ExponentialLR(of, 1.0)]),
    "cyclic": lambda of: CyclicLR(of, [0.1 * g["lr"] for g in of.param_groups], [g["lr"] for g in of.param_groups], 5),
    "plateau": lambda of: ReduceLROnPlateau(of, patience=0, min_lr=[g["lr"] / 8 for g in of.param_groups]),
}


class Layers:
    """Some of two layers, the first without a bias, in groups by kind with rates of their own, in this order."""

    def __init__(self, names: str, schedule: str, *kinds: str) -> None:
        self.model = nn.ModuleDict({name: nn.Linear(2, 2, bias=name == "b") for name in names})
        self.kinds = kinds
        named = [(kind, [p for n, p in self.model.named_parameters() if n.endswith(kind)]) for kind in kinds]
        self.optimizer = SGD([{"params": of, "lr": RATES[kind], "momentum": 0.5} for kind, of in named])
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})

    def steps(self, count: int) -> dict[str, list[float]]:
        """The rates of each kind after each of so many steps."""
        found: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        for _ in range(count):
            self.optimizer.step()
            self.schedule.step(*([1.0] if isinstance(self.schedule, ReduceLROnPlateau) else []))
            for kind, group in zip(self.kinds, self.optimizer.param_groups, strict=True):
                found[kind].append(group["lr"])
        return found


@pytest.mark.promise("layout-change")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_rates_follow_parameters_and_not_positions(schedule: str, first: int) -> None:
    stages = [Layers("a", schedule, "weight"), Layers("b", schedule, "weight", "bias")]
    for stage in stages:
        stage.steps(3)
    blobs = [stage.state.capture().data() for stage in stages]
    expected = stages[1].steps(5)
    after = [
        Layers("ab", schedule, "weight", "bias"),
        Layers("ab", schedule, "bias", "weight"),
        Layers("b", schedule, "bias"),
    ]
    for layers in after:
        load(layers.state, blobs[first], blobs[1 - first])
        assert layers.steps(5) == {kind: expected[kind] for kind in layers.kinds}
