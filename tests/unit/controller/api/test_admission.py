"""Limits on viewers' requests by identity, which take turns and delay no agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from everstep.bearer_tokens import Identity, TokenRole
from everstep.clock import ManualClock
from everstep.errors import RateLimited
from everstep.wire.v1.agent import Heartbeat
from everstep_controller.api.admission import AdmissionControl
from everstep_controller.app.controller import Controller
from everstep_controller.auth.peers import ConnectionPeer
from everstep_controller.server.connections import READ_PAUSE_KEY, SCOPE_KEY
from tests.support.fleet.controllers import VIEWER, InProcess, bearer, registration

VERA, OTTO = Identity(TokenRole.VIEWER, "vera"), Identity(TokenRole.VIEWER, "otto")
DEADLINE_S = 60.0
MANY = 400


def admission(clock: ManualClock, **given: Any) -> AdmissionControl:
    return AdmissionControl(
        **{"max_requests": 2, "max_bytes": 100, "loop_share": 1.0, "monotonic": clock.monotonic, **given}
    )


def test_requests_under_way_are_limited_by_identity() -> None:
    refused: list[str] = []
    limit = admission(ManualClock(), on_refused=refused.append)
    places = [limit.reserve(VERA) for _ in range(2)]
    with pytest.raises(RateLimited, match="viewer vera has 2 requests in progress") as caught:
        limit.reserve(VERA)
    assert caught.value.retry_after_s > 0
    assert refused == ["in_flight"]
    limit.reserve(OTTO)
    places[0].release()
    limit.reserve(VERA)
    assert len(limit) == 3


def test_nodes_that_join_with_one_token_are_not_limited() -> None:
    limit = admission(ManualClock())
    for _ in range(100):
        limit.reserve(Identity(TokenRole.JOIN, "rack3-*", "0123"))


def test_unread_bytes_are_limited_by_identity() -> None:
    refused: list[str] = []
    limit = admission(ManualClock(), max_requests=10, on_refused=refused.append)
    first, second, third = (limit.reserve(VERA) for _ in range(3))
    first.add_bytes(60)
    second.add_bytes(40)
    with pytest.raises(RateLimited, match="100 bytes of answers wait to be read by viewer vera"):
        third.add_bytes(1)
    limit.reserve(OTTO).add_bytes(60)
    assert (refused, limit.buffered_bytes) == (["bytes"], 160)
    first.release()
    third.add_bytes(60)


def test_single_answer_may_be_larger_than_the_byte_limit() -> None:
    limit = admission(ManualClock())
    limit.reserve(VERA).add_bytes(1000)
    assert limit.buffered_bytes == 1000


@pytest.mark.promise("fair-answers")
def test_admission_alternates_between_identities() -> None:
    ran: list[str] = []

    async def asks(limit: AdmissionControl, identity: Identity, name: str) -> None:
        place = limit.reserve(identity)
        for _ in range(2):
            await place.wait_for_slice()
            ran.append(name)

    async def scenario() -> None:
        limit = admission(ManualClock(), max_requests=10)
        vera = [asks(limit, VERA, f"vera {number}") for number in range(3)]
        await asyncio.gather(*vera, asks(limit, OTTO, "otto"))

    asyncio.run(scenario())
    assert ran[:4] == ["vera 0", "otto", "vera 1", "otto"]
    assert len(ran) == 8


@pytest.mark.promise("fair-answers")
def test_admission_runs_one_slice_per_loop_turn() -> None:
    turns: list[int] = [0]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        limit = admission(ManualClock(), max_requests=10)

        def begin() -> None:
            turns.append(0)
            loop.call_soon(begin)

        async def asks() -> None:
            place = limit.reserve(VERA)
            for _ in range(5):
                await place.wait_for_slice()
                turns[-1] += 1

        begin()
        await asyncio.gather(*(asks() for _ in range(4)))

    asyncio.run(scenario())
    assert sum(turns) == 20
    assert max(turns) == 1


def test_admission_passes_the_turn_of_a_cancelled_request() -> None:
    async def scenario() -> None:
        limit = admission(ManualClock())
        place = limit.reserve(VERA)
        gone = asyncio.create_task(place.wait_for_slice())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})
        async with asyncio.timeout(DEADLINE_S):
            await place.wait_for_slice()

    asyncio.run(scenario())


class Asked:
    """A request to an ASGI application and its answer, which waits for ``taken``."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes = b"", address: str = "") -> None:
        self.taken = asyncio.Event()
        self.rested_s = 0.0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self._given = body
        self._scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST" if body else "GET",
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            READ_PAUSE_KEY: self._rest,
            SCOPE_KEY: ConnectionPeer(address),
        }

    def _rest(self, seconds: float) -> None:
        self.rested_s = seconds

    async def __call__(self, controller: Controller) -> Asked:
        async with asyncio.timeout(DEADLINE_S):
            await controller.app(self._scope, self._receive, self._send)
        return self

    async def _receive(self) -> Any:
        return {"type": "http.request", "body": self._given}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.body += message["body"]
        if message.get("more_body"):
            await self.taken.wait()


def play(
    tmp_path: Path, scenario: Callable[[Controller], Coroutine[Any, Any, None]], *, nodes: int = MANY, **settings: Any
) -> None:
    """With many nodes."""

    async def with_controller() -> None:
        controller = await InProcess(f"sqlite:///{tmp_path / 'c.db'}", **settings).start()
        try:
            for name in (f"n{number:04}" for number in range(nodes)):
                await controller.agent_service.register(name, registration(name))
            await scenario(controller)
        finally:
            await controller.stop()

    asyncio.run(with_controller())


async def beat(controller: Controller) -> None:
    taken = controller.agent_service.take_heartbeat("n0000", Heartbeat(incarnation=1, seq=1, sent_at=0.0))
    if not isinstance(taken, bool):
        await taken


@pytest.mark.slow
@pytest.mark.promise("fair-answers")
def test_heartbeats_are_answered_while_large_pages_render(tmp_path: Path) -> None:
    async def scenario(controller: Controller) -> None:
        pages = [Asked("/v1/nodes?limit=1000", VIEWER) for _ in range(4)]
        asking = [asyncio.create_task(page(controller)) for page in pages]
        for _ in range(8):  # of sixteen slices
            await beat(controller)
            await asyncio.sleep(0)
        assert not any(page.status for page in pages)
        for page in pages:
            page.taken.set()
        await asyncio.gather(*asking)
        assert [len(json.loads(page.body)["nodes"]) for page in pages] == [MANY] * 4

    play(tmp_path, scenario)


@pytest.mark.parametrize("path", ["/openapi.json", "/", "/readyz", "/metrics", "/v1/nodes", "/nothing"])
def test_strangers_leave_turns_to_others(tmp_path: Path, path: str) -> None:
    """A request of another address, and one with a token that is known, do not wait for all strangers of one."""

    async def scenario(controller: Controller) -> None:
        assert (await Asked("/v1/jobs", VIEWER)(controller)).status == 200
        strangers = [Asked(path, {}, address="10.0.0.1") for _ in range(8)]
        others = [Asked("/healthz", {}, address="10.0.0.2"), Asked("/healthz", VIEWER, address="10.0.0.1")]
        for request in (*strangers, *others):
            request.taken.set()
        asking = [asyncio.create_task(request(controller)) for request in (*strangers, *others)]
        await asyncio.wait(asking[-2:])
        assert [request.status for request in others] == [200, 200]
        assert sum(bool(request.status) for request in strangers) <= 4
        await asyncio.gather(*asking)
        assert all(request.status for request in strangers)

    play(tmp_path, scenario, nodes=0)


@pytest.mark.slow
@pytest.mark.promise("fair-answers")
def test_admission_refuses_reader_over_request_limit(tmp_path: Path) -> None:
    async def scenario(controller: Controller) -> None:
        pages = [Asked("/v1/nodes?limit=1000", VIEWER) for _ in range(3)]
        asking = [asyncio.create_task(page(controller)) for page in pages]
        await asyncio.wait({asking[-1]})
        assert pages[-1].status == 429
        assert pages[-1].headers[b"retry-after"] == b"1"
        assert pages[-1].rested_s == 1.0
        assert json.loads(pages[-1].body)["code"] == "rate_limited"
        await beat(controller)
        other = Asked("/v1/jobs", bearer(TokenRole.VIEWER, "otto"))
        assert (await other(controller)).status == 200
        exposition = controller.metrics.render(()).decode()
        assert 'everstep_controller_requests_over_limit_total{limit="in_flight"} 1.0' in exposition
        assert "everstep_controller_requests_in_flight 2.0" in exposition
        for page in pages[:2]:
            page.taken.set()
        await asyncio.gather(*asking)
        assert [page.status for page in pages] == [200, 200, 429]
        assert (await Asked("/v1/jobs", VIEWER)(controller)).status == 200

    play(tmp_path, scenario, max_concurrent_requests=2)


@pytest.mark.slow
def test_admission_refuses_reader_over_unread_byte_limit(tmp_path: Path) -> None:
    async def scenario(controller: Controller) -> None:
        first = Asked("/v1/nodes?limit=1000", VIEWER)
        asking = asyncio.create_task(first(controller))
        while not first.body:
            await asyncio.sleep(0)
        refused = await Asked("/v1/nodes?limit=1000", VIEWER)(controller)
        assert refused.status == 429
        assert b"bytes of answers wait to be read by viewer vera" in refused.body
        assert len(first.body) == 64 << 10
        first.taken.set()
        await asking
        assert len(json.loads(first.body)["nodes"]) == 1000

    play(tmp_path, scenario, nodes=1000, max_unsent_answer_bytes=200_000)
