"""Record the core's events and decisions in a journal from which any hour can be replayed.

A journal is a directory of segments. Each segment begins with the whole state, and continues with one entry per event:
the event, the heartbeat data that rules read for it (``Transition.reads``; heartbeats themselves are too many), and the
decisions as text. No decision depends on the journal. If its disk is slow or full, the journal gets a gap and the
controller goes on. Secrets are blanked out.

A segment is the line ``MAGIC`` and a zlib stream of frames, each a 4-byte big-endian length and MessagePack: first a
``SegmentStart``, then ``JournalEntry`` frames.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from everstep import __version__
from everstep.errors import DECODE_ERRORS, ConfigurationError, MalformedMessage, Unavailable
from everstep.host.private_files import make_private_directories
from everstep.ids import JobId
from everstep_controller.core import engine
from everstep_controller.core.effects import Effect, describe, digest
from everstep_controller.core.events import Event, ReportArrived
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState, StatePart
from everstep_controller.core.transition import RecordedRead, Transition

log = logging.getLogger(__name__)

MAGIC = b"everstep-journal 1\n"
SUFFIX = ".journal"
SEGMENT_BYTES = 64 << 20
"""Compressed bytes after which the next segment begins."""
SEGMENT_S = 86400.0
"""Seconds after which the next segment begins."""
DRAIN_TIMEOUT_S = 5.0
"""Maximum seconds that a reader of the newest decisions waits for the disk."""
MAX_PENDING_BYTES = 16 << 20
"""Maximum bytes that may wait for the disk, without the state at the segment's start; beyond it the segment ends."""
RETRY_S = 10.0
"""Seconds from the start of a failed segment to the start of the next one: each start encodes the whole state."""
FLUSH_BYTES = 64 << 10
FLUSH_S = 0.2
"""Waiting data is handed to the disk at the next event after either limit."""
FRAME_LIMIT = 1 << 30
_LONGEST_LINE = 64
_BLANK = "0" * 64

_encoder = msgspec.msgpack.Encoder()


class SegmentStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a segment."""

    version: str
    at: float
    state: msgspec.Raw  # ``encode_state`` of the state before the first event
    is_continuation: bool = False  # this controller completed the segment before


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """One handled event."""

    at: float
    event: Event
    reads: tuple[RecordedRead, ...]
    decisions: tuple[str, ...]  # ``describe`` of its effects
    digest: int  # hash of the complete effects


class Journal:
    """Writes the journal. Every method runs in the loop's thread and never waits for the disk, except ``drain``.

    The directory is created if missing (ConfigurationError if that fails). The oldest segments are deleted beyond
    ``max_bytes`` in all, or after ``keep_s`` seconds. ``gaps`` counts segments that ended early, each before a gap.
    """

    def __init__(self, directory: Path, *, max_bytes: int, keep_s: float, segment_bytes: int = SEGMENT_BYTES) -> None:
        try:
            make_private_directories(directory)
        except OSError as error:
            raise ConfigurationError(
                f"the journal's directory {directory} cannot be created: {error.strerror}; create it, or give another "
                "journal_dir"
            ) from error
        self._directory = directory
        self._most_bytes = max_bytes
        self._keep_s = keep_s
        self._segment_bytes = segment_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._segment: _Segment | None = None
        self._waiting = bytearray()
        self._writing: Future[None] | None = None
        self._beginning_bytes = 0
        self._flushed_at = 0.0
        self.gaps = 0

    def decide(self, state: FleetState, event: Event, now: float) -> list[Effect]:
        """Run the core on an event and record it. If the core raises, nothing is changed or recorded."""
        self._begin_segment_if_due(state, now)
        transition = engine.run_transition(state, event, now)
        effects = transition.finish()
        self._note(event, now, transition, effects)
        if len(self._waiting) >= FLUSH_BYTES or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self.flush()
        return effects

    def _begin_segment_if_due(self, state: FleetState, now: float) -> None:
        segment, follows = self._segment, False
        if segment is not None:
            follows, age_s = not segment.failed, now - segment.began_at
            if age_s < (RETRY_S if segment.failed else SEGMENT_S) and (
                segment.failed or segment.written < self._segment_bytes
            ):
                return
        path = self._directory / f"{int(now * 1000):015d}-{state.epoch}{SUFFIX}"
        if segment is not None and path == segment.path:
            return
        self._end_segment()
        self._segment = _Segment(path, now)
        whole = msgspec.Raw(encode_state(state))
        self._add(SegmentStart(version=__version__, at=now, state=whole, is_continuation=follows))
        self._beginning_bytes = len(self._waiting)
        self._thread.submit(_prune, self._directory, self._most_bytes, now - self._keep_s)

    def _note(self, event: Event, now: float, transition: Transition, effects: Collection[Effect]) -> None:
        decisions = tuple(describe(effects))
        if transition.is_uneventful and not decisions:
            return
        if isinstance(event, ReportArrived):
            event = msgspec.structs.replace(event, entropy=_BLANK)
        self._add(JournalEntry(now, event, tuple(transition.reads), decisions, digest(effects)))

    def _add(self, frame: msgspec.Struct) -> None:
        body = _encoder.encode(frame)
        self._waiting += len(body).to_bytes(4, "big") + body

    def flush(self) -> None:
        """Hand waiting data to the disk's thread, unless the thread is busy; a later call does it then."""
        segment = self._segment
        if segment is None or not self._waiting or (self._writing is not None and not self._writing.done()):
            if segment is not None and len(self._waiting) > MAX_PENDING_BYTES + self._beginning_bytes:
                log.warning("the disk of the journal %s is too slow: the journal has a gap from here", self._directory)
                self._waiting.clear()
                segment.failed = True
            return
        self._writing = self._thread.submit(segment.write, bytes(self._waiting))
        self._waiting.clear()

    def _end_segment(self) -> None:
        if self._segment is None:
            return
        self.gaps += self._segment.failed
        self._thread.submit(self._segment.write, bytes(self._waiting))
        self._thread.submit(self._segment.close)
        self._waiting.clear()
        self._segment = None

    async def drain(self) -> None:
        """Wait until the disk has all earlier decisions. Raises Unavailable if that takes too long."""
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                for _ in range(2):  # first the data being written, then the data that waited for it
                    self.flush()
                    await asyncio.wrap_future(self._thread.submit(lambda: None))
        except TimeoutError:
            raise Unavailable(
                f"the disk of the journal {self._directory} did not write the recorded events within "
                f"{DRAIN_TIMEOUT_S:g} s: try again"
            ) from None

    def close(self) -> None:
        """Write waiting data and end the journal's thread."""
        self._end_segment()
        self._thread.shutdown()


class _Segment:
    """One file. Methods run in the journal's thread; the loop's thread reads ``failed`` and ``written``."""

    def __init__(self, path: Path, began_at: float) -> None:
        self.path = path
        self.began_at = began_at
        self.written = 0
        self.failed = False
        self._file: BinaryIO | None = None
        self._squeeze = zlib.compressobj(level=1)

    def write(self, data: bytes) -> None:
        if self.failed or not data:
            return
        squeezed = self._squeeze.compress(data) + self._squeeze.flush(zlib.Z_SYNC_FLUSH)
        try:
            if self._file is None:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                self._file = os.fdopen(descriptor, "wb", buffering=0)
                self._file.write(MAGIC)
            if self._file.write(squeezed) < len(squeezed):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.failed = True
            log.warning("the journal %s has a gap from here: %s", self.path, error.strerror)
        else:
            self.written += len(squeezed)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode_state(state: FleetState) -> bytes:
    """Return the state in MessagePack, without secrets."""
    # All releases store the fields of the state's parts beside the others, so that each reads the others' journals.
    stored: dict[str, Any] = {}
    for name in state.__struct_fields__:
        value = getattr(state, name)
        if isinstance(value, StatePart):
            stored.update((each.encode_name, getattr(value, each.name)) for each in msgspec.structs.fields(value))
        else:
            stored[name] = value
    return _encoder.encode(stored | {"jobs": _without_secrets(state.jobs)})


def decode_state(stored: bytes) -> FleetState:
    """Return a state from ``encode_state``. Raises ``DECODE_ERRORS``."""
    state = msgspec.msgpack.decode(stored, type=FleetState)
    for name in state.__struct_fields__:
        part = getattr(state, name)
        if isinstance(part, StatePart):
            setattr(state, name, msgspec.msgpack.decode(stored, type=type(part)))  # it skips the other parts' fields
    return state


def _without_secrets(jobs: dict[JobId, JobRecord]) -> dict[JobId, JobRecord]:
    """Return the jobs with blank secrets. Nodes are far larger, and have none."""
    body = _encoder.encode(jobs)
    for job in jobs.values():
        if job.secret:
            body = body.replace(job.secret.encode(), _BLANK[: len(job.secret)].encode())
    return msgspec.msgpack.decode(body, type=dict[JobId, JobRecord])


def segments(directory: Path) -> list[Path]:
    """Return the segments of a journal, oldest first."""
    return sorted(directory.glob("*" + SUFFIX))


def _prune(directory: Path, most_bytes: int, not_before: float) -> None:
    found = segments(directory)
    sizes = {path: path.stat().st_size for path in found}
    for path, follows in pairwise(found):
        if sum(sizes.values()) <= most_bytes and int(follows.name[:15]) / 1000 >= not_before:
            return
        path.unlink(missing_ok=True)
        del sizes[path]


def read_segment(path: Path) -> tuple[SegmentStart, Iterator[JournalEntry]]:
    """Return a segment's start and its entries, as far as they were written. Both raise MalformedMessage."""
    file = path.open("rb")
    if (line := file.readline(_LONGEST_LINE)) != MAGIC:
        file.close()
        raise MalformedMessage(_invalid_reason(path, line))
    frames = _frames(file)
    try:
        first = msgspec.msgpack.decode(next(frames), type=SegmentStart)
    except StopIteration:
        raise MalformedMessage(f"{path} ends before its first event") from None
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"{path} begins with data unknown to this release ({__version__}): {error}") from error
    return first, _entries(path, first.version, frames)


def _invalid_reason(path: Path, line: bytes) -> str:
    kind, _, number = line.strip().partition(b" ")
    if kind != MAGIC.split()[0] or not number.isdigit():
        return f"{path} is not a journal: it does not begin with {MAGIC.decode().strip()!r}"
    return (
        f"{path} is a journal of format {number.decode()}, and this release ({__version__}) reads format "
        f"{MAGIC.split()[1].decode()}: replay it with the release that wrote it"
    )


def _entries(path: Path, version: str, frames: Iterable[bytes]) -> Iterator[JournalEntry]:
    decoder = msgspec.msgpack.Decoder(JournalEntry)
    for number, frame in enumerate(frames, 1):
        try:
            yield decoder.decode(frame)
        except DECODE_ERRORS as error:
            raise MalformedMessage(
                f"event {number} of {path}, written by everstep {version}, cannot be read by this release "
                f"({__version__}): replay it with that release ({error})"
            ) from error


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Yield the frames up to the end, or up to a cut by a crash."""
    buffer, inflate = bytearray(), zlib.decompressobj()
    with file:
        while data := file.read(1 << 20):
            try:
                buffer += inflate.decompress(data)
            except zlib.error as error:
                raise MalformedMessage(f"{file.name} is damaged: {error}") from error
            while len(buffer) >= 4:
                end = 4 + int.from_bytes(buffer[:4], "big")
                if end > FRAME_LIMIT:
                    raise MalformedMessage(f"a frame of {end} bytes is too large for a journal")
                if len(buffer) < end:
                    break
                yield bytes(buffer[4:end])
                del buffer[:end]
