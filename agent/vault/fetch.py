"""Bringing another node's bytes (or this node's own) to where a rank wants them, checked on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

from agent.vault.findings import Findings
from agent.vault.peers import Peers
from agent.vault.reading import Library, Range
from agent.vault.scratch import Scratch
from agent.vault.segments import MOST_SLOT_BYTES, SegmentStore
from agent.vault.settings import VaultSettings
from agent.vault.statistics import Tally
from everstep.channel import Channel
from everstep.errors import DigestMismatch, MalformedMessage, NotFound
from everstep.manifests import MOST_MANIFEST_BYTES
from everstep.range_digests import RangeHasher
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.local import Fetch
from everstep.wire.v1.transfer import MAX_RANGES, Data, DataEnd, Get

KEPT_BUFFERS = 4
"""Of CHUNK_BYTES each: as many batches as a rank asks for at once (trainer_hooks/restore/landing.py)."""


class Buffers:
    """Memory to receive into, kept for the next transfer: to make its pages takes longer than to fill them. Safe to use
    from any thread."""

    def __init__(self) -> None:
        self._idle: list[bytearray] = []

    @contextmanager
    def one(self, length: int) -> Iterator[memoryview]:
        """``length`` bytes, at most CHUNK_BYTES, with anything in them."""
        if length < CHUNK_BYTES // 8:
            yield memoryview(bytearray(length))
            return
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = bytearray(CHUNK_BYTES)
        try:
            yield memoryview(buffer)[:length]
        finally:
            if len(self._idle) < KEPT_BUFFERS:
                self._idle.append(buffer)


class Fetcher:
    """Answers Fetch. Runs in worker threads; ``streams`` runs the further connections of a large fetch."""

    def __init__(
        self,
        settings: VaultSettings,
        store: SegmentStore,
        library: Library,
        peers: Peers,
        findings: Findings,
        tally: Tally,
        streams: Executor,
    ) -> None:
        self._settings = settings
        self._store = store
        self._library = library
        self._peers = peers
        self._findings = findings
        self._tally = tally
        self._streams = streams
        self._buffers = Buffers()

    def fetch(self, ask: Fetch) -> int:
        """Bytes landed in ``ask.into``.

        Raises NotFound where the node does not hold the version (or overwrote it on the way), Unavailable where it does
        not answer, DigestMismatch where the bytes there or on arrival are not what was sealed, MalformedMessage for
        ranges outside the payload, PermissionDenied and OutOfSlotMemory for where they should land.
        """
        _check_ranges(ask.ranges)
        if ask.node == self._settings.node:
            landed = self._copy(ask)
        elif ask.ranges:
            landed = self._get_ranges(ask)
        else:
            landed = self._get_manifest(ask)
        self._tally.add("fetched_bytes", landed)
        return landed

    def _open(self, ask: Fetch, length: int) -> Scratch:
        return Scratch(self._store.directory, ask.into, ask.into_offset, length, self._store.budget)

    def _copy(self, ask: Fetch) -> int:
        """From this node's own slots."""
        reading = self._library.open(ask.job, ask.rank, ask.version, ask.ranges)
        length = sum(n for _, n in ask.ranges) if ask.ranges else len(reading.manifest)
        scratch = self._open(ask, length)
        try:
            at = 0
            for piece in reading.pieces(ask.ranges) if ask.ranges else [[memoryview(reading.manifest)]]:
                at += scratch.write(piece, at)
                if not reading.still():
                    raise NotFound(f"rank {ask.rank}'s version {ask.version} was overwritten while it was read")
        finally:
            scratch.close()
        return length

    def _get_manifest(self, ask: Fetch) -> int:
        manifest = self._peers.call(ask.job, ask.node, lambda channel: self._receive_manifest(channel, ask))
        scratch = self._open(ask, len(manifest))
        try:
            return scratch.write([memoryview(manifest)], 0)
        finally:
            scratch.close()

    def _receive_manifest(self, channel: Channel, ask: Fetch) -> bytearray:
        length = self._ask(channel, ask, ())
        if length > MOST_MANIFEST_BYTES:
            raise MalformedMessage(f"{ask.node} announced a manifest of {length} bytes")
        manifest = bytearray()
        self._receive(channel, ask, [length], lambda piece, _: manifest.extend(piece))
        return manifest

    def _get_ranges(self, ask: Fetch) -> int:
        length = sum(n for _, n in ask.ranges)
        shares = split(ask.ranges, max(1, min(self._settings.streams, length // self._settings.stream_bytes)))
        begins = [0, *accumulate(sum(n for _, n in share) for share in shares)]
        scratch = self._open(ask, length)
        try:
            gets = [partial(self._get, ask, share, scratch, at) for share, at in zip(shares, begins, strict=False)]
            others = [self._streams.submit(get) for get in gets[1:]]
            try:
                gets[0]()
            finally:
                wait(others)
            for other in others:
                other.result()
        finally:
            scratch.close()
        return length

    def _get(self, ask: Fetch, ranges: tuple[Range, ...], scratch: Scratch, at: int) -> None:
        lengths = [n for _, n in ranges]

        def action(channel: Channel) -> None:
            length = self._ask(channel, ask, ranges)
            if length != sum(lengths):
                raise MalformedMessage(f"{ask.node} announced {length} bytes where {sum(lengths)} were asked for")
            self._receive(channel, ask, lengths, lambda piece, offset: scratch.write([piece], at + offset))

        self._peers.call(ask.job, ask.node, action)

    def _ask(self, channel: Channel, ask: Fetch, ranges: tuple[Range, ...]) -> int:
        """How many bytes will come. The peer looks for the slot before it answers, and hashes the first piece."""
        channel.send(Get(rank=ask.rank, version=ask.version, ranges=ranges))
        channel.patience(self._settings.settle_timeout_s)
        length = channel.answer(Data).bytes
        channel.patience(self._settings.io_timeout_s)
        return length

    def _receive(
        self, channel: Channel, ask: Fetch, lengths: list[int], land: Callable[[memoryview, int], object]
    ) -> None:
        """Receives and hashes piece by piece in a buffer that stays in the cache; ``land`` gets each with its offset.

        Landing by write costs one copy; landing in a fresh mapping costs a page fault for each page, which is more.
        """
        hasher, total = RangeHasher(lengths), sum(lengths)
        with self._buffers.one(min(CHUNK_BYTES, total)) as buffer:
            for start in range(0, total, CHUNK_BYTES):
                piece = buffer[: min(CHUNK_BYTES, total - start)]
                channel.receive_into(piece)
                hasher.update(piece)  # while the peer looks at the next one
                if not channel.status():
                    channel.answer(DataEnd)  # raises what the peer refuses for
                    raise MalformedMessage(f"{ask.node} said that the slot cannot be read on, and then that it can")
                land(piece, start)
        sealed = channel.answer(DataEnd).digests
        if sealed != hasher.digests():
            detail = "what arrived did not hash right"
            self._findings.transfer_corrupt(ask.job, ask.node, ask.rank, ask.version, detail)
            raise DigestMismatch(f"rank {ask.rank}'s version {ask.version} from {ask.node}: {detail}")


def _check_ranges(ranges: tuple[Range, ...]) -> None:
    if len(ranges) > MAX_RANGES:
        raise MalformedMessage(f"{len(ranges)} ranges in one fetch; at most {MAX_RANGES}: join neighbours")
    for offset, length in ranges:
        if not (0 <= offset < MOST_SLOT_BYTES and 0 <= length < MOST_SLOT_BYTES):
            raise MalformedMessage(f"({offset}, {length}) is no byte range")


def split(ranges: tuple[Range, ...], shares: int) -> list[tuple[Range, ...]]:
    """Cuts ranges into up to ``shares`` lists of about equal bytes, in order; each but the first has some."""
    each = max(1, -(-sum(n for _, n in ranges) // shares))
    result: list[list[Range]] = [[]]
    room = each
    for offset, length in ranges:
        while length > room and len(result) < shares:
            if room:
                result[-1].append((offset, room))
            offset, length, room = offset + room, length - room, each
            result.append([])
        result[-1].append((offset, length))
        room -= length
    return [tuple(share) for share in result if share]
