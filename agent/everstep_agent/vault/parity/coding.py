"""A lost shard made again: its group's parity says what it was, the survivors and the parity give its bytes.

Whoever wants ranges of it gets them landed in a scratch file, as of a slot that is there. Every chunk that they touch
is made whole, because only whole chunks can be hashed against what the lost rank sealed; nothing lands before that.
Who mends a slot takes chunks of it, and of P and Q themselves, without landing them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
import xxhash

from everstep.errors import ConfigurationError, DigestMismatch, EverstepError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import MOST_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES, chunk_count, slot_bytes_for, slot_to_fill
from everstep.native import DIGEST_BYTES
from everstep.wire.v1.local import Fetch, Protect
from everstep.wire.v1.vault_orders import ParityGroup
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.reading import Range
from everstep_agent.vault.memory.segments import Segment, SegmentKey, SegmentStore
from everstep_agent.vault.memory.shared_memory import Scratch
from everstep_agent.vault.parity.shards import (
    LETTERS,
    Facts,
    Letter,
    MemberFacts,
    ParityManifest,
    Place,
    Shards,
    all_at_once,
    not_a_home,
    parity_bytes,
    read_manifest,
    require,
)
from everstep_agent.vault.reporting import Tally

# ---- encode
# Making a group's P or Q on the node that is its home: members' chunks come in, side by side, and one comes out.
#
# Each chunk is hashed against what its rank sealed before it counts; the parity's own chunks are hashed as they are
# made. Members are read as any reader reads them, so a member that moves on meanwhile ends the work, and the slot that
# was begun is discarded.

PARITY_SLOTS = 2
"""The version that is protected, and the next one while it is made."""


class Encoder:
    """Answers Protect. Runs in worker threads; ``streams`` reads the members side by side."""

    def __init__(
        self, node: str, store: SegmentStore, book: JobBook, shards: Shards, tally: Tally, streams: Executor
    ) -> None:
        self._node = node
        self._store = store
        self._book = book
        self._shards = shards
        self._tally = tally
        self._streams = streams
        self._lock = threading.Lock()
        self._making: defaultdict[SegmentKey, threading.Lock] = defaultdict(threading.Lock)

    def protect(self, ask: Protect) -> ParityManifest:
        """Returns what is sealed here now. What is here already, of these very shards, is kept.

        Raises StaleGeneration, NotFound where this node is no home of the group or a member does not hold its shard,
        Unavailable, DigestMismatch for a member's bytes that are not what it sealed, OutOfSlotMemory, and
        ConfigurationError for a group that parity cannot be made of.
        """
        self._book.current(ask.job, ask.generation)
        manifest = self._manifest(ask)
        key = SegmentKey(ask.job, "parity", ask.group.group)
        with self._lock:
            making = self._making[key]
        with making:
            self._make(ask, key, manifest)
        self._book.protects(ask.job, ask.version, ask.group)
        return manifest

    def _manifest(self, ask: Protect) -> ParityManifest:
        group = ask.group
        _check_members(ask)
        if self._node not in group.parity:
            raise not_a_home(self._node, group.group)
        places = [Place(ask.job, node, rank, ask.version) for rank, node in group.members]
        known = self._known(SegmentKey(ask.job, "parity", group.group))
        asks = [partial(self._shards.facts, place, known, group) for place in places]
        found = require(all_at_once(self._streams, asks))
        return ParityManifest(
            letter=LETTERS[group.parity.index(self._node)],
            group=group.group,
            version=ask.version,
            members=tuple(
                MemberFacts(rank=place.number, node=place.node, sealed=facts)
                for place, facts in zip(places, found, strict=True)
            ),
        )

    def _known(self, key: SegmentKey) -> dict[bytes, bytes]:
        """Members' manifests by their digests, from what was made here before: they change with the plan only."""
        segment = self._store.get(key)
        known: dict[bytes, bytes] = {}
        if segment is None:
            return known
        for slot, _ in segment.view.sealed():
            try:
                made = read_manifest(segment.view.manifest(slot), str(segment.path))
            except (DigestMismatch, MalformedMessage):  # whoever looks after that slot says so
                continue
            known |= {member.sealed.digests[:DIGEST_BYTES]: member.sealed.manifest for member in made.members}
        return known

    def _make(self, ask: Protect, key: SegmentKey, manifest: ParityManifest) -> None:
        said = manifest.encode()
        if len(said) > MOST_MANIFEST_BYTES:
            raise ConfigurationError(
                f"the manifests and digests of the {len(manifest.members)} members of group {ask.group.group} take "
                f"{len(said)} bytes, and parity's own manifest {MOST_MANIFEST_BYTES} at most: make smaller groups"
            )
        segment = self._store.open(key, slot_bytes_for(len(said), manifest.payload_bytes), PARITY_SLOTS)
        self._book.require(ask.job, self._store.forget)
        if _holds(segment, ask, said):
            return
        slot = slot_to_fill(segment.view.headers(), set(ask.keep))
        payload = segment.view.begin(slot, ask.group.group, ask.version, said, manifest.payload_bytes)
        try:
            digests = [xxhash.xxh3_128_digest(said), *self._fill(ask, manifest, payload)]
            self._book.current(ask.job, ask.generation)
            segment.view.seal(slot, digests)
        except BaseException:
            segment.view.discard(slot)
            raise
        self._tally.add("parity_slots")
        self._tally.add("parity_bytes", manifest.payload_bytes)

    def _fill(self, ask: Protect, manifest: ParityManifest, payload: memoryview) -> list[bytes]:
        """Writes the parity chunk by chunk; the digest of each."""
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.sealed.payload_bytes))) for m in manifest.members]
        digests = []
        for index in range(chunk_count(manifest.payload_bytes)):
            chunks = self._gather(ask, manifest, index, buffers)
            into = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            galois.encode(chunks, **{manifest.letter.lower(): into})
            digests.append(xxhash.xxh3_128_digest(into))
        return digests

    def _gather(
        self, ask: Protect, manifest: ParityManifest, index: int, buffers: list[memoryview]
    ) -> list[memoryview]:
        chunks = [buffer[: m.sealed.chunk_bytes(index)] for m, buffer in zip(manifest.members, buffers, strict=True)]
        works = [
            partial(self._shards.chunk, Place(ask.job, m.node, m.rank, ask.version), m.sealed, index, chunk)
            for m, chunk in zip(manifest.members, chunks, strict=True)
            if chunk
        ]
        require(all_at_once(self._streams, works))
        return chunks

    def forget(self, job: str) -> None:
        """The job is over; what is being made finds no segment to be kept in."""
        with self._lock:
            for key in [k for k in self._making if k.job == job]:
                del self._making[key]


def _check_members(ask: Protect) -> None:
    group = ask.group
    nodes = [node for _, node in group.members]
    if len({*nodes, *group.parity}) != len(nodes) + 2:
        raise ConfigurationError(
            f"group {group.group} has a node twice ({', '.join([*nodes, *group.parity])}): "
            "members and parity must be on different nodes, or one loss costs two shards"
        )


def _holds(segment: Segment, ask: Protect, manifest: bytes) -> bool:
    return any(
        header.version == ask.version and segment.view.manifest(slot) == manifest for slot, header in segment.sealed()
    )


# ---- recovery
# A group's chunks made again from what is left of it: those of a lost member, and those of P or Q themselves.
#
# Every chunk that is read is hashed, and so is what is made of them, against what was sealed. A survivor that does not
# answer, or has other bytes than parity was made of, counts as lost as well, as long as parity bears it.


class Parity(msgspec.Struct, frozen=True):
    """P or Q of a group that somebody holds."""

    place: Place
    facts: Facts
    manifest: ParityManifest


class Wanted(msgspec.Struct, frozen=True):
    """What is to be made again, the shard ``place``: a member by its number, or P or Q. ``sealed``: as what."""

    which: int | Letter
    place: Place
    sealed: Facts


class Recovery:
    """One shard of a group, chunk by chunk, from the others.

    Args:
        members: of the group, in the order of their coefficients.
        parities: P and Q as far as they are there, without the wanted one.
        gone: of each place that is lost why.
    """

    def __init__(
        self,
        wanted: Wanted,
        members: Sequence[MemberFacts],
        parities: dict[Letter, Parity],
        gone: dict[str, str],
        shards: Shards,
        streams: Executor,
    ) -> None:
        job, version = wanted.place.job, wanted.place.version
        self._wanted = wanted
        self._members = members
        self._places = [Place(job, m.node, m.rank, version) for m in members]
        self._lost = {wanted.which} if isinstance(wanted.which, int) else set()
        self._parities = parities
        self._gone = gone
        self._shards = shards
        self._streams = streams
        self._buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.sealed.payload_bytes))) for m in members]
        size = min(CHUNK_BYTES, parity_bytes(max(m.sealed.payload_bytes for m in members)))
        self._parity_buffers: dict[Letter, memoryview] = {letter: memoryview(bytearray(size)) for letter in LETTERS}
        self._failed: set[Letter] = set()

    @property
    def sealed(self) -> Facts:
        """What the wanted shard was sealed as."""
        return self._wanted.sealed

    def chunk(self, index: int) -> memoryview:
        """Chunk ``index`` of the wanted shard, hashed; overwritten by the next one.

        Raises NotRestorable where more is lost than the parity that is left bears, and DigestMismatch.
        """
        while True:
            letters = self._enough(index)
            failed = self._read(index, letters)
            if failed:
                self._give_up(failed)
                continue
            found = self._made(index, letters)
            if xxhash.xxh3_128_digest(found) == self.sealed.digest(index):
                return found
            error = DigestMismatch(f"chunk {index} of {self._wanted.place}, made from it, is not its own")
            if len(letters) != 1:
                raise error
            self._give_up([(letters[0], error)])  # what is wrong was made so; the other one may be right

    def _made(self, index: int, letters: Sequence[Letter]) -> memoryview:
        from everstep_agent.vault.parity import galois  # numpy takes 30 ms and 15 MB of a vault that never needs it

        chunks = [buffer[: m.sealed.chunk_bytes(index)] for m, buffer in zip(self._members, self._buffers, strict=True)]
        lost = {number: chunks[number] for number in self._lost_in(index)}
        if lost:
            parity = {letter: self._parity_chunk(letter, index) for letter in letters}
            left = [None if number in lost else chunk for number, chunk in enumerate(chunks)]
            galois.recover(left, parity.get("P"), parity.get("Q"), lost)
        which = self._wanted.which
        if isinstance(which, int):
            return chunks[which]
        into = self._parity_buffers[which][: self.sealed.chunk_bytes(index)]
        galois.encode(chunks, into if which == "P" else None, into if which == "Q" else None)
        return into

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
            others = sum(number != self._wanted.which for number in lost)
            without = 2 - len(letters) - (self._wanted.which in LETTERS)
            raise NotRestorable(
                f"{self._wanted.place} cannot be made again: {others} other members and {without} of P and Q are lost "
                f"too: {reasons(self._gone)}"
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


def reasons(gone: dict[str, str]) -> str:
    return "; ".join(f"{place} is not to be had ({why})" for place, why in gone.items())


class Piece(msgspec.Struct, frozen=True):
    """``length`` bytes at ``start`` of a chunk that land at ``at`` of the landing."""

    start: int
    length: int
    at: int


class Decoder:
    """Makes shards again. Runs in worker threads; ``streams`` reads the survivors side by side."""

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
        assert ask.group is not None
        recovery = self.member(ask.job, ask.rank, ask.version, ask.group)
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

    def member(self, job: str, rank: int, version: Version, group: ParityGroup) -> Recovery:
        """A member's shard, to be made again. Raises NotRestorable, DigestMismatch, MalformedMessage."""
        parities, gone = self._parities(job, version, group.group, dict(zip(LETTERS, group.parity, strict=True)))
        what = f"rank {rank}'s version {version}"
        if not parities:
            raise NotRestorable(f"{what} cannot be made again: {reasons(gone)}")
        manifest = _agreed([parity.manifest for parity in parities.values()], what)
        for number, member in enumerate(manifest.members):
            if member.rank == rank:
                wanted = Wanted(number, Place(job, member.node, rank, version), member.sealed)
                return Recovery(wanted, manifest.members, parities, gone, self._shards, self._streams)
        raise MalformedMessage(f"rank {rank} is not in group {group.group}, of which there is parity of {version}")

    def row(self, place: Place, manifest: ParityManifest, sealed: Facts, group: ParityGroup | None) -> Recovery:
        """P or Q itself, the shard ``place`` that was sealed as ``sealed``, to be made again from its members.

        ``group`` says where the other one of the two is, for members that are lost. Raises DigestMismatch where that
        was made of other shards, and MalformedMessage.
        """
        parities, gone = self._others(place, manifest.letter, group)
        _agreed([manifest, *(parity.manifest for parity in parities.values())], str(place))
        wanted = Wanted(manifest.letter, place, sealed)
        return Recovery(wanted, manifest.members, parities, gone, self._shards, self._streams)

    def row_manifest(self, place: Place, group: ParityGroup) -> bytes:
        """The manifest of P or Q, whichever is kept on ``place.node``, as the other one says it.

        Raises NotRestorable where the other one is not to be had, and MalformedMessage.
        """
        mine = LETTERS[group.parity.index(place.node)]
        parities, gone = self._others(place, mine, group)
        for parity in parities.values():
            return msgspec.structs.replace(parity.manifest, letter=mine).encode()
        raise NotRestorable(f"the manifest of {place} cannot be made again: {reasons(gone)}")

    def _others(
        self, place: Place, mine: Letter, group: ParityGroup | None
    ) -> tuple[dict[Letter, Parity], dict[str, str]]:
        if group is None:
            return {}, {f"the other parity of group {place.number}": "nobody has said where it is"}
        homes = {letter: node for letter, node in zip(LETTERS, group.parity, strict=True) if letter != mine}
        return self._parities(place.job, place.version, place.number, homes)

    def _parities(
        self, job: str, version: Version, group: int, homes: Mapping[Letter, str]
    ) -> tuple[dict[Letter, Parity], dict[str, str]]:
        """Those that are there, and why others are not. Raises MalformedMessage where one is not what is asked for."""
        places = {letter: Place(job, node, group, version, parity=True) for letter, node in homes.items()}
        found = all_at_once(self._streams, [partial(self._shards.facts, place) for place in places.values()])
        parities, gone = {}, {}
        for (letter, place), facts in zip(places.items(), found, strict=True):
            if isinstance(facts, EverstepError):
                gone[str(place)] = str(facts)
            else:
                parities[letter] = Parity(place, facts, read_manifest(facts.manifest, str(place)))
                _check_parity(letter, parities[letter])
        return parities, gone


def _check_parity(letter: Letter, parity: Parity) -> None:
    manifest, place = parity.manifest, parity.place
    said = (manifest.letter, manifest.group, manifest.version, parity.facts.payload_bytes)
    if said != (letter, place.number, place.version, manifest.payload_bytes):
        raise MalformedMessage(
            f"{place}: it says to be {manifest.letter} of group {manifest.group} at {manifest.version}"
        )


def _agreed(manifests: Sequence[ParityManifest], what: str) -> ParityManifest:
    """Any of them. Raises DigestMismatch where they are of different shards."""
    if len({manifest.members_digest for manifest in manifests}) > 1:
        raise DigestMismatch(f"P and Q of the group of {what} were made of different shards")
    return manifests[0]


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
