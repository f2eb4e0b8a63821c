"""Reading a sealed slot that its rank may fill anew at any moment: checked first, and known to be the same after."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from everstep.errors import Conflict, DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.segments import SlotHeader
from everstep.layout.slots import CHUNK_BYTES
from everstep_agent.vault.memory.segments import SegmentFile, SegmentStore
from everstep_agent.vault.reporting import FindingReporter

ByteRange = tuple[int, int]


class SealedSlotReader:
    """One sealed slot, as it was when it was found."""

    def __init__(self, segment: SegmentFile, slot: int, header: SlotHeader) -> None:
        self.segment = segment
        self.slot = slot
        self.header = header
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
        """Whether everything read so far was the slot's: a fill announces itself before it touches a byte."""
        return self.segment.view.header(self.slot) == self.header

    def require_unchanged(self) -> None:
        """Raises Conflict where the slot moved on."""
        if not self.is_unchanged():
            raise Conflict(f"slot {self.slot} of {self.segment.path.name} was filled anew while it was read")

    def check(self, ranges: Sequence[ByteRange], checked_chunks: Container[int] = ()) -> set[int]:
        """Hashes every chunk that the ranges touch, each once, but for those ``done``; returns them.

        Raises MalformedMessage for a range outside the payload, DigestMismatch for a bad chunk, Conflict where the
        slot moved on.
        """
        touched = set()
        for first, last in _chunk_runs(ranges, len(self.payload)):
            touched |= {index for index in range(first, last + 1) if index not in checked_chunks}
        if not touched:
            return touched
        for index in sorted(touched):
            start = index * CHUNK_BYTES
            try:
                self.segment.view.verify_chunks(self.slot, start, min(CHUNK_BYTES, len(self.payload) - start))
            except (DigestMismatch, IndexError):
                self.require_unchanged()
                raise
        self.require_unchanged()
        return touched

    def sealed_digest(self, piece: ByteRange) -> bytes | None:
        """What was sealed as the digest of just these bytes, if they are one chunk."""
        offset, length = piece
        index, within = divmod(offset, CHUNK_BYTES)
        if within or not length or length != min(CHUNK_BYTES, len(self.payload) - offset):
            return None
        return self.digests[index + 1]

    def views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The ranges' bytes."""
        return [self.payload[offset : offset + length] for offset, length in ranges]

    def chunked_views(self, ranges: Sequence[ByteRange]) -> Iterator[list[memoryview]]:
        """The ranges' bytes, gathered into pieces of CHUNK_BYTES (the last may be shorter) as lists of views."""
        return (self.views(piece) for piece in split_into_chunks(ranges))


def split_into_chunks(ranges: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
    """Ranges, one after another, in pieces of exactly CHUNK_BYTES; the last is what is left."""
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
    """Runs (first, last) of chunks that the ranges touch, merged. Raises MalformedMessage for a range outside."""
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
    """Goes through the slots that say they hold a shard, and gives up those that do not."""

    def __init__(
        self,
        store: SegmentStore,
        finding_reporter: FindingReporter,
        job: str,
        rank: int,
        version: Version,
        parity: bool,
    ) -> None:
        self._finding_reporter = finding_reporter
        self._found = store.find(job, rank, version, parity=parity)
        whose = "the parity of group" if parity else "rank"
        self._lacking = f"no sealed slot here holds version {version} of {whose} {rank} of job {job}"
        self._bad: DigestMismatch | None = None

    def next_reader(self, ranges: Sequence[ByteRange], table: bytes | None = None) -> tuple[SealedSlotReader, set[int]]:
        """The next one of which the ranges hash right, with the chunks that were hashed.

        ``table``: it must have been sealed as that. Raises NotFound where there is none, DigestMismatch where one was
        bad.
        """
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


class SlotFinder:
    """Finds a slot that can be believed."""

    def __init__(self, store: SegmentStore, finding_reporter: FindingReporter) -> None:
        self._store = store
        self._finding_reporter = finding_reporter

    def open(
        self, job: str, rank: int, version: Version, ranges: Sequence[ByteRange], *, parity: bool = False
    ) -> SealedSlotReader:
        """A checked reading of a rank's share of a version: the manifest and what ``ranges`` touch hash right.

        ``parity``: of the parity of the group with that number instead.

        A slot that does not is given up, and the next one tried. Raises NotFound where no slot holds it,
        DigestMismatch where all that did were bad, MalformedMessage for ranges outside the payload.
        """
        return _SlotSearch(self._store, self._finding_reporter, job, rank, version, parity).next_reader(ranges)[0]

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
        """The ranges' bytes in pieces of CHUNK_BYTES, each hashed when it is asked for, with the slot it is from.
        ``unhashed``: but for chunks that are a range of their own, where this vault has hashed the slot once before.

        Where a slot proves bad on the way, another that was sealed as the same bytes takes its place. Raises what
        ``open`` does, before the first piece or at the one that is bad; NotFound also where the slot was filled anew on
        the way.
        """
        search = _SlotSearch(self._store, self._finding_reporter, job, rank, version, parity)
        reading, done = search.next_reader(() if skip_own_chunks else next(split_into_chunks(ranges), ()))
        _chunk_runs(ranges, len(reading.payload))  # before they are cut: into how many pieces is the asker's word
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
