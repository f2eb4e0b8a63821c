"""A machine's checkpoint memory: it outlives ranks, launchers and agents, and is lost with the power."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.ids import Version
from everstep.slots import SlotHeader, SlotState, slot_to_fill
from tests.sim.training_state import TrainingState

SLOTS = 5


@dataclass(slots=True)
class Slot:
    """One rank's share of a version. ``layout``: (rank, world, ranks a node, replicas, replicated)."""

    version: Version
    layout: tuple[int, int, int, int, bool]
    state: TrainingState
    sealed: bool = False
    rotten: bool = False


@dataclass(slots=True)
class Segment:
    """The slots of one rank of one node: its own, or copies of them on another machine."""

    node: str
    rank: int
    replica: bool
    slots: list[Slot | None] = field(default_factory=lambda: [None] * SLOTS)

    def begin(self, slot: Slot, keep: set[Version]) -> None:
        """Fills the slot that may be filled next (``everstep.slots.slot_to_fill``)."""
        headers = [
            None
            if old is None
            else SlotHeader(SlotState.SEALED if old.sealed else SlotState.FILLING, old.layout[0], old.version, 0, 0)
            for old in self.slots
        ]
        self.slots[slot_to_fill(headers, keep)] = slot

    def sealed(self) -> list[Slot]:
        return [slot for slot in self.slots if slot is not None and slot.sealed]


class VaultMemory:
    """All segments of one machine, and the generation up to which each job's transfers are refused.

    ``full``: there is no room for copies of other nodes' slots.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[str, str, int], Segment] = {}
        self.generations: dict[str, int] = {}
        self.full = False

    def segment(self, job: str, node: str, place: int, *, replica: bool) -> Segment:
        """``place``: the local rank of an own segment, the rank of a copied one."""
        return self._segments.setdefault((job, node, place), Segment(node, place, replica))

    def of_job(self, job: str) -> list[Segment]:
        return [segment for (name, _, _), segment in self._segments.items() if name == job]

    def configure(self, job: str, generation: int) -> None:
        self.generations[job] = max(generation, self.generations.get(job, 0))

    def forget(self, job: str) -> None:
        self._segments = {key: segment for key, segment in self._segments.items() if key[0] != job}

    def clear(self) -> None:
        self._segments, self.generations = {}, {}
