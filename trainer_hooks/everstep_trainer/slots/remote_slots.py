"""Receive slots of other nodes straight into live memory, hashed while they are in the cache.

The node's vault hands over an authenticated connection to the holder's vault. Bytes reach live memory before their
digests are known, so a batch counts only when it is complete with the right hash. The holder sends whole chunks
unchecked; if they arrive wrong it is asked once more, to learn whether they are wrong there. Once ``finish`` or
``close`` has returned, nothing is written any more.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotFound, Unavailable
from everstep.layout.digests import RangeHasher
from everstep.layout.manifests import Range
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.local import Fetch, Fetched, SlotInfo
from everstep.wire.v1.transfer import Data, DataEnd, Get
from everstep_trainer.slots.byte_moves import BATCH_BYTES, CopyTable, FetchBatch, run_copies
from everstep_trainer.slots.local_slots import BadSlot, map_read_only
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.state.layout import aligned

STREAM_COUNT = 2  # parallel connections: one is bound by one core at each end, and waits while the other end hashes
MIN_STREAM_BYTES = 32 << 20
BLOCK_BYTES = 256 << 10
"""Received, then hashed: with the kernel's source buffer it must fit a core's own cache. Divides CHUNK_BYTES."""
MAX_VIEWS = 128  # copies of a piece that are each received into place; with more, the piece goes through a buffer


class BadTransfer(BadSlot):
    """The received bytes are not those that the holder says it sent."""


class SlotStreams:
    """Receives batches, roughly in order, in threads of its own."""

    def __init__(self, vault: VaultClient, job: str, batches: Iterable[FetchBatch]) -> None:
        self._vault, self._job = vault, job
        self._todo = deque(batches)
        self._count = len(self._todo)
        self._failed = 0
        self._changed = threading.Condition()
        self._open: set[VaultChannel] = set()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self.landed: list[FetchBatch] = []
        self.failures: list[BadSlot] = []

    def start(self) -> None:
        """Start the threads, unless they run already. Returns at once."""
        if self._threads or not self._todo:
            return
        worth = sum(batch.nbytes for batch in self._todo) // MIN_STREAM_BYTES
        self._threads = [
            threading.Thread(target=self._work, name="everstep-receive", daemon=True)
            for _ in range(max(1, min(STREAM_COUNT, worth)))
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[BadSlot]:
        """Wait for everything; return the failed slots, whose filled memory must not be used."""
        self.start()
        for thread in self._threads:
            thread.join()
        left = self._count - len(self.landed) - self._failed
        assert self._stopped or not left, f"{left} batches neither came nor failed"
        return self.failures

    def close(self) -> None:
        """Abandon unfinished batches."""
        with self._changed:
            self._stopped = True
            for channel in self._open:
                channel.shutdown()
            self._changed.wait_for(lambda: not self._open)

    # --- in the threads

    def _work(self) -> None:
        receivers: dict[str, _Receiver] = {}
        buffer = bytearray(BLOCK_BYTES)
        try:
            while (batch := self._next()) is not None:
                try:
                    self._receive(batch, receivers, buffer)
                except EverstepError as error:
                    self._fail(batch.slot, error)
        finally:
            for receiver in receivers.values():
                self._close_receiver(receiver)

    def _next(self) -> FetchBatch | None:
        with self._changed:
            while self._todo and not self._stopped:
                batch = self._todo.popleft()
                if all(failure.slot is not batch.slot for failure in self.failures):
                    return batch
                self._failed += 1
        return None

    def _receive(self, batch: FetchBatch, receivers: dict[str, _Receiver], buffer: bytearray) -> None:
        node = batch.slot.node
        if node not in receivers:
            receivers[node] = self._connected(node, buffer)
        try:
            receivers[node].receive(batch)
        except EverstepError as error:
            self._close_receiver(receivers.pop(node))
            if isinstance(error, Unavailable) and not self._stopped:
                self._vault.report_broken_connection(job=self._job, node=node, reason=str(error))
            raise
        with self._changed:
            self.landed.append(batch)

    def _connected(self, node: str, buffer: bytearray) -> _Receiver:
        connection = self._vault.connect(job=self._job, node=node).result()
        channel = VaultChannel(connection.sock, node, connection.io_timeout_s)
        with self._changed:
            if not self._stopped:
                self._open.add(channel)
                return _Receiver(channel, connection.answer_timeout_s, connection.io_timeout_s, buffer)
        channel.close()
        raise Unavailable("the restore was abandoned")

    def _close_receiver(self, receiver: _Receiver) -> None:
        receiver.channel.close()
        with self._changed:
            self._open.discard(receiver.channel)
            self._changed.notify_all()

    def _fail(self, slot: SlotInfo, error: EverstepError) -> None:
        with self._changed:
            self._failed += 1
            if any(failure.slot is slot for failure in self.failures):
                return
            kind = BadTransfer if isinstance(error, _TransferCorrupted) else BadSlot
            self.failures.append(kind(slot, str(error), is_corrupt=isinstance(error, DigestMismatch)))


class _TransferCorrupted(DigestMismatch):
    """A mismatch found here, but not by the holder."""


class _Receiver:
    """Requests batches over one connection. ``buffer``: BLOCK_BYTES, for bytes that are not received into place."""

    def __init__(self, channel: VaultChannel, answer_timeout_s: float, io_timeout_s: float, buffer: bytearray) -> None:
        self.channel, self._answer_timeout_s, self._io_timeout_s = channel, answer_timeout_s, io_timeout_s
        self._buffer = memoryview(buffer)
        self._address = np.frombuffer(buffer, np.uint8).ctypes.data

    def receive(self, batch: FetchBatch) -> None:
        """Fill the batch's targets. After an error neither the connection nor the filled memory may be used."""
        if self._receive_and_verify(batch, unhashed=True):
            return
        slot = batch.slot
        wrong = _TransferCorrupted(
            f"the bytes that {slot.node} sent of rank {slot.rank}'s version {slot.version} have the wrong digest"
        )
        try:
            self._receive_and_verify(batch, unhashed=False)  # the holder itself refuses bytes that are wrong there
        except (DigestMismatch, NotFound):
            raise
        except EverstepError as error:
            raise wrong from error
        raise wrong

    def _receive_and_verify(self, batch: FetchBatch, unhashed: bool) -> bool:
        """Fill the batch's targets; return whether the bytes are those sealed. ``unhashed``: as Get.skip_hash."""
        slot, channel = batch.slot, self.channel
        channel.send(Get(rank=slot.rank, version=slot.version, ranges=batch.ranges, skip_hash=unhashed))
        channel.set_receive_timeout(self._answer_timeout_s)
        announced = channel.receive_answer(Data).bytes
        if announced != batch.nbytes:
            raise MalformedMessage(f"{slot.node} announced {announced} bytes instead of the requested {batch.nbytes}")
        channel.set_receive_timeout(self._io_timeout_s)
        hasher = RangeHasher([length for _, length in batch.ranges])
        for at, rows in _cut(batch.copies, CHUNK_BYTES, 0, batch.nbytes):
            self._piece(at, min(CHUNK_BYTES, batch.nbytes - at), rows, hasher)
            channel.require_good_piece()
        return channel.receive_answer(DataEnd).digests == hasher.digests()

    def _piece(self, at: int, length: int, rows: CopyTable, hasher: RangeHasher) -> None:
        """Receive a piece into place, or through the buffer if it has many copies or bytes that two of them want."""
        if len(rows.source) <= MAX_VIEWS and np.all(rows.source[1:] >= rows.source[:-1] + rows.length[:-1]):
            for view in self._views(at, length, rows):
                for start in range(0, len(view), BLOCK_BYTES):
                    self._take(view[start : start + BLOCK_BYTES], hasher)
            return
        for start, some in _cut(rows, BLOCK_BYTES, at, at + length):
            self._take(self._buffer[: min(BLOCK_BYTES, at + length - start)], hasher)
            run_copies(self._address - start, some)

    def _take(self, view: memoryview, hasher: RangeHasher) -> None:
        self.channel.receive_into(view)
        hasher.update(view)

    def _views(self, at: int, length: int, rows: CopyTable) -> Iterator[memoryview]:
        """Yield the destinations of the bytes from ``at`` on: live memory, or the buffer for unwanted ones."""
        here = at
        for source, target, count in zip(*(column.tolist() for column in rows), strict=True):
            yield self._buffer[: source - here]
            yield memoryview((ctypes.c_ubyte * count).from_address(target)).cast("B")
            here = source + count
        yield self._buffer[: at + length - here]


def _cut(rows: CopyTable, every: int, begin: int, end: int) -> Iterator[tuple[int, CopyTable]]:
    """Yield (begin, copies from it) of each ``every`` bytes from ``begin``, a multiple of ``every``, to ``end``."""
    rows = rows.split_at_multiples(every)
    starts = np.arange(begin, end, every)
    bounds = np.searchsorted(rows.source, np.append(starts, end)).tolist()
    for start, first, last in zip(starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        yield start, CopyTable(*(column[first:last] for column in rows))


# ---- slots that the node's vault rebuilds from parity, copied out of a small window while more arrives: a scratch file
# that the vault writes and this rank reads. Making its pages takes as long as fetching as much, so it is reused.

WINDOW_BATCHES = 4
MAX_CONCURRENT_FETCHES = 16
"""Parallel fetches if everything fits into the window. A vault works on 64 of one process."""
WINDOW_BYTES = WINDOW_BATCHES * BATCH_BYTES
"""Kept for the next restore, which then saves the 50 ms of making these pages. Removed with the job."""


class ScratchFetch:
    """Fetches batches in their order through the window's file, which ``scratch`` returns."""

    def __init__(self, vault: VaultClient, job: str, scratch: Callable[[], Path], batches: list[FetchBatch]) -> None:
        self._vault, self._job, self._scratch = vault, job, scratch
        self._todo = deque(batches)
        self._is_circular = sum(aligned(batch.nbytes) for batch in self._todo) > WINDOW_BYTES
        self._under_way: deque[tuple[FetchBatch, int, Future[Fetched]]] = deque()
        self._number = self._base = self._next = self._end = 0
        self._data = memoryview(b"")
        self.failures: list[BadSlot] = []

    def start(self) -> None:
        """Request as much as the window takes. Returns at once."""
        most = WINDOW_BATCHES if self._is_circular else MAX_CONCURRENT_FETCHES
        while self._todo and len(self._under_way) < most:
            batch = self._todo.popleft()
            if any(failure.slot is batch.slot for failure in self.failures):
                continue
            at = self._window_offset(batch)
            asked = self._vault.fetch(make_fetch(self._job, batch.slot, self._scratch(), batch.ranges, at))
            self._under_way.append((batch, at, asked))

    def finish(self) -> list[BadSlot]:
        """Wait for everything; return the failed slots, whose bytes must not be used."""
        self.start()
        while self._under_way:
            batch, at, asked = self._under_way[0]
            try:
                asked.result()
                run_copies(self._address(at, batch.nbytes), batch.copies)
            except EverstepError as error:
                self._fail(batch.slot, error)
            self._under_way.popleft()
            self.start()
        return self.failures

    def close(self) -> None:
        """Abandon unfinished batches. The vault may still write them, so their file is not reused."""
        if self._under_way or self.failures or self._end > WINDOW_BYTES:
            self._scratch().unlink(missing_ok=True)

    def _window_offset(self, batch: FetchBatch) -> int:
        """Return where a batch lands: a part of the window already copied from, unless all batches fit at once."""
        if self._is_circular:
            at = self._base + self._number % WINDOW_BATCHES * BATCH_BYTES
            self._number += 1
        else:
            at = self._base + self._next
            self._next += aligned(batch.nbytes)
        self._end = max(self._end, at + batch.nbytes)
        return at

    def _fail(self, slot: SlotInfo, error: EverstepError) -> None:
        if all(failure.slot is not slot for failure in self.failures):
            self.failures.append(BadSlot(slot, str(error), is_corrupt=isinstance(error, DigestMismatch)))
        self._base, self._next = aligned(self._end), 0  # beyond late writes of the failed fetch

    def _address(self, at: int, nbytes: int) -> int:
        if at + nbytes > len(self._data):
            path = self._scratch()
            self._data = map_read_only(str(path), os.stat(path).st_size)
        return int(np.frombuffer(self._data, np.uint8).ctypes.data) + at


def make_fetch(job: str, slot: SlotInfo, into: Path, ranges: tuple[Range, ...] = (), offset: int = 0) -> Fetch:
    """Return the vault request for ranges of a slot, or for its manifest, written to ``into`` from ``offset`` on."""
    return Fetch(
        request=0,
        job=job,
        node=slot.node,
        rank=slot.rank,
        version=slot.version,
        ranges=ranges,
        target_path=str(into),
        target_offset=offset,
        parity_group=slot.parity_group,
    )
