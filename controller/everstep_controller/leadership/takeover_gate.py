"""Agents that come while this controller takes over: they wait at the door instead of knocking again and again.

A fleet whose leader died is at the next one's port before that has restored its state. Each that is refused is back in
a fifth of a second: 12,500 agents would keep it from restoring.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WAIT_S = 0.75
"""Seconds that an agent is kept waiting: less than the second after which it would take this controller for hung
(``connect_timeout_s`` of ``everstep_agent.config``)."""
ADMITTED_PER_TURN = 32
"""So many are let in before whoever else waits for the event loop has his turn: about five milliseconds."""


class WaitingConnection(Protocol):
    """A connection that waits."""

    def on_leader_known(self) -> None:
        """It is known who leads: ask again."""


class TakeoverGate:
    """Who waits, and whether anybody should. For the event loop's thread."""

    def __init__(self) -> None:
        self._taking_over = False
        self._waiting: dict[WaitingConnection, None] = {}
        self._admit_task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """This controller begins to take over: whoever comes waits."""
        self._taking_over = True

    def open(self) -> None:
        """It leads, or another one does after all."""
        self._taking_over = False
        self._admit_task = asyncio.create_task(self._admit_waiting())

    def hold_back(self, connection: WaitingConnection) -> bool:
        """Takes a visitor in, who is told with ``settled``; False where nothing is to be settled."""
        if self._taking_over:
            self._waiting[connection] = None
        return self._taking_over

    def remove(self, connection: WaitingConnection) -> None:
        """He does not wait any more."""
        self._waiting.pop(connection, None)

    async def _admit_waiting(self) -> None:
        while self._waiting:
            for visitor in list(self._waiting)[:ADMITTED_PER_TURN]:
                del self._waiting[visitor]
                visitor.on_leader_known()
            await asyncio.sleep(0)
