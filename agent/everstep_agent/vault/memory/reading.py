"""Read sealed slots that their rank may refill at any moment: hash first, and check for changes after."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from everstep.errors import Conflict, DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader
from everstep.layout.slots import CHUNK_BYTES
from everstep_agent.vault.memory.segments import SegmentFile, SegmentStore
from everstep_agent.vault.reporting import FindingReporter

ByteRange = tuple[int, int]


class SealedSlotReader:
    """One sealed slot, with the header it had when it was found."""

    def __init__(self, segment: SegmentFile, slot: int, header: SlotHeader) -> None:
        self.segment, self.slot, self.header = segment, slot, header
        view = segment.view
        try:
            self.digests = view.digests(slot)
            self.payload = view.payload(slot)
            self.manifest = view.manifest(slot)
        except DigestMismatch:
            self.require_unchanged()
            raise
        self.require_unchanged()

    def is_unchanged(self) -> bool:
        """Return whether all bytes read so far are the slot's own: a fill changes the header before it touches any."""
        return self.segment.view.header(self.slot) == self.header

    def require_unchanged(self) -> None:
        """Raise Conflict if the slot has changed."""
        if not self.is_unchanged():
            raise Conflict(f"slot {self.slot} of {self.segment.path.name} was refilled while it was read")

    def check(self, ranges: Sequence[ByteRange], checked_chunks: Container[int] = ()) -> set[int]:
        """Hash every chunk that the ranges touch, each once, except ``checked_chunks``; return the hashed ones."""
        touched = {
            index
            for first, last in _chunk_runs(ranges, len(self.payload))
            for index in range(first, last + 1)
            if index not in checked_chunks
        }
        for index in sorted(touched):
            start = index * CHUNK_BYTES
            try:
                self.segment.view.verify_chunks(self.slot, start, min(CHUNK_BYTES, len(self.payload) - start))
            except (DigestMismatch, IndexError):
                self.require_unchanged()
                raise
        if touched:
            self.require_unchanged()
        return touched

    def sealed_digest(self, piece: ByteRange) -> bytes | None:
        """Return the sealed digest of these bytes if they are exactly one chunk."""
        offset, length = piece
        index, within = divmod(offset, CHUNK_BYTES)
        if within or not length or length != min(CHUNK_BYTES, len(self.payload) - offset):
            return None
        return self.digests[index + 1]

    def views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        return [self.payload[offset : offset + length] for offset, length in ranges]


def split_into_chunks(ranges: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
    """Split consecutive ranges into pieces of exactly CHUNK_BYTES; the last holds the rest."""
    piece: list[ByteRange] = []
    room = CHUNK_BYTES
    for offset, length in ranges:
        at, end = offset, offset + length
        while at < end:
            taken = min(room, end - at)
            piece.append((at, taken))
            at += taken
            room -= taken
            if not room:
                yield piece
                piece, room = [], CHUNK_BYTES
    if piece:
        yield piece


def _chunk_runs(ranges: Sequence[ByteRange], length: int) -> list[ByteRange]:
    """Return the merged runs (first, last) of touched chunks. Raises MalformedMessage for a range outside."""
    runs: list[ByteRange] = []
    for start, count in sorted(ranges):
        if start < 0 or count < 0 or start + count > length:
            raise MalformedMessage(f"bytes {start} to {start + count} are outside a payload of {length} bytes")
        if not count:
            continue
        first, last = start // CHUNK_BYTES, (start + count - 1) // CHUNK_BYTES
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs


class _SlotSearch:
    """Try the slots whose headers name a shard, and discard those whose bytes are wrong."""

    def __init__(self, finder: SlotFinder, job: str, rank: int, version: Version, parity: bool) -> None:
        self._finding_reporter = finder.finding_reporter
        self._found = finder.store.find(job, rank, version, parity=parity)
        whose = "the parity of group" if parity else "rank"
        self._lacking = f"no sealed slot on this node holds version {version} of {whose} {rank} of job {job}"
        self._bad: DigestMismatch | None = None

    def next_reader(self, ranges: Sequence[ByteRange], table: bytes | None = None) -> tuple[SealedSlotReader, set[int]]:
        """Return the next slot whose ranges hash right, of this digest ``table`` if given, and the hashed chunks."""
        for segment, slot, header in self._found:
            if table not in (None, header.table_digest):
                continue
            try:
                reading = SealedSlotReader(segment, slot, header)
                return reading, reading.check(ranges)
            except Conflict:
                continue
            except DigestMismatch as error:
                self.report_corrupt(segment, slot, header, error)
        raise NotFound(self._lacking) if self._bad is None else self._bad

    def report_corrupt(self, segment: SegmentFile, slot: int, header: SlotHeader, error: DigestMismatch) -> None:
        self._finding_reporter.report_corrupt_slot(segment, slot, header, error, detected_by="reader")
        self._bad = error


@dataclass(eq=False)
class SlotFinder:
    """Find slots whose bytes hash right."""

    store: SegmentStore
    finding_reporter: FindingReporter

    def open(
        self, job: str, rank: int, version: Version, ranges: Sequence[ByteRange], *, parity: bool = False
    ) -> SealedSlotReader:
        """Return a reader of the share of a rank or, with ``parity``, of the group with that number; hashes ``ranges``.
        Raises NotFound, MalformedMessage, or DigestMismatch if all slots are bad."""
        return _SlotSearch(self, job, rank, version, parity).next_reader(ranges)[0]

    def read_pieces(
        self,
        job: str,
        rank: int,
        version: Version,
        ranges: Sequence[ByteRange],
        *,
        parity: bool = False,
        skip_own_chunks: bool = False,
    ) -> Iterator[tuple[SealedSlotReader, list[memoryview]]]:
        """Yield pieces of CHUNK_BYTES, hashed on demand, with their slot; ``skip_own_chunks``: do not hash whole chunks
        that this vault has hashed before. Raises what ``open`` does, at any piece."""
        search = _SlotSearch(self, job, rank, version, parity)
        reading, done = search.next_reader(() if skip_own_chunks else next(split_into_chunks(ranges), ()))
        # check before splitting, because the client determines the number of pieces
        _chunk_runs(ranges, len(reading.payload))
        skip_own_chunks = skip_own_chunks and (reading.slot, reading.header) in reading.segment.sealed()
        unseen = {each[0] // CHUNK_BYTES for each in ranges if skip_own_chunks and reading.sealed_digest(each)}
        for piece in split_into_chunks(ranges):
            try:
                done |= reading.check(piece, done | unseen)
            except Conflict as error:
                raise NotFound(str(error)) from error
            except DigestMismatch as error:
                search.report_corrupt(reading.segment, reading.slot, reading.header, error)
                reading, done = search.next_reader(piece, reading.header.table_digest)
            yield reading, reading.views(piece)
