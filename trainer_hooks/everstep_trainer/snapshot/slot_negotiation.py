"""How many slots a rank has, and how large: what every node of the job has the memory for, the same on all ranks.

Which steps are stored, and which versions stay, goes by it (retention.py). So when the ranks know one another's
layouts, one of each node asks its vault for what is best that the node has room for, and says so in the generation's
store; all take the least of what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from everstep.errors import OutOfSlotMemory
from everstep.layout.slots import SLOTS
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.snapshot.exchange import decode

# ---- choices
# What a job chooses for its snapshots in ``run.track``; the same on all ranks.

LEAN_SLOTS = 2
"""The committed version and the one that may be committed next."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError, with the mend, for what is no choice.

    ``overlap``: whether the next step begins while state that no other rank holds is still copied. A rank that is
    lost meanwhile then costs the step. None: where a GPU holds it, since there a copy costs the step next to nothing.

    ``slots``: places for versions in each rank's memory, and again on the node that keeps its copies. With all of them
    (SLOTS) each step is stored, and a loss costs none that is finished; with LEAN_SLOTS only versions that are to be
    committed are, about two a second, and a loss costs the steps since the last of those. None: all of them where every
    node of the job has the memory, else LEAN_SLOTS (everstep_trainer.snapshot.slot_negotiation).

    ``every``: how many steps apart snapshots are, besides those of steps that are announced to be committed. None: as
    many as it takes that training does not stand still for them for long (everstep_trainer.snapshot.pace), one as a
    rule.
    With LEAN_SLOTS there are none besides those.

    ``require``: whether the training script hears of it where a node has no memory for checkpoints, instead of training
    on without (everstep_trainer.snapshot.planning).

    ``exclude``: patterns of names of tensors that are neither stored nor restored (everstep_trainer.state.tensors).
    """

    overlap: bool | None = None
    slots: int | None = None
    every: int | None = None
    exclude: tuple[str, ...] = ()
    require: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: take 1 for a snapshot of each step, or more")
        if self.every is not None and self.lean:
            raise ValueError(f"slots={LEAN_SLOTS} stores what is announced alone: leave out every={self.every}")
        if self.slots not in (None, LEAN_SLOTS, SLOTS):
            raise ValueError(
                f"slots={self.slots}: take {SLOTS}, with which every step is stored, or {LEAN_SLOTS} for what is to be "
                f"committed alone, in {LEAN_SLOTS}/{SLOTS} of the memory; or leave it out"
            )

    @property
    def lean(self) -> bool:
        """Whether the user wants it so."""
        return self.slots == LEAN_SLOTS


DEFAULT = Choices()


class Provision(msgspec.Struct, frozen=True):
    """``slots`` of each rank, besides those for pinned versions. ``spare``: each with room for the larger share that is
    left to a rank when one node goes, so that nothing must grow on top of a loss."""

    slots: int
    spare: bool = False

    @property
    def lean(self) -> bool:
        """Whether only what is to be committed is stored."""
        return self.slots == LEAN_SLOTS


LEAN = Provision(LEAN_SLOTS)
EVERY_STEP = (Provision(SLOTS, spare=True), Provision(SLOTS))


def provisions(choices: Choices) -> tuple[Provision, ...]:
    """What may be, the best first."""
    if choices.slots is None:
        return (*EVERY_STEP, LEAN)
    return (LEAN,) if choices.lean else EVERY_STEP


class Room(msgspec.Struct, frozen=True):
    """What one node has room for: the first of the provisions that fits, and why none before it does. ``lacks``: not
    even the last one fits."""

    fits: int
    why: str = ""
    lacks: bool = False


class Agreed(msgspec.Struct, frozen=True):
    """What all take. ``why``: there is no room for a better one, in words; empty for the best. ``lacking``: the node
    that has no room for this either, empty where there is none."""

    provision: Provision
    why: str = ""
    lacking: str = ""


Ask = Callable[[Provision, bool], None]
"""Whether this node has room for that; the flag: as one of several choices. Raises OutOfSlotMemory."""


class Quartermaster:
    """One rank's part in the agreement.

    Args:
        put: publishes under a key, for all ranks. get: waits for the values of keys.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        member: Member,
        choices: Choices,
        put: Callable[[str, bytes], None],
        get: Callable[[list[str]], list[bytes]],
    ) -> None:
        self._spec = spec
        self._member = member
        self._choices = provisions(choices)
        self._put = put
        self._get = get
        self._said: dict[str, Room] = {}

    def agree(self, tag: str, ask: Ask) -> Agreed:
        """What all ranks take for the layouts that were exchanged under ``tag``. Asked again it is the same: what a
        node has said once stands, since others may have read it. Raises Unavailable where a node is silent,
        MalformedMessage where it cannot be understood."""
        speaks = self._member.local_rank == 0  # once for the node
        if speaks and tag not in self._said:
            self._said[tag] = self._look(ask)
        if self._spec.world_size == 1:
            return self._least([self._said[tag]])
        if speaks:
            self._put(_key(tag, self._member.node), msgspec.msgpack.encode(self._said[tag]))
        bodies = self._get([_key(tag, node) for node in self._spec.seats])
        return self._least([decode(body, Room) for body in bodies])

    def _look(self, ask: Ask) -> Room:
        why = ""
        for number, provision in enumerate(self._choices):
            tentative = number < len(self._choices) - 1
            try:
                ask(provision, tentative)
            except OutOfSlotMemory as error:
                why = str(error)
            else:
                return Room(number, why)
        return Room(len(self._choices) - 1, why, lacks=True)

    def _least(self, rooms: Sequence[Room]) -> Agreed:
        said = list(zip(self._spec.seats, rooms, strict=True))
        node, least = max(said, key=lambda each: (each[1].fits, each[1].lacks))
        lacking = node if least.lacks else ""
        return Agreed(self._choices[least.fits], f"{node}: {least.why}" if least.why else "", lacking)


def _key(tag: str, node: str) -> str:
    return f"snapshot/{tag}/room/{node}"
