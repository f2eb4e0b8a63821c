"""This node's slots, read straight from their segment files, and nothing of them unchecked."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from everstep.errors import DigestMismatch
from everstep.slots import CHUNK_BYTES, SegmentView, SlotState
from everstep.wire.v1.local import SlotInfo
from trainer_hooks.restore.reshard import Range


class BadSlot(Exception):
    """A slot that cannot be used, and why; ``corrupt`` when its bytes are not what was sealed."""

    def __init__(self, slot: SlotInfo, reason: str, *, corrupt: bool) -> None:
        super().__init__(reason)
        self.slot = slot
        self.reason = reason
        self.corrupt = corrupt


class LocalSlots:
    """Sealed slots in this node's segment files, mapped privately: what is read here can never be written."""

    def __init__(self) -> None:
        self._views: dict[str, SegmentView] = {}

    def _view(self, slot: SlotInfo) -> SegmentView:
        if slot.path not in self._views:
            with open(slot.path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._views[slot.path] = SegmentView(memoryview(mapping))
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
            return torch.frombuffer(view.payload(slot.slot), dtype=torch.uint8)
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
