"""What the node's vault makes again from parity: batch by batch in a small window, copied out of it while more comes.

The window is a scratch file that the vault writes and this rank reads. Its pages are made once, which takes as long as
fetching as much, and are kept for the next restore: so it is small, and used again and again. Every byte in it was
hashed by the vault.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from everstep.errors import DigestMismatch, EverstepError
from everstep.wire.v1.local import Fetched, SlotInfo
from trainer_hooks.restore.batches import BATCH_BYTES, Batch
from trainer_hooks.restore.local import BadSlot, map_readable
from trainer_hooks.restore.moves import copy_rows
from trainer_hooks.snapshot.layout import ALIGN
from trainer_hooks.vault_client import VaultClient

PLACES = 4
MOST_AT_ONCE = 16
"""Fetches, where all that is fetched fits into the window. A vault works on 64 of one process."""
WINDOW_BYTES = PLACES * BATCH_BYTES
"""Kept for the next restore, which then needs none of the 50 ms that making these pages takes. Goes with the job."""


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
