"""Copy from this node's slots and hash them in one pass, with several threads. Bytes reach live memory before their
digest is known: a chunk with a wrong digest fails the whole pass, and no filled memory may be used."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

import numpy as np
import torch
import xxhash

from everstep.errors import DigestMismatch
from everstep.layout.manifests import Range
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import CHUNK_BYTES, SegmentView, chunk_count
from everstep.native import MIN_BYTES, CopyHash, copy_hash
from everstep.wire.v1.local import SlotInfo
from everstep_trainer.slots.byte_moves import NO_COPIES, CopyTable, run_copies

BLOCK_BYTES = 2 << 20
"""Hashed, then copied, without native code: large enough to bypass the cache when written, small enough to be in it."""
MIN_THREAD_BYTES = 16 << 20
MAX_THREADS = 8  # with more threads, memory bandwidth is the limit


class HashingCopy:
    """Checks the chunks ``checked`` of a payload and copies from it, once. Raises IndexError outside of it."""

    def __init__(
        self,
        payload: memoryview,
        copies: CopyTable,
        digests: Sequence[bytes],
        checked: Iterable[int],
        native: CopyHash | None = copy_hash,
    ) -> None:
        if len(copies.source) and (
            int(copies.source[0]) < 0 or int((copies.source + copies.length).max()) > len(payload)
        ):
            raise IndexError(f"a tensor would lie outside a payload of {len(payload)} bytes")
        checked = frozenset(checked)
        if checked and not 0 <= min(checked) <= max(checked) < len(digests):
            raise IndexError(f"chunks {min(checked)} to {max(checked)} are not among {len(digests)}")
        self._payload = payload
        self._address = np.frombuffer(payload, np.uint8).ctypes.data if len(payload) else 0
        self._digests, self._checked, self._native = digests, checked, native
        self._block_bytes = BLOCK_BYTES if native is None else CHUNK_BYTES
        self._copies = copies.split_at_multiples(self._block_bytes)
        blocks = self._copies.source // self._block_bytes
        found, begins = np.unique(blocks, return_index=True)
        ends = np.append(begins, len(blocks))[1:]
        self._of_block = dict(zip(found.tolist(), zip(begins.tolist(), ends.tolist(), strict=True), strict=True))
        touched = {block * self._block_bytes // CHUNK_BYTES for block in found.tolist()}
        self._chunks = sorted(touched | self._checked)
        self._stop = threading.Event()
        self._failures: list[Exception] = []

    def run(self, threads: int) -> None:
        """Run the pass. Raises DigestMismatch, naming a chunk. Afterwards no thread copies any more."""
        todo = iter(self._chunks)
        worth = len(self._chunks) * CHUNK_BYTES // MIN_THREAD_BYTES
        helpers = [
            threading.Thread(target=self._work, args=(todo,), name="everstep-restore", daemon=True)
            for _ in range(min(threads - 1, worth))
        ]
        try:
            for helper in helpers:
                helper.start()
            self._work(todo)
        except BaseException:
            self._stop.set()
            raise
        finally:
            for helper in helpers:
                if helper.ident is not None:
                    helper.join()
        if self._failures:
            raise self._failures[0]

    def _work(self, todo: Iterable[int]) -> None:
        for chunk in todo:
            if self._stop.is_set():
                return
            try:
                self._sweep(chunk)
            except DigestMismatch as error:
                self._failures.append(error)
                self._stop.set()

    def _sweep(self, chunk: int) -> None:
        start = chunk * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, len(self._payload))
        if chunk not in self._checked:
            self._copy_and_hash(start, end, None)
            return
        if self._native is not None and end - start >= MIN_BYTES:
            digest = self._copy_native(self._native, start, end)
        else:
            hasher = xxhash.xxh3_128()
            self._copy_and_hash(start, end, hasher)
            digest = hasher.digest()
        if digest != self._digests[chunk]:
            raise DigestMismatch(f"chunk {chunk} is not what was sealed")

    def _copy_native(self, native: CopyHash, start: int, end: int) -> bytes:
        source, target, length = self._in_block(start)
        source = source - start
        columns = (source.ctypes.data, target.ctypes.data, length.ctypes.data)
        return native.scatter(self._address + start, end - start, *columns, len(source))

    def _copy_and_hash(self, start: int, end: int, hasher: xxhash.xxh3_128 | None) -> None:
        for at in range(start, end, self._block_bytes):
            if hasher is not None:
                hasher.update(self._payload[at : min(at + self._block_bytes, end)])
            run_copies(self._address, self._in_block(at))

    def _in_block(self, at: int) -> CopyTable:
        """Return the copies from the block that begins there."""
        first, last = self._of_block.get(at // self._block_bytes, (0, 0))
        return CopyTable(*(column[first:last] for column in self._copies))


def threads_for(ranks: int) -> int:
    """Return the number of copying threads for each of ``ranks`` ranks on this machine."""
    return max(2, min(MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


def chunks_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return the chunks that (offset, length) ranges touch."""
    runs = (range(start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES + 1) for start, length in ranges if length)
    return set(itertools.chain.from_iterable(runs))


def chunks_of_copies(copies: CopyTable) -> set[int]:
    cut = copies.split_at_multiples(CHUNK_BYTES)
    return set(np.unique(cut.source // CHUNK_BYTES).tolist())


# ---- this node's slots, read from their segment files and always checked


def map_read_only(path: str, length: int = 0) -> memoryview:
    """Map a file shared and read-only: a page fault costs a third of a private mapping's. Raises OSError."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ))


def as_tensor(buffer: memoryview) -> torch.Tensor:
    """Return read-only bytes as a tensor to copy from; torch would warn of writes, which end the process here."""
    array = np.frombuffer(buffer, np.uint8)
    alias = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    alias.source = array  # type: ignore[attr-defined]  # the tensor keeps the alias, the alias the mapping
    return torch.frombuffer(alias, dtype=torch.uint8)


class BadSlot(Exception):
    """A slot that cannot be used, and why; ``is_corrupt`` if its bytes are not those sealed. ``check`` found it."""

    check = "xxh3-128 of each 8 MiB chunk"

    def __init__(self, slot: SlotInfo, reason: str, *, is_corrupt: bool) -> None:
        super().__init__(reason)
        self.slot, self.reason, self.is_corrupt = slot, reason, is_corrupt


class SlotDiffersFromState(BadSlot):
    """The slot's bytes are those sealed, and not those of the state that was copied."""

    check = "digests of the tensors, kept when they were copied"


class HashScope(Enum):
    """Chunks of a slot that a reader hashes: all, those it reads, or none, if another rank checks it before use."""

    ALL = auto()
    READ = auto()
    NONE = auto()


class LocalSlots:
    """Sealed slots in this node's segment files; ``own_segment`` returns one that this process has mapped already."""

    def __init__(self, own_segment: Callable[[str], SegmentView | None] = lambda _: None, threads: int = 2) -> None:
        self._own_segment, self._threads = own_segment, threads
        self._views: dict[str, SegmentView] = {}

    def _view(self, slot: SlotInfo) -> SegmentView:
        if slot.path not in self._views:
            self._views[slot.path] = self._own_segment(slot.path) or SegmentView(map_read_only(slot.path))
        return self._views[slot.path]

    def manifest(self, slot: SlotInfo) -> bytes:
        """Return the slot's manifest, checked. Raises BadSlot."""
        try:
            return self._require(slot).manifest(slot.slot)
        except (DigestMismatch, OSError) as error:
            raise self._bad(slot, error) from error

    def copy_and_check(
        self,
        slot: SlotInfo,
        copies: CopyTable = NO_COPIES,
        extra_ranges: Iterable[Range] = (),
        scope: HashScope = HashScope.ALL,
    ) -> torch.Tensor:
        """Copy from the slot, hash the chunks of ``scope``, return the payload. Raises BadSlot: drop the copies."""
        try:
            view = self._require(slot)
            digests, payload = view.digests(slot.slot)[1:], view.payload(slot.slot)
            if len(digests) != chunk_count(len(payload)):
                raise _SlotRefilled(f"slot {slot.slot} of {slot.path} is being refilled")
            checked: Iterable[int] = range(len(digests)) if scope is HashScope.ALL else ()
            if scope is HashScope.READ:
                checked = chunks_of_copies(copies) | chunks_of(extra_ranges)
            HashingCopy(payload, copies, digests, checked).run(self._threads)
            return as_tensor(payload)
        except (DigestMismatch, IndexError, OSError) as error:
            raise self._bad(slot, error) from error

    def require_unchanged(self, slot: SlotInfo) -> None:
        """Raise BadSlot if the slot was refilled since."""
        try:
            self._require(slot)
        except DigestMismatch as error:
            raise self._bad(slot, error) from error

    def _require(self, slot: SlotInfo) -> SegmentView:
        view = self._view(slot)
        header = view.header(slot.slot)
        expected = (SlotState.SEALED, slot.rank, slot.version)
        if header is None or (header.state, header.rank, header.version) != expected:
            raise _SlotRefilled(
                f"slot {slot.slot} of {slot.path} no longer holds version {slot.version} of rank {slot.rank}"
            )
        return view

    def _bad(self, slot: SlotInfo, error: Exception) -> BadSlot:
        """Return the error for a slot; a slot that was refilled while it was hashed is not corrupt."""
        corrupt = isinstance(error, DigestMismatch) and not isinstance(error, _SlotRefilled)
        if corrupt:
            try:
                self._require(slot)
            except _SlotRefilled as moved:
                return BadSlot(slot, str(moved), is_corrupt=False)
        return BadSlot(slot, str(error), is_corrupt=corrupt)


class _SlotRefilled(DigestMismatch):
    """The slot has been refilled: no corruption."""
