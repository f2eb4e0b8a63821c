"""Receive copies of other nodes' slots: reserve a slot, fill it, hash it, and only then seal it.

The bytes of one transfer may come over several connections. A slot stays reserved until the last of them has stopped
writing. An interrupted transfer resumes if the same slot is offered again, and makes room for any other.
"""

from __future__ import annotations

import ctypes
import operator
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import xxhash

from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, chunk_count, slot_bytes_for, slot_to_fill
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import ManifestPart, Part, Put, split_digests
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters

MANIFEST_PIECE = -1  # piece number of the manifest; other pieces are chunks, by their numbers
SETTLE_TIMEOUT_S = 1.0  # seconds to wait for a broken connection's writers before their connection is closed here too


class IncomingTransfer:
    """One transfer into one slot."""

    def __init__(self, job: str, sender: str, put: Put, segment: SegmentFile, slot: int) -> None:
        self.id = secrets.token_bytes(16)
        self.job, self.sender, self.put = job, sender, put
        self.digests = split_digests(put.digests)
        self.segment, self.slot = segment, slot
        self.manifest, self.payload = segment.view.reserve(
            slot, put.rank, put.version, put.manifest_bytes, put.payload_bytes
        )
        self.received: set[int] = set()  # pieces received and hashed: MANIFEST_PIECE and chunk numbers
        self.writers: set[VaultChannel] = set()
        self.is_aborted = False
        self.is_detached = False
        self._lock = threading.Lock()
        self._attempts: Counter[int] = Counter()

    @contextmanager
    def receiving_piece(self, piece: int) -> Iterator[Callable[[], None]]:
        """Receive a piece inside this context, and call the yielded function to count it as received, unless another
        connection has since begun to write it or broken off in it: its bytes are then unknown."""
        attempt = self._begin_attempt(piece)
        try:
            yield partial(self._complete_attempt, piece, attempt)
        except BaseException:
            self._begin_attempt(piece)
            raise

    def _begin_attempt(self, piece: int) -> int:
        with self._lock:
            self.received.discard(piece)
            self._attempts[piece] += 1
            return self._attempts[piece]

    def _complete_attempt(self, piece: int, attempt: int) -> None:
        with self._lock:
            if self._attempts[piece] == attempt:
                self.received.add(piece)

    @property
    def has_manifest(self) -> bool:
        return MANIFEST_PIECE in self.received

    @property
    def received_chunks(self) -> set[int]:
        return self.received - {MANIFEST_PIECE}

    def matches(self, sender: str, put: Put) -> bool:
        """Return whether ``sender`` offers these very bytes."""
        own = self.put
        ours = (self.sender, own.version, own.digests, own.payload_bytes, own.manifest_bytes)
        return ours == (sender, put.version, put.digests, put.payload_bytes, put.manifest_bytes)

    def shut_down_writers(self) -> None:
        for writer in self.writers:
            writer.shutdown()

    def chunk(self, index: int) -> memoryview:
        return self.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@dataclass(eq=False)
class SlotReceiver:
    """All transfers into this vault. Safe to use from any thread."""

    _store: SegmentStore
    _job_table: JobTable
    _finding_reporter: FindingReporter
    _counters: VaultCounters

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._writer_left = threading.Condition(self._lock)
        self._segment_locks: defaultdict[SegmentKey, threading.Lock] = defaultdict(threading.Lock)
        self._transfers: dict[bytes, IncomingTransfer] = {}

    def begin(self, job: str, sender: str, put: Put) -> IncomingTransfer | None:
        """Reserve a slot, or return None if these very bytes are sealed here already. Raises EverstepError."""
        self._job_table.require_current(job, put.generation)
        digests = split_digests(put.digests)
        if len(digests) != chunk_count(put.payload_bytes) + 1 or len(digests[-1]) != len(digests[0]):
            raise MalformedMessage(f"{len(put.digests)} bytes of digests for a payload of {put.payload_bytes} bytes")
        key = SegmentKey(job, "replica", put.rank)
        with self._segment_lock(key):
            need = slot_bytes_for(put.manifest_bytes, put.payload_bytes)
            segment = self._store.open(key, max(put.slot_bytes, need), put.slots, self._versions_to_keep(key, put))
            self._job_table.require_configured(job, self._store.delete_job)
            self._abort_stale(key)
            if _holds(segment, put):
                return None
            self._wait_for_earlier_writers(segment, sender, put)
            if (resumed := self._resume_detached(segment, sender, put)) is not None:
                self._counters.add("reused_bytes", sum(len(resumed.chunk(index)) for index in resumed.received_chunks))
                return resumed
            incoming = IncomingTransfer(job, sender, put, segment, self._free_slot(segment, put))
            with self._lock:
                self._transfers[incoming.id] = incoming
        self._counters.add("reused_bytes", fill_from_other_versions(incoming))
        return incoming

    def _versions_to_keep(self, key: SegmentKey, put: Put) -> list[Version]:
        """Return what to keep if slots are short: versions the rank names, then its generation's (maybe committed)."""
        segment = self._store.get(key)
        sealed = () if segment is None else (header.version for _, header in segment.view.sealed_slots())
        own = sorted((version for version in sealed if version.generation == put.generation), reverse=True)
        return [*put.keep, *own]

    def _wait_for_earlier_writers(self, segment: SegmentFile, sender: str, put: Put) -> None:
        """Wait for earlier connections with the same bytes: their sender's end may not be known here yet."""
        with self._writer_left:
            earlier = [i for i in self._transfers.values() if i.segment is segment and i.matches(sender, put)]
            for incoming in earlier:
                incoming.is_detached = True
                unused = partial(operator.not_, incoming.writers)
                if not self._writer_left.wait_for(unused, SETTLE_TIMEOUT_S):
                    incoming.shut_down_writers()
                    self._writer_left.wait_for(unused, SETTLE_TIMEOUT_S)

    def _resume_detached(self, segment: SegmentFile, sender: str, put: Put) -> IncomingTransfer | None:
        """Resume an interrupted transfer of the same bytes under a new id, without the old connection; drop others."""
        with self._lock:
            detached = [i for i in self._transfers.values() if i.segment.key == segment.key and i.is_detached]
            same = (i for i in detached if i.segment is segment and not i.writers and i.matches(sender, put))
            found = next(same, None)
            for other in detached:
                if other is not found:
                    other.is_aborted = True
                    self._release_if_unused(other)
            if found is not None:
                del self._transfers[found.id]
                found.id, found.put, found.is_detached = secrets.token_bytes(16), put, False
                self._transfers[found.id] = found
            return found

    def _abort_stale(self, key: SegmentKey) -> None:
        """Abort transfers of an ended generation: silent senders would hold their slots until a time-out."""
        generation = self._job_table.get_config(key.job).generation
        with self._lock:
            for incoming in [i for i in self._transfers.values() if i.segment.key == key]:
                # An interrupted transfer may be resumed.
                if incoming.put.generation < generation and not incoming.is_detached:
                    incoming.is_aborted = True
                    incoming.shut_down_writers()
                    self._release_if_unused(incoming)

    def forget_job(self, job: str) -> None:
        """Forget a job that is over; its transfers find no segment to seal in."""
        with self._lock:
            for key in [k for k in self._segment_locks if k.job == job]:
                del self._segment_locks[key]
            for incoming in [i for i in self._transfers.values() if i.job == job and i.is_detached]:
                del self._transfers[incoming.id]

    def _segment_lock(self, key: SegmentKey) -> threading.Lock:
        with self._lock:
            return self._segment_locks[key]

    def _free_slot(self, segment: SegmentFile, put: Put) -> int:
        with self._lock:
            used = {i.slot for i in self._transfers.values() if i.segment is segment}
        free = [slot for slot in range(segment.view.slots) if slot not in used]
        return free[slot_to_fill([segment.view.header(slot) for slot in free], set(put.keep))]

    def receive_part(self, job: str, sender: str, part: Part, channel: VaultChannel) -> None:
        """Receive and hash a part's chunks. The connection stays usable after DigestMismatch and Conflict."""
        with self._writing_to(job, sender, part.transfer, channel) as incoming:
            if part.first_chunk + part.chunks > chunk_count(incoming.put.payload_bytes):
                raise MalformedMessage(f"{sender} sent chunks beyond the payload's end")
            failure: DigestMismatch | None = None
            for index in range(part.first_chunk, part.first_chunk + part.chunks):
                chunk = incoming.chunk(index)
                with incoming.receiving_piece(index) as counts:
                    channel.receive_into(chunk)
                    if not channel.receive_piece_status():
                        raise failure or _slot_refilled_error(incoming)
                    if xxhash.xxh3_128_digest(chunk) == incoming.digests[index + 1]:
                        counts()
                    elif failure is None:  # the rest is read to keep the connection in step
                        failure = self._report_corrupt(incoming, f"chunk {index}")
            if failure is not None:
                raise failure

    def receive_manifest(self, job: str, sender: str, part: ManifestPart, channel: VaultChannel) -> None:
        """Receive the manifest and hash it. Raises what ``receive_part`` does."""
        with (
            self._writing_to(job, sender, part.transfer, channel) as incoming,
            incoming.receiving_piece(MANIFEST_PIECE) as counts,
        ):
            for start in range(0, len(incoming.manifest), CHUNK_BYTES):
                channel.receive_into(incoming.manifest[start : start + CHUNK_BYTES])
                if not channel.receive_piece_status():
                    raise _slot_refilled_error(incoming)
            if xxhash.xxh3_128_digest(incoming.manifest) != incoming.digests[0]:
                raise self._report_corrupt(incoming, "the manifest")
            counts()
        self._counters.add("received_manifests")

    @contextmanager
    def _writing_to(self, job: str, sender: str, transfer: bytes, channel: VaultChannel) -> Iterator[IncomingTransfer]:
        """Keep the transfer's slot reserved inside this context; abort the transfer if its bytes are bad."""
        with self._lock:
            incoming = self._transfers.get(transfer)
            if incoming is None or incoming.is_aborted or (incoming.job, incoming.sender) != (job, sender):
                raise MalformedMessage(f"{sender} sent a part of an unknown transfer")
            incoming.writers.add(channel)
        try:
            yield incoming
        except (DigestMismatch, Conflict):
            incoming.is_aborted = True
            raise
        finally:
            with self._lock:
                incoming.writers.discard(channel)
                self._writer_left.notify_all()
                self._release_if_unused(incoming)

    def _report_corrupt(self, incoming: IncomingTransfer, description: str) -> DigestMismatch:
        put = incoming.put
        detail = f"{description} has a wrong digest"
        self._finding_reporter.report_corrupt_transfer(incoming.job, incoming.sender, put.rank, put.version, detail)
        return DigestMismatch(f"{description} of rank {put.rank}'s version {put.version} differs from the sealed bytes")

    def _release_if_unused(self, incoming: IncomingTransfer) -> None:
        if incoming.is_aborted and not incoming.writers and incoming.id in self._transfers:
            del self._transfers[incoming.id]
            incoming.segment.view.discard(incoming.slot)

    def finish(self, job: str, sender: str, transfer: bytes) -> None:
        """Seal the slot. Raises StaleGeneration, NotFound, or Conflict if bytes are missing."""
        with self._lock:
            incoming = self._transfers.get(transfer)
        if incoming is None or incoming.is_aborted or (incoming.job, incoming.sender) != (job, sender):
            raise NotFound("the transfer is unknown")
        put = incoming.put
        with self._segment_lock(incoming.segment.key):
            self._job_table.require_current(job, put.generation)
            if self._store.get(incoming.segment.key) is not incoming.segment:
                raise Conflict("the segment was replaced or forgotten while the slot was filled; send it again")
            received, expected = len(incoming.received_chunks), len(incoming.digests) - 1
            if incoming.writers or received != expected or not incoming.has_manifest:
                missing = "" if incoming.has_manifest else ", but not the manifest"
                raise Conflict(f"received {received} of {expected} chunks{missing}")
            view = incoming.segment.view
            view.seal(incoming.slot, incoming.digests)
            for slot, header in list(view.sealed_slots()):
                if header.version == put.version and slot != incoming.slot:
                    view.discard(slot)  # the rank sealed the version again, and the newer seal holds
            with self._lock:
                del self._transfers[incoming.id]
        self._job_table.note_holder(job, put.rank, sender)
        self._counters.add("received_slots")
        self._counters.add("received_bytes", put.payload_bytes + put.manifest_bytes)

    def detach(self, transfer: bytes) -> None:
        """Detach a transfer whose first connection ended; its sender may come back."""
        with self._lock:
            incoming = self._transfers.get(transfer)
            if incoming is not None:
                incoming.is_detached = True
                # the segment is gone, so the transfer cannot resume
                if self._store.get(incoming.segment.key) is not incoming.segment:
                    incoming.is_aborted = True
                    self._release_if_unused(incoming)


def _slot_refilled_error(incoming: IncomingTransfer) -> Conflict:
    return Conflict(f"{incoming.sender} refilled the slot while it was sent")


def fill_from_other_versions(incoming: IncomingTransfer) -> int:
    """Copy what sealed slots of the same rank share, hashed at its new place; return the number of chunk bytes."""
    view, count = incoming.segment.view, 0
    wanted: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, digest in enumerate(incoming.digests[1:]):
        wanted[digest].append(index)
    for slot, header in list(view.sealed_slots()):
        if slot == incoming.slot or header.rank != incoming.put.rank:
            continue
        try:
            manifest, *theirs = view.digests(slot)
            same_length = header.manifest_bytes == len(incoming.manifest)  # nothing else checks the sender's number
            if not incoming.has_manifest and same_length and manifest == incoming.digests[0]:
                incoming.manifest[:] = view.manifest(slot)
                incoming.received.add(MANIFEST_PIECE)
            payload = view.payload(slot)
        except EverstepError:  # refilled or damaged; the scrubber or reader of that slot reports it
            continue
        for place, digest in enumerate(theirs if wanted else ()):
            chunk = payload[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
            for index in wanted.pop(digest, ()):
                count += _copy_chunk(incoming, index, chunk)
    return count


def _copy_chunk(incoming: IncomingTransfer, index: int, chunk: memoryview) -> int:
    into = incoming.chunk(index)
    if len(into) != len(chunk):
        return 0
    to, source = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, chunk))
    ctypes.memmove(to, source, len(into))  # without Python's lock, which a slice assignment would hold
    if xxhash.xxh3_128_digest(into) != incoming.digests[index + 1]:
        return 0
    incoming.received.add(index)
    return len(into)


def _holds(segment: SegmentFile, put: Put) -> bool:
    table = xxhash.xxh3_128_digest(put.digests)
    return any(
        header.rank == put.rank
        and header.version == put.version
        and header.payload_bytes == put.payload_bytes
        and header.table_digest == table
        for _, header in segment.sealed()
    )
