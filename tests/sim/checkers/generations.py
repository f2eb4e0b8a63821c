"""Generations of a job strictly increase, and no two rosters share a number."""

from __future__ import annotations

from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation

Roster = tuple[tuple[str, int], ...]


class Generations(Checker):
    """By what is written, by what reaches nodes, and by what processes enter."""

    name = "generations"

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._rosters: dict[tuple[str, int], Roster] = {}

    def watches(self) -> Watches:
        return {facts.Durable: self._durable, facts.Delivered: self._delivered, facts.Entered: self._entered}

    def _durable(self, fact: facts.Durable) -> None:
        for row in fact.batch.generations:
            before = self._newest.get(row.job, 0)
            if row.number <= before:
                raise Violation(self.name, f"{row.job}: generation {row.number} is written after {before}")
            self._newest[row.job] = row.number

    def _delivered(self, fact: facts.Delivered) -> None:
        if isinstance(fact.body, NewGeneration):
            self._compare(fact.body.spec, fact.node)

    def _entered(self, fact: facts.Entered) -> None:
        self._compare(fact.spec, fact.node)
        seat = fact.spec.roster[fact.rank]
        if seat.node != fact.node:
            raise Violation(self.name, f"{fact.node} plays rank {fact.rank}, which is {seat.node}'s")

    def _compare(self, spec: GenerationSpec, node: str) -> None:
        roster = tuple((member.node, member.local_rank) for member in spec.roster)
        known = self._rosters.setdefault((spec.job, spec.number), roster)
        if known != roster:
            raise Violation(self.name, f"{spec.job}: two rosters have number {spec.number} ({node} has the second)")
