"""Check that mesh blocks are whole, lie within the requested domain, and stay together while they lose no node."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.effects import PutGeneration
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import LeaderDecided, LeaderStarted


class MeshBlocks(Checker):
    """Check every roster, whatever the reason of the generation."""

    name = "mesh_blocks"

    def __init__(self) -> None:
        self._seats: dict[str, Sequence[str]] = {}

    def handlers(self) -> Handlers:
        return {LeaderDecided: self._on_decision, LeaderStarted: self._on_leader}

    def _on_leader(self, _start: LeaderStarted) -> None:
        """Forget the rosters: the last one that the earlier leader decided may not have been written."""
        self._seats.clear()

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, PutGeneration) and effect.spec.spec.block_nodes > 1:
                self._check(effect.spec)

    def _check(self, spec: GenerationSpec) -> None:
        title, block = f"{spec.job} generation {spec.number}", spec.spec.block_nodes
        blocks = _blocks(spec.seats, block)
        for nodes in blocks:
            if len(nodes) != block:
                raise Violation(self.name, f"{title}: {nodes} are not a whole block of {block}")
            names = {node: self._domain(node, spec.spec.block_within) for node in nodes}
            if spec.spec.block_within and (len(set(names.values())) > 1 or "" in names.values()):
                raise Violation(self.name, f"{title}: a block is not within one {spec.spec.block_within}: {names}")
        before = () if spec.reason is GenerationReason.FORMED else self._seats.get(spec.job, ())
        for nodes in _blocks(before, block):
            if set(nodes) <= set(spec.seats) and nodes not in blocks:
                raise Violation(self.name, f"{title}: {nodes} lost no node, and are no block any more: {spec.seats}")
        self._seats[spec.job] = spec.seats

    def _domain(self, node: str, within: str) -> str:
        domain = self.world.machines[node].domain
        return {"rack": domain.rack, "switch": domain.switch, "": ""}[within]


def _blocks(seats: Sequence[str], block: int) -> list[tuple[str, ...]]:
    return [tuple(seats[start : start + block]) for start in range(0, len(seats), block)]
