"""An agent asks every controller it knows which epoch it leads by, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from everstep_agent.uplink.client import MAX_ANSWER_BYTES, fetch_newest_succession

from everstep.wire.v1.agent import LeadershipProof

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def found(*answers: bytes | None) -> LeadershipProof | None:
    """What is found where controllers answer so; None: they say nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes | None) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /readyz HTTP/1.1\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    servers = [
        await asyncio.start_server(lambda r, w, answer=answer: serve(r, w, answer), "127.0.0.1", 0)
        for answer in answers
    ]
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
