"""Test that a checker detects every mutant."""

from __future__ import annotations

import pytest

from everstep_controller.core.health import eviction
from tests.sim.mutants.all_mutants import MUTANTS
from tests.sim.mutants.detection import detect
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.patching import edited_function


@pytest.mark.promise("simulation")
@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        # `make test` plays every fourth mutant, the nightly tests play the others
        pytest.param(mutant, id=mutant.name.replace(" ", "_"), marks=[pytest.mark.nightly] if index % 4 else [])
        for index, mutant in enumerate(MUTANTS)
    ],
)
def test_mutant_is_detected(mutant: Mutant) -> None:
    detection = detect(mutant)
    assert detection.outcome is not None, f"{mutant.name}: no checker detected it in {detection.worlds} worlds"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_mutant_can_be_applied(mutant: Mutant) -> None:
    """Notice at once that the text that a mutant changes is gone, also for mutants of the nightly tests."""
    with mutant.apply():
        pass


def test_mutation_rejects_missing_text() -> None:
    with pytest.raises(AssertionError, match="0 times"), edited_function(eviction.recent_evictions, "no such text", ""):
        pass
