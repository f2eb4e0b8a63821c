"""The listener of a controller: how many connections one turn of the event loop takes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import uvloop
from everstep_controller.server.listener import ACCEPTED_AT_ONCE, duplicate_listeners, listen

COMING = 64


async def _turns_until_all_are_taken(listeners: list[socket.socket]) -> int:
    """Turns of the loop from the first connection taken to the last."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    turn, all_taken = 0, loop.create_future()

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            seen.append(turn)
            transport.close()
            if len(seen) == COMING:
                all_taken.set_result(None)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if not all_taken.done():
            loop.call_soon(next_turn)

    with ExitStack() as stack:
        for _ in range(COMING):
            stack.enter_context(socket.create_connection(listeners[0].getsockname()))
        servers = [await loop.create_server(Taken, sock=listener) for listener in listeners]
        loop.call_soon(next_turn)
        await asyncio.wait_for(all_taken, 60)
        for server in servers:
            server.close()
    return seen[-1] - seen[0]


def _turns(listeners: list[socket.socket]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_turns_until_all_are_taken(listeners))


def test_listener_accepts_many_connections_per_loop_turn() -> None:
    assert _turns(duplicate_listeners(listen(("127.0.0.1", 0)))) < COMING // ACCEPTED_AT_ONCE + 2
    assert _turns([listen(("127.0.0.1", 0))]) >= COMING - 1  # what libuv does by itself: else the ears can go
