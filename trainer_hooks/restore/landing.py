"""What comes from other nodes: fetched batch by batch into a small window, and copied out of it while more comes.

The window is a scratch file that the vault writes and this rank reads. Its pages are made once, which takes as long as
fetching as much, and are kept for the next restore: so it is small, and used again and again. Every byte in it was
hashed by two vaults.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np

from everstep.boxes import Range
from everstep.errors import DigestMismatch, EverstepError
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.local import Fetched, SlotInfo
from trainer_hooks.restore.local import BadSlot, map_readable
from trainer_hooks.restore.moves import Rows, copy_rows
from trainer_hooks.snapshot.layout import ALIGN
from trainer_hooks.vault_client import VaultClient

BATCH_BYTES = 2 * CHUNK_BYTES
"""Of a slot in one fetch: whole chunks, so that each is hashed once where it lies."""
PLACES = 4
MOST_AT_ONCE = 16
"""Fetches, where all that is fetched fits into the window. A vault works on 64 of one process."""
WINDOW_BYTES = PLACES * BATCH_BYTES
"""Kept for the next restore, which then needs none of the 50 ms that making these pages takes. Goes with the job."""
GAP_BYTES = 4 << 10
"""Bytes between two ranges that are cheaper to fetch than another range."""
MOST_RANGES = 1 << 16
"""A quarter of what a vault takes in one request."""


class Batch(msgspec.Struct, frozen=True):
    """Ranges of a slot that are fetched together, and the copies out of where they land one after another."""

    slot: SlotInfo
    ranges: tuple[Range, ...]
    rows: Rows
    nbytes: int


def batches_of(slot: SlotInfo, rows: Rows) -> Iterator[Batch]:
    """Copies out of a slot by way of the window; ``rows`` have offsets in the slot's payload."""
    rows = rows.cut(BATCH_BYTES)
    block = rows.source // BATCH_BYTES
    for first, last in _runs(block[1:] != block[:-1], len(block)):
        for begin in range(first, last, MOST_RANGES):
            yield _batch(slot, Rows(*(column[begin : min(begin + MOST_RANGES, last)] for column in rows)))


def _runs(breaks: np.ndarray, count: int) -> Iterator[tuple[int, int]]:
    """(first, one behind the last) of each run; ``breaks`` says of each member but the first whether it begins one."""
    if count:
        begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        yield from zip(begins, [*begins[1:], count], strict=True)


def _batch(slot: SlotInfo, rows: Rows) -> Batch:
    ends = np.maximum.accumulate(rows.source + rows.length)
    runs = list(_runs(rows.source[1:] > ends[:-1] + GAP_BYTES, len(ends)))
    begins = np.array([int(rows.source[first]) for first, _ in runs])
    lengths = np.array([int(ends[last - 1]) for _, last in runs]) - begins
    lands = np.cumsum(lengths) - lengths
    counts = [last - first for first, last in runs]
    landed = rows.source + np.repeat(lands - begins, counts)
    ranges = tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
    return Batch(slot, ranges, Rows(landed, rows.target, rows.length), int(lengths.sum()))


class Landing:
    """Carries out batches in their order.

    Args:
        scratch: the window's file, below the vault's directory of segments; asked for when there is something to fetch.
    """

    def __init__(self, vault: VaultClient, job: str, scratch: Callable[[], Path], batches: Iterable[Batch]) -> None:
        self._vault = vault
        self._job = job
        self._scratch = scratch
        self._todo = deque(batches)
        self._round = sum(_aligned(batch.nbytes) for batch in self._todo) > WINDOW_BYTES
        self._under_way: deque[tuple[Batch, int, Future[Fetched]]] = deque()
        self._number = self._base = self._next = self._end = 0
        self._data = memoryview(b"")
        self.failures: list[BadSlot] = []

    def begin(self) -> None:
        """Asks for as much as the window takes. Returns at once."""
        most = PLACES if self._round else MOST_AT_ONCE
        while self._todo and len(self._under_way) < most:
            batch = self._todo.popleft()
            if self._failed(batch.slot):
                continue
            at = self._place(batch)
            asked = self._vault.fetch(
                job=self._job,
                node=batch.slot.node,
                rank=batch.slot.rank,
                version=batch.slot.version,
                ranges=batch.ranges,
                into=str(self._scratch()),
                into_offset=at,
                group=batch.slot.group,
            )
            self._under_way.append((batch, at, asked))

    def finish(self) -> list[BadSlot]:
        """Waits for all of it; the slots that failed, of which nothing may be used."""
        self.begin()
        while self._under_way:
            batch, at, asked = self._under_way[0]
            try:
                asked.result()
                copy_rows(self._address(at, batch.nbytes), batch.rows)
            except EverstepError as error:
                self._fail(batch.slot, error)
            self._under_way.popleft()
            self.begin()
        return self.failures

    def close(self) -> None:
        """Leaves what is not finished. A vault may still write what nobody waits for any more: not into a file that is
        used again."""
        if self._under_way or self.failures or self._end > WINDOW_BYTES:
            self._scratch().unlink(missing_ok=True)

    def _place(self, batch: Batch) -> int:
        """Where it lands: in a place of the window that has been copied out of, unless all of it fits at once."""
        if self._round:
            at = self._base + self._number % PLACES * BATCH_BYTES
            self._number += 1
        else:
            at = self._base + self._next
            self._next += _aligned(batch.nbytes)
        self._end = max(self._end, at + batch.nbytes)
        return at

    def _failed(self, slot: SlotInfo) -> bool:
        return any(failure.slot is slot for failure in self.failures)

    def _fail(self, slot: SlotInfo, error: EverstepError) -> None:
        if not self._failed(slot):
            self.failures.append(BadSlot(slot, str(error), corrupt=isinstance(error, DigestMismatch)))
        self._base, self._next = -(-self._end // ALIGN) * ALIGN, 0  # where no late write of it lands

    def _address(self, at: int, nbytes: int) -> int:
        if at + nbytes > len(self._data):
            path = self._scratch()
            self._data = map_readable(str(path), os.stat(path).st_size)
        return int(np.frombuffer(self._data, np.uint8).ctypes.data) + at


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
