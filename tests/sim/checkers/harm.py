"""Which nodes lost what their memory held, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim import facts

if TYPE_CHECKING:
    from tests.sim.world import World


class Harm:
    """Notes of memory that went, and of slots that began to rot."""

    def __init__(self) -> None:
        self._notes: list[tuple[float, str]] = []

    def note(self, world: World, fact: facts.MemoryLost | facts.FaultBegan) -> None:
        if isinstance(fact, facts.MemoryLost) or fact.kind == "rot_slots":
            self._notes.append((world.timeline.now, fact.node))

    def since(self, at: float) -> set[str]:
        """The nodes that were harmed at that moment or later."""
        return {node for noted, node in self._notes if noted >= at}
