"""Which holder of the same bytes a rank reads from first."""

from __future__ import annotations

from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec, Member


def distance(spec: GenerationSpec, own: Member, slot: SlotInfo) -> tuple[int, int, int, int]:
    """A key to sort by, the nearest first.

    This node's slots come first, its own rank's before others. Then the roster's, those of its rack before others, each
    rank beginning with another, so that not all ask the same vault. Then those of nodes outside it, which may have been
    evicted for lying; last what has to be made from parity.
    """
    if slot.group is not None:
        return 3, 0, slot.rank, 0
    if slot.node == own.node:
        return 0, int(slot.rank != own.rank), slot.rank, 0
    if slot.node in spec.seated:
        far = int(not spec.is_near(own.node, slot.node))
        return 1, far, int(slot.replica), (slot.rank - own.rank) % spec.world_size
    return 2, slot.rank, int(slot.replica), 0
