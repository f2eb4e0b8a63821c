"""Which wrong states a generation may start from after corruption: those that nobody could tell from right ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from everstep_controller.core.effects import PutGeneration
from everstep_controller.core.events import Tick

from everstep.ids import Version
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule
from tests.sim import facts
from tests.sim.checkers.restores import Restores
from tests.sim.facts import Violation
from tests.sim.training_state import TrainingState

CLEAN = TrainingState(None, 60, (), frozenset())
WRONG = TrainingState(CLEAN, 66, (), frozenset({"n4"}))


class Runs:
    """Generations of one replicated job, and what they start from."""

    def __init__(self) -> None:
        self.checker = Restores()
        self.checker.world = SimpleNamespace(jobs={"b": SimpleNamespace(replicated=True)})  # type: ignore[assignment]
        self._watch = self.checker.watches()

    def opens(self, number: int, *seats: str, ceiling: Version | None = None) -> GenerationSpec:
        more: dict[str, Any] = {"trace": "", "store": "n1:8000", "store_node": seats[0], "secret": "s" * 64}
        spec = GenerationSpec(
            job="b",
            number=number,
            reason=GenerationReason.CORRUPTION if ceiling is not None else GenerationReason.GROWTH,
            sentence="",
            seats=seats,
            restore=RestoreRule(ceiling=ceiling),
            replica_nodes={},
            holders=(),
            spec=JobSpec(job="b", min_nodes=1, max_nodes=2),
            issued_at=0.0,
            **more,
        )
        self._watch[facts.Handled](facts.Handled("c1", 1, Tick(), [PutGeneration(spec, 0.0)], 0.0))
        return spec

    def starts(self, spec: GenerationSpec, version: Version, state: TrainingState) -> None:
        self._watch[facts.Restored](facts.Restored(spec, version, state, torn=False))


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_checker_rejects_state_computed_wrong_by_one_of_two(runs: Runs) -> None:
    runs.opens(6, "n4", "n5")
    again = runs.opens(7, "n4", "n5", ceiling=Version(6, 66))
    with pytest.raises(Violation, match=r"starts from what \['n4'\] got wrong"):
        runs.starts(again, Version(6, 66), WRONG)


def test_checker_allows_undetectable_state_of_a_lone_node(runs: Runs) -> None:
    runs.opens(6, "n4")
    runs.starts(runs.opens(7, "n4", "n2"), Version(1, 60), CLEAN)
    runs.starts(runs.opens(8, "n4", "n2", ceiling=Version(6, 66)), Version(6, 66), WRONG)
