"""Lists read as many pages as they need, and streams continue after the last event seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import cast

import httpx
import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.client import AsyncClient, Client, calls, clients, exchange
from everstep.client.exchange import Call, EventParser
from everstep.wire.v1 import operator as op
from everstep.wire.v1.enrolment import IssueViewer
from everstep.wire.v1.training import GenerationSpec
from tests.support.fleet.controllers import SECRET, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool

OPERATOR = mint(SECRET, TokenRole.OPERATOR, "olga")


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path_factory.mktemp("controller"), program_forks) as process:
        yield process


def numbers_of(call: Call[op.EventList]) -> op.EventList:
    """Answer as a controller with 25 events."""
    after, limit = int(str(call.query["after"])), int(str(call.query["limit"]))
    found = [op.Event(id=n, at=0.0, kind="x", sentence="s") for n in range(1, 26) if n > after][:limit]
    return op.EventList(events=tuple(found), next_after=found[-1].id if found else after)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PAGE_SIZE", 10)


@pytest.mark.usefixtures("small_pages")
def test_list_reads_pages_as_needed() -> None:
    asked: list[Call[op.EventList]] = []

    def send(call: Call[op.EventList]) -> op.EventList:
        asked.append(call)
        return numbers_of(call)

    pages = clients.PagedList(send, calls.events(after=2))
    assert [event.id for event in pages] == list(range(3, 26))
    assert [call.query["after"] for call in asked] == [2, 12, 22]
    asked.clear()
    some = pages.collect(13)
    assert ([event.id for event in some.events], some.next_after) == (list(range(3, 16)), 15)
    assert [call.query["limit"] for call in asked] == [10, 3]


@pytest.mark.usefixtures("small_pages")
def test_async_list_reads_the_same_pages() -> None:
    async def send(call: Call[op.EventList]) -> op.EventList:
        return numbers_of(call)

    async def read() -> tuple[list[int], op.EventList]:
        pages = clients.AsyncPagedList(send, calls.events())
        return [event.id async for event in pages], await pages.collect()

    ids, whole = asyncio.run(read())
    assert ids == [event.id for event in whole.events] == list(range(1, 26))


def test_generations_are_joined_oldest_first() -> None:
    listing = calls.generations(job="llama")
    first, second, third, fourth = cast(list[GenerationSpec], list("1234"))  # joining does not look into them
    newest = op.GenerationList(generations=(third, fourth), next="c")
    older = op.GenerationList(generations=(first, second))
    assert listing.join([newest, older]).generations == (first, second, third, fourth)
    assert listing.entries(newest) == (fourth, third)


def test_event_parser_takes_pieces_and_separators_in_sentences() -> None:
    data = '{"s": "a\u2028b\x85"}'.encode()
    sent = b"retry: 500\n\n: keep-alive\n\nid: 1\nevent: entry\ndata: %s\n\nevent: gap\ndata: {}\n\n" % data
    whole = list(EventParser().feed(sent))
    assert whole == [("entry", data), ("gap", b"{}")]
    parser = EventParser()
    assert [event for byte in sent for event in parser.feed(bytes([byte]))] == whole


def test_stream_continues_after_the_last_event(process: ControllerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream is cut after one event, as by a controller that restarts; none is lost or repeated."""
    monkeypatch.setattr(clients, "RECONNECT_PAUSE_S", 0.0)
    client = Client(process.url, OPERATOR)
    for number in range(3):
        client.issue_credential(IssueViewer(subject=f"wall{number}", reason="a test"))
    whole = client.stream

    def cut(after: int | None = None) -> Iterator[op.Event | op.EventGap]:
        with closing(whole(after)) as stream:
            yield next(stream)

    monkeypatch.setattr(client, "stream", cut)
    wanted = [event.id for event in client.events()][:3]
    with closing(client.follow(0)) as events:
        assert [event.id for _, event in zip(range(3), events, strict=False) if isinstance(event, op.Event)] == wanted


def test_async_client_calls_and_streams(process: ControllerProcess) -> None:
    async def scene() -> None:
        async with AsyncClient(process.url, OPERATOR) as client, aclosing(client.follow()) as events:
            fleet = await client.status()
            first = asyncio.ensure_future(anext(events))
            while not first.done():
                await client.issue_credential(IssueViewer(subject="async", reason="a test"))
                await asyncio.wait({first}, timeout=0.2)
            event = await first
            assert isinstance(event, op.Event)
            assert event.id > fleet.newest_event
            assert "async" in event.sentence

    asyncio.run(scene())


def test_requests_of_a_session_share_a_connection(process: ControllerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Client] = []
    real_open = Client._open

    def recording_open(client: Client) -> httpx.Client:
        opened.append(client)
        return real_open(client)

    monkeypatch.setattr(Client, "_open", recording_open)
    with Client(process.url, OPERATOR) as client:
        client.status()
        client.status()
    assert len(opened) == 1
    client.status()
    client.status()
    assert len(opened) == 3
