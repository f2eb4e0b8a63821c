"""Stream the event log as server-sent events, from recent rows in memory and older rows in the store."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from everstep.bearer_tokens import Identity
from everstep.errors import RateLimited, Unavailable
from everstep.wire.v1.operator import Event, EventGap
from everstep_controller.api.admission import IdentityKey, identity_key
from everstep_controller.server.connections import CLOSE_CONNECTION_KEY
from everstep_controller.store.reader import EventPage
from everstep_controller.store.rows import EventLogRow

MAX_STREAMS_PER_IDENTITY = 8
"""Streams of one identity, such as a wall of displays that share a token."""
MAX_STREAMS = 256
"""Streams of all identities. A stuck one holds some 0.2 MiB."""
RETRY_AFTER_S = 10.0
"""Seconds after which a reader that does not read has been cut off."""


@dataclass(eq=False)
class StreamReservation:
    """One reader's reservation, until it is released."""

    readers: StreamReservations
    who: IdentityKey
    buffered_bytes: int = 0  # encoded bytes that the reader has not taken yet

    def release(self) -> None:
        """End the reservation: the stream is over."""
        self.readers.open.discard(self)


class StreamReservations:
    """Counts and limits streams."""

    def __init__(self) -> None:
        self.open: set[StreamReservation] = set()

    def __len__(self) -> int:
        return len(self.open)

    @property
    def buffered_bytes(self) -> int:
        """Encoded bytes that readers have not taken yet."""
        return sum(stream.buffered_bytes for stream in self.open)

    def reserve(self, identity: Identity) -> StreamReservation:
        """Reserve a stream; the caller must release it. Raises RateLimited if there are too many."""
        who = identity_key(identity)
        if sum(stream.who == who for stream in self.open) >= MAX_STREAMS_PER_IDENTITY:
            raise RateLimited(
                f"{identity.role} {identity.subject} reads {MAX_STREAMS_PER_IDENTITY} event streams already, the most "
                "allowed: close one, or use another token",
                RETRY_AFTER_S,
            )
        if len(self) >= MAX_STREAMS:
            raise RateLimited(
                f"{MAX_STREAMS} event streams are open already, the most that a controller serves: close some, or poll "
                "/v1/events?after=",
                RETRY_AFTER_S,
            )
        reservation = StreamReservation(self, who)
        self.open.add(reservation)
        return reservation


ROWS_IN_MEMORY = 4096
"""Rows in memory. A reader that falls further behind is served from the store."""
FRAME_ROWS = 256
FRAME_BYTES = 64 << 10
"""Either limit ends one write: a stuck reader holds no more than that and one row."""
KEEPALIVE_S = 15.0
"""Seconds between comments on an idle stream, below the 30 s after which proxies close connections."""

RETRY_MS = 500
"""Milliseconds after which a reader reconnects when its stream has ended."""
OUTAGE_RETRY_MS = 5000
"""Milliseconds until a reconnect if the stream ended because the database cannot be read."""

SLOW_READER_S = 10.0
"""Seconds that a reader may take for a socket's full buffers. A dashboard on a train may need as long once."""

Read = Callable[[int], Awaitable[EventPage]]
"""Returns a page of stored events after an id."""


def event_of(row: EventLogRow) -> Event:
    """Return the row as shown to operators."""
    detail = msgspec.json.decode(row.detail, type=dict[str, str])
    return Event(**(msgspec.structs.asdict(row) | {"detail": detail}))


def frame_of(row: EventLogRow) -> bytes:
    """Return the row's frame."""
    return b"id: %d\nevent: entry\ndata: %s\n\n" % (row.id, msgspec.json.encode(event_of(row)))


class EventFeed:
    """The newest committed rows, and a signal for more."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self._rows: deque[EventLogRow] = deque(maxlen=ROWS_IN_MEMORY)
        self._frames: dict[int, bytes] = {}
        self._more = asyncio.Event()
        self.closed = False

    def publish(self, rows: list[EventLogRow]) -> None:
        """Publish rows that were just committed, in order."""
        if not rows:
            return
        self._rows.extend(rows)
        self.newest = rows[-1].id
        self._wake()

    def frame(self, row: EventLogRow) -> bytes:
        """Return a row's frame, which is encoded once for all streams that follow closely."""
        frame = self._frames.get(row.id)
        if frame is None:
            frame = self._frames[row.id] = frame_of(row)
            if len(self._frames) > FRAME_ROWS:
                del self._frames[next(iter(self._frames))]
        return frame

    def close(self) -> None:
        """End every stream."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    def since(self, after: int) -> list[EventLogRow] | None:
        """Return the first FRAME_ROWS rows after ``after``, or None if memory does not reach back that far."""
        if after >= self.newest:
            return []
        if not self._rows or self._rows[0].id > after + 1:
            return None
        first = bisect.bisect_right(self._rows, after, key=lambda row: row.id)
        return [self._rows[i] for i in range(first, min(first + FRAME_ROWS, len(self._rows)))]

    async def wait_for_more(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for new rows or the end."""
        if self.closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._more.wait()


class EventStream(StreamingResponse):
    """Sends frames while ``check_allowed`` holds; cuts off a client that takes nothing for ``slow_s``."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        reservation: StreamReservation,
        on_cut: Callable[[], None],
        check_allowed: Callable[[], bool] = lambda: True,
        *,
        slow_s: float = SLOW_READER_S,
    ) -> None:
        super().__init__(frames, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._place = reservation
        self._cut = on_cut
        self._may = check_allowed
        self._slow_s = slow_s
        self._hang_up: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hang_up = scope.get(CLOSE_CONNECTION_KEY, self._hang_up)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.release()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for frames in self.body_iterator:
                if not self._may():
                    break
                self._place.buffered_bytes = len(frames)
                async with asyncio.timeout(self._slow_s):
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                self._place.buffered_bytes = 0
        except TimeoutError:
            self._cut()
            self._hang_up()  # an orderly close would wait for the reader to take the sent data
            await asyncio.sleep(0)  # lets the server notice the end
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def joined_frames(
    rows: Iterable[EventLogRow],
    after: int = 0,
    deleted_through: int = 0,
    encode: Callable[[EventLogRow], bytes] = frame_of,
) -> Iterator[bytes]:
    """Yield the rows' frames, joined up to FRAME_BYTES and FRAME_ROWS, with a gap wherever rows were deleted."""
    joined, count = bytearray(), 0
    for row in rows:
        if after < row.id - 1 and after < deleted_through:
            text = f"events {after + 1} to {row.id - 1} have been deleted: the stream continues with event {row.id}"
            joined += _gap(after, row.id - 1, "deleted", text)
        joined += encode(row)
        after = row.id
        count += 1
        if count == FRAME_ROWS or len(joined) >= FRAME_BYTES:
            yield bytes(joined)
            joined, count = bytearray(), 0
    if joined:
        yield bytes(joined)


def _gap(after: int, through: int, reason: Literal["deleted", "unknown"], sentence: str) -> bytes:
    """Return a gap's frame. Its id is the last missing one, so that a reconnecting reader does not get it twice."""
    gap = EventGap(after=after, through=through, reason=reason, sentence=sentence)
    return b"id: %d\nevent: gap\ndata: %s\n\n" % (through, msgspec.json.encode(gap))


async def event_frames(feed: EventFeed, after: int, read: Read) -> AsyncIterator[bytes]:
    """Yield events after ``after``, with gaps, then new ones until the feed closes or the database cannot be read."""
    yield b"retry: %d\n\n" % RETRY_MS
    try:
        async for frames in _following(feed, after, read):
            yield frames
    except Unavailable:
        yield b"retry: %d\n: further events cannot be read now, reconnect later\n\n" % OUTAGE_RETRY_MS


async def _following(feed: EventFeed, after: int, read: Read) -> AsyncIterator[bytes]:
    if after > feed.newest:
        known = await read(after)
        if after > known.newest:  # otherwise the event is durable, and about to be published
            text = f"there is no event {after}: the newest event is {known.newest}, and the stream continues after it"
            yield _gap(after, known.newest, "unknown", text)
            after = known.newest
    while not feed.closed:
        rows = feed.since(after)
        frames_of = joined_frames(rows or (), encode=feed.frame)
        if rows is None:
            found = await read(after)
            rows, frames_of = found.rows, joined_frames(found.rows, after, found.deleted_through)
        if rows:
            for frames in frames_of:
                yield frames
            after = rows[-1].id
            continue
        before = feed.newest
        await feed.wait_for_more(KEEPALIVE_S)
        if feed.newest == before:
            yield b": keep-alive\n\n"
