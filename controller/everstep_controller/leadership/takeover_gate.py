"""Hold back new connections while this controller takes over.

After a leader dies, its fleet contacts the next controller before that has restored its state. An agent that is refused
returns after 0.2 s, and 12,500 such agents would keep the controller from restoring.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WAIT_S = 0.75
"""Seconds that an agent is held back; after its ``connect_timeout_s``, one second, this controller would seem hung."""
ADMISSIONS_PER_LOOP_ITERATION = 32
"""Agents admitted per turn of the event loop: about five milliseconds of work."""


class HeldConnection(Protocol):
    """A connection that can be held back."""

    def on_leader_known(self) -> None:
        """Route the connection, now that the leader is known."""


class TakeoverGate:
    """The connections held back during a takeover. For the event loop's thread."""

    def __init__(self) -> None:
        self._taking_over = False
        self._waiting: dict[HeldConnection, None] = {}
        self._admit_task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Hold back connections from now on: a takeover begins."""
        self._taking_over = True

    def open(self) -> None:
        """Admit connections: the takeover is over, whether or not it succeeded."""
        self._taking_over = False
        self._admit_task = asyncio.create_task(self._admit_waiting())

    def hold_back(self, connection: HeldConnection) -> bool:
        """Hold ``connection`` back until ``on_leader_known``. Return False if no takeover is in progress."""
        if self._taking_over:
            self._waiting[connection] = None
        return self._taking_over

    def remove(self, connection: HeldConnection) -> None:
        """Remove a connection that no longer waits."""
        self._waiting.pop(connection, None)

    async def _admit_waiting(self) -> None:
        while self._waiting:
            for visitor in list(self._waiting)[:ADMISSIONS_PER_LOOP_ITERATION]:
                del self._waiting[visitor]
                visitor.on_leader_known()
            await asyncio.sleep(0)
