"""Copies are where they are not lost together: as many as are asked for, on different nodes, sharing no rack, switch or
power unit where that can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep_controller.core.effects import PutGeneration

from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class Placing(Checker):
    """Works out by trial what the best places are, each chosen beside those before it, for every node of each roster.
    Homes that copies did not get to may be passed over."""

    name = "placing"

    def watches(self) -> Watches:
        return {facts.Decided: self._handled}

    def _handled(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, PutGeneration):
                self._look(effect.spec, self._passed_over(fact, effect.spec.job))

    def _passed_over(self, fact: facts.Decided, job: str) -> set[str]:
        live = self.world.controller(fact.controller).state.job_runtime[job]
        return {home for home, until in live.commits.skipped_replica_nodes.items() if until > fact.at}

    def _look(self, spec: GenerationSpec, passed_over: set[str]) -> None:
        copies = min(spec.spec.replicas, len(spec.seats)) - 1
        takers = [node for node in spec.seats if node not in passed_over]
        if len(takers) <= copies:
            takers = list(spec.seats)
        for node in spec.seats:
            chosen = spec.replica_nodes[node]
            what = f"{spec.job} generation {spec.number}: copies of {node} are on {chosen}"
            if len(chosen) != copies or len({node, *chosen}) != copies + 1 or not set(chosen) <= set(spec.seats):
                raise Violation(self.name, f"{what}, and should be on {copies} others")
            if not set(chosen) <= set(takers):
                raise Violation(self.name, f"{what}, of which {sorted(set(chosen) - set(takers))} take none")
            costs, allowed = self._costs((node, *chosen)), self._worst((node,), takers, copies)
            if costs > allowed:
                raise Violation(self.name, f"{what}, which share {costs} domains where {allowed} would do")

    def _worst(self, holders: tuple[str, ...], takers: Sequence[str], copies: int) -> int:
        """What the best beside those before it cost together, whichever of equals is taken each time."""
        if not copies:
            return self._costs(holders)
        offers = {other: self._beside(other, holders) for other in takers if other not in holders}
        least = min(offers.values())
        best = (other for other, cost in offers.items() if cost == least)
        return max(self._worst((*holders, other), takers, copies - 1) for other in best)

    def _costs(self, holders: Sequence[str]) -> int:
        return sum(self._beside(one, holders[:at]) for at, one in enumerate(holders))

    def _beside(self, one: str, others: Collection[str]) -> int:
        """How many domains fail for it and for one of the others at once."""
        mine = self.world.machines[one].domain
        theirs = [self.world.machines[other].domain for other in others]
        return sum(
            bool(name) and name == getattr(other, kind)
            for other in theirs
            for kind, name in (("rack", mine.rack), ("switch", mine.switch), ("power", mine.power))
        )
