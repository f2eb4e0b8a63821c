"""Agree on the number and size of slots, the same on all ranks, that every node of the job has the memory for.

They decide which steps are stored and which versions stay (VersionRetention). One rank of each node asks its vault for
the best provision that the node has room for, and publishes it in the generation's store; all take the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from everstep.errors import OutOfSlotMemory
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.slots.layout_exchange import decode_value
from everstep_trainer.snapshot.pace import DEFAULT_BUDGET

# ---- a job's choices for its snapshots in ``run.track``; the same on all ranks

CANDIDATE_ONLY_SLOTS = 2  # the committed version and the one that may be committed next


class SnapshotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``Run.track``. Raises ValueError, with a fix, for invalid ones.

    Attributes:
        overlap: Whether the next step begins while state that no other rank holds is still being copied. A rank that is
            lost meanwhile then costs the step. None: only for state on a GPU, where a copy costs the next step almost
            nothing.
        slots: Versions in each rank's memory, and again on the node that keeps its copies. SLOTS_PER_RANK stores each
            step, and a loss costs no finished step. CANDIDATE_ONLY_SLOTS stores only versions to be committed, about
            two a second, and a loss costs the steps since the last of them. None: SLOTS_PER_RANK if every node of the
            job has the memory, else CANDIDATE_ONLY_SLOTS.
        interval: Steps between snapshots, besides those announced to be committed. None: as few as keep their cost
            within ``budget`` (everstep_trainer.snapshot.pace), from 1 to 8. With CANDIDATE_ONLY_SLOTS there are no
            others.
        budget: Share of training's time that snapshots may take before they become less frequent than every step,
            unless ``interval`` is given.
        exclude: Patterns of names of tensors that are neither stored nor restored (everstep_trainer.state.tensors).
        require_checkpoints: Whether the training script gets an error if a node has no memory for checkpoints, instead
            of training without (everstep_trainer.snapshot.planner).
        copy_audits: How often a copy that may be committed is compared with its sources; None: never
            (everstep_trainer.sdc.copy_audit). The same on all ranks.
    """

    overlap: bool | None = None
    slots: int | None = None
    interval: int | None = None
    budget: float = DEFAULT_BUDGET
    exclude: tuple[str, ...] = ()
    require_checkpoints: bool = False
    copy_audits: AuditOptions | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"snapshot_every={self.interval}: take 1 for a snapshot of each step, or more")
        if not 0.0 < self.budget < 1.0:
            raise ValueError(
                f"snapshot_budget={self.budget}: take a share of the time between 0 and 1, such as {DEFAULT_BUDGET}, "
                "or snapshot_every=1 for a snapshot of each step"
            )
        if self.interval is not None and self.candidates_only:
            raise ValueError(
                f"slots={CANDIDATE_ONLY_SLOTS} stores only commit candidates: leave out snapshot_every={self.interval}"
            )
        if self.slots not in (None, CANDIDATE_ONLY_SLOTS, SLOTS_PER_RANK):
            raise ValueError(
                f"slots={self.slots}: take {SLOTS_PER_RANK} to store every step, {CANDIDATE_ONLY_SLOTS} to store only "
                f"commit candidates in {CANDIDATE_ONLY_SLOTS}/{SLOTS_PER_RANK} of the memory, or leave it out"
            )

    @property
    def audits_copies(self) -> bool:
        """Whether copies are compared with their sources, and restored tensors with the digests kept since then."""
        return self.copy_audits is not None

    @property
    def candidates_only(self) -> bool:
        """True if the user chose to store only versions to be committed."""
        return self.slots == CANDIDATE_ONLY_SLOTS


DEFAULT_OPTIONS = SnapshotOptions()


class SlotProvision(msgspec.Struct, frozen=True):
    """A number of slots per rank, without pinned ones; ``has_spare_room`` for the larger shares after a node's loss."""

    slots: int
    has_spare_room: bool = False

    @property
    def candidates_only(self) -> bool:
        """True if only versions to be committed are stored."""
        return self.slots == CANDIDATE_ONLY_SLOTS


CANDIDATES_ONLY = SlotProvision(CANDIDATE_ONLY_SLOTS)
EVERY_STEP = (SlotProvision(SLOTS_PER_RANK, has_spare_room=True), SlotProvision(SLOTS_PER_RANK))


def acceptable_provisions(options: SnapshotOptions) -> tuple[SlotProvision, ...]:
    """Return the provisions that the options allow, the best first."""
    if options.slots is None:
        return (*EVERY_STEP, CANDIDATES_ONLY)
    return (CANDIDATES_ONLY,) if options.candidates_only else EVERY_STEP


class NodeRoom(msgspec.Struct, frozen=True):
    """The room of one node: the first of the provisions that fits (else the last), and why no earlier one does."""

    provision_index: int
    reason: str = ""
    is_insufficient: bool = False


class AgreedProvision(msgspec.Struct, frozen=True):
    """The provision of all ranks, why there is no better one (empty for the best), and a node without room for it."""

    provision: SlotProvision
    reason: str = ""
    short_node: str = ""


RoomCheck = Callable[[SlotProvision, bool], None]
"""Checks that this node has room for a provision; the flag marks one of several choices. Raises OutOfSlotMemory."""


@dataclass(eq=False)
class SlotNegotiation:
    """One rank's part in the agreement: ``publish`` and ``receive`` exchange values by key among all ranks."""

    _spec: GenerationSpec
    _member: Member
    _options: SnapshotOptions
    _publish: Callable[[str, bytes], None]
    _receive: Callable[[list[str]], list[bytes]]

    def __post_init__(self) -> None:
        self._provisions = acceptable_provisions(self._options)
        self._published: dict[str, NodeRoom] = {}

    def agree(self, tag: str, check_room: RoomCheck) -> AgreedProvision:
        """Return the provision that all ranks take for the layouts exchanged under ``tag``, the same at each call: a
        node's published room stays, since others may have read it. Raises Unavailable, MalformedMessage."""
        speaks = self._member.local_rank == 0  # once per node
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
        last = len(self._provisions) - 1
        for number, provision in enumerate(self._provisions):
            try:
                check_room(provision, number < last)
                return NodeRoom(number, why)
            except OutOfSlotMemory as error:
                why = str(error)
        return NodeRoom(last, why, is_insufficient=True)

    def _least(self, rooms: Sequence[NodeRoom]) -> AgreedProvision:
        said = zip(self._spec.seats, rooms, strict=True)
        node, least = max(said, key=lambda each: (each[1].provision_index, each[1].is_insufficient))
        provision, reason = self._provisions[least.provision_index], f"{node}: {least.reason}" if least.reason else ""
        return AgreedProvision(provision, reason, node if least.is_insufficient else "")


def _key(tag: str, node: str) -> str:
    return f"snapshot/{tag}/room/{node}"
