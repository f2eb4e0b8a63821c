"""Reading a sealed slot that its rank may fill anew at any moment: checked first, and known to be the same after."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from everstep.errors import Conflict, DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.segments import SlotHeader
from everstep.layout.slots import CHUNK_BYTES
from everstep_agent.vault.memory.segments import Segment, SegmentStore
from everstep_agent.vault.reporting import Findings

Range = tuple[int, int]


class Reading:
    """One sealed slot, as it was when it was found."""

    def __init__(self, segment: Segment, slot: int, header: SlotHeader) -> None:
        self.segment = segment
        self.slot = slot
        self.header = header
        view = segment.view
        try:
            self.digests = view.digests(slot)
            self.payload = view.payload(slot)
            self.manifest = view.manifest(slot)
        except DigestMismatch:
            self.require_still()
            raise
        self.require_still()

    def still(self) -> bool:
        """Whether everything read so far was the slot's: a fill announces itself before it touches a byte."""
        return self.segment.view.header(self.slot) == self.header

    def require_still(self) -> None:
        """Raises Conflict where the slot moved on."""
        if not self.still():
            raise Conflict(f"slot {self.slot} of {self.segment.path.name} was filled anew while it was read")

    def check(self, ranges: Sequence[Range], done: Container[int] = ()) -> set[int]:
        """Hashes every chunk that the ranges touch, each once, but for those ``done``; returns them.

        Raises MalformedMessage for a range outside the payload, DigestMismatch for a bad chunk, Conflict where the
        slot moved on.
        """
        touched = set()
        for first, last in _chunk_runs(ranges, len(self.payload)):
            touched |= {index for index in range(first, last + 1) if index not in done}
        if not touched:
            return touched
        for index in sorted(touched):
            start = index * CHUNK_BYTES
            try:
                self.segment.view.check_chunks(self.slot, start, min(CHUNK_BYTES, len(self.payload) - start))
            except (DigestMismatch, IndexError):
                self.require_still()
                raise
        self.require_still()
        return touched

    def sealed(self, piece: Range) -> bytes | None:
        """What was sealed as the digest of just these bytes, if they are one chunk."""
        offset, length = piece
        index, within = divmod(offset, CHUNK_BYTES)
        if within or not length or length != min(CHUNK_BYTES, len(self.payload) - offset):
            return None
        return self.digests[index + 1]

    def views(self, ranges: Sequence[Range]) -> list[memoryview]:
        """The ranges' bytes."""
        return [self.payload[offset : offset + length] for offset, length in ranges]

    def pieces(self, ranges: Sequence[Range]) -> Iterator[list[memoryview]]:
        """The ranges' bytes, gathered into pieces of CHUNK_BYTES (the last may be shorter) as lists of views."""
        return (self.views(piece) for piece in cut(ranges))


def cut(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Ranges, one after another, in pieces of exactly CHUNK_BYTES; the last is what is left."""
    piece: list[Range] = []
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


def _chunk_runs(ranges: Sequence[Range], length: int) -> list[Range]:
    """Runs (first, last) of chunks that the ranges touch, merged. Raises MalformedMessage for a range outside."""
    runs: list[Range] = []
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


class _Search:
    """Goes through the slots that say they hold a shard, and gives up those that do not."""

    def __init__(
        self, store: SegmentStore, findings: Findings, job: str, rank: int, version: Version, parity: bool
    ) -> None:
        self._findings = findings
        self._found = store.find(job, rank, version, parity=parity)
        whose = "the parity of group" if parity else "rank"
        self._lacking = f"no sealed slot here holds version {version} of {whose} {rank} of job {job}"
        self._bad: DigestMismatch | None = None

    def next(self, ranges: Sequence[Range], table: bytes | None = None) -> tuple[Reading, set[int]]:
        """The next one of which the ranges hash right, with the chunks that were hashed.

        ``table``: it must have been sealed as that. Raises NotFound where there is none, DigestMismatch where one was
        bad.
        """
        for segment, slot, header in self._found:
            if table not in (None, header.table):
                continue
            try:
                reading = Reading(segment, slot, header)
                return reading, reading.check(ranges)
            except Conflict:
                continue
            except DigestMismatch as error:
                self.give_up(segment, slot, header, error)
        raise NotFound(self._lacking) if self._bad is None else self._bad

    def give_up(self, segment: Segment, slot: int, header: SlotHeader, error: DigestMismatch) -> None:
        self._findings.slot_corrupt(segment, slot, header, error, seen_by="reader")
        self._bad = error


class Library:
    """Finds a slot that can be believed."""

    def __init__(self, store: SegmentStore, findings: Findings) -> None:
        self._store = store
        self._findings = findings

    def open(self, job: str, rank: int, version: Version, ranges: Sequence[Range], *, parity: bool = False) -> Reading:
        """A checked reading of a rank's share of a version: the manifest and what ``ranges`` touch hash right.

        ``parity``: of the parity of the group with that number instead.

        A slot that does not is given up, and the next one tried. Raises NotFound where no slot holds it,
        DigestMismatch where all that did were bad, MalformedMessage for ranges outside the payload.
        """
        return _Search(self._store, self._findings, job, rank, version, parity).next(ranges)[0]

    def pieces(
        self,
        job: str,
        rank: int,
        version: Version,
        ranges: Sequence[Range],
        *,
        parity: bool = False,
        unhashed: bool = False,
    ) -> Iterator[tuple[Reading, list[memoryview]]]:
        """The ranges' bytes in pieces of CHUNK_BYTES, each hashed when it is asked for, with the slot it is from.
        ``unhashed``: but for chunks that are a range of their own, where this vault has hashed the slot once before.

        Where a slot proves bad on the way, another that was sealed as the same bytes takes its place. Raises what
        ``open`` does, before the first piece or at the one that is bad; NotFound also where the slot was filled anew on
        the way.
        """
        search = _Search(self._store, self._findings, job, rank, version, parity)
        reading, done = search.next(() if unhashed else next(cut(ranges), ()))
        _chunk_runs(ranges, len(reading.payload))  # before they are cut: into how many pieces is the asker's word
        unhashed = unhashed and (reading.slot, reading.header) in reading.segment.sealed()
        unseen = {each[0] // CHUNK_BYTES for each in ranges if unhashed and reading.sealed(each)}
        for piece in cut(ranges):
            try:
                done |= reading.check(piece, done | unseen)
            except Conflict as error:
                raise NotFound(str(error)) from error
            except DigestMismatch as error:
                search.give_up(reading.segment, reading.slot, reading.header, error)
                reading, done = search.next(piece, reading.header.table)
            yield reading, reading.views(piece)
