"""Bringing what a rank asks for to where it wants it: any node's slots' manifests, and bytes of this node's slots."""

from __future__ import annotations

from collections.abc import Iterator

from agent.vault.parity.shards import Place, Shards
from agent.vault.reading import Library
from agent.vault.scratch import Scratch
from agent.vault.segments import SegmentStore
from agent.vault.statistics import Tally
from everstep.errors import MalformedMessage, NotFound
from everstep.wire.v1.local import Fetch


class Fetcher:
    """Answers Fetch. Runs in worker threads."""

    def __init__(self, node: str, store: SegmentStore, library: Library, shards: Shards, tally: Tally) -> None:
        self._node = node
        self._store = store
        self._library = library
        self._shards = shards
        self._tally = tally

    def fetch(self, ask: Fetch) -> int:
        """Bytes landed in ``ask.into``.

        Raises NotFound where the node does not hold the version (or overwrote it on the way), Unavailable where it does
        not answer, DigestMismatch where the bytes there or on arrival are not what was sealed, MalformedMessage for
        ranges outside the payload or of another node's, PermissionDenied and OutOfSlotMemory for where they should
        land.
        """
        landed = self._copy(ask) if ask.ranges else self._bring_manifest(ask)
        self._tally.add("fetched_bytes", landed)
        return landed

    def _bring_manifest(self, ask: Fetch) -> int:
        manifest = self._shards.facts(Place(ask.job, ask.node, ask.rank, ask.version)).manifest
        return self._land(ask, len(manifest), iter([[memoryview(manifest)]]))

    def _copy(self, ask: Fetch) -> int:
        """From this node's own slots."""
        if ask.node != self._node:
            raise MalformedMessage(
                f"a vault fetches no ranges of another node's slots: read rank {ask.rank}'s version {ask.version} over "
                f"a connection to {ask.node} (Connect)"
            )
        reading = self._library.open(ask.job, ask.rank, ask.version, ask.ranges)

        def pieces() -> Iterator[list[memoryview]]:
            for piece in reading.pieces(ask.ranges):
                yield piece
                if not reading.still():
                    raise NotFound(f"rank {ask.rank}'s version {ask.version} was overwritten while it was read")

        return self._land(ask, sum(length for _, length in ask.ranges), pieces())

    def _land(self, ask: Fetch, length: int, pieces: Iterator[list[memoryview]]) -> int:
        scratch = Scratch(self._store.directory, ask.into, ask.into_offset, length, self._store.budget)
        try:
            at = 0
            for piece in pieces:
                at += scratch.write(piece, at)
        finally:
            scratch.close()
        return length
