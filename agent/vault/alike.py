"""What other ranks of a version stored alike: pieces of a slot, wherever else they lie.

State that ranks hold alike is divided among them, and each piece of it is stored by some on different nodes
(docs/decisions/0005). Their slots differ, and a piece lies in each at another place; but one plan made all slots of a
version, so that it is the same box in each. What is between pieces is nobody's, and zeros as a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from agent.vault.jobs import JobBook
from agent.vault.manifests import ask_bytes, ask_manifest
from agent.vault.peers import Peers
from agent.vault.reading import Range, Reading
from agent.vault.segments import Segment, SegmentStore
from agent.vault.settings import VaultSettings
from everstep.boxes import Box
from everstep.channel import Channel
from everstep.errors import Conflict, DigestMismatch, EverstepError, NotFound
from everstep.manifests import BLOB_PREFIX, Manifest, decode_manifest
from everstep.slots import CHUNK_BYTES, SlotHeader
from everstep.wire.v1.transfer import InventoryAsk, InventoryList

log = logging.getLogger(__name__)

MOST_ASKED = 64
"""Nodes whose inventories are asked for at most: which of them have a piece, nobody here knows."""

Key = tuple[int, Box]


class Gap(msgspec.Struct, frozen=True):
    """``length`` bytes at ``start`` of a chunk: of the piece that they belong to, those from ``within`` on."""

    start: int
    length: int
    within: int


class Supply(msgspec.Struct, frozen=True):
    """Another rank's slot on a node: where in its payload each piece begins, and where its Python state."""

    node: str
    rank: int
    places: dict[Key, int]
    blob: Range


class Alike:
    """The other slots of one slot's version, looked for once, and only as far as they are needed.

    Args:
        manifest: the slot's own, as sealed. Raises MalformedMessage where it is none that ranks write.
    """

    def __init__(
        self,
        settings: VaultSettings,
        book: JobBook,
        store: SegmentStore,
        peers: Peers,
        segment: Segment,
        header: SlotHeader,
        manifest: bytes,
    ) -> None:
        self._settings = settings
        self._book = book
        self._store = store
        self._peers = peers
        self._job = segment.key.job
        self._rank = header.rank
        self._version = header.version
        self._manifest = decode_manifest(manifest)
        self._read: dict[str, Supply | None] = {}
        self._found: list[Supply] = []
        self._more = self._look()

    # --- what a chunk may have been ------------------------------------------------------------------------------

    def chunks(self, index: int, rotten: memoryview) -> Iterator[tuple[bytearray, str]]:
        """Chunk ``index`` with more and more of it taken from elsewhere, each time with the nodes that it is from.

        ``rotten`` is what is there now. What is yielded is overwritten by the next one.
        """
        begin, made = index * CHUNK_BYTES, bytearray(rotten)
        gaps, blob = self._gaps(begin, len(made)), _overlap(_blob_of(self._manifest), begin, len(made))
        padding = _padding([*gaps.values(), *([blob] if blob else [])], len(made))
        nodes: dict[str, None] = {}
        for supply in self._supplies():
            if not gaps and blob is None:
                break
            pieces = {key: gap for key, gap in gaps.items() if key in supply.places}
            if self._fill(made, supply, [(supply.places[key], gap) for key, gap in pieces.items()]):
                self._book.saw(self._job, self._rank, supply.node)
                nodes[supply.node] = None
                gaps = {key: gap for key, gap in gaps.items() if key not in pieces}
                yield made, ", ".join(nodes)
            if blob is not None and supply.blob[1] == _blob_of(self._manifest)[1]:
                other = made.copy()  # each rank has Python state of its own, and many have the same
                if self._fill(other, supply, [(supply.blob[0], blob)]):
                    yield other, ", ".join({**nodes, supply.node: None})
        for gap in padding:
            made[gap.start : gap.start + gap.length] = bytes(gap.length)
        yield made, ", ".join(nodes) or "the slot itself"

    def _gaps(self, begin: int, length: int) -> dict[Key, Gap]:
        """The pieces that have bytes in that part of the payload."""
        found = {}
        for stored in self._manifest.stored:
            nbytes = stored.box.volume * self._manifest.catalog[stored.tensor].itemsize
            gap = _overlap((stored.at, nbytes), begin, length)
            if gap is not None:
                found[stored.tensor, stored.box] = gap
        return found

    def _fill(self, made: bytearray, supply: Supply, gaps: Iterable[tuple[int, Gap]]) -> bool:
        """Takes bytes of these pieces, each with where it begins, from there. False where there are none to be had."""
        wanted = list(gaps)
        if not wanted:
            return False
        ranges = [(at + gap.within, gap.length) for at, gap in wanted]
        try:
            data = memoryview(self._bytes_of(supply, ranges))
        except EverstepError as error:
            log.info("%s gives no pieces of rank %d's %s: %s", supply.node, supply.rank, self._version, error)
            return False
        at = 0
        for _, gap in wanted:
            made[gap.start : gap.start + gap.length] = data[at : at + gap.length]
            at += gap.length
        return True

    def _bytes_of(self, supply: Supply, ranges: list[Range]) -> bytes:
        """Whoever has them hashes them first."""
        if supply.node != self._settings.node:
            ask = partial(ask_bytes, settings=self._settings, rank=supply.rank, version=self._version, ranges=ranges)
            return self._peers.call(self._job, supply.node, ask)
        for segment, slot, header in self._store.find(self._job, supply.rank, self._version):
            try:
                reading = Reading(segment, slot, header)
                reading.check(ranges)
                data = b"".join(reading.views(ranges))
                reading.require_still()
                return data
            except (DigestMismatch, Conflict):
                continue
        raise NotFound(f"rank {supply.rank}'s {self._version} is not here any more")

    # --- where there is more of it -------------------------------------------------------------------------------

    def _supplies(self) -> Iterator[Supply]:
        yield from self._found
        for supply in self._more:
            self._found.append(supply)
            yield supply

    def _look(self) -> Iterator[Supply]:
        node = self._settings.node
        for segment in self._store.segments(self._job):
            for slot, header in segment.sealed() if segment.key.kind != "parity" else ():
                if header.version == self._version and header.rank != self._rank:
                    try:
                        manifest = segment.view.manifest(slot)
                    except DigestMismatch:
                        continue
                    yield from self._supply(node, header.rank, "", manifest)
        for other in self._book.likely_holders(self._job, self._rank, besides=node, most=MOST_ASKED):
            try:
                yield from self._look_at(other)
            except EverstepError as error:
                log.info("%s tells nothing of %s: %s", other, self._version, error)

    def _look_at(self, node: str) -> Iterator[Supply]:
        def ask(channel: Channel) -> InventoryList:
            channel.send(InventoryAsk())
            return channel.answer(InventoryList)

        for there in self._peers.call(self._job, node, ask).slots:
            if there.version == self._version and there.rank != self._rank:
                get = partial(ask_manifest, settings=self._settings, rank=there.rank, version=self._version)
                manifest = b"" if there.manifest_digest in self._read else self._peers.call(self._job, node, get)
                yield from self._supply(node, there.rank, there.manifest_digest, manifest)

    def _supply(self, node: str, rank: int, digest: str, body: bytes) -> Iterator[Supply]:
        """The slot, where it is one of the same plan. ``digest``: of its manifest, which is read once."""
        known = self._read.get(digest) if digest else None
        if not digest or digest not in self._read:
            manifest = decode_manifest(body)
            if manifest.catalog == self._manifest.catalog:
                places = {(stored.tensor, stored.box): stored.at for stored in manifest.stored}
                known = Supply(node, rank, places, _blob_of(manifest))
            if digest:
                self._read[digest] = known
        if known is not None:
            yield msgspec.structs.replace(known, node=node, rank=rank)


def _blob_of(manifest: Manifest) -> Range:
    return manifest.blob_at, BLOB_PREFIX + manifest.blob_capacity


def _overlap(piece: Range, begin: int, length: int) -> Gap | None:
    """What of a piece lies in the ``length`` bytes from ``begin`` on, as seen from there."""
    start, end = max(piece[0], begin), min(sum(piece), begin + length)
    return Gap(start - begin, end - start, start - piece[0]) if start < end else None


def _padding(taken: Iterable[Gap], length: int) -> list[Gap]:
    """What of a chunk of that length is nobody's."""
    at, found = 0, []
    for gap in sorted(taken, key=lambda each: each.start):
        if gap.start > at:
            found.append(Gap(at, gap.start - at, 0))
        at = max(at, gap.start + gap.length)
    return [*found, Gap(at, length - at, 0)] if at < length else found
