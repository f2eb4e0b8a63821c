"""Event streams deliver every event to readers that keep up, and cut off readers that do not."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, TypeAlias

import pytest

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import RateLimited, Unavailable
from everstep.wire.v1.operator import Event
from everstep_controller.api import stream
from everstep_controller.api.stream import (
    FRAME_BYTES,
    FRAME_ROWS,
    MAX_STREAMS,
    MAX_STREAMS_PER_IDENTITY,
    EventFeed,
    EventStream,
    StreamReservation,
    StreamReservations,
    event_frames,
    event_of,
)
from everstep_controller.store.reader import EventPage
from everstep_controller.store.rows import EventLogRow

VERA = Identity(TokenRole.VIEWER, "vera", "")
Message: TypeAlias = MutableMapping[str, Any]

SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}


def place() -> StreamReservation:
    """The reservation of the only reader."""
    return StreamReservations().reserve(VERA)


def _rows(first: int, count: int) -> list[EventLogRow]:
    return [EventLogRow(id=first + i, at=1.0, kind="k", sentence="s" * 100) for i in range(count)]


async def _nothing_more() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_stream_resumes_after_the_last_read_event() -> None:
    feed, got = EventFeed(0), bytearray()
    feed.publish(_rows(1, 50))

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: Message) -> None:
        got.extend(message.get("body", b""))
        if b"id: 50\n" in got:
            feed.close()

    reader = EventStream(event_frames(feed, 20, read), place(), lambda: None)
    asyncio.run(reader(SCOPE, _nothing_more, send))
    assert [f"id: {i}\n".encode() in got for i in (20, 21, 50)] == [False, True, True]


def test_event_is_encoded_once_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, encoded, done = EventFeed(0), list[int](), list[bytes]()

    def counted(row: EventLogRow) -> Event:
        encoded.append(row.id)
        return event_of(row)

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def follow() -> None:
        got = bytearray()

        async def send(message: Message) -> None:
            got.extend(message.get("body", b""))
            if b"id: 3\n" in message.get("body", b""):
                done.append(bytes(got))
                if len(done) == 20:
                    feed.close()

        await EventStream(event_frames(feed, 0, read), place(), lambda: None)(SCOPE, _nothing_more, send)

    async def follow_all() -> None:
        readers = [asyncio.create_task(follow()) for _ in range(20)]
        await asyncio.sleep(0)
        feed.publish(_rows(1, 3))
        async with asyncio.timeout(60):
            await asyncio.gather(*readers)

    monkeypatch.setattr(stream, "event_of", counted)
    asyncio.run(follow_all())
    assert encoded == [1, 2, 3]
    assert len(set(done)) == 1


def test_stream_ends_when_reader_loses_access() -> None:
    feed, sent, rights = EventFeed(0), list[Message](), [True]
    feed.publish(_rows(1, 3))

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: Message) -> None:
        sent.append(message)
        if b"id: 3\n" in message.get("body", b""):
            rights[0] = False
            feed.publish(_rows(4, 1))

    async def bounded() -> None:
        async with asyncio.timeout(60):
            reader = EventStream(event_frames(feed, 0, read), place(), lambda: None, lambda: rights[0])
            await reader(SCOPE, _nothing_more, send)

    asyncio.run(bounded())
    assert b"id: 4\n" not in b"".join(message.get("body", b"") for message in sent)
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_stream_pages_the_store_for_lagging_reader() -> None:
    feed, asked, got = EventFeed(0), list[int](), bytearray()
    feed.publish(_rows(5001, 10))

    async def read(after: int) -> EventPage:
        asked.append(after)
        return EventPage(_rows(after + 1, 1000), deleted_through=0, newest=5010)

    async def send(message: Message) -> None:
        got.extend(message.get("body", b""))
        if b"id: 5010\n" in got:
            feed.close()

    asyncio.run(EventStream(event_frames(feed, 0, read), place(), lambda: None)(SCOPE, _nothing_more, send))
    assert asked == [0, 1000, 2000, 3000, 4000]
    assert got.count(b"event: entry") == 5010


def _streamed(feed: EventFeed, after: int, stored: EventPage, until: bytes) -> list[tuple[int, str]]:
    """Ids and names of the events sent to a reader after event `after`, up to a frame that contains `until`."""
    got = bytearray()

    async def read(_after: int) -> EventPage:
        return stored

    async def send(message: Message) -> None:
        got.extend(message.get("body", b""))
        if until in got:
            feed.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await EventStream(event_frames(feed, after, read), place(), lambda: None)(SCOPE, _nothing_more, send)

    asyncio.run(bounded())
    frames = [dict(line.split(": ", 1) for line in frame.splitlines()) for frame in got.decode().split("\n\n")[1:-1]]
    return [(int(frame["id"]), frame["event"]) for frame in frames if "id" in frame]


@pytest.mark.promise("event-stream")
def test_stream_sends_gap_for_deleted_events() -> None:
    feed = EventFeed(43)
    stored = EventPage(_rows(41, 3), deleted_through=40, newest=43)
    sent = _streamed(feed, 30, stored, b"id: 43\n")
    assert sent == [(40, "gap"), (41, "entry"), (42, "entry"), (43, "entry")]


def test_stream_sends_gap_when_position_is_beyond_newest() -> None:
    feed = EventFeed(43)
    feed.publish(_rows(44, 2))
    assert _streamed(feed, 90, EventPage([], deleted_through=0, newest=43), b"id: 45\n") == [
        (43, "gap"),
        (44, "entry"),
        (45, "entry"),
    ]


@pytest.mark.promise("slow-readers")
@pytest.mark.parametrize("length", [10, 9000], ids=["many", "long"])
def test_stream_frame_is_bounded_by_rows_and_bytes(length: int) -> None:
    feed, sent = EventFeed(0), list[bytes]()
    rows = [EventLogRow(id=1 + i, at=1.0, kind="k", sentence="s" * length) for i in range(4 * FRAME_ROWS)]
    feed.publish(rows)

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if b"id: %d\n" % rows[-1].id in sent[-1]:
            feed.close()

    asyncio.run(EventStream(event_frames(feed, 0, read), place(), lambda: None)(SCOPE, _nothing_more, send))
    assert sum(body.count(b"event: entry") for body in sent) == len(rows)
    assert max(body.count(b"event: entry") for body in sent) <= FRAME_ROWS
    assert max(len(body) for body in sent) <= FRAME_BYTES + 2 * length


def test_streams_are_limited_per_identity_and_in_total() -> None:
    readers = StreamReservations()
    places = [readers.reserve(VERA) for _ in range(MAX_STREAMS_PER_IDENTITY)]
    with pytest.raises(RateLimited, match="viewer vera reads 8 event streams already") as refused:
        readers.reserve(VERA)
    assert refused.value.retry_after_s > 0
    for i in range(MAX_STREAMS - MAX_STREAMS_PER_IDENTITY):
        readers.reserve(Identity(TokenRole.OPERATOR, f"o{i // MAX_STREAMS_PER_IDENTITY}", ""))
    with pytest.raises(RateLimited, match="256 event streams are open already"):
        readers.reserve(Identity(TokenRole.VIEWER, "another", ""))
    places.pop().release()
    readers.reserve(VERA)
    assert len(readers) == MAX_STREAMS


def test_stream_ends_with_later_retry_when_database_is_away() -> None:
    feed = EventFeed(100)

    async def away(_after: int) -> EventPage:
        raise Unavailable("the database\nis away")

    async def messages(after: int) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await EventStream(event_frames(feed, after, away), place(), lambda: None)(SCOPE, _nothing_more, send)
        return sent

    for after in (5, 200):
        first, *frames, last = asyncio.run(messages(after))
        text = b"".join(frame["body"] for frame in frames).decode()
        assert (first["status"], last["body"], last["more_body"]) == (200, b"", False)
        retries = [int(line.partition(":")[2]) for line in text.splitlines() if line.startswith("retry:")]
        assert retries[-1] > retries[0]
        assert all(line.startswith((":", "retry:")) or not line for line in text.splitlines())
