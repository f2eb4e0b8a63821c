"""Nodes that come to a controller that stands by, again and again: they may not reach the one that leads.

An agent that starts, or lost its session, tries the addresses that it was given in turn: it knocks here once, or for as
long as nobody leads. One that does not get through to the leader goes on knocking.
"""

from __future__ import annotations

from everstep.clock import Clock

PAUSE_S = 10.0
"""Seconds between two knocks of a node that count as one stay: an agent waits for an address that says nothing for up
to seconds before it tries the next one."""


class Knocks:
    """Who knocked lately, and since when. For the event loop's thread.

    Args:
        insistent_s: for so long a node must have come again and again to count.
    """

    def __init__(self, clock: Clock, insistent_s: float) -> None:
        self._clock = clock
        self._insistent_s = insistent_s
        self._stays: dict[str, tuple[float, float]] = {}

    def hear(self, node: str) -> None:
        """A node that proved who it is was sent on."""
        now = self._clock.monotonic()
        since, last = self._stays.get(node, (now, now))
        self._stays[node] = (since if now - last <= PAUSE_S else now, now)

    def insistent(self) -> int:
        """How many different nodes come again and again."""
        now = self._clock.monotonic()
        self._stays = {node: stay for node, stay in self._stays.items() if now - stay[1] <= PAUSE_S}
        return sum(last - since >= self._insistent_s for since, last in self._stays.values())
