"""Long polls, and what the end of their connection says about a node.

A node that dies closes its connections within milliseconds; that is noticed while its poll is held and between two
polls alike, so that a job need not wait for silence to be long enough.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Receive

from controller.core import events as ev
from controller.loop import FleetLoop
from controller.transaction import new_trace
from everstep.errors import EverstepError
from everstep.vocabulary import NodeState

log = logging.getLogger(__name__)

Client = tuple[str, int]
_DOUBTED = (NodeState.SUSPECT, NodeState.LOST)


class Polls:
    """Holds polls for directives and tells the core of connections that end without our doing."""

    def __init__(self, loop: FleetLoop) -> None:
        self._loop = loop
        self._outbox = loop.outbox
        self._idle: dict[Client, tuple[str, int]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def hold(
        self, node: str, incarnation: int, after: int, wait_s: float, client: Client | None, receive: Receive
    ) -> bool:
        """Waits until there is something beyond ``after``, ``wait_s`` at most. False when the client is gone.

        Args:
            client: the connection's other end, by which ``connection_lost`` knows it again.
        """
        if client is not None:
            self._idle.pop(client, None)
        await self._heard(node, incarnation)
        self._outbox.acknowledge(node, after)
        if not self._outbox.has_any(node, after) and not await self._wait(node, wait_s, receive):
            await self._disconnected(node, incarnation)
            return False
        if client is not None:
            self._idle[client] = (node, incarnation)
        return True

    def connection_lost(self, client: Client | None) -> None:
        """A connection ended. If it last carried a poll, and no poll is held now, its node may be gone."""
        polled = self._idle.pop(client, None) if client is not None else None
        if polled is not None:
            telling = asyncio.get_running_loop().create_task(self._disconnected(*polled))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _heard(self, node: str, incarnation: int) -> None:
        """Tells the core of a node it had doubts about."""
        live = self._loop.state.live_nodes.get(node)
        doubted = self._loop.state.nodes[node].state in _DOUBTED or (live is not None and live.gone_at is not None)
        if doubted:
            event = ev.NodeHeard(node=node, incarnation=incarnation, trace=new_trace())
            await self._loop.submit(lambda tx, now: tx.hear(event, now))

    async def _wait(self, node: str, wait_s: float, receive: Receive) -> bool:
        """False when the client went away meanwhile, even if something came at the same moment: it stays queued."""
        something = self._outbox.wait(node)
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait({something, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return not gone.done()
        finally:
            self._outbox.leave(node, something)
            gone.cancel()

    async def _disconnected(self, node: str, incarnation: int) -> None:
        """Tells the core, unless another poll is held (the node only changed connections), or we are stopping."""
        if self._outbox.waiting(node) or self._outbox.closed:
            return
        event = ev.NodeDisconnected(node=node, incarnation=incarnation, trace=new_trace())
        try:
            await self._loop.submit(lambda tx, now: tx.hear(event, now))
        except EverstepError as error:  # nobody is left to tell
            log.info("the end of a connection of node %s was not taken up: %s", node, error, extra={"node": node})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
