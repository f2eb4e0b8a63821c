"""Rules that choose the controller that an agent tries next, as pure functions."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import pytest

from everstep.clock import Backoff
from everstep.wire.v1.agent import LeadershipProof
from everstep_agent.uplink.client import (
    HUNG_RETRY_S,
    MAX_ANSWER_BYTES,
    STABLE_SESSION_S,
    ControllerAddresses,
    fetch_newest_succession,
)

A, B, C = "http://a:1", "http://b:1", "http://c:1"
BACKOFF = Backoff(floor_s=0.02, ceiling_s=0.2)
LONG = STABLE_SESSION_S


def failing(controllers: ControllerAddresses, now: float, attempts: int) -> list[tuple[str, float]]:
    """Return the addresses tried from ``now`` on while every one refuses, with the time of each attempt."""
    tried = []
    for _ in range(attempts):
        url, at = controllers.next_address(now)
        now = max(now, at)
        tried.append((url, now))
        controllers.mark_failed(url, now, BACKOFF, 0.999)
    return tried


def test_refusing_addresses_are_all_tried_without_delay() -> None:
    assert failing(ControllerAddresses([A, B, C]), 5.0, 3) == [(A, 5.0), (B, 5.0), (C, 5.0)]


def test_each_address_backs_off_up_to_the_ceiling() -> None:
    tried = [at for url, at in failing(ControllerAddresses([A, B]), 0.0, 40) if url == A]
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses[:3] == pytest.approx([0.02, 0.04, 0.08], rel=0.01)
    assert pauses[4:] == pytest.approx([0.2] * len(pauses[4:]), rel=0.01)


def test_ended_session_tries_other_addresses_first() -> None:
    controllers = ControllerAddresses([A, B])
    controllers.mark_ended(A, 100.0, LONG, BACKOFF, 0.5)
    assert failing(controllers, 100.0, 2) == [(B, 100.0), (A, 100.0)]


def test_controller_ending_sessions_at_once_is_backed_off() -> None:
    controllers = ControllerAddresses([A])
    now = 0.0
    for _ in range(20):
        controllers.mark_ended(A, now, 0.0, BACKOFF, 0.999)
        now = controllers.next_address(now)[1]
    assert now > 2.0


def test_retry_after_is_honored_while_others_are_tried() -> None:
    controllers = ControllerAddresses([A, B])
    controllers.mark_failed(A, 0.0, BACKOFF, 0.5, min_pause_s=1.0)
    assert [url for url, at in failing(controllers, 0.0, 4) if at < 1.0] == [B, B, B, B]
    assert controllers.next_address(1.5)[0] == A


def test_hung_controller_is_tried_after_the_others() -> None:
    controllers = ControllerAddresses([A, B])
    controllers.mark_hung(A, 1.0, BACKOFF, 0.5)
    assert all(url == B for url, at in failing(controllers, 1.0, 20) if at < 1.0 + HUNG_RETRY_S)


def test_answer_timeout_doubles_per_hang_until_a_session() -> None:
    controllers = ControllerAddresses([A])
    found = []
    for _ in range(4):
        found.append(controllers.connect_timeout_s(A, 1.0, 5.0))
        controllers.mark_hung(A, 0.0, BACKOFF, 0.5)
    assert found == [1.0, 2.0, 4.0, 5.0]
    controllers.mark_ended(A, 0.0, LONG, BACKOFF, 0.5)
    assert controllers.connect_timeout_s(A, 1.0, 5.0) == 1.0


def test_empty_address_list_is_refused() -> None:
    with pytest.raises(ValueError, match="no controller"):
        ControllerAddresses([])


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def found(*answers: bytes | None) -> LeadershipProof | None:
    """Return the proof found among controllers with these answers; None: a controller that does not answer."""

    async def serve(answer: bytes | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /readyz HTTP/1.1\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    servers = [await asyncio.start_server(partial(serve, answer), "127.0.0.1", 0) for answer in answers]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    try:
        return await fetch_newest_succession(urls, None, 0.5)
    finally:
        for server in servers:
            server.close()


def test_highest_epoch_of_all_controllers_is_found() -> None:
    shown = [HEAD + b'{"ok":true,"epoch":%d,"proof":"p%d","database":"away"}' % (n, n) for n in (3, 5, 4)]
    assert asyncio.run(found(*shown)) == LeadershipProof(epoch=5, proof="p5")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"not HTTP",
        HEAD,
        HEAD + b'{"ok":false,"role":"standby","leader":""}',
        HEAD + b'{"epoch":-1}',
        HEAD + b'{"epoch":"5"}',
        HEAD + b'{"epoch":5,"proof":"' + b"x" * 5000 + b'"}',
        HEAD + b"[" * (2 * MAX_ANSWER_BYTES),
        HEAD + b'{"x":' + b"[" * (MAX_ANSWER_BYTES - 5),
        HEAD + b'"\xff"',
    ],
)
@pytest.mark.slow
def test_invalid_leader_answer_is_ignored(answer: bytes | None) -> None:
    assert asyncio.run(found(answer)) is None
    assert asyncio.run(found(answer, HEAD + b'{"epoch":2,"proof":"p"}')) == LeadershipProof(epoch=2, proof="p")


def test_unreachable_controller_is_ignored() -> None:
    assert asyncio.run(fetch_newest_succession(["http://127.0.0.1:1"], None, 0.5)) is None
