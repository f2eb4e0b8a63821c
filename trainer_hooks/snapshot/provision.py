"""How many slots a rank has, and how large: what every node of the job has the memory for, the same on all ranks.

Which steps are stored, and which versions stay, goes by it (retention.py). So when the ranks know one another's
layouts, one of each node asks its vault for what is best that the node has room for, and says so in the generation's
store; all take the least of what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from everstep.errors import OutOfSlotMemory
from everstep.slots import SLOTS
from everstep.wire.v1.training import GenerationSpec, Member
from trainer_hooks.snapshot.choices import LEAN_SLOTS, Choices
from trainer_hooks.store_messages import decode


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
