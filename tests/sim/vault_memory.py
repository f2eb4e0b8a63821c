"""A machine's checkpoint memory: it outlives ranks, launchers and agents, and is lost with the power."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK, SlotHeader, SlotState, slot_to_fill
from tests.sim.training_state import TrainingState

PARITY_SLOTS = 2
"""Of a group's parity on one of its homes: the version that is protected, and the next one while it is made."""


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
    slots: list[Slot | None] = field(default_factory=lambda: [None] * SLOTS_PER_RANK)

    def headers(self) -> list[SlotHeader | None]:
        """As a segment's file has them."""
        return [
            None
            if old is None
            else SlotHeader(SlotState.SEALED if old.sealed else SlotState.FILLING, old.layout[0], old.version, 0, 0)
            for old in self.slots
        ]

    def begin(self, slot: Slot, keep: set[Version]) -> None:
        """Fills the slot that may be filled next (``everstep.layout.slots.slot_to_fill``). Raises OutOfSlotMemory."""
        self.slots[slot_to_fill(self.headers(), keep)] = slot

    def sealed(self) -> list[Slot]:
        return [slot for slot in self.slots if slot is not None and slot.sealed]


@dataclass(frozen=True, slots=True)
class Parity:
    """P or Q of a version: of which slots, in the order of the group's members."""

    version: Version
    letter: str
    members: tuple[tuple[str, Slot], ...]

    @property
    def digest(self) -> str:
        """The same for P and Q of the same shards."""
        return ",".join(f"{node}:{slot.layout}:{slot.version}:{slot.state.digest}" for node, slot in self.members)


class VaultMemory:
    """All segments of one machine, and the generation up to which each job's transfers are refused.

    ``full``: there is no room for copies of other nodes' slots, nor for parity. ``parity``: by job and group.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[str, str, int], Segment] = {}
        self.parity: dict[tuple[str, int], list[Parity]] = {}
        self.generations: dict[str, int] = {}
        self.full = False

    def segment(self, job: str, node: str, place: int, *, replica: bool, slots: int = SLOTS_PER_RANK) -> Segment:
        """``place``: the local rank of an own segment, the rank of a copied one. ``slots``: at least so many."""
        segment = self._segments.setdefault((job, node, place), Segment(node, place, replica))
        segment.slots += [None] * (slots - len(segment.slots))
        return segment

    def of_job(self, job: str) -> list[Segment]:
        return [segment for (name, _, _), segment in self._segments.items() if name == job]

    def held(self, job: str, rank: int, version: Version) -> Slot | None:
        """That rank's share of a version, if it is here; a rotten one where there is no other."""
        found = [
            slot
            for segment in self.of_job(job)
            for slot in segment.sealed()
            if slot.version == version and slot.layout[0] == rank
        ]
        return min(found, key=lambda slot: slot.rotten, default=None)

    def keep_parity(self, job: str, group: int, made: Parity, keep: set[Version]) -> None:
        """Raises OutOfSlotMemory where two others are to be kept."""
        held = [one for one in self.parity.get((job, group), ()) if one.version != made.version]
        while len(held) >= PARITY_SLOTS:
            loose = [one for one in held if one.version not in keep]
            if not loose:
                raise OutOfSlotMemory(f"both slots hold parity that is still needed: {sorted(keep)}")
            held.remove(min(loose, key=lambda one: one.version))
        self.parity[job, group] = [*held, made]

    def configure(self, job: str, generation: int) -> None:
        self.generations[job] = max(generation, self.generations.get(job, 0))

    def forget(self, job: str) -> None:
        self._segments = {key: segment for key, segment in self._segments.items() if key[0] != job}
        self.parity = {key: made for key, made in self.parity.items() if key[0] != job}
        self.generations.pop(job, None)

    def clear(self) -> None:
        self._segments, self.generations, self.parity = {}, {}, {}
