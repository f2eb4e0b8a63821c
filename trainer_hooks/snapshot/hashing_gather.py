"""Copies of many tensors into one slot that make the digests of its chunks in the same pass.

What would be hashed when the slot is sealed need not be read again, and the digests are of what was in live memory, not
of what lies in the slot by then. As fast as a plain copy, so that training is not held up for longer.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from everstep.native import SHORTEST_BYTES, CopyHash
from everstep.slots import CHUNK_BYTES, chunk_count
from trainer_hooks.rows import Rows

WORTH_A_THREAD_BYTES = 16 << 20


class _Chunk(NamedTuple):
    """``rows``: what fills it, but the other way round: to the offset ``source`` in the chunk, from the address
    ``target``. ``columns``: where the rows' columns are."""

    address: int
    length: int
    rows: Rows
    columns: tuple[int, int, int]


class HashingGather:
    """Pairs of tensors of one dtype and shape each, to be copied again and again; the memory of none may move.

    Args:
        payload: the slot's bytes, all that is hashed; what nothing is copied to is hashed as it is then.
        targets: contiguous, disjoint parts of it.
        sources: live tensors on the CPU.
    """

    def __init__(
        self, payload: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor], native: CopyHash
    ) -> None:
        self._native = native
        self._payload = payload
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[1].nbytes]
        self._plain = [pair for pair in pairs if _is_plain(pair[1])]
        others = [pair for pair in pairs if not _is_plain(pair[1])]
        self._targets, self._sources = [target for target, _ in others], [source for _, source in others]
        self._chunks = list(self._cut())

    def copy(self) -> list[bytes]:
        """Everything, without Python's lock for most of it; the xxh3-128 of each chunk."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)
        digests = [b""] * len(self._chunks)
        todo = iter(range(len(digests)))

        def work() -> None:
            for number in todo:
                digests[number] = self._fill(self._chunks[number])

        worth = min(torch.get_num_threads(), self._payload.numel() // WORTH_A_THREAD_BYTES)
        helpers = [threading.Thread(target=work, name="everstep-copy", daemon=True) for _ in range(worth - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if not all(digests):
            raise RuntimeError("a thread that copied has failed")
        return digests

    def _cut(self) -> Iterator[_Chunk]:
        base = self._payload.data_ptr()
        columns = [(to.data_ptr() - base, source.data_ptr(), source.nbytes) for to, source in self._plain]
        rows = Rows(*np.array(sorted(columns), np.int64).reshape(-1, 3).T.copy()).cut(CHUNK_BYTES)
        count = chunk_count(self._payload.numel())
        bounds = np.searchsorted(rows.source, np.arange(count + 1) * CHUNK_BYTES).tolist()
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            start = number * CHUNK_BYTES
            source, target, length = (column[first:last] for column in rows)
            size = min(CHUNK_BYTES, self._payload.numel() - start)
            yield _chunk(base + start, size, Rows(source - start, target.copy(), length.copy()))

    def _fill(self, chunk: _Chunk) -> bytes:
        address, length, rows, columns = chunk
        if length >= SHORTEST_BYTES:
            return self._native.gather(address, length, *columns, len(rows.source))
        for to, source, nbytes in zip(*(column.tolist() for column in rows), strict=True):
            ctypes.memmove(address + to, source, nbytes)
        return xxhash.xxh3_128_digest(ctypes.string_at(address, length))


def _chunk(address: int, length: int, rows: Rows) -> _Chunk:
    offsets, sources, sizes = (column.ctypes.data for column in rows)
    return _Chunk(address, length, rows, (offsets, sources, sizes))


def _is_plain(source: torch.Tensor) -> bool:
    """Whether its bytes are its elements in a row."""
    kind = type(source) in (torch.Tensor, torch.nn.Parameter) and not source.is_conj() and not source.is_neg()
    return kind and source.is_contiguous()
