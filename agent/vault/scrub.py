"""Looking at what lies still: a bit that flips in a slot or its header is found before somebody restores from it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from agent.vault.findings import Findings
from agent.vault.repair import Bad, Repairer
from agent.vault.segments import Segment, SegmentKey, SegmentStore
from agent.vault.statistics import Tally
from everstep.clock import Clock
from everstep.errors import DigestMismatch
from everstep.segment_records import Look
from everstep.slots import CHUNK_BYTES, SlotHeader, chunk_count

log = logging.getLogger(__name__)


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
