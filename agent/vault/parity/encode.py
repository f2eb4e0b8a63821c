"""Making a group's P or Q on the node that is its home: members' chunks come in, side by side, and one comes out.

Each chunk is hashed against what its rank sealed before it counts; the parity's own chunks are hashed as they are
made. Members are read as any reader reads them, so a member that moves on meanwhile ends the work, and the slot that
was begun is discarded.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Executor
from functools import partial

import xxhash

from agent.vault.jobs import JobBook
from agent.vault.parity.manifest import LETTERS, MemberFacts, ParityManifest, read_manifest
from agent.vault.parity.shards import Place, Shards, all_at_once, not_a_home, require
from agent.vault.segments import Segment, SegmentKey, SegmentStore
from agent.vault.statistics import Tally
from everstep.errors import ConfigurationError, DigestMismatch, MalformedMessage
from everstep.manifests import MOST_MANIFEST_BYTES
from everstep.slot_choice import slot_to_fill
from everstep.slots import CHUNK_BYTES, DIGEST_BYTES, chunk_count, slot_bytes_for
from everstep.wire.v1.supervision import Protect

PARITY_SLOTS = 2
"""The version that is protected, and the next one while it is made."""


class Encoder:
    """Answers Protect. Runs in worker threads; ``streams`` reads the members side by side."""

    def __init__(
        self, node: str, store: SegmentStore, book: JobBook, shards: Shards, tally: Tally, streams: Executor
    ) -> None:
        self._node = node
        self._store = store
        self._book = book
        self._shards = shards
        self._tally = tally
        self._streams = streams
        self._lock = threading.Lock()
        self._making: defaultdict[SegmentKey, threading.Lock] = defaultdict(threading.Lock)

    def protect(self, ask: Protect) -> ParityManifest:
        """Returns what is sealed here now. What is here already, of these very shards, is kept.

        Raises StaleGeneration, NotFound where this node is no home of the group or a member does not hold its shard,
        Unavailable, DigestMismatch for a member's bytes that are not what it sealed, OutOfSlotMemory, and
        ConfigurationError for a group that parity cannot be made of.
        """
        self._book.current(ask.job, ask.generation)
        manifest = self._manifest(ask)
        key = SegmentKey(ask.job, "parity", ask.group.group)
        with self._lock:
            making = self._making[key]
        with making:
            self._make(ask, key, manifest)
        self._book.protects(ask.job, ask.version, ask.group)
        return manifest

    def _manifest(self, ask: Protect) -> ParityManifest:
        group = ask.group
        _check(ask)
        if self._node not in group.parity:
            raise not_a_home(self._node, group.group)
        places = [Place(ask.job, node, rank, ask.version) for rank, node in group.members]
        known = self._known(SegmentKey(ask.job, "parity", group.group))
        asks = [partial(self._shards.facts, place, known, group) for place in places]
        found = require(all_at_once(self._streams, asks))
        return ParityManifest(
            letter=LETTERS[group.parity.index(self._node)],
            group=group.group,
            version=ask.version,
            members=tuple(
                MemberFacts(rank=place.number, node=place.node, sealed=facts)
                for place, facts in zip(places, found, strict=True)
            ),
        )

    def _known(self, key: SegmentKey) -> dict[bytes, bytes]:
        """Members' manifests by their digests, from what was made here before: they change with the plan only."""
        segment = self._store.get(key)
        known: dict[bytes, bytes] = {}
        if segment is None:
            return known
        for slot, _ in segment.view.sealed():
            try:
                made = read_manifest(segment.view.manifest(slot), str(segment.path))
            except (DigestMismatch, MalformedMessage):  # whoever looks after that slot says so
                continue
            known |= {member.sealed.digests[:DIGEST_BYTES]: member.sealed.manifest for member in made.members}
        return known

    def _make(self, ask: Protect, key: SegmentKey, manifest: ParityManifest) -> None:
        said = manifest.encode()
        if len(said) > MOST_MANIFEST_BYTES:
            raise ConfigurationError(
                f"the manifests and digests of the {len(manifest.members)} members of group {ask.group.group} take "
                f"{len(said)} bytes, and parity's own manifest {MOST_MANIFEST_BYTES} at most: make smaller groups"
            )
        segment = self._store.open(key, slot_bytes_for(len(said), manifest.payload_bytes), PARITY_SLOTS)
        self._book.require(ask.job, self._store.forget)
        if _holds(segment, ask, said):
            return
        slot = slot_to_fill(segment.view.headers(), set(ask.keep))
        payload = segment.view.begin(slot, ask.group.group, ask.version, said, manifest.payload_bytes)
        try:
            digests = [xxhash.xxh3_128_digest(said), *self._fill(ask, manifest, payload)]
            self._book.current(ask.job, ask.generation)
            segment.view.seal(slot, digests)
        except BaseException:
            segment.view.discard(slot)
            raise
        self._tally.add("parity_slots")
        self._tally.add("parity_bytes", manifest.payload_bytes)

    def _fill(self, ask: Protect, manifest: ParityManifest, payload: memoryview) -> list[bytes]:
        """Writes the parity chunk by chunk; the digest of each."""
        from agent.vault.parity import gf  # numpy takes 30 ms and 15 MB of a vault that never needs it

        buffers = [memoryview(bytearray(min(CHUNK_BYTES, m.sealed.payload_bytes))) for m in manifest.members]
        digests = []
        for index in range(chunk_count(manifest.payload_bytes)):
            chunks = self._gather(ask, manifest, index, buffers)
            into = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            gf.encode(chunks, **{manifest.letter.lower(): into})
            digests.append(xxhash.xxh3_128_digest(into))
        return digests

    def _gather(
        self, ask: Protect, manifest: ParityManifest, index: int, buffers: list[memoryview]
    ) -> list[memoryview]:
        chunks = [buffer[: m.sealed.chunk_bytes(index)] for m, buffer in zip(manifest.members, buffers, strict=True)]
        works = [
            partial(self._shards.chunk, Place(ask.job, m.node, m.rank, ask.version), m.sealed, index, chunk)
            for m, chunk in zip(manifest.members, chunks, strict=True)
            if chunk
        ]
        require(all_at_once(self._streams, works))
        return chunks

    def forget(self, job: str) -> None:
        """The job is over; what is being made finds no segment to be kept in."""
        with self._lock:
            for key in [k for k in self._making if k.job == job]:
                del self._making[key]


def _check(ask: Protect) -> None:
    group = ask.group
    nodes = [node for _, node in group.members]
    if len({*nodes, *group.parity}) != len(nodes) + 2:
        raise ConfigurationError(
            f"group {group.group} has a node twice ({', '.join([*nodes, *group.parity])}): "
            "members and parity must be on different nodes, or one loss costs two shards"
        )


def _holds(segment: Segment, ask: Protect, manifest: bytes) -> bool:
    return any(
        header.version == ask.version and segment.view.manifest(slot) == manifest for slot, header in segment.sealed()
    )
