"""A lost shard made again: its group's parity says what it was, the survivors and the parity give its bytes.

Whoever wants ranges of it gets them landed in a scratch file, as of a slot that is there. Every chunk that they touch
is made whole, because only whole chunks can be hashed against what the lost rank sealed; nothing lands before that.
A survivor that does not answer, or has other bytes than parity was made of, counts as lost as well, as long as parity
bears it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
import xxhash

from agent.vault.parity.manifest import LETTERS, Facts, Letter, ParityManifest, read_manifest
from agent.vault.parity.shards import Place, Shards, all_at_once
from agent.vault.reading import Range
from agent.vault.scratch import Scratch
from agent.vault.segments import SegmentStore
from agent.vault.statistics import Tally
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotRestorable
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.local import Fetch


class Piece(msgspec.Struct, frozen=True):
    """``length`` bytes at ``start`` of a chunk that land at ``at`` of the landing."""

    start: int
    length: int
    at: int


class Parity(msgspec.Struct, frozen=True):
    """P or Q of a group that somebody holds."""

    place: Place
    facts: Facts
    manifest: ParityManifest


class Decoder:
    """Answers a Fetch of a shard that is lost. Runs in worker threads; ``streams`` reads the survivors side by side."""

    def __init__(self, store: SegmentStore, shards: Shards, tally: Tally, streams: Executor) -> None:
        self._store = store
        self._shards = shards
        self._tally = tally
        self._streams = streams

    def fetch(self, ask: Fetch) -> int:
        """Bytes landed in ``ask.into``: ranges of the payload of ``ask.rank``, or its manifest where there are none.

        Raises NotRestorable where more is lost than the group bears, with who and why; DigestMismatch where what was
        made is not what was sealed; MalformedMessage for ranges outside the payload; and what Scratch raises.
        """
        recovery = self._recovery(ask)
        sealed = recovery.sealed
        length = sum(n for _, n in ask.ranges) if ask.ranges else len(sealed.manifest)
        wanted = pieces_by_chunk(ask.ranges, sealed.payload_bytes)
        scratch = Scratch(self._store.directory, ask.into, ask.into_offset, length, self._store.budget)
        try:
            if not ask.ranges:
                scratch.write([memoryview(sealed.manifest)], 0)
            for index, pieces in sorted(wanted.items()):
                chunk = recovery.chunk(index)
                for piece in pieces:
                    scratch.write([chunk[piece.start : piece.start + piece.length]], piece.at)
        finally:
            scratch.close()
        self._tally.add("decoded_bytes", length)
        return length

    def _recovery(self, ask: Fetch) -> Recovery:
        group = ask.group
        assert group is not None
        places = [Place(ask.job, node, group.group, ask.version, parity=True) for node in group.parity]
        found = all_at_once(self._streams, [partial(self._shards.facts, place) for place in places])
        gone = {str(p): str(error) for p, error in zip(places, found, strict=True) if isinstance(error, EverstepError)}
        parities = {
            letter: Parity(place, facts, read_manifest(facts.manifest, str(place)))
            for letter, place, facts in zip(LETTERS, places, found, strict=True)
            if isinstance(facts, Facts)
        }
        _check(ask, parities, gone)
        return Recovery(ask, parities, gone, self._shards, self._streams)


def _check(ask: Fetch, parities: dict[Letter, Parity], gone: dict[str, str]) -> None:
    """Raises NotRestorable where no parity is left, and MalformedMessage or DigestMismatch where it is of another."""
    if not parities:
        raise NotRestorable(f"rank {ask.rank}'s version {ask.version} cannot be made again: {_reasons(gone)}")
    for letter, parity in parities.items():
        manifest = parity.manifest
        said = (manifest.letter, manifest.group, manifest.version, parity.facts.payload_bytes)
        if said != (letter, parity.place.number, ask.version, manifest.payload_bytes):
            raise MalformedMessage(
                f"{parity.place}: it says to be {manifest.letter} of group {manifest.group} at {manifest.version}"
            )
        if ask.rank not in [member.rank for member in manifest.members]:
            raise MalformedMessage(f"{parity.place}: rank {ask.rank} is not in its group")
    if len({parity.manifest.members_digest for parity in parities.values()}) > 1:
        raise DigestMismatch(
            f"P and Q of the group of rank {ask.rank}'s version {ask.version} were made of different shards"
        )


def _reasons(gone: dict[str, str]) -> str:
    return "; ".join(f"{place} is not to be had ({why})" for place, why in gone.items())


class Recovery:
    """One lost member, chunk by chunk. ``gone`` says of each place that is lost why."""

    def __init__(
        self, ask: Fetch, parities: dict[Letter, Parity], gone: dict[str, str], shards: Shards, streams: Executor
    ) -> None:
        manifest = next(iter(parities.values())).manifest
        self._members = manifest.members
        self._places = [Place(ask.job, m.node, m.rank, ask.version) for m in self._members]
        self._wanted = [m.rank for m in self._members].index(ask.rank)
        self._lost = {self._wanted}
        self._parities = parities
        self._gone = gone
        self._shards = shards
        self._streams = streams
        self._longest = manifest.longest
        self._buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.sealed.payload_bytes))) for m in self._members]
        size = min(CHUNK_BYTES, manifest.payload_bytes)
        self._parity_buffers = {letter: memoryview(bytearray(size)) for letter in parities}
        self._failed: set[Letter] = set()

    @property
    def sealed(self) -> Facts:
        """What the lost rank sealed."""
        return self._members[self._wanted].sealed

    def chunk(self, index: int) -> memoryview:
        """Chunk ``index`` of the lost shard, hashed; overwritten by the next one.

        Raises NotRestorable where more is lost than the parity that is left bears, and DigestMismatch.
        """
        while True:
            letters = self._enough(index)
            failed = self._read(index, letters)
            if failed:
                self._give_up(failed)
                continue
            found = self._recovered(index, letters)
            if xxhash.xxh3_128_digest(found) == self.sealed.digest(index):
                return found
            error = DigestMismatch(f"chunk {index} of {self._places[self._wanted]}, made from it, is not its own")
            if len(letters) > 1:
                raise error
            self._give_up([(letters[0], error)])  # what is wrong was made so; the other one may be right

    def _recovered(self, index: int, letters: Sequence[Letter]) -> memoryview:
        from agent.vault.parity import gf  # numpy takes 30 ms and 15 MB of a vault that never needs it

        chunks = [buffer[: m.sealed.chunk_bytes(index)] for m, buffer in zip(self._members, self._buffers, strict=True)]
        parity = {letter: self._parity_chunk(letter, index) for letter in letters}
        lost = {number: chunks[number] for number in self._lost_in(index)}
        left = [None if number in lost else chunk for number, chunk in enumerate(chunks)]
        gf.recover(left, parity.get("P"), parity.get("Q"), lost)
        return lost[self._wanted]

    def _lost_in(self, index: int) -> list[int]:
        """Lost members that had bytes there; of the others it is known that they had none."""
        return [number for number in sorted(self._lost) if self._members[number].sealed.chunk_bytes(index)]

    def _parity_chunk(self, letter: Letter, index: int) -> memoryview:
        return self._parity_buffers[letter][: self._parities[letter].facts.chunk_bytes(index)]

    def _enough(self, index: int) -> list[Letter]:
        """As many of P and Q as members are lost."""
        letters = [letter for letter in LETTERS if letter in self._parities and letter not in self._failed]
        lost = self._lost_in(index)
        if len(letters) < len(lost):
            raise NotRestorable(
                f"{self._places[self._wanted]} cannot be made again: {len(lost) - 1} other members and "
                f"{2 - len(letters)} of P and Q are lost too: {_reasons(self._gone)}"
            )
        return letters[: len(lost)]

    def _read(self, index: int, letters: Sequence[Letter]) -> list[tuple[int | Letter, EverstepError]]:
        """Reads that chunk of the survivors and of the parity; who failed, and why."""
        whole = [number for number in range(len(self._members)) if number not in self._lost]
        present = [number for number in whole if self._members[number].sealed.chunk_bytes(index)]
        works = [
            partial(
                self._shards.chunk,
                self._places[number],
                self._members[number].sealed,
                index,
                self._buffers[number][: self._members[number].sealed.chunk_bytes(index)],
            )
            for number in present
        ] + [
            partial(
                self._shards.chunk,
                self._parities[letter].place,
                self._parities[letter].facts,
                index,
                self._parity_chunk(letter, index),
            )
            for letter in letters
        ]
        outcomes = all_at_once(self._streams, works)
        return [
            (who, outcome)
            for who, outcome in zip([*present, *letters], outcomes, strict=True)
            if isinstance(outcome, EverstepError)
        ]

    def _give_up(self, failed: Sequence[tuple[int | Letter, EverstepError]]) -> None:
        for who, error in failed:
            if isinstance(who, int):
                self._lost.add(who)
                self._gone[str(self._places[who])] = str(error)
            else:
                self._failed.add(who)
                self._gone[str(self._parities[who].place)] = str(error)


def pieces_by_chunk(ranges: Sequence[Range], length: int) -> dict[int, list[Piece]]:
    """Which parts of which chunks the ranges are, and where each lands. Raises MalformedMessage for one outside."""
    found: dict[int, list[Piece]] = {}
    at = 0
    for offset, count in ranges:
        if offset < 0 or count < 0 or offset + count > length:
            raise MalformedMessage(f"bytes {offset} to {offset + count} are outside a payload of {length} bytes")
        for index, start, part in _parts(offset, count):
            found.setdefault(index, []).append(Piece(start, part, at))
            at += part
    return found


def _parts(offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    while count:
        index, start = divmod(offset, CHUNK_BYTES)
        part = min(count, CHUNK_BYTES - start)
        yield index, start, part
        offset, count = offset + part, count - part
