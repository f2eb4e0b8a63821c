"""Before a job has made its slots: whether all that it will need on this node could be made."""

from __future__ import annotations

from collections.abc import Sequence

from agent.vault.findings import Findings
from agent.vault.segments import SegmentKey, SegmentStore
from everstep.errors import OutOfSlotMemory
from everstep.wire.v1.local import SegmentNeed


def check_room(store: SegmentStore, findings: Findings, job: str, needs: Sequence[SegmentNeed]) -> None:
    """Raises OutOfSlotMemory, with the arithmetic, for want of room, and tells the supervisor."""
    wanted = []
    for need in needs:
        draft, path = store.paths(SegmentKey(job, "replica" if need.replica else "own", need.number))
        wanted.append((draft, path, need.bytes))
    try:
        store.budget.foresee(wanted, _words(job, needs))
    except OutOfSlotMemory as error:
        findings.memory_short(job, str(error))
        raise


def _words(job: str, needs: Sequence[SegmentNeed]) -> str:
    own, copies = ([need for need in needs if need.replica is replica] for replica in (False, True))
    pinned = sum(need.pinned for need in needs)
    said = f"slots of {len(own)} ranks here: {_bytes(own)} bytes"
    said += f", copies of {len(copies)} ranks of other nodes: {_bytes(copies)} bytes" if copies else ""
    said += f", {pinned} of these for versions on their way to storage or parity" if pinned else ""
    return f"job {job} ({said}; what is made already apart)"


def _bytes(needs: Sequence[SegmentNeed]) -> int:
    return sum(need.bytes for need in needs)
