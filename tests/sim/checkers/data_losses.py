"""Track the nodes that lost checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.cluster.observations import FaultInjected, MemoryLost

if TYPE_CHECKING:
    from tests.sim.cluster.world import World


class DataLosses:
    """The times at which nodes lost their memory, or had a slot corrupted."""

    def __init__(self) -> None:
        self._losses: list[tuple[float, str]] = []

    def note(self, world: World, observation: MemoryLost | FaultInjected) -> None:
        """Note a loss of memory, or a fault that corrupts a slot."""
        if isinstance(observation, MemoryLost) or observation.kind == "corrupt_slot":
            self._losses.append((world.timeline.now, observation.node))

    def since(self, at: float) -> set[str]:
        """Return the nodes that lost data at that time or later."""
        return {node for lost_at, node in self._losses if lost_at >= at}
