"""Plan copies of bytes to addresses in columns: a million tensors are three arrays, not a million objects.

Live memory is written by address, without torch. Other copies (a part of a larger box, another device) go between two
torch tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from everstep.layout.manifests import Range
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.v1.local import SlotInfo

# ---- copy tables

Column = np.ndarray


class CopyTable(NamedTuple):
    """Copies in ascending order of ``source`` (byte offsets): ``length`` bytes each, to the address ``target``."""

    source: Column
    target: Column
    length: Column

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def split_at_multiples(self, every: int) -> CopyTable:
        """Return the same copies, none across a multiple of ``every`` bytes of the source."""
        first, last = self.source // every, (self.source + self.length - 1) // every
        count = last - first + 1
        which = np.repeat(np.arange(len(count)), count)
        block = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
        start = np.maximum(self.source[which], block * every)
        end = np.minimum(self.source[which] + self.length[which], (block + 1) * every)
        cut = CopyTable(start, self.target[which] + start - self.source[which], end - start)
        if np.any(start[1:] < start[:-1]):  # pieces of two copies of the same bytes
            order = np.argsort(start, kind="stable")
            cut = CopyTable(*(column[order] for column in cut))
        return cut


NO_COPIES = CopyTable(*(np.zeros(0, np.int64) for _ in range(3)))


SMALL_BYTES = 64 << 10  # below this size, releasing Python's lock costs more than the copy

_libc = ctypes.CDLL(None)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = None
_locked = ctypes.PyDLL(None)
_locked.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_locked.memmove.restype = None


class TensorCopies:
    """Collects copies into live tensors, and keeps the tensors alive."""

    def __init__(self) -> None:
        self._source: list[int] = []
        self._target: list[int] = []
        self._length: list[int] = []
        self._tensors: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._source)

    def add(self, target: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Fill ``target``, which must satisfy ``is_byte_copyable``, with consecutive byte ranges of the source."""
        address = target.data_ptr()
        for start, length in ranges:
            self._source.append(start)
            self._target.append(address)
            self._length.append(length)
            address += length
        if address - target.data_ptr() != target.nbytes:
            raise ValueError(f"{address - target.data_ptr()} bytes do not fill a tensor of {target.nbytes}")
        self._tensors.append(target)

    def table(self) -> CopyTable:
        """Return the copies in order of the source, joined where they are adjacent at both ends."""
        if not self._source:
            return NO_COPIES
        columns = np.array((self._source, self._target, self._length), np.int64)
        source, target, length = columns[:, np.argsort(columns[0], kind="stable")]
        ends = source[:-1] + length[:-1]
        joined = (ends == source[1:]) & (target[:-1] + length[:-1] == target[1:])
        begins = np.flatnonzero(np.concatenate(([True], ~joined)))
        return CopyTable(source[begins], target[begins], np.add.reduceat(length, begins))

    def mark_written(self) -> None:
        """Increment torch's write counts of the tensors, as torch's own writes would have."""
        torch.autograd.graph.increment_version(self._tensors)


def run_copies(base: int, copies: CopyTable) -> None:
    """Run the copies from the memory that begins at address ``base``."""
    for source, target, length in zip(*(column.tolist() for column in copies), strict=True):
        (_locked if length < SMALL_BYTES else _libc).memmove(target, base + source, length)


def is_byte_copyable(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether stored elements of ``dtype`` equal this tensor's own bytes in order."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.layout is torch.strided
        and target.dtype == dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


# ---- batches: the wanted bytes of a slot in pieces that are requested, received and hashed separately

BATCH_BYTES = 2 * CHUNK_BYTES
"""Bytes of a slot in one request: whole chunks, so that each is hashed once by its holder."""
GAP_BYTES = 4 << 10  # gap between two ranges that is cheaper to fetch than another range
MAX_RANGES = 1 << 16  # a quarter of the ranges that a vault accepts in one request


class FetchBatch(msgspec.Struct, frozen=True):
    """Ranges of a slot, none across a chunk's end, and the copies from where they land one after another."""

    slot: SlotInfo
    ranges: tuple[Range, ...]
    copies: CopyTable
    nbytes: int


def split_into_batches(slot: SlotInfo, copies: CopyTable) -> Iterator[FetchBatch]:
    """Yield the requests for ``copies``, whose sources are offsets in the slot's payload."""
    copies = copies.split_at_multiples(min(BATCH_BYTES, CHUNK_BYTES))
    block = copies.source // BATCH_BYTES
    for first, last in _runs(block[1:] != block[:-1], len(block)):
        for begin in range(first, last, MAX_RANGES):
            yield _batch(slot, CopyTable(*(column[begin : min(begin + MAX_RANGES, last)] for column in copies)))


def _runs(breaks: np.ndarray, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first, one after the last) of each run; ``breaks`` tells for each member but the first if a run begins."""
    if count:
        begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        yield from zip(begins, [*begins[1:], count], strict=True)


def _batch(slot: SlotInfo, rows: CopyTable) -> FetchBatch:
    ends = np.maximum.accumulate(rows.source + rows.length)
    chunk = rows.source // CHUNK_BYTES
    apart = (rows.source[1:] > ends[:-1] + GAP_BYTES) | (chunk[1:] != chunk[:-1])
    runs = list(_runs(apart, len(ends)))
    begins = np.array([int(rows.source[first]) for first, _ in runs])
    lengths = np.array([int(ends[last - 1]) for _, last in runs]) - begins
    lands = np.cumsum(lengths) - lengths
    counts = [last - first for first, last in runs]
    landed = rows.source + np.repeat(lands - begins, counts)
    ranges = tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
    return FetchBatch(slot, ranges, CopyTable(landed, rows.target, rows.length), int(lengths.sum()))
