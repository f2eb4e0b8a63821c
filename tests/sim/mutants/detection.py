"""Play worlds with a mutant until a checker detects it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.sim.faults.plan import make_plan
from tests.sim.mutants.mutant import Mutant
from tests.sim.run import CRASH, Outcome, play

DEFAULT_SEEDS = 150
"""Number of worlds within which a checker must detect every mutant."""


@dataclass(frozen=True)
class Detection:
    """The first world in which a checker detected the mutant. ``outcome`` is None if no checker did."""

    mutant: str
    outcome: Outcome | None
    worlds: int


def detect(mutant: Mutant, seeds: int = DEFAULT_SEEDS) -> Detection:
    """Play worlds with the mutant, its own seeds first, until a checker reports a broken promise."""
    order = [*mutant.seeds, *(seed for seed in range(seeds) if seed not in mutant.seeds)]
    with mutant.apply():
        for count, seed in enumerate(order, 1):
            outcome = play(make_plan(seed))
            if outcome.checker not in ("", CRASH):  # every test would detect a crash, so it does not count
                return Detection(mutant.name, outcome, count)
    return Detection(mutant.name, None, len(order))
