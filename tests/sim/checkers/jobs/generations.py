"""Check that generations of a job strictly increase, and that no two rosters share a number."""

from __future__ import annotations

from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import GenerationSpec
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import BatchWritten, DirectiveDelivered, GenerationEntered

Roster = tuple[tuple[str, int], ...]


class Generations(Checker):
    """Compare the generations that are written, that reach nodes, and that processes enter."""

    name = "generations"

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._rosters: dict[tuple[str, int], Roster] = {}

    def handlers(self) -> Handlers:
        return {
            BatchWritten: self._on_write,
            DirectiveDelivered: self._on_delivery,
            GenerationEntered: self._on_entry,
        }

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.generations:
            before = self._newest.get(row.job, 0)
            if row.number <= before:
                raise Violation(self.name, f"{row.job}: generation {row.number} is written after {before}")
            self._newest[row.job] = row.number

    def _on_delivery(self, delivery: DirectiveDelivered) -> None:
        if isinstance(delivery.body, NewGeneration):
            self._compare(delivery.body.spec, delivery.node)

    def _on_entry(self, entry: GenerationEntered) -> None:
        self._compare(entry.spec, entry.node)
        seat = entry.spec.roster[entry.rank]
        if seat.node != entry.node:
            raise Violation(self.name, f"{entry.node} runs rank {entry.rank}, which belongs to {seat.node}")

    def _compare(self, spec: GenerationSpec, node: str) -> None:
        roster = tuple((member.node, member.local_rank) for member in spec.roster)
        known = self._rosters.setdefault((spec.job, spec.number), roster)
        if known != roster:
            raise Violation(self.name, f"{spec.job}: two rosters have number {spec.number} ({node} has the second)")
