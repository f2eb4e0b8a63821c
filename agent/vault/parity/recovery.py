"""A group's chunks made again from what is left of it: those of a lost member, and those of P or Q themselves.

Every chunk that is read is hashed, and so is what is made of them, against what was sealed. A survivor that does not
answer, or has other bytes than parity was made of, counts as lost as well, as long as parity bears it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
import xxhash

from agent.vault.parity.manifest import LETTERS, Facts, Letter, MemberFacts, ParityManifest
from agent.vault.parity.shards import Place, Shards, all_at_once
from agent.vault.parity.stripes import parity_bytes
from everstep.errors import DigestMismatch, EverstepError, NotRestorable
from everstep.slots import CHUNK_BYTES


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
        from agent.vault.parity import gf  # numpy takes 30 ms and 15 MB of a vault that never needs it

        chunks = [buffer[: m.sealed.chunk_bytes(index)] for m, buffer in zip(self._members, self._buffers, strict=True)]
        lost = {number: chunks[number] for number in self._lost_in(index)}
        if lost:
            parity = {letter: self._parity_chunk(letter, index) for letter in letters}
            left = [None if number in lost else chunk for number, chunk in enumerate(chunks)]
            gf.recover(left, parity.get("P"), parity.get("Q"), lost)
        which = self._wanted.which
        if isinstance(which, int):
            return chunks[which]
        into = self._parity_buffers[which][: self.sealed.chunk_bytes(index)]
        gf.encode(chunks, into if which == "P" else None, into if which == "Q" else None)
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
