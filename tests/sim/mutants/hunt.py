"""``python -m tests.sim.mutants.hunt``: lets every mutant loose in the default worlds, and says who sees it where."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from tests.sim.mutants.listed import MUTANTS
from tests.sim.mutants.mutant import Mutant
from tests.sim.plan import make
from tests.sim.run import CRASH, Outcome, play

DEFAULT_SEEDS = 150
"""Worlds in which every mutant must be seen."""


@dataclass(frozen=True)
class Sighting:
    """``outcome`` None: nobody saw it."""

    mutant: str
    outcome: Outcome | None
    worlds: int


def hunt(mutant: Mutant, seeds: int = DEFAULT_SEEDS) -> Sighting:
    """Plays worlds with the mistake in place until a checker complains."""
    order = [*mutant.seeds, *(seed for seed in range(seeds) if seed not in mutant.seeds)]
    with mutant.apply():
        for count, seed in enumerate(order, 1):
            outcome = play(make(seed))
            if outcome.checker not in ("", CRASH):  # a mistake that only crashes is seen by anybody
                return Sighting(mutant.name, outcome, count)
    return Sighting(mutant.name, None, len(order))


def _hunt_by_place(place: int) -> Sighting:
    logging.disable(logging.CRITICAL)
    return hunt(MUTANTS[place])


def main() -> int:
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count()) as pool:
        found = pool.imap(_hunt_by_place, range(len(MUTANTS)))
        console = Console(stderr=True)
        sightings = list(track(found, "mutants", total=len(MUTANTS), console=console, disable=not sys.stderr.isatty()))
    for sighting in sightings:
        where = (
            "NOBODY SAW IT"
            if sighting.outcome is None
            else f"seed {sighting.outcome.seed}, {sighting.outcome.sentence}"
        )
        print(f"{sighting.mutant}: {where[:160]} ({sighting.worlds} worlds)")
    missed = sum(1 for sighting in sightings if sighting.outcome is None)
    print(f"{len(sightings) - missed} of {len(sightings)} mistakes are seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
