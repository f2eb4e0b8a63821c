"""Which slot of a segment to write over. Pure."""

from __future__ import annotations

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.slots import SlotHeader, SlotState


def slot_to_fill(headers: list[SlotHeader | None], keep: set[Version]) -> int:
    """Which slot to fill next: an empty or unfinished one, else the oldest that is not to be kept.

    ``keep`` are versions that somebody may still need. Raises OutOfSlotMemory where every slot holds one of those.
    """
    free = [i for i, h in enumerate(headers) if h is None or h.state is not SlotState.SEALED]
    if free:
        return free[0]
    old = [(h.version, i) for i, h in enumerate(headers) if h is not None and h.version not in keep]
    if not old:
        raise OutOfSlotMemory(f"all {len(headers)} slots hold versions that are still needed: {sorted(keep)}")
    return min(old)[1]
