"""Readers of the event stream: those that read get everything, those that do not are cut off and cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from controller.api.stream import AuditFeed, EventStream, server_sent
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

    async def read(_after: int) -> list[AuditRow]:
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

    async def read(after: int) -> list[AuditRow]:
        asked.append(after)
        return _rows(after + 1, 1000)

    async def send(message: dict[str, Any]) -> None:
        got.extend(message.get("body", b""))
        if b"id: 5010\n" in got:
            feed.close()

    asyncio.run(EventStream(server_sent(feed, 0, read), lambda: None)(SCOPE, _nothing_more, send))
    assert asked == [0, 1000, 2000, 3000, 4000]
    assert got.count(b"event: audit") == 5010
