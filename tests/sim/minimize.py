"""Delta debugging: which of a seed's faults are needed for its failure (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.plan import Plan


def shortest(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan with as few of the faults as were found to keep ``fails`` true: none can be left out any more."""
    places = [place for place, _ in plan.faults]
    parts = 2
    while len(places) >= 1:
        size = -(-len(places) // parts)
        chunks = [places[i : i + size] for i in range(0, len(places), size)]
        kept = _without_one(plan, places, chunks, fails)
        if kept is not None:
            places, parts = kept, max(2, parts - 1)
        elif parts >= len(places):
            break
        else:
            parts = min(len(places), parts * 2)
    return plan.only(places)


def _without_one(
    plan: Plan, places: list[int], chunks: list[list[int]], fails: Callable[[Plan], bool]
) -> list[int] | None:
    """The places without one of the chunks, where that still fails."""
    for chunk in chunks:
        kept = [place for place in places if place not in chunk]
        if fails(plan.only(kept)):
            return kept
    return None
