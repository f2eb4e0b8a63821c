"""The node's segments: files that hold slots, created, found again, enlarged and unlinked.

A rank writes ``DIR/JOB/own-LOCALRANK`` through its own mapping. This vault writes ``DIR/JOB/replica-RANK`` with slots
received from other nodes' ranks, and ``DIR/JOB/parity-GROUP``. A file is drafted under a name that begins with a dot
and renamed when its headers are written. Other files there are scratch space of ranks.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from everstep.errors import ConfigurationError, DigestMismatch
from everstep.ids import Version
from everstep.layout.segment_header import (
    MAX_SLOTS,
    NONCE_BYTES,
    PAGE_BYTES,
    is_intact,
    segment_bytes,
    segment_name,
    write_header,
)
from everstep.layout.slot_header import SlotHeader, SlotRecordPair, SlotState
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView, format_segment
from everstep.wire.v1.local import SlotInfo
from everstep_agent.lifecycle import delete_segments
from everstep_agent.vault.memory import shared_memory

# Replacement: when an existing segment can be reused, and what its replacement takes over.

SlotMoves = list[tuple[int, int, SlotHeader]]  # old slots, each with its new slot number and header


def can_reuse(old: SegmentView, path: Path, slot_bytes: int, slots: int, exact_slots: bool) -> bool:
    """Return whether the file's segment meets the request; with ``exact_slots`` more slots are too many."""
    fits = old.slots == slots if exact_slots else old.slots >= slots
    # A smaller allocation has given memory back for a replacement that could not be made.
    return old.slot_bytes >= slot_bytes and fits and shared_memory.allocated_bytes(path) >= old.segment.total_bytes


def replacement_layout(old: SegmentView | None, slot_bytes: int, slots: int, exact_slots: bool) -> tuple[int, int]:
    """Return slot bytes and count of the replacement; each old slot's content fits into a new one."""
    old_bytes, old_slots = (0, 0) if old is None else (old.slot_bytes, old.slots)
    whole_pages = -(-max(slot_bytes, old_bytes) // PAGE_BYTES) * PAGE_BYTES
    return whole_pages, slots if exact_slots else max(slots, old_slots)


def replaceable_bytes(old: SegmentView, path: Path, slots: int, keep: Sequence[Version] | None) -> int:
    """Return the bytes of slots not carried over, given back before a segment of ``slots`` slots replaces it."""
    if not _has_reduced_slots(old, slots, keep):
        return 0
    carried = slots if slots < old.slots else len(slots_to_carry(old, slots, keep))
    missing = segment_bytes(old.slots, old.slot_bytes) - shared_memory.allocated_bytes(path)
    return max(0, (old.slots - carried) * old.slot_bytes - missing)


def slots_to_carry(old: SegmentView, slots: int, keep: Sequence[Version] | None) -> SlotMoves:
    """Return the slots that a segment of ``slots`` slots takes over: all sealed ones in place or, with fewer places,
    those of ``keep`` in order, then the newest. If a reduced count stays the same, only ``keep`` is taken over."""
    sealed = list(old.sealed_slots())
    if not _has_reduced_slots(old, slots, keep):
        return [(slot, slot, header) for slot, header in sealed]
    order = {version: place for place, version in enumerate(keep or ())}
    if slots == old.slots:
        return [(slot, slot, header) for slot, header in sealed if header.version in order]
    sealed.sort(key=lambda each: each[1].version, reverse=True)
    sealed.sort(key=lambda each: order.get(each[1].version, len(order)))
    return [(slot, place, header) for place, (slot, header) in enumerate(sealed[:slots])]


def _has_reduced_slots(old: SegmentView, slots: int, keep: Sequence[Version] | None) -> bool:
    """Return whether the slot count is limited because memory is short."""
    return slots < old.slots or (slots == old.slots < SLOTS_PER_RANK and keep is not None)


def copy_slots(old: SegmentView, new: SegmentView, moves: SlotMoves) -> None:
    """Copy the slots that hash right."""
    for slot, place, header in moves:
        try:
            old.verify(slot)
            payload = new.begin(place, header.rank, header.version, old.manifest(slot), header.payload_bytes)
            payload[:] = old.payload(slot)
            if old.header(slot) == header:
                new.seal(place, old.digests(slot))
            else:
                new.discard(place)
        except (DigestMismatch, ValueError):
            new.discard(place)  # bad bytes, or the rank began to refill it


SegmentKind = Literal["own", "replica", "parity"]
SEGMENT_KINDS: dict[str, SegmentKind] = {"own": "own", "replica": "replica", "parity": "parity"}
MAX_SLOT_BYTES = 1 << 48
MAX_LOCAL_RANKS = 64


class SegmentKey(msgspec.Struct, frozen=True, order=True):
    """Identify a segment: a local rank's own, the copies of a rank's slots, or a group's P or Q."""

    job: str
    kind: SegmentKind
    number: int

    @property
    def filename(self) -> str:
        return segment_name(self.kind, self.number)


class DamageReport(msgspec.Struct, frozen=True):
    """Damaged bytes of a segment, found outside a request. ``subject`` names their owner."""

    job: str
    subject: str
    message: str
    evidence: dict[str, str]


class SegmentFile:
    """A mapped segment file, readable even when the file is gone. Raises DigestMismatch if it is another segment's."""

    def __init__(self, key: SegmentKey, path: Path) -> None:
        self.key, self.path = key, path
        self.mapping = _map(path, key.kind != "own")
        self._file_stat = path.stat()
        self._repair_lock = threading.Lock()
        self.unchecked_slots: dict[int, SlotHeader] = {}
        self.view = SegmentView(memoryview(self.mapping))
        found = self.view.segment
        self._header = msgspec.structs.replace(found, kind=key.kind, number=key.number, job=key.job)
        if found.job and found != self._header:
            raise DigestMismatch(f"the file holds the segment {found.job}/{segment_name(found.kind, found.number)}")

    def sealed(self) -> list[tuple[int, SlotHeader]]:
        """Return the sealed slots, except those of an earlier vault that are not hashed yet."""
        return [(slot, header) for slot, header in self.view.sealed_slots() if self.unchecked_slots.get(slot) != header]

    def discard(self, slot: int, header: SlotHeader | None) -> bool:
        """Mark the slot empty if it still matches ``header`` (None: damaged)."""
        return self._write_repair(lambda view: view.discard_if_unchanged(slot, header))

    def repair_header(self) -> bool:
        """Rewrite the segment's header if it is damaged. Returns False if it is intact or cannot be written."""
        if is_intact(memoryview(self.mapping), self._header):
            return False
        try:
            write_header(self._writable_bytes(), self._header)
        except (OSError, DigestMismatch):
            return False
        return True

    def repair_records(self, slot: int, records: SlotRecordPair) -> bool:
        """Rewrite a slot's damaged record from its twin. Returns False if the slot has changed."""
        return self._write_repair(lambda view: view.repair_records(slot, records))

    def repair(self, slot: int, header: SlotHeader, **parts: Any) -> bool:
        """Run ``SegmentView.repair``. Returns False if the slot no longer matches ``header``."""
        return self._write_repair(lambda view: view.repair(slot, header, **parts))

    def seal_copied(self) -> None:
        """Seal slots that a rank copied but did not hash before it died. A living rank writes the same words itself."""
        for slot in range(self.view.slots):
            header = self.view.header(slot)
            if header is not None and header.state is SlotState.COPIED:
                digests = self.view.compute_digests(slot, header)
                self._write_repair(partial(SegmentView.seal_copied, slot=slot, header=header, digests=digests))

    def free_slot(self, slot: int) -> None:
        """Free the memory of a slot, whatever it holds. The segment cannot be filled then; ``open`` makes another."""
        self.discard(slot, self.view.header(slot))
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if os.path.samestat(os.fstat(descriptor), self._file_stat):
                shared_memory.free_pages(descriptor, self._header.slot_offset(slot) + PAGE_BYTES, self.view.slot_bytes)
        finally:
            os.close(descriptor)

    def _write_repair(self, work: Callable[[SegmentView], bool]) -> bool:
        """Run one repair at a time, and only while the file still is this segment and can be opened."""
        with self._repair_lock:
            try:
                return work(self._writable())
            except (OSError, DigestMismatch):
                return False

    def finish_repair(self, slot: int) -> None:
        """Complete a repair that an earlier vault left unfinished, so that the slot can be filled again."""
        self._writable().finish_repair(slot)

    def _writable(self) -> SegmentView:
        """Return a writable view; own segments are mapped writable only for repairs. Raises FileNotFoundError."""
        return self.view if self.key.kind != "own" else SegmentView(self._writable_bytes())

    def _writable_bytes(self) -> memoryview:
        """Return the writable bytes. Raises FileNotFoundError if the path no longer names this file."""
        mapping = self.mapping if self.key.kind != "own" else _map(self.path, True)
        if not os.path.samestat(self.path.stat(), self._file_stat):
            raise FileNotFoundError(errno.ENOENT, "the segment was replaced", str(self.path))
        return memoryview(mapping)

    def describe_damage(self, slot: int | None, header: SlotHeader | None, message: str) -> DamageReport:
        """Describe damage to a slot, to a slot with a lost header, or to the segment's own header."""
        evidence = {"path": str(self.path)} | ({} if slot is None else {"slot": str(slot)})
        owner = self.key.filename if header is None or self.key.kind == "parity" else f"rank{header.rank}"
        if header is not None:
            owner += f"/{header.version}"
        elif slot is not None:
            owner += f"/slot{slot}"
        return DamageReport(self.key.job, f"{self.key.job}/{owner}", message, evidence)

    def slot_info(self, node: str, slot: int, header: SlotHeader) -> SlotInfo:
        mark = self.view.finished() if self.key.kind == "own" else None
        return SlotInfo(
            node=node,
            rank=header.rank,
            version=header.version,
            path=str(self.path),
            slot=slot,
            replica=self.key.kind != "own",
            manifest_digest=self.view.digests(slot)[0].hex(),
            finished=None if mark is None else Version(mark.generation, mark.step),
            finished_by=0 if mark is None else mark.rank,
            loop_ended=mark is not None and mark.loop_ended,
        )


def _map(path: Path, writable: bool) -> mmap.mmap:
    """Map the file. Raises OSError, or DigestMismatch if it is too short."""
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = os.fstat(descriptor).st_size
        if length < PAGE_BYTES:
            raise DigestMismatch(f"{path} has {length} bytes and is not a segment")
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


class SegmentStore:
    """All segments under one directory. Safe to use from any thread."""

    def __init__(self, directory: Path, node: str, memory_limit: int | None) -> None:
        self.directory, self._node = directory, node
        self.budget = shared_memory.MemoryBudget(directory, memory_limit)
        self._prefaulter = shared_memory.Prefaulter()
        self._lock = threading.Lock()
        self._creation_locks: dict[SegmentKey, threading.Lock] = {}
        self._segments: dict[SegmentKey, SegmentFile] = {}
        self._unreported_damage: list[DamageReport] = []
        self._damage_handler: Callable[[DamageReport], None] = self._unreported_damage.append

    def report_damage(self, damage: DamageReport) -> None:
        self._damage_handler(damage)

    def set_damage_handler(self, handler: Callable[[DamageReport], None]) -> None:
        """Send damage reports to ``handler`` from now on, from any thread; earlier ones go there at once."""
        self._damage_handler = handler
        while self._unreported_damage:
            handler(self._unreported_damage.pop(0))

    def get(self, key: SegmentKey) -> SegmentFile | None:
        with self._lock:
            return self._segments.get(key)

    def segments(self, job: str | None = None) -> list[SegmentFile]:
        """Return all segments, or one job's, own ones first."""
        with self._lock:
            return [s for k, s in sorted(self._segments.items()) if job is None or k.job == job]

    def jobs(self) -> set[str]:
        with self._lock:
            return {key.job for key in self._segments}

    def find(
        self, job: str, rank: int, version: Version, *, parity: bool = False
    ) -> Iterator[tuple[SegmentFile, int, SlotHeader]]:
        """Yield unchecked slots whose headers name that rank's share of the version (or that group's parity)."""
        for segment in self.segments(job):
            if (segment.key.kind == "parity") != parity:
                continue
            for slot, header in segment.view.sealed_slots():
                if header.rank == rank and header.version == version:
                    yield segment, slot, header

    def count_unchecked(self, job: str) -> int:
        """Return the number of the job's sealed slots that are not hashed yet."""
        return sum(
            segment.view.header(slot) == header
            for segment in self.segments(job)
            for slot, header in list(segment.unchecked_slots.items())
        )

    def inventory(self, job: str) -> tuple[SlotInfo, ...]:
        """Return the job's checked sealed slots without parity. A slot being refilled is left out."""
        found = []
        for segment in self.segments(job):
            if segment.key.kind == "parity":
                continue
            if segment.key.kind == "own":
                segment.seal_copied()
            for slot, header in segment.sealed():
                try:
                    found.append(segment.slot_info(self._node, slot, header))
                except DigestMismatch:
                    continue
        return tuple(found)

    def open(self, key: SegmentKey, slot_bytes: int, slots: int, keep: Sequence[Version] | None = None) -> SegmentFile:
        """Return a segment with room for ``slots`` slots of ``slot_bytes``; a replacement takes over the sealed slots
        that hash right. An own segment's pages exist on return, a replica's are made while it is filled. With ``keep``
        there are exactly ``slots`` (else never fewer than before), and it is carried over as in ``slots_to_carry``.
        Raises ConfigurationError, OutOfSlotMemory."""
        _check_sizes(key, slot_bytes, slots)
        with self._lock:
            creation_lock = self._creation_locks.setdefault(key, threading.Lock())
        with creation_lock:
            old, exact = self.get(key), keep is not None
            if old is not None and can_reuse(old.view, old.path, slot_bytes, slots, exact):
                self.repair_header(old)
                return old
            before = None if old is None else old.view
            return self._create(key, old, *replacement_layout(before, slot_bytes, slots, exact), keep)

    def plan_file(
        self, key: SegmentKey, slot_bytes: int, slots: int, keep: Sequence[Version] = ()
    ) -> shared_memory.PlannedFile | None:
        """Return the file that ``open`` would make for exactly ``slots`` slots; None if the existing one serves."""
        old = self.get(key)
        if old is not None and can_reuse(old.view, old.path, slot_bytes, slots, True):
            return None
        size, _ = replacement_layout(None if old is None else old.view, slot_bytes, slots, True)
        freed = 0 if old is None else replaceable_bytes(old.view, old.path, slots, keep)
        return shared_memory.PlannedFile(self.draft_and_final_path(key)[0], segment_bytes(slots, size), freed)

    def repair_header(self, segment: SegmentFile) -> None:
        """Repair the header before a rank maps the file and in each scrub round, and report the damage."""
        if segment.repair_header():
            message = f"the header of {segment.path} was damaged and has been rewritten; its slots are intact"
            self.report_damage(segment.describe_damage(None, None, message))

    def draft_and_final_path(self, key: SegmentKey) -> tuple[Path, Path]:
        """Return the draft name and the final name of a segment."""
        folder = self.directory / key.job
        return folder / f".{key.filename}", folder / key.filename

    def _create(
        self, key: SegmentKey, old: SegmentFile | None, slot_bytes: int, slots: int, keep: Sequence[Version] | None
    ) -> SegmentFile:
        draft, path = self.draft_and_final_path(key)
        description = f"{slots} slots of {slot_bytes} bytes for {key.job}/{key.filename}"
        length = segment_bytes(slots, slot_bytes)
        self._prefaulter.stop(path)
        moves, freed = [], 0
        if old is not None:
            old.seal_copied()
            freed = replaceable_bytes(old.view, old.path, slots, keep)
            moves = slots_to_carry(old.view, slots, keep)
        advice = shared_memory.ADVICE_FEWER_SLOTS if slots >= SLOTS_PER_RANK else shared_memory.ADVICE_FEWER_COPIES
        with self.budget.reserve(draft, length, description, freed, advice):
            try:
                self._make_folder(key.job)
                if old is not None and freed:
                    for slot in set(range(old.view.slots)) - {slot for slot, _, _ in moves}:
                        old.free_slot(slot)
                self._draft(key, draft, length, slot_bytes, slots, description)
                if old is not None:
                    copy_slots(old.view, SegmentView(memoryview(_map(draft, True))), moves)
                self.budget.rename(draft, path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        return self.register(SegmentFile(key, path))

    def _make_folder(self, job: str) -> None:
        if not self.directory.exists():
            message = (
                f"{self.directory} was removed while its vault runs (logind does so when the user logs out, unless "
                "RemoveIPC=no); the vault creates new slots and copies those that are still mapped"
            )
            subject = f"{job}/{self.directory.name}"
            self.report_damage(DamageReport(job, subject, message, {"path": str(self.directory)}))
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.directory / job).mkdir(mode=0o700, exist_ok=True)

    def _draft(self, key: SegmentKey, draft: Path, length: int, slot_bytes: int, slots: int, description: str) -> None:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if shared_memory.has_huge_pages(self.directory):
                shared_memory.allocate_huge_pages(descriptor, length)
            shared_memory.allocate(descriptor, length, description)
        finally:
            os.close(descriptor)
        mapping = _map(draft, True)
        buffer, nonce = memoryview(mapping), secrets.token_bytes(NONCE_BYTES)
        format_segment(buffer, slots, slot_bytes, nonce=nonce, kind=key.kind, number=key.number, job=key.job)
        if key.kind == "own":
            shared_memory.populate(mapping)
        else:
            self._prefaulter.start(self.draft_and_final_path(key)[1], mapping)

    def register(self, segment: SegmentFile) -> SegmentFile:
        with self._lock:
            self._segments[segment.key] = segment
        return segment

    def discard_lost_header(self, segment: SegmentFile, slot: int) -> None:
        """Discard a slot whose header records are both damaged: its content can no longer be identified."""
        if segment.discard(slot, None):
            message = f"slot {slot} of {segment.path} is discarded: both records of its header were damaged"
            self.report_damage(segment.describe_damage(slot, None, message))

    def repair_records(self, segment: SegmentFile, slot: int, records: SlotRecordPair) -> None:
        """Repair a slot's record that differs from its twin: it is damaged, or its writer died between the two."""
        if segment.repair_records(slot, records) and records.invalid:
            message = f"a header record of slot {slot} of {segment.path} was damaged; restored from its second copy"
            header = None if records.state is SlotState.EMPTY else records.header
            self.report_damage(segment.describe_damage(slot, header, message))

    def delete_job(self, job: str) -> None:
        """Unlink all of a job's files. Processes that have them mapped keep the bytes."""
        with self._lock:
            for key in [k for k in self._segments if k.job == job]:
                del self._segments[key]
                self._creation_locks.pop(key, None)
        self._prefaulter.stop(self.directory / job)
        shutil.rmtree(self.directory / job, ignore_errors=True)

    def delete_all(self) -> None:
        """Unlink everything under the directory, scratch files included, and the directory."""
        with self._lock:
            self._segments.clear()
        self._prefaulter.stop(self.directory)
        delete_segments(self.directory)


def _check_sizes(key: SegmentKey, slot_bytes: int, slots: int) -> None:
    if not 1 <= slots <= MAX_SLOTS:
        raise ConfigurationError(f"a segment has 1 to {MAX_SLOTS} slots, not {slots}")
    if not 1 <= slot_bytes < MAX_SLOT_BYTES:
        raise ConfigurationError(f"slot_bytes must be positive and under 2^48, not {slot_bytes}")
    if key.kind == "own" and not 0 <= key.number < MAX_LOCAL_RANKS:
        raise ConfigurationError(f"a local rank is 0 to {MAX_LOCAL_RANKS - 1}, not {key.number}")
