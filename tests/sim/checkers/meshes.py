"""Blocks of a mesh are whole, stay within the domain that they ask for, and are not torn apart for others."""

from __future__ import annotations

from collections.abc import Sequence

from everstep_controller.core.effects import PutGeneration

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class Meshes(Checker):
    """Looks at every roster, whatever it was made for: growth, an eviction, a loss, a window."""

    name = "meshes"

    def __init__(self) -> None:
        self._before: dict[str, Sequence[str]] = {}

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.TookOver: self._took_over}

    def _took_over(self, _fact: facts.TookOver) -> None:
        """The last roster that the one before decided may not have been written."""
        self._before.clear()

    def _handled(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, PutGeneration) and effect.spec.spec.block_nodes > 1:
                self._look(effect.spec)

    def _look(self, spec: GenerationSpec) -> None:
        what, block = f"{spec.job} generation {spec.number}", spec.spec.block_nodes
        blocks = _blocks(spec.seats, block)
        for nodes in blocks:
            if len(nodes) != block:
                raise Violation(self.name, f"{what}: {nodes} are no whole block of {block}")
            names = {node: self._domain(node, spec.spec.block_within) for node in nodes}
            if spec.spec.block_within and (len(set(names.values())) > 1 or "" in names.values()):
                raise Violation(self.name, f"{what}: a block is not within one {spec.spec.block_within}: {names}")
        before = () if spec.reason is GenerationReason.FORMED else self._before.get(spec.job, ())
        for nodes in _blocks(before, block):
            if set(nodes) <= set(spec.seats) and nodes not in blocks:
                raise Violation(self.name, f"{what}: {nodes} lost nobody, and are a block no more: {spec.seats}")
        self._before[spec.job] = spec.seats

    def _domain(self, node: str, within: str) -> str:
        domain = self.world.machines[node].domain
        return {"rack": domain.rack, "switch": domain.switch, "": ""}[within]


def _blocks(seats: Sequence[str], block: int) -> list[tuple[str, ...]]:
    return [tuple(seats[at : at + block]) for at in range(0, len(seats), block)]
