"""This node's slots, read straight from their segment files, and nothing of them unchecked."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from enum import Enum, auto

import numpy as np
import torch

from everstep.boxes import Range
from everstep.errors import DigestMismatch
from everstep.slots import SegmentView, SlotState, chunk_count
from everstep.wire.v1.local import SlotInfo
from trainer_hooks.restore.sweep import Sweep, chunks_of, chunks_of_rows
from trainer_hooks.rows import NOTHING, Rows


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


class Check(Enum):
    """Which chunks of a slot a reader hashes: all of them, those that it reads, or none, because another rank's word
    on them is heard before anything is used."""

    ALL = auto()
    READ = auto()
    NONE = auto()


class LocalSlots:
    """Sealed slots in this node's segment files.

    Args:
        own: a segment that this process has mapped already, by its path; None of another one, which is then mapped
            read-only. To map a slot anew costs as much as to copy it.
        threads: that copy and hash side by side.
    """

    def __init__(self, own: Callable[[str], SegmentView | None] = lambda _: None, threads: int = 2) -> None:
        self._own = own
        self._threads = threads
        self._views: dict[str, SegmentView] = {}

    def _view(self, slot: SlotInfo) -> SegmentView:
        if slot.path not in self._views:
            self._views[slot.path] = self._own(slot.path) or SegmentView(map_readable(slot.path))
        return self._views[slot.path]

    def manifest(self, slot: SlotInfo) -> bytes:
        """The slot's manifest, checked. Raises BadSlot."""
        try:
            return self._require(slot).manifest(slot.slot)
        except (DigestMismatch, OSError) as error:
            raise self._bad(slot, error) from error

    def sweep(
        self, slot: SlotInfo, rows: Rows = NOTHING, also: Iterable[Range] = (), check: Check = Check.ALL
    ) -> torch.Tensor:
        """Copies ``rows`` out of the slot, and hashes what ``check`` says; returns the payload.

        ``also``: ranges that will be read from what is returned. Raises BadSlot, after which nothing of what was
        copied may be used.
        """
        try:
            view = self._require(slot)
            digests, payload = view.digests(slot.slot)[1:], view.payload(slot.slot)
            if len(digests) != chunk_count(len(payload)):
                raise _MovedOn(f"slot {slot.slot} of {slot.path} is being filled anew")
            checked: Iterable[int] = ()
            if check is Check.ALL:
                checked = range(len(digests))
            elif check is Check.READ:
                checked = chunks_of_rows(rows) | chunks_of(also)
            Sweep(payload, rows, digests, checked).run(self._threads)
            return as_tensor(payload)
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

    def _bad(self, slot: SlotInfo, error: Exception) -> BadSlot:
        """A slot that was filled anew while it was hashed is not corrupt."""
        corrupt = isinstance(error, DigestMismatch) and not isinstance(error, _MovedOn)
        if corrupt:
            try:
                self._require(slot)
            except _MovedOn as moved:
                return BadSlot(slot, str(moved), corrupt=False)
        return BadSlot(slot, str(error), corrupt=corrupt)


class _MovedOn(DigestMismatch):
    """The slot is another one by now: no corruption."""
