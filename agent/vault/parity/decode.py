"""A lost shard made again: its group's parity says what it was, the survivors and the parity give its bytes.

Whoever wants ranges of it gets them landed in a scratch file, as of a slot that is there. Every chunk that they touch
is made whole, because only whole chunks can be hashed against what the lost rank sealed; nothing lands before that.
Who mends a slot takes chunks of it, and of P and Q themselves, without landing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec

from agent.vault.parity.manifest import LETTERS, Facts, Letter, ParityManifest, read_manifest
from agent.vault.parity.recovery import Parity, Recovery, Wanted, reasons
from agent.vault.parity.shards import Place, Shards, all_at_once
from agent.vault.reading import Range
from agent.vault.scratch import Scratch
from agent.vault.segments import SegmentStore
from agent.vault.statistics import Tally
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.local import Fetch
from everstep.wire.v1.parity import ParityGroup


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
                _check(letter, parities[letter])
        return parities, gone


def _check(letter: Letter, parity: Parity) -> None:
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
