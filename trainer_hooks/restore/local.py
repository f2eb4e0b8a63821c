"""This node's slots, read straight from their segment files, and nothing of them unchecked."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import torch

from everstep.boxes import Range
from everstep.errors import DigestMismatch
from everstep.slots import CHUNK_BYTES, SegmentView, SlotState
from everstep.wire.v1.local import SlotInfo


def map_readable(path: str, length: int = 0) -> memoryview:
    """A file mapped shared and read-only: a fault costs a third of a private mapping's. Raises OSError."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ))


def as_tensor(buffer: memoryview) -> torch.Tensor:
    """Read-only bytes as a tensor to copy from.

    torch has no read-only tensors and warns of what a write would do. Here it would end the process: the pages cannot
    be written.
    """
    array = np.frombuffer(buffer, np.uint8)
    alias = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    alias.source = array  # type: ignore[attr-defined]  # the tensor keeps the alias, the alias the mapping
    return torch.frombuffer(alias, dtype=torch.uint8)


class BadSlot(Exception):
    """A slot that cannot be used, and why; ``corrupt`` when its bytes are not what was sealed."""

    def __init__(self, slot: SlotInfo, reason: str, *, corrupt: bool) -> None:
        super().__init__(reason)
        self.slot = slot
        self.reason = reason
        self.corrupt = corrupt


class LocalSlots:
    """Sealed slots in this node's segment files, mapped read-only."""

    def __init__(self) -> None:
        self._views: dict[str, SegmentView] = {}

    def _view(self, slot: SlotInfo) -> SegmentView:
        if slot.path not in self._views:
            self._views[slot.path] = SegmentView(map_readable(slot.path))
        return self._views[slot.path]

    def manifest(self, slot: SlotInfo) -> bytes:
        """The slot's manifest, checked. Raises BadSlot."""
        try:
            return self._require(slot).manifest(slot.slot)
        except (DigestMismatch, OSError) as error:
            raise self._bad(slot, error) from error

    def payload(self, slot: SlotInfo, ranges: Iterable[Range]) -> torch.Tensor:
        """The slot's payload; the chunks that ``ranges`` touch have been hashed. Raises BadSlot."""
        try:
            view = self._require(slot)
            for first, last in chunk_runs(ranges):
                end = min((last + 1) * CHUNK_BYTES, len(view.payload(slot.slot)))
                view.check_chunks(slot.slot, first * CHUNK_BYTES, end - first * CHUNK_BYTES)
            return as_tensor(view.payload(slot.slot))
        except (DigestMismatch, IndexError, OSError) as error:
            raise self._bad(slot, error) from error

    def check(self, slot: SlotInfo) -> None:
        """Hashes the slot's whole payload. Raises BadSlot."""
        try:
            self._require(slot).check_chunks(slot.slot)
        except (DigestMismatch, IndexError, OSError) as error:
            raise self._bad(slot, error) from error

    def require_still(self, slot: SlotInfo) -> None:
        """Raises BadSlot where the slot was filled anew since."""
        try:
            self._require(slot)
        except DigestMismatch as error:
            raise self._bad(slot, error) from error

    def _require(self, slot: SlotInfo) -> SegmentView:
        view = self._view(slot)
        header = view.header(slot.slot)
        said = (SlotState.SEALED, slot.rank, slot.version)
        if header is None or (header.state, header.rank, header.version) != said:
            raise _MovedOn(f"slot {slot.slot} of {slot.path} is not rank {slot.rank}'s {slot.version} any more")
        return view

    @staticmethod
    def _bad(slot: SlotInfo, error: Exception) -> BadSlot:
        corrupt = isinstance(error, DigestMismatch) and not isinstance(error, _MovedOn)
        return BadSlot(slot, str(error), corrupt=corrupt)


class _MovedOn(DigestMismatch):
    """The slot is another one by now: no corruption."""


def chunk_runs(ranges: Iterable[Range]) -> list[tuple[int, int]]:
    """Runs (first, last) of the chunks that (offset, length) ranges touch, each chunk once."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if not length:
            continue
        first, last = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
