"""Judge a GPU's uncorrectable memory error once: contained to one process, or not.

One error shows as several facts within moments: XID 48, an uncorrected count that rises, XID 63 (the row is to be
remapped), and XID 94 (contained) or 95 (uncontained). NVIDIA's catalogue resets the GPU at once for XID 95 and for an
XID 48 alone. An XID 48 with XID 63, and XID 94, wait for the end of the job ("drain and reset").
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

XID_UNCORRECTABLE = 48
XID_ROW_REMAPPED, XID_CONTAINED, XID_UNCONTAINED = 63, 94, 95

SETTLE_S = 3.0
"""Seconds to wait for an error's other facts. The driver writes all of them in one interrupt, within milliseconds."""
EXPLAINS_S = 30.0
"""Seconds for which a contained error explains a risen count, which is read every ten seconds."""
MAX_GPUS = 64


class Containment(StrEnum):
    """PENDING: too early to tell. CONTAINED: the reset may wait for the end of the job. UNCONTAINED: it may not."""

    PENDING = "pending"
    CONTAINED = "contained"
    UNCONTAINED = "uncontained"


class _GpuErrors(msgspec.Struct):
    """What is known of one GPU. Times are monotonic seconds."""

    state: Containment | None = None
    unexplained_since: float | None = None  # an error that nothing has called contained yet
    contained_at: float | None = None  # the newest XID that calls an error contained
    count: int | None = None  # the uncorrected count of the newest poll


class MemoryErrors:
    """The memory errors of a node's GPUs since their last reset. Methods return whether a judgement changed."""

    def __init__(self, contained: tuple[str, ...] = ()) -> None:
        self._gpus = {bus_id: _GpuErrors(state=Containment.CONTAINED) for bus_id in contained}

    @property
    def contained(self) -> tuple[str, ...]:
        """Addresses of the GPUs whose errors were all contained."""
        return tuple(bus_id for bus_id, gpu in self._gpus.items() if gpu.state is Containment.CONTAINED)

    def containment(self, bus_id: str) -> Containment:
        """Return the judgement of the GPU's errors; UNCONTAINED if nothing says otherwise."""
        gpu = self._gpus.get(bus_id)
        return Containment.UNCONTAINED if gpu is None or gpu.state is None else gpu.state

    def note_xid(self, bus_id: str, xid: int, now_s: float) -> bool:
        """Process an XID."""
        if xid == XID_UNCONTAINED:
            return self._set(self._gpu(bus_id), Containment.UNCONTAINED)
        if xid == XID_UNCORRECTABLE:
            return self._note_error(self._gpu(bus_id), now_s)
        if xid not in (XID_ROW_REMAPPED, XID_CONTAINED):
            return False
        gpu = self._gpu(bus_id)
        gpu.contained_at, gpu.unexplained_since = now_s, None
        return gpu.state is not Containment.UNCONTAINED and self._set(gpu, Containment.CONTAINED)

    def note_count(self, bus_id: str, count: int | None, now_s: float) -> bool:
        """Process the uncorrected count of a poll; None if it is unknown."""
        if count is None:
            return False
        gpu = self._gpu(bus_id)
        before, gpu.count = gpu.count, count
        return before is not None and count > before and self._note_error(gpu, now_s)

    def settle(self, now_s: float) -> bool:
        """Judge the errors that nothing has called contained for ``SETTLE_S``."""
        changed = False
        for gpu in self._gpus.values():
            if gpu.unexplained_since is not None and now_s - gpu.unexplained_since >= SETTLE_S:
                gpu.unexplained_since = None
                changed |= self._set(gpu, Containment.UNCONTAINED)
        return changed

    def clear(self, bus_id: str | None) -> None:
        """Forget a GPU that was reset or replaced; None: all, after a boot. Counts begin anew."""
        for known in list(self._gpus) if bus_id is None else [bus_id]:
            self._gpus.pop(known, None)

    def _gpu(self, bus_id: str) -> _GpuErrors:
        if bus_id not in self._gpus and len(self._gpus) >= MAX_GPUS:
            del self._gpus[next(iter(self._gpus))]
        return self._gpus.setdefault(bus_id, _GpuErrors())

    def _note_error(self, gpu: _GpuErrors, now_s: float) -> bool:
        if gpu.state is Containment.UNCONTAINED:
            return False
        if gpu.contained_at is not None and now_s - gpu.contained_at <= EXPLAINS_S:
            return self._set(gpu, Containment.CONTAINED)
        if gpu.unexplained_since is None:
            gpu.unexplained_since = now_s
        return gpu.state is None and self._set(gpu, Containment.PENDING)

    @staticmethod
    def _set(gpu: _GpuErrors, state: Containment) -> bool:
        before, gpu.state = gpu.state, state
        return before is not state
