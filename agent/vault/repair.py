"""Bytes of a sealed slot that went bad, taken from another holder of the same share of the same version.

What is fetched is believed only when it hashes to what this slot was sealed as, so it does not matter whom one asks,
nor what is wrong with the bytes there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import xxhash

from agent.vault.jobs import JobBook
from agent.vault.manifests import ask_manifest, receive_pieces
from agent.vault.peers import Peers
from agent.vault.segments import Segment
from agent.vault.settings import VaultSettings
from everstep.channel import Channel
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.slots import CHUNK_BYTES, SlotHeader
from everstep.wire.v1.transfer import Data, Get

log = logging.getLogger(__name__)

Fetch = Callable[[Channel], bytes]


class Bad(msgspec.Struct, frozen=True):
    """What of a sealed slot does not hash right, and in words."""

    table: bool
    manifest: bool
    chunks: tuple[int, ...]
    words: str


class Repairer:
    """Mends sealed slots in place. For one thread: ``SegmentView.mend`` knows of one mender."""

    def __init__(self, settings: VaultSettings, book: JobBook, peers: Peers) -> None:
        self._settings = settings
        self._book = book
        self._peers = peers

    def mend(self, segment: Segment, slot: int, header: SlotHeader, bad: Bad) -> str:
        """Where the right bytes came from, in words; empty where the slot could not be mended.

        A slot that is filled anew meanwhile is left alone. Parity is not mended: its group makes it again.
        """
        if segment.key.kind == "parity":
            return ""
        try:
            return self._mend(segment, slot, header, bad)
        except DigestMismatch:
            return ""  # it is another slot by now, or was spoilt again

    def _mend(self, segment: Segment, slot: int, header: SlotHeader, bad: Bad) -> str:
        sources: dict[str, None] = {}
        if bad.table:
            table = segment.view.rebuilt_table(slot, header)
            if table is None or not segment.mend(slot, header, table=table):
                return ""
            sources["its own bytes"] = None
        sealed = segment.view.digests(slot)
        if bad.manifest:
            manifest, node = self._find(segment, header, partial(self._get_manifest, header), sealed[0])
            if manifest is None or not segment.mend(slot, header, manifest=manifest):
                return ""
            sources[node] = None
        for index in bad.chunks:
            at = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, header.payload_bytes - at)
            chunk, node = self._find(segment, header, partial(self._get, header, at, length), sealed[index + 1])
            if chunk is None or not segment.mend(slot, header, chunks={index: chunk}):
                return ""
            sources[node] = None
        return ", ".join(sources)

    def _find(self, segment: Segment, header: SlotHeader, fetch: Fetch, digest: bytes) -> tuple[bytes | None, str]:
        """Bytes with that digest, and the node that had them."""
        job = segment.key.job
        for node in self._holders(job, header.rank):
            try:
                found = self._peers.call(job, node, fetch)
            except EverstepError as error:
                log.info("%s cannot mend rank %d's %s: %s", node, header.rank, header.version, error)
                continue
            if xxhash.xxh3_128_digest(found) == digest:
                return found, node
        return None, ""

    def _holders(self, job: str, rank: int) -> Iterable[str]:
        try:
            return self._book.likely_holders(job, rank, besides=self._settings.node)
        except NotFound:
            return ()  # nobody has configured the job yet

    def _get_manifest(self, header: SlotHeader, channel: Channel) -> bytes:
        return ask_manifest(channel, self._settings, header.rank, header.version)

    def _get(self, header: SlotHeader, at: int, length: int, channel: Channel) -> bytes:
        """The peer hashes before it answers."""
        channel.send(Get(rank=header.rank, version=header.version, ranges=((at, length),)))
        channel.patience(self._settings.settle_timeout_s)
        announced = channel.answer(Data).bytes
        channel.patience(self._settings.io_timeout_s)
        if announced != length:
            raise MalformedMessage(f"{channel.peer} announced {announced} bytes where {length} were asked for")
        return receive_pieces(channel, length)
