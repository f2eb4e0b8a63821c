"""Every deliberate mistake is seen by a checker: what the checkers say is worth something."""

from __future__ import annotations

import pytest
from everstep_controller.core.health import eviction

from tests.sim.mutants.hunt import hunt
from tests.sim.mutants.listed import MUTANTS
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.surgery import mistaken


@pytest.mark.promise("simulation")
@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        # every fourth in every suite, the others at night
        pytest.param(mutant, id=mutant.name.replace(" ", "_"), marks=[pytest.mark.nightly] if place % 4 else [])
        for place, mutant in enumerate(MUTANTS)
    ],
)
def test_mutant_is_detected(mutant: Mutant) -> None:
    sighting = hunt(mutant)
    assert sighting.outcome is not None, f"{mutant.name}: nobody saw it in {sighting.worlds} worlds"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_mutant_can_be_applied(mutant: Mutant) -> None:
    """Notice at once when the text that a mutant changes is gone, also for mutants that are hunted only at night."""
    with mutant.apply():
        pass


def test_mutant_list_has_at_least_fifteen() -> None:
    assert len({mutant.name for mutant in MUTANTS}) >= 15


def test_mutation_is_undone_afterwards() -> None:
    before = eviction.recent_evictions
    with mistaken(eviction.recent_evictions, "eviction.evicted_at >", "eviction.evicted_at <"):
        assert eviction.recent_evictions is not before
    assert eviction.recent_evictions is before


def test_mutation_rejects_missing_text() -> None:
    with pytest.raises(AssertionError, match="0 times"), mistaken(eviction.recent_evictions, "no such text", ""):
        pass
