"""Readers of the event stream: those that read get everything, those that do not are cut off and cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from controller.api.stream import AuditFeed, EventStream, server_sent
from controller.store.reader import Following
from controller.store.records import AuditRow

SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}


def _rows(first: int, count: int) -> list[AuditRow]:
    return [AuditRow(id=first + i, at=1.0, kind="k", sentence="s" * 100) for i in range(count)]


async def _nothing_more() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_reader_that_reads_gets_every_row_from_where_it_left_off() -> None:
    feed, got = AuditFeed(0), bytearray()
    feed.publish(_rows(1, 50))

    async def read(_after: int) -> Following:
        raise AssertionError("memory reaches back that far")

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 50\n" in got:
            feed.close()

    stream = EventStream(server_sent(feed, 20, read), lambda: None)
    asyncio.run(stream(SCOPE, _nothing_more, send))
    assert [f"id: {i}\n".encode() in got for i in (20, 21, 50)] == [False, True, True]


def test_a_reader_that_takes_nothing_is_cut_off_and_counted() -> None:
    cut: list[bool] = []

    async def frames() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await EventStream(frames(), lambda: cut.append(True), slow_s=0.01)(SCOPE, _nothing_more, stuck)

    asyncio.run(bounded())
    assert cut == [True]


def test_a_reader_far_behind_is_served_from_the_store_page_by_page() -> None:
    feed, asked, got = AuditFeed(0), list[int](), bytearray()
    feed.publish(_rows(5001, 10))

    async def read(after: int) -> Following:
        asked.append(after)
        return Following(_rows(after + 1, 1000), pruned=0, newest=5010)

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 5010\n" in got:
            feed.close()

    asyncio.run(EventStream(server_sent(feed, 0, read), lambda: None)(SCOPE, _nothing_more, send))
    assert asked == [0, 1000, 2000, 3000, 4000]
    assert got.count(b"event: audit") == 5010


def _streamed(feed: AuditFeed, after: int, stored: Following, until: bytes) -> list[tuple[int, str]]:
    """Ids and names of what a reader is sent after ``after``, up to a frame with ``until`` in it."""
    got = bytearray()

    async def read(_after: int) -> Following:
        return stored

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if until in got:
            feed.close()

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await EventStream(server_sent(feed, after, read), lambda: None)(SCOPE, _nothing_more, send)

    asyncio.run(bounded())
    frames = [dict(line.split(": ", 1) for line in one.splitlines()) for one in got.decode().split("\n\n")[1:-1]]
    return [(int(frame["id"]), frame["event"]) for frame in frames if "id" in frame]


def test_a_reader_whose_next_events_were_deleted_is_told_which_and_gets_the_rest() -> None:
    feed = AuditFeed(43)
    stored = Following(_rows(41, 3), pruned=40, newest=43)
    sent = _streamed(feed, 30, stored, b"id: 43\n")
    assert sent == [(40, "gap"), (41, "audit"), (42, "audit"), (43, "audit")]


def test_numbers_that_no_event_has_are_no_gap() -> None:
    feed = AuditFeed(43)
    assert _streamed(feed, 30, Following(_rows(41, 3), pruned=20, newest=43), b"id: 43\n")[0] == (41, "audit")


def test_a_reader_of_another_past_is_told_so_and_goes_on_from_here() -> None:
    feed = AuditFeed(43)
    feed.publish(_rows(44, 2))
    assert _streamed(feed, 90, Following([], pruned=0, newest=43), b"id: 45\n") == [
        (43, "gap"),
        (44, "audit"),
        (45, "audit"),
    ]


def test_a_reader_that_saw_what_is_about_to_be_published_misses_nothing() -> None:
    feed = AuditFeed(43)

    async def read(_after: int) -> Following:
        feed.publish(_rows(44, 3))
        return Following([], pruned=0, newest=45)

    got = bytearray()

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 46\n" in got:
            feed.close()

    asyncio.run(EventStream(server_sent(feed, 45, read), lambda: None)(SCOPE, _nothing_more, send))
    assert (got.count(b"event: gap"), got.count(b"event: audit")) == (0, 1)
