"""Take over the segments of an earlier vault at once, and hash each slot before it is used.

A node may hold hundreds of gigabytes, so the vault serves from the start and hashes in the background, newest versions
first. Until then a slot is neither listed nor counted. Bytes read from it earlier are hashed for that read.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from everstep.errors import DigestMismatch
from everstep.ids import NAME_PATTERN
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.v1.local import SlotInfo
from everstep_agent.vault.memory.segments import SEGMENT_KINDS, DamageReport, SegmentFile, SegmentKey, SegmentStore

log = logging.getLogger(__name__)

MAX_THREADS = 8  # each thread hashes 7 to 34 GB/s; more threads are limited by memory bandwidth
_FILE = re.compile(r"^(own|replica|parity)-(0|[1-9][0-9]{0,6})$")


class SegmentAdoption:
    """Adopt segments: call ``adopt_segments`` once before serving, then ``start``. Otherwise thread-safe."""

    def __init__(self, store: SegmentStore, threads: int | None = None) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._unchecked_slots: list[tuple[SegmentFile, int, SlotHeader]] = []
        self._stopping = False
        # by default half of the processors, since living ranks go on computing
        count = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)) if threads is None else threads
        self._threads = [threading.Thread(target=self._run, name="adopt", daemon=True) for _ in range(count)]

    def adopt_segments(self) -> int:
        """Take over whole segments, reading headers only; return the number of sealed slots to check. Unfinished
        replicas are discarded, own ones left to their rank, which may be alive."""
        for folder in sorted(p for p in self._store.directory.iterdir() if p.is_dir() and not p.is_symlink()):
            if re.fullmatch(NAME_PATTERN, folder.name):
                for path in sorted(folder.iterdir()):
                    self._adopt_file(folder.name, path)
        self._unchecked_slots.sort(key=lambda each: each[2].version)
        return len(self._unchecked_slots)

    def _adopt_file(self, job: str, path: Path) -> None:
        if path.name.startswith("."):
            path.unlink()
            return
        name = _FILE.match(path.name)
        if name is None:
            return
        key = SegmentKey(job, SEGMENT_KINDS[name[1]], int(name[2]))
        try:
            segment = SegmentFile(key, path)
        except (DigestMismatch, OSError) as error:
            path.unlink(missing_ok=True)
            self._store.report_damage(
                DamageReport(job, f"{job}/{path.name}", f"{path} is discarded: {error}", {"path": str(path)})
            )
            return
        self._store.repair_header(segment)
        for slot in range(segment.view.slots):
            self._adopt_slot(segment, slot)
        self._store.register(segment)

    def _adopt_slot(self, segment: SegmentFile, slot: int) -> None:
        segment.finish_repair(slot)
        header = segment.view.read_records(slot).header
        if header is None:
            self._store.discard_lost_header(segment, slot)
        elif header.state is SlotState.SEALED:
            segment.unchecked_slots[slot] = header
            self._unchecked_slots.append((segment, slot, header))
        elif header.state is not SlotState.EMPTY and segment.key.kind != "own":
            segment.discard(slot, header)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; unchecked slots are left for the next vault."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping or not self._unchecked_slots:
                    return
                segment, slot, header = self._unchecked_slots.pop()
            if self._store.get(segment.key) is segment:  # otherwise the job is over, or has a larger segment
                self.ensure_checked(segment, slot, header)

    def ensure_checked(self, segment: SegmentFile, slot: int, header: SlotHeader) -> None:
        """Check the slot now, in this thread, if it is not checked yet."""
        if segment.unchecked_slots.get(slot) != header:
            return
        try:
            if not self._hash(segment, slot, header):
                return
        except (DigestMismatch, IndexError) as error:
            if segment.discard(slot, header):
                self._store.report_damage(segment.describe_damage(slot, header, f"{error}; the slot is discarded"))
            elif segment.view.header(slot) == header:
                return  # it could not be discarded, but stays unchecked and so unused
        with self._changed:
            segment.unchecked_slots.pop(slot, None)
            self._changed.notify_all()

    def _hash(self, segment: SegmentFile, slot: int, header: SlotHeader) -> bool:
        """Hash the slot. Returns False if the vault ends meanwhile. Raises DigestMismatch, IndexError."""
        segment.view.manifest(slot)
        for start in range(0, header.payload_bytes, CHUNK_BYTES):
            if self._stopping:
                return False
            segment.view.verify_chunks(slot, start, min(CHUNK_BYTES, header.payload_bytes - start))
        return True

    def inventory(self, job: str, timeout_s: float) -> tuple[tuple[SlotInfo, ...], int]:
        """Return the job's checked slots, and the number still unchecked after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._store.count_unchecked(job), timeout_s)
        # Counted first: a slot checked in between is asked for again, not missed.
        unchecked = self._store.count_unchecked(job)
        return self._store.inventory(job), unchecked
