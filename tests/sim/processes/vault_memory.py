"""Simulate a machine's checkpoint memory.

The memory outlives ranks, launchers and agents, and is lost with the power.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import SLOTS_PER_RANK, slot_to_fill
from tests.sim.cluster.training_state import TrainingState

PARITY_SLOTS = 2
"""Slots for a group's parity on a node: for the protected version, and for the next one while it is made."""


@dataclass(slots=True)
class Slot:
    """One rank's share of a version.

    ``layout``: (rank, world size, ranks per node, replicas, whether the state is replicated).
    """

    version: Version
    layout: tuple[int, int, int, int, bool]
    state: TrainingState
    sealed: bool = False
    corrupt: bool = False


@dataclass(slots=True)
class Segment:
    """The slots of one rank of one node: its own, or copies of them on another machine."""

    node: str
    rank: int
    replica: bool
    slots: list[Slot | None] = field(default_factory=lambda: [None] * SLOTS_PER_RANK)

    def headers(self) -> list[SlotHeader | None]:
        """Return the slots' headers as in a segment's file."""
        return [
            None
            if slot is None
            else SlotHeader(SlotState.SEALED if slot.sealed else SlotState.FILLING, slot.layout[0], slot.version, 0, 0)
            for slot in self.slots
        ]

    def begin(self, slot: Slot, needed: set[Version]) -> None:
        """Fill the slot that ``everstep.layout.slots.slot_to_fill`` chooses.

        Raises:
            OutOfSlotMemory: All slots hold versions that are still needed.
        """
        self.slots[slot_to_fill(self.headers(), needed)] = slot

    def sealed(self) -> list[Slot]:
        """Return the sealed slots."""
        return [slot for slot in self.slots if slot is not None and slot.sealed]


@dataclass(frozen=True, slots=True)
class Parity:
    """P or Q of a version, with the slots that it was made from, in the order of the group's members."""

    version: Version
    letter: str
    members: tuple[tuple[str, Slot], ...]

    @property
    def digest(self) -> str:
        """Return a digest of the shards, which is equal for P and Q of the same shards."""
        return ",".join(f"{node}:{slot.layout}:{slot.version}:{slot.state.digest}" for node, slot in self.members)


class VaultMemory:
    """All segments of one machine.

    Attributes:
        parity: P and Q of parity groups, by job and group.
        generations: The newest generation of each job. Transfers of earlier ones are refused.
        is_full: Whether there is no room for copies of other nodes' slots, nor for parity.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[str, str, int], Segment] = {}
        self.parity: dict[tuple[str, int], list[Parity]] = {}
        self.generations: dict[str, int] = {}
        self.is_full = False

    def segment(self, job: str, node: str, rank: int, *, replica: bool, slots: int = SLOTS_PER_RANK) -> Segment:
        """Return a segment, made with at least ``slots`` slots if it does not exist.

        Args:
            job: The job's name.
            node: The node whose rank fills the segment.
            rank: The local rank of a segment of this node, or the rank of a copied segment.
            replica: Whether the segment is a copy of another node's segment.
            slots: The least number of slots.
        """
        segment = self._segments.setdefault((job, node, rank), Segment(node, rank, replica))
        segment.slots += [None] * (slots - len(segment.slots))
        return segment

    def segments_of(self, job: str) -> list[Segment]:
        """Return the job's segments."""
        return [segment for (name, _, _), segment in self._segments.items() if name == job]

    def find_share(self, job: str, rank: int, version: Version) -> Slot | None:
        """Return the rank's share of a version, or None. An intact share is preferred to a corrupt one."""
        found = [
            slot
            for segment in self.segments_of(job)
            for slot in segment.sealed()
            if slot.version == version and slot.layout[0] == rank
        ]
        return min(found, key=lambda slot: slot.corrupt, default=None)

    def store_parity(self, job: str, group: int, parity: Parity, needed: set[Version]) -> None:
        """Store parity.

        Raises:
            OutOfSlotMemory: Both slots hold versions that are still needed.
        """
        held = [old for old in self.parity.get((job, group), ()) if old.version != parity.version]
        while len(held) >= PARITY_SLOTS:
            removable = [old for old in held if old.version not in needed]
            if not removable:
                raise OutOfSlotMemory(f"both slots hold parity that is still needed: {sorted(needed)}")
            held.remove(min(removable, key=lambda old: old.version))
        self.parity[job, group] = [*held, parity]

    def configure(self, job: str, generation: int) -> None:
        """Refuse the transfers of generations before ``generation``."""
        self.generations[job] = max(generation, self.generations.get(job, 0))

    def forget(self, job: str) -> None:
        """Delete everything of a job."""
        self._segments = {key: segment for key, segment in self._segments.items() if key[0] != job}
        self.parity = {key: parities for key, parities in self.parity.items() if key[0] != job}
        self.generations.pop(job, None)

    def clear(self) -> None:
        """Delete everything, as a loss of power does."""
        self._segments, self.generations, self.parity = {}, {}, {}
