"""Bytes of a sealed slot that went bad, made good from wherever the same bytes still are.

What is found is believed only when it hashes to what this slot was sealed as, so it does not matter whom one asks, nor
what is wrong with the bytes there. Looked for are, the cheapest first: the same chunk in another slot of this node
(what did not change from step to step), the same share on another node, the group whose parity keeps it, and its
pieces in other ranks' slots of the version. P and Q are made again from their members.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

import msgspec
import xxhash

from everstep.clock import Clock
from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.layout.manifests import BLOB_PREFIX, Box, Manifest, decode_manifest
from everstep.layout.segments import Look, SlotHeader
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.wire.framing import Channel
from everstep.wire.v1.transfer import InventoryAsk, InventoryList
from everstep.wire.v1.vault_orders import ParityGroup
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.reading import Range, Reading
from everstep_agent.vault.memory.segments import Segment, SegmentKey, SegmentStore
from everstep_agent.vault.parity.coding import Decoder, Recovery
from everstep_agent.vault.parity.shards import Facts, Place, read_manifest
from everstep_agent.vault.reporting import Findings, Tally
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import Peers, ask_bytes, ask_manifest

# ---- alike
# What other ranks of a version stored alike: pieces of a slot, wherever else they lie.
#
# State that ranks hold alike is divided among them, and each piece of it is stored by some on different nodes
# (docs/decisions/0005). Their slots differ, and a piece lies in each at another place; but one plan made all slots of a
# version, so that it is the same box in each. What is between pieces is nobody's, and zeros as a rule.

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


# ---- scrub
# Looking at what lies still: a bit that flips in a slot or its header is found before somebody restores from it.


class Scrubber:
    """Goes over all headers and all sealed slots, again and again, at a bounded rate, in a thread of its own.

    Bytes that are not what was sealed are mended from wherever they still are; where that is nowhere the slot is
    discarded. A header of which a part is damaged is mended from its other part. Two records that do not agree may
    be a writer at work, so they are left alone until the next round finds them just so.

    A slot that was not there in the round before is left for the next one: what a running job overwrites after a few
    steps has no time to rot, and hashing it once more would cost the job's own cores.

    Args:
        interval_s: from one round's beginning to the next one's; a round that takes longer is followed at once.
        bytes_per_s: read at most, on average over a chunk and the pause after it.
    """

    def __init__(
        self,
        store: SegmentStore,
        findings: Findings,
        tally: Tally,
        clock: Clock,
        repairer: Repairer,
        interval_s: float,
        bytes_per_s: float,
    ) -> None:
        self._store = store
        self._findings = findings
        self._tally = tally
        self._clock = clock
        self._repairer = repairer
        self._interval_s = interval_s
        self._bytes_per_s = bytes_per_s
        self._seen: set[tuple[SegmentKey, int, SlotHeader]] = set()
        self._at_odds: dict[tuple[SegmentKey, int], Look] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            begun = self._clock.monotonic()
            try:
                self.round()
            except Exception:  # a machine that is short of something for a moment; slots rot on
                log.exception("a round over the slots was broken off; the next one begins anew")
            self._stopping.wait(max(0.0, begun + self._interval_s - self._clock.monotonic()))

    def round(self) -> None:
        """Looks at every header, and hashes every slot that is sealed now and was in the round before, once."""
        before, self._seen = self._seen, set()
        odd_before, self._at_odds = self._at_odds, {}
        for segment in self._store.segments():
            self._look_at_headers(segment, odd_before)
            for slot, header in segment.sealed():
                if self._stopping.is_set():
                    return
                self._seen.add((segment.key, slot, header))
                if (segment.key, slot, header) in before:
                    self._scrub(segment, slot, header)

    def _look_at_headers(self, segment: Segment, before: dict[tuple[SegmentKey, int], Look]) -> None:
        self._store.mend_header(segment)
        for slot in range(segment.view.slots):
            look = segment.view.look(slot)
            if look.agree:
                continue
            self._at_odds[segment.key, slot] = look
            if before.get((segment.key, slot)) != look:
                continue
            if look.header is None:
                self._store.lost_header(segment, slot)
            else:
                self._store.mend_records(segment, slot, look)

    def _scrub(self, segment: Segment, slot: int, header: SlotHeader) -> None:
        bad = self._hash(segment, slot, header)
        if bad is None:
            self._tally.add("scrubbed_slots")
            return
        # A fill announces itself in the header before it touches a byte: the same header means the same bytes.
        if segment.view.header(slot) != header or self._store.get(segment.key) is not segment:
            return
        source = self._repairer.mend(segment, slot, header, bad)
        if source:
            message = f"{bad.words}; it is mended from {source}"
            self._findings.damage(segment.damage(slot, header, message), seen_by="scrubber")
        elif not self._stopping.is_set():  # else nobody was asked
            self._findings.slot_corrupt(segment, slot, header, bad.words, seen_by="scrubber")

    def _hash(self, segment: Segment, slot: int, header: SlotHeader) -> Bad | None:
        """What does not hash right; None where all does, and where the slot is no longer what it was."""
        words: list[str] = []
        table = self._says(words, partial(segment.view.digests, slot))
        manifest = not table and self._says(words, partial(segment.view.manifest, slot))
        self._pause(header.manifest_bytes)
        chunks = []
        for index in range(0 if table else chunk_count(header.payload_bytes)):
            start = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, header.payload_bytes - start)
            if self._says(words, partial(segment.view.check_chunks, slot, start, length)):
                chunks.append(index)
            self._pause(length)
            if self._stopping.is_set() or segment.view.header(slot) != header:
                return None
        return Bad(table, manifest, tuple(chunks), words[0]) if words else None

    @staticmethod
    def _says(words: list[str], check: Callable[[], object]) -> bool:
        """Whether ``check`` finds bad bytes; why goes to ``words``."""
        try:
            check()
        except (DigestMismatch, IndexError) as error:
            words.append(str(error))
            return True
        return False

    def _pause(self, count: int) -> None:
        self._tally.add("scrubbed_bytes", count)
        self._stopping.wait(count / self._bytes_per_s)
