"""Bringing a slot's manifest, from any node, to where a rank wants it. Bytes of slots it reads itself (``Connect``)."""

from __future__ import annotations

from agent.vault.parity.shards import Place, Shards
from agent.vault.scratch import Scratch
from agent.vault.segments import SegmentStore
from agent.vault.statistics import Tally
from everstep.errors import MalformedMessage
from everstep.wire.v1.local import Fetch


class Fetcher:
    """Answers Fetch. Runs in worker threads."""

    def __init__(self, store: SegmentStore, shards: Shards, tally: Tally) -> None:
        self._store = store
        self._shards = shards
        self._tally = tally

    def fetch(self, ask: Fetch) -> int:
        """Bytes landed in ``ask.into``.

        Raises NotFound where the node does not hold the version, Unavailable where it does not answer, DigestMismatch
        where the manifest there or on arrival is not what was sealed, MalformedMessage where ranges are asked for,
        PermissionDenied and OutOfSlotMemory for where it should land.
        """
        if ask.ranges:
            raise MalformedMessage(
                f"a vault brings no ranges of slots that are there: read rank {ask.rank}'s version {ask.version} over "
                f"a connection to {ask.node} (Connect)"
            )
        manifest = self._shards.facts(Place(ask.job, ask.node, ask.rank, ask.version)).manifest
        scratch = Scratch(self._store.directory, ask.into, ask.into_offset, len(manifest), self._store.budget)
        try:
            scratch.write([memoryview(manifest)], 0)
        finally:
            scratch.close()
        self._tally.add("fetched_bytes", len(manifest))
        return len(manifest)
