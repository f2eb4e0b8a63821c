"""Bytes of a sealed slot that went bad, made good from wherever the same bytes still are.

What is found is believed only when it hashes to what this slot was sealed as, so it does not matter whom one asks, nor
what is wrong with the bytes there. Looked for are, the cheapest first: the same chunk in another slot of this node
(what did not change from step to step), the same share on another node, the group whose parity keeps it, and its
pieces in other ranks' slots of the version. P and Q are made again from their members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import msgspec
import xxhash

from agent.vault.alike import Alike
from agent.vault.jobs import JobBook
from agent.vault.manifests import ask_bytes, ask_manifest
from agent.vault.parity.decode import Decoder
from agent.vault.parity.manifest import Facts, read_manifest
from agent.vault.parity.recovery import Recovery
from agent.vault.parity.shards import Place
from agent.vault.peers import Peers
from agent.vault.segments import Segment, SegmentStore
from agent.vault.settings import VaultSettings
from everstep.channel import Channel
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.slots import CHUNK_BYTES, SlotHeader
from everstep.wire.v1.parity import ParityGroup

log = logging.getLogger(__name__)

PARITY = "its parity group"
Bytes = bytes | bytearray | memoryview
Found = Iterator[tuple[Bytes, str]]
"""What bytes may have been, and where they are from, in words."""


class Bad(msgspec.Struct, frozen=True):
    """What of a sealed slot does not hash right, and in words."""

    table: bool
    manifest: bool
    chunks: tuple[int, ...]
    words: str


class Repairer:
    """Mends sealed slots in place. For one thread: ``SegmentView.mend`` knows of one mender."""

    def __init__(
        self, settings: VaultSettings, book: JobBook, store: SegmentStore, peers: Peers, decoder: Decoder
    ) -> None:
        self.settings = settings
        self.book = book
        self.store = store
        self.peers = peers
        self.decoder = decoder

    def mend(self, segment: Segment, slot: int, header: SlotHeader, bad: Bad) -> str:
        """Where the right bytes came from, in words; empty where the slot could not be mended.

        A slot that is filled anew meanwhile is left alone.
        """
        search = _SearchRow if segment.key.kind == "parity" else _SearchShare
        try:
            return self._mend(segment, slot, header, bad, search(self, segment, slot, header))
        except DigestMismatch:
            return ""  # it is another slot by now, or was spoilt again

    def _mend(self, segment: Segment, slot: int, header: SlotHeader, bad: Bad, search: _Search) -> str:
        sources: dict[str, None] = {}
        if bad.table:
            table = segment.view.rebuilt_table(slot, header)
            if table is None or not segment.mend(slot, header, table=table):
                return ""
            sources["its own bytes"] = None
        sealed = segment.view.digests(slot)
        if bad.manifest:
            manifest, source = _right(search.manifest(), sealed[0])
            if not source or not segment.mend(slot, header, manifest=manifest):
                return ""
            sources[source] = None
        for index in bad.chunks:
            chunk, source = _right(search.chunk(index, sealed[index + 1]), sealed[index + 1])
            if not source or not segment.mend(slot, header, chunks={index: chunk}):
                return ""
            sources[source] = None
        return ", ".join(sources)


def _right(found: Found, digest: bytes) -> tuple[bytes, str]:
    """The first that has that digest, and where it is from."""
    for data, source in found:
        if xxhash.xxh3_128_digest(data) == digest:
            return bytes(data), source
    return b"", ""


class _Search:
    """Where bytes of one slot may be found again. What is yielded may be overwritten by what comes next."""

    def __init__(self, repairer: Repairer, segment: Segment, slot: int, header: SlotHeader) -> None:
        self._repairer = repairer
        self._segment = segment
        self._slot = slot
        self._header = header
        self._job = segment.key.job

    def manifest(self) -> Found:
        raise NotImplementedError

    def chunk(self, index: int, digest: bytes) -> Found:
        """``digest``: what it was sealed with."""
        raise NotImplementedError

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self._header.payload_bytes - index * CHUNK_BYTES)


class _SearchShare(_Search):
    """Of a rank's slot, its own or a copy."""

    def manifest(self) -> Found:
        ask = partial(
            ask_manifest, settings=self._repairer.settings, rank=self._header.rank, version=self._header.version
        )
        yield from self._copies(ask)
        if (recovery := self._recovery) is not None:
            yield recovery.sealed.manifest, PARITY

    def chunk(self, index: int, digest: bytes) -> Found:
        yield from self._here(digest, self._length(index))
        ranges = ((index * CHUNK_BYTES, self._length(index)),)
        settings, header = self._repairer.settings, self._header
        yield from self._copies(
            partial(ask_bytes, settings=settings, rank=header.rank, version=header.version, ranges=ranges)
        )
        yield from self._from_parity(index)
        yield from self._alike_chunks(index)

    def _here(self, digest: bytes, length: int) -> Found:
        """The same chunk of another slot, whosever it is."""
        for segment in self._repairer.store.segments(self._job):
            for slot, header in segment.sealed():
                if (segment, slot) == (self._segment, self._slot):
                    continue
                try:
                    sealed = segment.view.digests(slot)[1:]
                    payload = segment.view.payload(slot)
                except DigestMismatch:
                    continue
                for place, other in enumerate(sealed):
                    chunk = payload[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                    if other == digest and len(chunk) == length:
                        yield chunk, f"{segment.path.name}'s {header.version} here"

    def _copies(self, ask: Callable[[Channel], bytes]) -> Found:
        repairer, rank = self._repairer, self._header.rank
        try:
            holders = repairer.book.likely_holders(self._job, rank, besides=repairer.settings.node)
        except NotFound:
            return  # nobody has configured the job yet
        for node in holders:
            try:
                yield repairer.peers.call(self._job, node, ask), node
            except EverstepError as error:
                log.info("%s cannot mend rank %d's %s: %s", node, rank, self._header.version, error)

    def _from_parity(self, index: int) -> Found:
        if (recovery := self._recovery) is not None:
            yield from _made(recovery, index)

    @cached_property
    def _recovery(self) -> Recovery | None:
        rank, version = self._header.rank, self._header.version
        group = self._repairer.book.group_of(self._job, version, rank)
        if group is None:
            return None
        try:
            return self._repairer.decoder.member(self._job, rank, version, group)
        except EverstepError as error:
            log.info("parity cannot mend rank %d's %s: %s", rank, version, error)
            return None

    def _alike_chunks(self, index: int) -> Found:
        if self._alike is not None:
            at = index * CHUNK_BYTES
            rotten = self._segment.view.payload(self._slot)[at : at + self._length(index)]
            yield from self._alike.chunks(index, rotten)

    @cached_property
    def _alike(self) -> Alike | None:
        repairer = self._repairer
        try:
            manifest = self._segment.view.manifest(self._slot)
            return Alike(
                repairer.settings,
                repairer.book,
                repairer.store,
                repairer.peers,
                self._segment,
                self._header,
                manifest,
            )
        except MalformedMessage:
            return None  # it is none of those that say what is where


class _SearchRow(_Search):
    """Of P or Q."""

    def manifest(self) -> Found:
        if self._group is not None:
            try:
                yield self._repairer.decoder.row_manifest(self._place, self._group), PARITY
            except EverstepError as error:
                log.info("%s", error)

    def chunk(self, index: int, digest: bytes) -> Found:
        if self._recovery is not None:
            yield from _made(self._recovery, index)

    @property
    def _place(self) -> Place:
        return Place(
            self._job, self._repairer.settings.node, self._segment.key.number, self._header.version, parity=True
        )

    @cached_property
    def _group(self) -> ParityGroup | None:
        return self._repairer.book.group(self._job, self._header.version, self._segment.key.number)

    @cached_property
    def _recovery(self) -> Recovery | None:
        view = self._segment.view
        manifest, digests = view.manifest(self._slot), b"".join(view.digests(self._slot))
        sealed = Facts(payload_bytes=self._header.payload_bytes, manifest=manifest, digests=digests)
        try:
            said = read_manifest(manifest, str(self._place))
            return self._repairer.decoder.row(self._place, said, sealed, self._group)
        except EverstepError as error:
            log.info("%s cannot be made again: %s", self._place, error)
            return None


def _made(recovery: Recovery, index: int) -> Found:
    try:
        yield recovery.chunk(index), PARITY
    except EverstepError as error:
        log.info("chunk %d: %s", index, error)
