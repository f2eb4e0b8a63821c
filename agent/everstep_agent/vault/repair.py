"""Repair damaged bytes of sealed slots from other copies of the same bytes.

Found bytes are used only if they hash to the slot's sealed digest. Sources, cheapest first: the same chunk in another
slot of this node (state unchanged between steps), the same share on another node, the parity group, and pieces in other
ranks' slots of the version. P and Q are made again from their members.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import xxhash

from everstep.clock import Clock
from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.layout.manifests import Box, decode_manifest
from everstep.layout.slot_header import SlotHeader, SlotRecordPair
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.reading import ByteRange, SealedSlotReader
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.parity.coding import ParityDecoder, ShardRecovery
from everstep_agent.vault.parity.shards import ShardInfo, ShardLocation, decode_parity_manifest
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerPool, fetch_bytes, fetch_inventory, fetch_manifest

# Replicated state: pieces of a slot that other ranks of the version store too.
#
# Ranks divide the state that is identical on all of them, and several ranks on different nodes store each piece
# (docs/decisions/0005), at different offsets. One plan made all slots of a version, so that a piece is the same box in
# each. Bytes between pieces belong to no piece and are normally zeros. The digests of a slot's pieces are its own.

log = logging.getLogger(__name__)

MAX_INVENTORIES = 64
"""Maximum number of nodes asked for their inventory: this node does not know which of them has a piece."""

PieceKey = tuple[int, Box]


class ChunkGap(msgspec.Struct, frozen=True):
    """``length`` bytes at ``start`` of a chunk, which lie at ``piece_offset`` of their piece."""

    start: int
    length: int
    piece_offset: int


class PieceSource(msgspec.Struct, frozen=True):
    """Another rank's slot on a node, with the payload offset of each piece and the range of its Python state."""

    node: str
    rank: int
    piece_offsets: dict[PieceKey, int]
    python_state_range: ByteRange


class ReplicaPieces:
    """The other slots of one slot's version, searched as far as needed. Raises MalformedMessage for a bad manifest."""

    def __init__(self, repairer: SlotRepairer, segment: SegmentFile, header: SlotHeader, manifest: bytes) -> None:
        self._repairer = repairer
        self._job = segment.key.job
        self._rank = header.rank
        self._version = header.version
        self._manifest = decode_manifest(manifest)
        self._sources_by_manifest: dict[str, PieceSource | None] = {}
        self._sources: list[PieceSource] = []
        self._source_search = self._search_sources()

    def rebuild_chunk(self, index: int, corrupt_chunk: memoryview) -> Iterator[tuple[bytearray, str]]:
        """Yield chunk ``index`` with more and more bytes from elsewhere, in one buffer, and the nodes of origin."""
        begin, made = index * CHUNK_BYTES, bytearray(corrupt_chunk)
        gaps, python_state = self._pieces_in(begin, len(made)), self._manifest.python_state_range
        blob, digests = (_overlap(each, begin, len(made)) for each in (python_state, self._manifest.digests_range))
        padding = _unused_gaps([*gaps.values(), *(each for each in (blob, digests) if each)], len(made))
        nodes: dict[str, None] = {}
        for supply in self._iter_sources():
            if not gaps and blob is None:
                break
            pieces = {key: gap for key, gap in gaps.items() if key in supply.piece_offsets}
            if self._copy_pieces(made, supply, [(supply.piece_offsets[key], gap) for key, gap in pieces.items()]):
                self._repairer.job_table.note_holder(self._job, self._rank, supply.node)
                nodes[supply.node] = None
                gaps = {key: gap for key, gap in gaps.items() if key not in pieces}
                yield made, ", ".join(nodes)
            if blob is not None and supply.python_state_range[1] == python_state[1]:
                other = made.copy()  # each rank has its own Python state, and many are equal
                if self._copy_pieces(other, supply, [(supply.python_state_range[0], blob)]):
                    yield other, ", ".join({**nodes, supply.node: None})
        for gap in padding:
            made[gap.start : gap.start + gap.length] = bytes(gap.length)
        yield made, ", ".join(nodes) or "the slot itself"

    def _pieces_in(self, begin: int, length: int) -> dict[PieceKey, ChunkGap]:
        """Return the pieces that have bytes in that part of the payload."""
        found = {}
        for stored in self._manifest.stored:
            nbytes = stored.box.volume * self._manifest.catalog[stored.tensor].itemsize
            gap = _overlap((stored.offset, nbytes), begin, length)
            if gap is not None:
                found[stored.tensor, stored.box] = gap
        return found

    def _copy_pieces(self, made: bytearray, piece_source: PieceSource, gaps: Sequence[tuple[int, ChunkGap]]) -> bool:
        """Copy bytes of these pieces, each given by its offset and gap. Returns False if they are unavailable."""
        if not gaps:
            return False
        ranges = [(at + gap.piece_offset, gap.length) for at, gap in gaps]
        try:
            data = memoryview(self._read_bytes(piece_source, ranges))
        except EverstepError as error:
            log.info("%s cannot provide pieces of rank %d: %s", piece_source.node, piece_source.rank, error)
            return False
        at = 0
        for _, gap in gaps:
            made[gap.start : gap.start + gap.length] = data[at : at + gap.length]
            at += gap.length
        return True

    def _read_bytes(self, piece_source: PieceSource, ranges: list[ByteRange]) -> bytes:
        """Read ranges; their holder hashes them first."""
        if piece_source.node != self._repairer.settings.node:
            rank, settings = piece_source.rank, self._repairer.settings
            request = partial(fetch_bytes, settings=settings, rank=rank, version=self._version, ranges=ranges)
            return self._repairer.peers.call(self._job, piece_source.node, request)
        for segment, slot, header in self._repairer.store.find(self._job, piece_source.rank, self._version):
            try:
                reading = SealedSlotReader(segment, slot, header)
                reading.check(ranges)
                data = b"".join(reading.views(ranges))
                reading.require_unchanged()
                return data
            except (DigestMismatch, Conflict):
                continue
        raise NotFound(f"this node no longer holds {self._version} of rank {piece_source.rank}")

    def _iter_sources(self) -> Iterator[PieceSource]:
        yield from self._sources
        for supply in self._source_search:
            self._sources.append(supply)
            yield supply

    def _search_sources(self) -> Iterator[PieceSource]:
        node = self._repairer.settings.node
        for segment in self._repairer.store.segments(self._job):
            for slot, header in segment.sealed() if segment.key.kind != "parity" else ():
                if header.version == self._version and header.rank != self._rank:
                    try:
                        manifest = segment.view.manifest(slot)
                    except DigestMismatch:
                        continue
                    yield from self._make_source(node, header.rank, "", manifest)
        for other in self._repairer.job_table.likely_holders(self._job, self._rank, node, MAX_INVENTORIES):
            try:
                yield from self._search_node(other)
            except EverstepError as error:
                log.info("%s did not answer the inventory for %s: %s", other, self._version, error)

    def _search_node(self, node: str) -> Iterator[PieceSource]:
        peers, settings = self._repairer.peers, self._repairer.settings
        for there in peers.call(self._job, node, fetch_inventory).slots:
            if there.version == self._version and there.rank != self._rank:
                get = partial(fetch_manifest, settings=settings, rank=there.rank, version=self._version)
                known = there.manifest_digest in self._sources_by_manifest
                manifest = b"" if known else peers.call(self._job, node, get)
                yield from self._make_source(node, there.rank, there.manifest_digest, manifest)

    def _make_source(self, node: str, rank: int, digest: str, body: bytes) -> Iterator[PieceSource]:
        """Yield the slot as a source if it has the same plan. ``digest`` is its manifest's, which is read once."""
        known = self._sources_by_manifest.get(digest) if digest else None
        if not digest or digest not in self._sources_by_manifest:
            manifest = decode_manifest(body)
            if manifest.catalog == self._manifest.catalog:
                offsets = {(stored.tensor, stored.box): stored.offset for stored in manifest.stored}
                known = PieceSource(node, rank, offsets, manifest.python_state_range)
            if digest:
                self._sources_by_manifest[digest] = known
        if known is not None:
            yield msgspec.structs.replace(known, node=node, rank=rank)


def _overlap(piece: ByteRange, begin: int, length: int) -> ChunkGap | None:
    """Return the part of a piece inside the ``length`` bytes from ``begin``, relative to ``begin``."""
    start, end = max(piece[0], begin), min(sum(piece), begin + length)
    return ChunkGap(start - begin, end - start, start - piece[0]) if start < end else None


def _unused_gaps(gaps: Iterable[ChunkGap], length: int) -> list[ChunkGap]:
    """Return the gaps of the chunk that belong to no piece."""
    at, found = 0, []
    for gap in sorted(gaps, key=lambda each: each.start):
        if gap.start > at:
            found.append(ChunkGap(at, gap.start - at, 0))
        at = max(at, gap.start + gap.length)
    return [*found, ChunkGap(at, length - at, 0)] if at < length else found


PARITY_SOURCE = "its parity group"
BytesLike = bytes | bytearray | memoryview
Candidates = Iterator[tuple[BytesLike, str]]  # candidate bytes, each with a description of their source


class CorruptParts(msgspec.Struct, frozen=True):
    """The parts of a sealed slot that do not hash right, and a description."""

    is_table_corrupt: bool
    is_manifest_corrupt: bool
    chunks: tuple[int, ...]
    description: str


@dataclass(eq=False)
class SlotRepairer:
    """Repair sealed slots in place. For one thread: ``SegmentView.repair`` allows one repairer."""

    settings: VaultSettings
    job_table: JobTable
    store: SegmentStore
    peers: PeerPool
    decoder: ParityDecoder

    def repair(self, segment: SegmentFile, slot: int, header: SlotHeader, corrupt: CorruptParts) -> str:
        """Repair a slot and describe the source of the right bytes; "" if it was refilled or could not be repaired."""
        search = _ParitySearch if segment.key.kind == "parity" else _RankSlotSearch
        try:
            sources = list(_repair_parts(segment, slot, header, corrupt, search(self, segment, slot, header)))
        except (DigestMismatch, _Unrepairable):
            return ""  # without a source, or the slot was refilled or damaged again
        return ", ".join(dict.fromkeys(sources))


class _Unrepairable(Exception):
    """No source has the right bytes, or the slot has changed."""


def _repair_parts(
    segment: SegmentFile, slot: int, header: SlotHeader, corrupt: CorruptParts, search: _RankSlotSearch | _ParitySearch
) -> Iterator[str]:
    """Repair part by part, and yield the source of each. Raises _Unrepairable at the first without a source."""
    if corrupt.is_table_corrupt:
        table = segment.view.rebuild_table(slot, header)
        if table is None or not segment.repair(slot, header, table=table):
            raise _Unrepairable
        yield "its own bytes"
    digests = segment.view.digests(slot)
    if corrupt.is_manifest_corrupt:
        manifest, source = _first_matching(search.manifest(), digests[0])
        if not source or not segment.repair(slot, header, manifest=manifest):
            raise _Unrepairable
        yield source
    for index in corrupt.chunks:
        chunk, source = _first_matching(search.chunk(index, digests[index + 1]), digests[index + 1])
        if not source or not segment.repair(slot, header, chunks={index: chunk}):
            raise _Unrepairable
        yield source


def _first_matching(found: Candidates, digest: bytes) -> tuple[bytes, str]:
    """Return the first candidate with that digest, and its source."""
    for data, source in found:
        if xxhash.xxh3_128_digest(data) == digest:
            return bytes(data), source
    return b"", ""


@dataclass
class _RepairSearch:
    """Candidates for the bytes of one slot. The next candidate may overwrite the previous one."""

    _repairer: SlotRepairer
    _segment: SegmentFile
    _slot: int
    _header: SlotHeader


class _RankSlotSearch(_RepairSearch):
    """Candidates for a rank's slot, its own or a copy."""

    def manifest(self) -> Candidates:
        header = self._header
        yield from self._ask_holders(
            partial(fetch_manifest, settings=self._repairer.settings, rank=header.rank, version=header.version)
        )
        if (recovery := self._recovery) is not None:
            yield recovery.info.manifest, PARITY_SOURCE

    def chunk(self, index: int, digest: bytes) -> Candidates:
        settings, header, start = self._repairer.settings, self._header, index * CHUNK_BYTES
        length = min(CHUNK_BYTES, header.payload_bytes - start)
        yield from self._same_chunk_on_node(digest, length)
        yield from self._ask_holders(
            partial(fetch_bytes, settings=settings, rank=header.rank, version=header.version, ranges=((start, length),))
        )
        yield from _recovered_chunk(self._recovery, index)
        if self._replica_pieces is not None:
            corrupt = self._segment.view.payload(self._slot)[start : start + length]
            yield from self._replica_pieces.rebuild_chunk(index, corrupt)

    def _same_chunk_on_node(self, digest: bytes, length: int) -> Candidates:
        """Yield the same chunk of other slots, of any rank."""
        for segment in self._repairer.store.segments(self._segment.key.job):
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

    def _ask_holders(self, request: Callable[[VaultChannel], bytes]) -> Candidates:
        repairer, rank, job = self._repairer, self._header.rank, self._segment.key.job
        try:
            holders = repairer.job_table.likely_holders(job, rank, exclude=repairer.settings.node)
        except NotFound:
            return  # the job is not configured yet
        for node in holders:
            try:
                yield repairer.peers.call(job, node, request), node
            except EverstepError as error:
                log.info("%s cannot repair rank %d's %s: %s", node, rank, self._header.version, error)

    @cached_property
    def _recovery(self) -> ShardRecovery | None:
        rank, version, job = self._header.rank, self._header.version, self._segment.key.job
        group = self._repairer.job_table.find_parity_group(job, version, rank)
        if group is None:
            return None
        try:
            return self._repairer.decoder.recover_member(job, rank, version, group)
        except EverstepError as error:
            log.info("parity cannot repair rank %d's %s: %s", rank, version, error)
            return None

    @cached_property
    def _replica_pieces(self) -> ReplicaPieces | None:
        try:
            manifest = self._segment.view.manifest(self._slot)
            return ReplicaPieces(self._repairer, self._segment, self._header, manifest)
        except MalformedMessage:
            return None  # the manifest does not list pieces


class _ParitySearch(_RepairSearch):
    """Candidates for P or Q."""

    def manifest(self) -> Candidates:
        if self._group is not None:
            try:
                yield self._repairer.decoder.rebuild_parity_manifest(self._location, self._group), PARITY_SOURCE
            except EverstepError as error:
                log.info("%s", error)

    def chunk(self, index: int, digest: bytes) -> Candidates:
        yield from _recovered_chunk(self._recovery, index)

    @property
    def _location(self) -> ShardLocation:
        key = self._segment.key
        return ShardLocation(key.job, self._repairer.settings.node, key.number, self._header.version, is_parity=True)

    @property
    def _group(self) -> ParityGroup | None:
        key = self._segment.key
        return self._repairer.job_table.get_parity_group(key.job, self._header.version, key.number)

    @cached_property
    def _recovery(self) -> ShardRecovery | None:
        view = self._segment.view
        manifest, digests = view.manifest(self._slot), b"".join(view.digests(self._slot))
        sealed = ShardInfo(payload_bytes=self._header.payload_bytes, manifest=manifest, digests=digests)
        try:
            decoded = decode_parity_manifest(manifest, str(self._location))
            return self._repairer.decoder.recover_parity(self._location, decoded, sealed, self._group)
        except EverstepError as error:
            log.info("%s cannot be recovered: %s", self._location, error)
            return None


def _recovered_chunk(recovery: ShardRecovery | None, index: int) -> Candidates:
    try:
        if recovery is not None:
            yield recovery.recover_chunk(index), PARITY_SOURCE
    except EverstepError as error:
        log.info("chunk %d: %s", index, error)


# Scrubbing: find a flipped bit in a slot or its header before a restore reads it.


@dataclass(eq=False)
class Scrubber:
    """Check all headers and sealed slots repeatedly, at a bounded rate, in a thread; repair them, or discard slots
    without another copy. Two header records that do not agree may mean a writer at work, so they are left alone until
    the next round finds them unchanged. So is a slot that was not there in the previous round: one that a running job
    overwrites has no time to rot. A round begins ``interval_s`` after the last one began, or when that is over.
    ``bytes_per_s`` is the average over a chunk and its pause."""

    _repairer: SlotRepairer
    _finding_reporter: FindingReporter
    _counters: VaultCounters
    _clock: Clock
    _interval_s: float
    _bytes_per_s: float

    def __post_init__(self) -> None:
        self._store = self._repairer.store
        self._scrubbed_before: set[tuple[SegmentKey, int, SlotHeader]] = set()
        self._inconsistent_headers: dict[tuple[SegmentKey, int], SlotRecordPair] = {}
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
            started_at = self._clock.monotonic()
            try:
                self.run_round()
            except Exception:  # the machine may lack memory for a moment; scrubbing must go on
                log.exception("a scrub round failed; the next one checks all slots again")
            self._stopping.wait(max(0.0, started_at + self._interval_s - self._clock.monotonic()))

    def run_round(self) -> None:
        """Check every header, and hash once every slot that is sealed now and was in the previous round."""
        before, self._scrubbed_before = self._scrubbed_before, set()
        odd_before, self._inconsistent_headers = self._inconsistent_headers, {}
        for segment in self._store.segments():
            self._check_headers(segment, odd_before)
            for slot, header in segment.sealed():
                if self._stopping.is_set():
                    return
                self._scrubbed_before.add((segment.key, slot, header))
                if (segment.key, slot, header) in before:
                    self._scrub(segment, slot, header)

    def _check_headers(self, segment: SegmentFile, before: dict[tuple[SegmentKey, int], SlotRecordPair]) -> None:
        self._store.repair_header(segment)
        for slot in range(segment.view.slots):
            look = segment.view.read_records(slot)
            if look.is_consistent:
                continue
            self._inconsistent_headers[segment.key, slot] = look
            if before.get((segment.key, slot)) == look:
                if look.header is None:
                    self._store.discard_lost_header(segment, slot)
                else:
                    self._store.repair_records(segment, slot, look)

    def _scrub(self, segment: SegmentFile, slot: int, header: SlotHeader) -> None:
        bad = self._find_corrupt_parts(segment, slot, header)
        if bad is None:
            self._counters.add("scrubbed_slots")
            return
        # A fill changes the header before it touches a byte, so an unchanged header means unchanged bytes.
        if segment.view.header(slot) != header or self._store.get(segment.key) is not segment:
            return
        if source := self._repairer.repair(segment, slot, header, bad):
            message = f"{bad.description}; repaired from {source}"
            self._finding_reporter.report_damage(segment.describe_damage(slot, header, message), detected_by="scrubber")
        elif not self._stopping.is_set():  # if stopping, no other node was asked
            self._finding_reporter.report_corrupt_slot(segment, slot, header, bad.description, detected_by="scrubber")

    def _find_corrupt_parts(self, segment: SegmentFile, slot: int, header: SlotHeader) -> CorruptParts | None:
        """Return the parts that do not hash right; None if all do, or the slot has changed."""
        errors: list[str] = []
        table = _has_bad_bytes(errors, partial(segment.view.digests, slot))
        manifest = not table and _has_bad_bytes(errors, partial(segment.view.manifest, slot))
        self._pause(header.manifest_bytes)
        chunks = []
        for index in range(0 if table else chunk_count(header.payload_bytes)):
            start = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, header.payload_bytes - start)
            if _has_bad_bytes(errors, partial(segment.view.verify_chunks, slot, start, length)):
                chunks.append(index)
            self._pause(length)
            if self._stopping.is_set() or segment.view.header(slot) != header:
                return None
        return CorruptParts(table, manifest, tuple(chunks), errors[0]) if errors else None

    def _pause(self, byte_count: int) -> None:
        self._counters.add("scrubbed_bytes", byte_count)
        self._stopping.wait(byte_count / self._bytes_per_s)


def _has_bad_bytes(errors: list[str], check: Callable[[], object]) -> bool:
    """Return whether ``check`` finds bad bytes; append its error to ``errors``."""
    try:
        check()
    except (DigestMismatch, IndexError) as error:
        errors.append(str(error))
        return True
    return False
