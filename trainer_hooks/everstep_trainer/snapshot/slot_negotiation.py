"""How many slots a rank has, and how large: what every node of the job has the memory for, the same on all ranks.

Which steps are stored, and which versions stay, goes by it (retention.py). So when the ranks know one another's
layouts, one of each node asks its vault for what is best that the node has room for, and says so in the generation's
store; all take the least of what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from everstep.errors import OutOfSlotMemory
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.snapshot.exchange import decode_value

# ---- choices
# What a job chooses for its snapshots in ``run.track``; the same on all ranks.

CANDIDATE_ONLY_SLOTS = 2
"""The committed version and the one that may be committed next."""


class SnapshotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError, with the mend, for what is no choice.

    ``overlap``: whether the next step begins while state that no other rank holds is still copied. A rank that is
    lost meanwhile then costs the step. None: where a GPU holds it, since there a copy costs the step next to nothing.

    ``slots``: places for versions in each rank's memory, and again on the node that keeps its copies. With all of them
    (SLOTS_PER_RANK) each step is stored, and a loss costs none that is finished; with CANDIDATE_ONLY_SLOTS only
    versions that are to be committed are, about two a second, and a loss costs the steps since the last of those. None:
    all of them where every node of the job has the memory, else CANDIDATE_ONLY_SLOTS
    (everstep_trainer.snapshot.slot_negotiation).

    ``interval``: how many steps apart snapshots are, besides those of steps that are announced to be committed. None:
    as many as it takes that training does not stand still for them for long (everstep_trainer.snapshot.pace), one as a
    rule. With CANDIDATE_ONLY_SLOTS there are none besides those.

    ``require_checkpoints``: whether the training script hears of it where a node has no memory for checkpoints, instead
    of training on without (everstep_trainer.snapshot.planning).

    ``exclude``: patterns of names of tensors that are neither stored nor restored (everstep_trainer.state.tensors).
    """

    overlap: bool | None = None
    slots: int | None = None
    interval: int | None = None
    exclude: tuple[str, ...] = ()
    require_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"snapshot_every={self.interval}: take 1 for a snapshot of each step, or more")
        if self.interval is not None and self.candidates_only:
            raise ValueError(
                f"slots={CANDIDATE_ONLY_SLOTS} stores what is announced alone: leave out snapshot_every={self.interval}"
            )
        if self.slots not in (None, CANDIDATE_ONLY_SLOTS, SLOTS_PER_RANK):
            raise ValueError(
                f"slots={self.slots}: take {SLOTS_PER_RANK}, with which every step is stored, or "
                f"{CANDIDATE_ONLY_SLOTS} for what is to be "
                f"committed alone, in {CANDIDATE_ONLY_SLOTS}/{SLOTS_PER_RANK} of the memory; or leave it out"
            )

    @property
    def candidates_only(self) -> bool:
        """Whether the user wants it so."""
        return self.slots == CANDIDATE_ONLY_SLOTS


DEFAULT_OPTIONS = SnapshotOptions()


class SlotProvision(msgspec.Struct, frozen=True):
    """``slots`` of each rank, besides those for pinned versions. ``has_spare_room``: each with room for the larger
    share that is left to a rank when one node goes, so that nothing must grow on top of a loss."""

    slots: int
    has_spare_room: bool = False

    @property
    def candidates_only(self) -> bool:
        """Whether only what is to be committed is stored."""
        return self.slots == CANDIDATE_ONLY_SLOTS


CANDIDATES_ONLY = SlotProvision(CANDIDATE_ONLY_SLOTS)
EVERY_STEP = (SlotProvision(SLOTS_PER_RANK, has_spare_room=True), SlotProvision(SLOTS_PER_RANK))


def acceptable_provisions(options: SnapshotOptions) -> tuple[SlotProvision, ...]:
    """What may be, the best first."""
    if options.slots is None:
        return (*EVERY_STEP, CANDIDATES_ONLY)
    return (CANDIDATES_ONLY,) if options.candidates_only else EVERY_STEP


class NodeRoom(msgspec.Struct, frozen=True):
    """What one node has room for: the first of the provisions that fits, and why none before it does.
    ``is_insufficient``: not even the last one fits."""

    provision_index: int
    reason: str = ""
    is_insufficient: bool = False


class AgreedProvision(msgspec.Struct, frozen=True):
    """What all take. ``reason``: there is no room for a better one, in words; empty for the best. ``short_node``: the
    node that has no room for this either, empty where there is none."""

    provision: SlotProvision
    reason: str = ""
    short_node: str = ""


RoomCheck = Callable[[SlotProvision, bool], None]
"""Whether this node has room for that; the flag: as one of several choices. Raises OutOfSlotMemory."""


class SlotNegotiation:
    """One rank's part in the agreement.

    Args:
        publish: publishes under a key, for all ranks. receive: waits for the values of keys.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        member: Member,
        options: SnapshotOptions,
        publish: Callable[[str, bytes], None],
        receive: Callable[[list[str]], list[bytes]],
    ) -> None:
        self._spec = spec
        self._member = member
        self._provisions = acceptable_provisions(options)
        self._publish = publish
        self._receive = receive
        self._published: dict[str, NodeRoom] = {}

    def agree(self, tag: str, check_room: RoomCheck) -> AgreedProvision:
        """What all ranks take for the layouts that were exchanged under ``tag``. Asked again it is the same: what a
        node has said once stands, since others may have read it. Raises Unavailable where a node is silent,
        MalformedMessage where it cannot be understood."""
        speaks = self._member.local_rank == 0  # once for the node
        if speaks and tag not in self._published:
            self._published[tag] = self._find_room(check_room)
        if self._spec.world_size == 1:
            return self._least([self._published[tag]])
        if speaks:
            self._publish(_key(tag, self._member.node), msgspec.msgpack.encode(self._published[tag]))
        bodies = self._receive([_key(tag, node) for node in self._spec.seats])
        return self._least([decode_value(body, NodeRoom) for body in bodies])

    def _find_room(self, check_room: RoomCheck) -> NodeRoom:
        why = ""
        for number, provision in enumerate(self._provisions):
            tentative = number < len(self._provisions) - 1
            try:
                check_room(provision, tentative)
            except OutOfSlotMemory as error:
                why = str(error)
            else:
                return NodeRoom(number, why)
        return NodeRoom(len(self._provisions) - 1, why, is_insufficient=True)

    def _least(self, rooms: Sequence[NodeRoom]) -> AgreedProvision:
        said = list(zip(self._spec.seats, rooms, strict=True))
        node, least = max(said, key=lambda each: (each[1].provision_index, each[1].is_insufficient))
        lacking = node if least.is_insufficient else ""
        return AgreedProvision(
            self._provisions[least.provision_index], f"{node}: {least.reason}" if least.reason else "", lacking
        )


def _key(tag: str, node: str) -> str:
    return f"snapshot/{tag}/room/{node}"
