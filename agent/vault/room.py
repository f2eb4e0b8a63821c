"""Before a job has made its slots: whether all that it will need on this node could be made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from agent.vault.findings import Findings
from agent.vault.memory import FEWER_COPIES, FEWER_SLOTS
from agent.vault.segments import SegmentKey, SegmentStore
from everstep.errors import OutOfSlotMemory
from everstep.segment_header import PAGE, segment_bytes
from everstep.slots import SLOTS, SlotState
from everstep.wire.v1.local import CheckRoom, SegmentNeed

LEFT_TO_TRAINING = 0.25
"""Of the memory that is free when slots are planned, where a job could do with fewer of them: the training may not have
taken all of its own yet (activations, gradients, the loader's workers), and what it lacks the kernel kills for."""


def check_room(store: SegmentStore, findings: Findings, asked: CheckRoom) -> None:
    """Raises OutOfSlotMemory, with the arithmetic, for want of room; a lack that nothing helps is a finding."""
    keyed = [(SegmentKey(asked.job, "replica" if need.replica else "own", need.number), need) for need in asked.needs]
    wanted = [store.foresee(key, need.slot_bytes, need.slots + need.pinned, asked.keep) for key, need in keyed]
    missing = [file for file in wanted if file is not None]
    margin = LEFT_TO_TRAINING if asked.tentative else 0.0
    foresee = partial(store.budget.foresee, missing, _words(asked.job, asked.needs), _otherwise(asked), margin)
    try:
        try:
            foresee()
        except OutOfSlotMemory:
            if not _give_back(store, asked, {key for key, _ in keyed}):
                raise
            foresee()
    except OutOfSlotMemory as error:
        if not asked.tentative:
            findings.memory_short(asked.job, str(error))
        raise


def _give_back(store: SegmentStore, asked: CheckRoom, needed: Collection[SegmentKey]) -> bool:
    """Frees what copies hold that were made for another roster, but for what the job may still go back to."""
    given = False
    for segment in store.segments(asked.job):
        if segment.key.kind == "replica" and segment.key.number < asked.below and segment.key not in needed:
            for slot in range(segment.view.slots):
                header = segment.view.header(slot)
                if header is None or header.state is not SlotState.SEALED or header.version not in asked.keep:
                    segment.give_back(slot)
                    given = True
    return given


def _otherwise(asked: CheckRoom) -> str:
    """Fewer slots are no advice where they are what is asked for next, or there are no fewer."""
    fewer = not asked.tentative and any(need.slots >= SLOTS for need in asked.needs)
    return f"{FEWER_SLOTS}; or {FEWER_COPIES}" if fewer else FEWER_COPIES


def _words(job: str, needs: Sequence[SegmentNeed]) -> str:
    own, copies = ([need for need in needs if need.replica is replica] for replica in (False, True))
    pinned = sum(need.pinned * (need.slot_bytes + PAGE) for need in needs)
    slots = "/".join(str(count) for count in sorted({need.slots for need in needs}))
    said = f"{slots} slots of {len(own)} ranks here: {_bytes(own)} bytes"
    said += f", copies of {len(copies)} ranks of other nodes: {_bytes(copies)} bytes" if copies else ""
    said += f", {pinned} of these for versions on their way to storage or parity" if pinned else ""
    return f"job {job} ({said}; what is made already apart)"


def _bytes(needs: Sequence[SegmentNeed]) -> int:
    return sum(segment_bytes(need.slots + need.pinned, need.slot_bytes) for need in needs)
