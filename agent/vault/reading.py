"""Reading a sealed slot that its rank may fill anew at any moment: checked first, and known to be the same after."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import xxhash

from agent.vault.findings import Findings
from agent.vault.segments import Segment, SegmentStore
from everstep.errors import Conflict, DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.slots import CHUNK_BYTES, SlotHeader

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

    def check(self, ranges: Sequence[Range]) -> None:
        """Hashes every chunk that the ranges touch, each once.

        Raises MalformedMessage for a range outside the payload, DigestMismatch for a bad chunk, Conflict where the
        slot moved on.
        """
        for first, last in _chunk_runs(ranges, len(self.payload)):
            start = first * CHUNK_BYTES
            end = min((last + 1) * CHUNK_BYTES, len(self.payload))
            try:
                self.segment.view.check_chunks(self.slot, start, end - start)
            except (DigestMismatch, IndexError):
                self.require_still()
                raise
        self.require_still()

    def pieces(self, ranges: Sequence[Range]) -> Iterator[list[memoryview]]:
        """The ranges' bytes, gathered into pieces of CHUNK_BYTES (the last may be shorter) as lists of views."""
        return gather(self.payload, ranges)


def gather(payload: memoryview, ranges: Sequence[Range]) -> Iterator[list[memoryview]]:
    """Cuts ranges of ``payload``, one after another, into pieces of exactly CHUNK_BYTES; the last is what is left."""
    piece: list[memoryview] = []
    room = CHUNK_BYTES
    for offset, length in ranges:
        at, end = offset, offset + length
        while at < end:
            taken = min(room, end - at)
            piece.append(payload[at : at + taken])
            at += taken
            room -= taken
            if not room:
                yield piece
                piece, room = [], CHUNK_BYTES
    if piece:
        yield piece


class RangeHasher:
    """xxh3-128 of each range, fed with the ranges' bytes one after another while they are still in the cache."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._left = deque(lengths)
        self._digests: list[bytes] = []
        self._hash = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        while view:
            self._close_finished()
            taken = min(self._left[0], len(view))
            self._hash.update(view[:taken])
            self._left[0] -= taken
            view = view[taken:]

    def _close_finished(self) -> None:
        while self._left and not self._left[0]:
            self._left.popleft()
            self._digests.append(self._hash.digest())
            self._hash = xxhash.xxh3_128()

    def digests(self) -> bytes:
        """All digests, one after another. To be asked once everything was fed."""
        self._close_finished()
        return b"".join(self._digests)


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
        bad: DigestMismatch | None = None
        for segment, slot, header in self._store.find(job, rank, version, parity=parity):
            try:
                reading = Reading(segment, slot, header)
                reading.check(ranges)
            except Conflict:
                continue
            except DigestMismatch as error:
                self._findings.slot_corrupt(segment, slot, header, error, seen_by="reader")
                bad = error
            else:
                return reading
        if bad is not None:
            raise bad
        whose = "the parity of group" if parity else "rank"
        raise NotFound(f"no sealed slot here holds version {version} of {whose} {rank} of job {job}")
