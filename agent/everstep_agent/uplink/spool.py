"""Queue reports that the controller has not acknowledged: numbered, bounded, in memory and in a file.

After a crash of the supervisor, the next run sends the file's reports. The file is appended to without fsync, because
it must outlive the process and not the machine: a lost machine's reports are worth nothing. It is emptied whenever all
reports are acknowledged, which is most of the time.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.errors import MalformedMessage
from everstep.ids import Version
from everstep.vocabulary import Severity
from everstep.wire.framing import PREFIX_BYTES, FrameDecoder, encode_frame
from everstep.wire.v1.agent import NumberedReport
from everstep.wire.v1.local import MAX_FRAME_BYTES
from everstep.wire.v1.training import (
    AnyReport,
    AuditsClean,
    FindingCleared,
    FindingRaised,
    LauncherJoined,
    VersionSealed,
)

log = logging.getLogger(__name__)

MAX_REPORTS_PER_REQUEST = 1024
"""Limit of ``everstep.wire.v1.agent.Reports``."""

_SUPERSEDED = (VersionSealed, AuditsClean)
"""Reports after which others of the same kind follow: a lost one only delays a commit or a verification."""
MAX_BYTES_PER_REQUEST = 512 << 10
"""Half of the controller's limit, since JSON is larger than the MessagePack counted here."""

_MAX_FILE_FACTOR = 4
"""The file is rewritten when acknowledged records make it this many times as large as the limit."""


class _SpooledReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    body: AnyReport


class _AcknowledgedThrough(msgspec.Struct, frozen=True, tag=True, array_like=True):
    through: int


class _QueuedReport(msgspec.Struct):
    report: NumberedReport
    size: int
    due: float


def is_urgent(report: AnyReport) -> bool:
    """Return whether a recovery may wait for this report: all but seals, clean audits and mild findings."""
    if isinstance(report, FindingRaised):
        return report.finding.severity is Severity.CRITICAL
    return not isinstance(report, _SUPERSEDED)


class Spool:
    """Unacknowledged reports in order of their numbers.

    Over the limits the oldest seals and clean audits are dropped first, then the oldest mild findings, then the oldest
    of the rest. The ``file`` keeps reports, without the first of these, for the next run. A report that is not urgent
    may wait ``batch_window_s`` to be sent with others.
    """

    def __init__(self, file: Path | None, *, max_reports: int, max_bytes: int, batch_window_s: float) -> None:
        self._entries: dict[int, _QueuedReport] = {}
        self._seals: dict[tuple[str, int, int, Version], int] = {}
        self.size_bytes = 0
        """Bytes of unacknowledged reports, as MessagePack."""
        self._last = 0
        self.sent_through = 0
        """The largest number ever put into a request, 0 before the first."""
        self.newest_urgent_number = 0
        """The number of the last urgent report, 0 before the first."""
        self._max_reports = max_reports
        self._max_bytes = max_bytes
        self._batch_window_s = batch_window_s
        self.dropped_count = 0
        self.refused_count = 0
        self._path = file
        self._file = -1
        if file is not None:
            unsent = _read_unacknowledged(file)
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            for report in unsent:
                self.add(report, 0.0)
            if unsent:
                log.info("%d reports of an earlier run are still to be sent", len(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, report: AnyReport, now: float) -> int:
        """Queue a report and return its number. ``now`` is monotonic seconds. A seal replaces an unsent one of the same
        rank and version (it names more replicas) and keeps its digests."""
        urgent = is_urgent(report)
        due = now if urgent else now + self._batch_window_s
        if isinstance(report, VersionSealed):
            report, due = self._merge_seal(report, due)
        self._last += 1
        self.newest_urgent_number = self._last if urgent else self.newest_urgent_number
        frame = encode_frame(_SpooledReport(self._last, report))
        self._entries[self._last] = _QueuedReport(NumberedReport(number=self._last, body=report), len(frame), due)
        self.size_bytes += len(frame)
        if not isinstance(report, _SUPERSEDED):
            self._append(frame)
        self._shrink()
        return self._last

    def _merge_seal(self, report: VersionSealed, due: float) -> tuple[VersionSealed, float]:
        key = (report.job, report.generation, report.rank, report.version)
        earlier = self._entries.get(self._seals.get(key, 0))
        if earlier is not None and earlier.report.number > self.sent_through:
            body = earlier.report.body
            assert isinstance(body, VersionSealed)
            report = msgspec.structs.replace(report, digests={**body.digests, **report.digests})
            due = min(due, earlier.due)
            self._remove(earlier.report.number)
        self._seals[key] = self._last + 1
        return report, due

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a report is due (0 if one is), or None if the spool is empty."""
        if not self._entries:
            return None
        return max(0.0, min(entry.due for entry in self._entries.values()) - now)

    def next_batch(self, max_reports: int = MAX_REPORTS_PER_REQUEST) -> tuple[NumberedReport, ...]:
        """Return the oldest reports that fit one request, in order; they stay until acknowledged."""
        chosen: list[NumberedReport] = []
        room = MAX_BYTES_PER_REQUEST
        for entry in itertools.islice(self._entries.values(), max_reports):
            room -= entry.size
            if chosen and room < 0:
                break
            chosen.append(entry.report)
        if chosen:
            self.sent_through = max(self.sent_through, chosen[-1].number)
        return tuple(chosen)

    def acknowledge(self, through: int) -> None:
        """Remove all reports up to ``through``, which are durable at the controller."""
        for number in list(self._entries):
            if number > through:
                break
            self._remove(number)
        if not self._entries:
            self._truncate()
        else:
            self._append(encode_frame(_AcknowledgedThrough(through)))

    def drop_refused(self, number: int) -> None:
        """Drop a report that the controller will never accept, so that the others get through."""
        self.refused_count += 1
        self._remove(number)

    def drop_seals(self, job: str, before_generation: int) -> list[int]:
        """Drop seals of ``job`` from generations before ``before_generation``, and return their numbers."""
        dropped: list[int] = []
        for number, entry in list(self._entries.items()):
            body = entry.report.body
            if isinstance(body, VersionSealed) and body.job == job and body.generation < before_generation:
                self._remove(number)
                dropped.append(number)
        return dropped

    def close(self) -> None:
        """Close the file; unacknowledged reports stay in it for the next run."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _remove(self, number: int) -> None:
        if (entry := self._entries.pop(number, None)) is None:
            return
        self.size_bytes -= entry.size
        body = entry.report.body
        if isinstance(body, VersionSealed):
            key = (body.job, body.generation, body.rank, body.version)
            if self._seals.get(key) == number:
                del self._seals[key]

    def _shrink(self) -> None:
        """Drop a sixteenth more than necessary, so that a long absence does not trigger a search for every report."""
        if len(self._entries) <= self._max_reports and self.size_bytes <= self._max_bytes:
            return
        reports, size = self._max_reports * 15 // 16, self._max_bytes * 15 // 16
        for kinds in (_SUPERSEDED, (FindingRaised, FindingCleared), (object,)):
            for number, entry in list(self._entries.items()):
                if len(self._entries) <= reports and self.size_bytes <= size:
                    break
                if isinstance(entry.report.body, kinds):
                    self._remove(number)
                    self.dropped_count += 1
        self._rewrite()

    def _append(self, frame: bytes) -> None:
        if self._file < 0:
            return
        try:
            os.write(self._file, frame)
        except OSError as error:
            log.warning("%s cannot be written; unsent reports are kept in memory only: %s", self._path, error)
            self.close()
            return
        if os.lseek(self._file, 0, os.SEEK_CUR) > _MAX_FILE_FACTOR * self._max_bytes:
            self._rewrite()

    def _rewrite(self) -> None:
        self._truncate()
        for entry in self._entries.values():
            if isinstance(entry.report.body, _SUPERSEDED):
                continue
            self._append(encode_frame(_SpooledReport(entry.report.number, entry.report.body)))

    def _truncate(self) -> None:
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)


def _read_unacknowledged(file: Path) -> list[AnyReport]:
    """Return the reports an earlier run left unacknowledged, without launcher offers, which need a live connection. A
    torn last record stems from the crash and is left out, as is everything from the first undecodable record on."""
    reports: dict[int, AnyReport] = {}
    try:
        for record in _read_records(file) if file.exists() else ():
            if isinstance(record, _SpooledReport):
                reports[record.number] = record.body
            else:
                reports = {n: body for n, body in reports.items() if n > record.through}
    except MalformedMessage as error:
        log.warning("%s is damaged; the reports after the damage are lost: %s", file, error)
    return [body for body in reports.values() if not isinstance(body, LauncherJoined)]


def _read_records(file: Path) -> Iterator[_SpooledReport | _AcknowledgedThrough]:
    """Yield each whole record. Raises MalformedMessage at the first that does not decode."""
    decoder: FrameDecoder[_SpooledReport | _AcknowledgedThrough] = FrameDecoder(
        _SpooledReport | _AcknowledgedThrough, MAX_FRAME_BYTES
    )
    with file.open("rb") as stream:
        while len(prefix := stream.read(PREFIX_BYTES)) == PREFIX_BYTES:
            yield from decoder.feed(prefix + stream.read(int.from_bytes(prefix, "big")))
