"""Readers of the event stream: those that read get everything, those that do not are cut off and cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from everstep_controller.api import stream
from everstep_controller.api.stream import (
    FRAME_BYTES,
    FRAME_ROWS,
    MAX_STREAMS,
    MAX_STREAMS_PER_IDENTITY,
    AuditFeed,
    EventStream,
    StreamReservation,
    StreamReservations,
    event_frames,
    event_of,
)
from everstep_controller.store.reader import EventPage
from everstep_controller.store.rows import AuditRow

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import RateLimited, Unavailable
from everstep.wire.v1.operator import Event

VERA = Identity(TokenRole.VIEWER, "vera", "")
SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}


def place() -> StreamReservation:
    """A reader's, with nobody beside it."""
    return StreamReservations().reserve(VERA)


def _rows(first: int, count: int) -> list[AuditRow]:
    return [AuditRow(id=first + i, at=1.0, kind="k", sentence="s" * 100) for i in range(count)]


async def _nothing_more() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_stream_resumes_after_the_last_read_event() -> None:
    feed, got = AuditFeed(0), bytearray()
    feed.publish(_rows(1, 50))

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 50\n" in got:
            feed.close()

    reader = EventStream(event_frames(feed, 20, read), place(), lambda: None)
    asyncio.run(reader(SCOPE, _nothing_more, send))
    assert [f"id: {i}\n".encode() in got for i in (20, 21, 50)] == [False, True, True]


def test_event_is_encoded_once_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, encoded, done = AuditFeed(0), list[int](), list[bytes]()

    def counted(row: AuditRow) -> Event:
        encoded.append(row.id)
        return event_of(row)

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def follow() -> None:
        got = bytearray()

        async def send(message: dict[str, Any]) -> None:
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


def test_feed_keeps_a_bounded_number_of_frames() -> None:
    feed = AuditFeed(0)
    for row in _rows(1, 3 * FRAME_ROWS):
        feed.frame(row)
    assert len(feed._frames) == FRAME_ROWS


def test_stream_cuts_off_and_counts_stalled_reader() -> None:
    cut: list[bool] = []

    async def frames() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await EventStream(frames(), place(), lambda: cut.append(True), slow_s=0.01)(SCOPE, _nothing_more, stuck)

    asyncio.run(bounded())
    assert cut == [True]


def test_stream_ends_when_reader_loses_access() -> None:
    feed, sent, rights = AuditFeed(0), list[dict[str, Any]](), [True]
    feed.publish(_rows(1, 3))

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: dict[str, Any]) -> None:
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
    feed, asked, got = AuditFeed(0), list[int](), bytearray()
    feed.publish(_rows(5001, 10))

    async def read(after: int) -> EventPage:
        asked.append(after)
        return EventPage(_rows(after + 1, 1000), deleted_through=0, newest=5010)

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 5010\n" in got:
            feed.close()

    asyncio.run(EventStream(event_frames(feed, 0, read), place(), lambda: None)(SCOPE, _nothing_more, send))
    assert asked == [0, 1000, 2000, 3000, 4000]
    assert got.count(b"event: audit") == 5010


def _streamed(feed: AuditFeed, after: int, stored: EventPage, until: bytes) -> list[tuple[int, str]]:
    """Ids and names of what a reader is sent after ``after``, up to a frame with ``until`` in it."""
    got = bytearray()

    async def read(_after: int) -> EventPage:
        return stored

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if until in got:
            feed.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await EventStream(event_frames(feed, after, read), place(), lambda: None)(SCOPE, _nothing_more, send)

    asyncio.run(bounded())
    frames = [dict(line.split(": ", 1) for line in one.splitlines()) for one in got.decode().split("\n\n")[1:-1]]
    return [(int(frame["id"]), frame["event"]) for frame in frames if "id" in frame]


@pytest.mark.promise("event-stream")
def test_stream_sends_gap_for_deleted_events() -> None:
    feed = AuditFeed(43)
    stored = EventPage(_rows(41, 3), deleted_through=40, newest=43)
    sent = _streamed(feed, 30, stored, b"id: 43\n")
    assert sent == [(40, "gap"), (41, "audit"), (42, "audit"), (43, "audit")]


def test_stream_reports_no_gap_for_unused_event_ids() -> None:
    feed = AuditFeed(43)
    assert _streamed(feed, 30, EventPage(_rows(41, 3), deleted_through=20, newest=43), b"id: 43\n")[0] == (41, "audit")


def test_stream_sends_gap_when_position_is_beyond_newest() -> None:
    feed = AuditFeed(43)
    feed.publish(_rows(44, 2))
    assert _streamed(feed, 90, EventPage([], deleted_through=0, newest=43), b"id: 45\n") == [
        (43, "gap"),
        (44, "audit"),
        (45, "audit"),
    ]


def test_stream_skips_published_events_already_read() -> None:
    feed = AuditFeed(43)

    async def read(_after: int) -> EventPage:
        feed.publish(_rows(44, 3))
        return EventPage([], deleted_through=0, newest=45)

    got = bytearray()

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 46\n" in got:
            feed.close()

    asyncio.run(EventStream(event_frames(feed, 45, read), place(), lambda: None)(SCOPE, _nothing_more, send))
    assert (got.count(b"event: gap"), got.count(b"event: audit")) == (0, 1)


# --- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("slow-readers")
@pytest.mark.parametrize("words", [10, 9000], ids=["many", "long"])
def test_stream_frame_is_bounded_by_rows_and_bytes(words: int) -> None:
    feed, sent = AuditFeed(0), list[bytes]()
    rows = [AuditRow(id=1 + i, at=1.0, kind="k", sentence="s" * words) for i in range(4 * FRAME_ROWS)]
    feed.publish(rows)

    async def read(_after: int) -> EventPage:
        raise AssertionError("memory reaches back that far")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))
        if b"id: %d\n" % rows[-1].id in sent[-1]:
            feed.close()

    asyncio.run(EventStream(event_frames(feed, 0, read), place(), lambda: None)(SCOPE, _nothing_more, send))
    assert sum(body.count(b"event: audit") for body in sent) == len(rows)
    assert max(body.count(b"event: audit") for body in sent) <= FRAME_ROWS
    assert max(len(body) for body in sent) <= FRAME_BYTES + 2 * words


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


def test_stream_frees_place_and_bytes_at_any_end() -> None:
    readers = StreamReservations()

    async def frames() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        raise RuntimeError("the database's answer makes no sense")

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            assert readers.buffered_bytes == 1000
            await asyncio.Event().wait()

    async def taken(message: dict[str, Any]) -> None:
        pass

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def bounded(send: Any, receive: Any) -> None:
        async with asyncio.timeout(60):
            await EventStream(frames(), readers.reserve(VERA), lambda: None, slow_s=0.01)(SCOPE, receive, send)

    asyncio.run(bounded(stuck, _nothing_more))
    with pytest.raises(RuntimeError):
        asyncio.run(bounded(taken, _nothing_more))
    asyncio.run(bounded(stuck, gone))
    assert (len(readers), readers.buffered_bytes) == (0, 0)


def test_stream_ends_with_later_retry_when_database_is_away() -> None:
    feed = AuditFeed(100)

    async def away(_after: int) -> EventPage:
        raise Unavailable("the database\nis away")

    async def sent(after: int) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            said.append(message)

        await EventStream(event_frames(feed, after, away), place(), lambda: None)(SCOPE, _nothing_more, send)
        return said

    for after in (5, 200):
        first, *frames, last = asyncio.run(sent(after))
        text = b"".join(frame["body"] for frame in frames).decode()
        assert (first["status"], last["body"], last["more_body"]) == (200, b"", False)
        retries = [int(line.partition(":")[2]) for line in text.splitlines() if line.startswith("retry:")]
        assert retries[-1] > retries[0]
        assert all(line.startswith((":", "retry:")) or not line for line in text.splitlines())
