"""Simulate the network: connections that keep the order of their frames, and network faults.

A connection behaves as TCP over a lossy network. Frames arrive in order or not at all, and a lost frame is
retransmitted and arrives later. Frames sent before a close may arrive while the next connection is already in use.
Programs repeat a request themselves if no answer comes. A partition may cut one direction only. Then one end receives
nothing, and the other end does not notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from tests.sim.cluster.timeline import Timeline

RETRANSMIT_S = 0.2
"""Seconds by which a lost packet delays its frame (Linux: smallest retransmission timeout)."""
DEFAULT_DELAY_S = 0.0005
"""Mean seconds that a frame takes on its way, unless the plan says otherwise."""


class Endpoint(Protocol):
    """One end of a connection."""

    def received(self, connection: Connection, frame: Any) -> None: ...
    def closed(self, connection: Connection) -> None: ...


class Network:
    """The links between hosts, with their cuts and delays.

    A direction is a pair (source, target) of host names. ``*`` stands for all hosts.
    """

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.delay_s = DEFAULT_DELAY_S
        self.loss = 0.0
        self._cuts: dict[tuple[str, str], int] = {}
        self._extra_delays_s: dict[str, float] = {}
        self.connections: list[Connection] = []

    def cut(self, source: str, target: str) -> None:
        """Cut the direction from ``source`` to ``target``. As many calls of ``restore`` restore it."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def restore(self, source: str, target: str) -> None:
        """Undo one cut of the direction."""
        remaining = self._cuts.get((source, target), 0) - 1
        if remaining > 0:
            self._cuts[source, target] = remaining
        else:
            self._cuts.pop((source, target), None)

    def slow(self, host: str, extra_s: float) -> None:
        """Delay every frame from or to ``host`` by ``extra_s`` seconds. 0 ends the delay."""
        self._extra_delays_s[host] = extra_s

    def restore_all(self) -> None:
        """Undo all cuts, delays and losses."""
        self._cuts.clear()
        self._extra_delays_s.clear()
        self.loss = 0.0

    def is_passable(self, source: str, target: str) -> bool:
        """Return whether frames from ``source`` reach ``target``."""
        if not self._cuts:
            return True
        return not any(pair in self._cuts for pair in ((source, target), (source, "*"), ("*", target)))

    def drop_unsent_frames(self, host: str) -> None:
        """Drop the unsent frames of a host that lost power. Its peers do not see their connections close."""
        for connection in self.connections:
            if host in connection.hosts:
                connection.drop_unsent(connection.hosts.index(host))

    def has_no_cuts(self) -> bool:
        """Return whether all hosts reach one another."""
        return not self._cuts

    def connected(self, first: str, second: str) -> bool:
        """Return whether frames pass between two hosts in both directions."""
        return self.is_passable(first, second) and self.is_passable(second, first)

    def transit_s(self, source: str, target: str) -> float:
        """Return the seconds that one frame takes, retransmissions included."""
        transit_s = self.delay_s * (0.5 + self.rng.random())
        while self.loss and self.rng.random() < self.loss:
            transit_s += RETRANSMIT_S
        if self._extra_delays_s:
            transit_s += self._extra_delays_s.get(source, 0.0) + self._extra_delays_s.get(target, 0.0)
        return transit_s

    def connect(
        self, source: str, target: str, endpoint: Endpoint, accept: Callable[[Connection], Endpoint | None]
    ) -> Connection:
        """Begin to connect ``endpoint`` on ``source`` with ``target``.

        Args:
            source: The host that opens the connection.
            target: The host that accepts it.
            endpoint: The end on ``source``.
            accept: Returns the end on ``target``, or None to refuse. A refusal closes ``endpoint``.
        """
        connection = Connection(self, (source, target))
        connection.endpoints[0] = endpoint
        self.connections = [old for old in self.connections if not old.is_closed]
        self.connections.append(connection)

        def arrive() -> None:
            if not connection.is_open(0):
                return
            accepted = accept(connection)
            if accepted is None:
                connection.reset()
            else:
                connection.endpoints[1] = accepted
                connection.send_waiting(0)

        if self.connected(source, target):
            self.timeline.after(self.transit_s(source, target), arrive)
        return connection


_CLOSE_FRAME: Any = object()
"""The frame that ends the stream of one side."""


class Connection:
    """A connection between two hosts. Side 0 opened it, side 1 accepted it.

    Attributes:
        hosts: The names of both sides' hosts.
        is_closed: Whether no frame arrives any more.
        extra_delay_s: Seconds added to each frame, by the sending side.
    """

    def __init__(self, network: Network, hosts: tuple[str, str]) -> None:
        self.network = network
        self.hosts = hosts
        self.endpoints: list[Endpoint | None] = [None, None]
        self.is_closed = False
        self.extra_delay_s = [0.0, 0.0]
        self._has_closed = [False, False]
        self._last_arrival_at = [0.0, 0.0]
        self._unsent: list[list[Any]] = [[], []]

    def is_open(self, side: int) -> bool:
        """Return whether ``side`` has not closed, and has not seen the other side close."""
        return not self.is_closed and not self._has_closed[side]

    def send(self, side: int, frame: Any) -> None:
        """Send a frame from ``side`` to the other. A frame on a cut link waits until the link is restored."""
        if self.is_open(side):
            self._send(side, frame)

    def _send(self, side: int, frame: Any) -> None:
        if self._unsent[side] or not self._is_passable(side):
            self._unsent[side].append(frame)
            self.network.timeline.after(RETRANSMIT_S, lambda: self.send_waiting(side))
            return
        self._transmit(side, frame)

    def _is_passable(self, side: int) -> bool:
        if self.endpoints[1 - side] is None:
            return False
        source, target = self.hosts if side == 0 else self.hosts[::-1]
        return self.network.is_passable(source, target)

    def _transmit(self, side: int, frame: Any) -> None:
        source, target = self.hosts if side == 0 else self.hosts[::-1]
        timeline = self.network.timeline
        transit_s = self.network.transit_s(source, target) + self.extra_delay_s[side]
        arrival_at = max(self._last_arrival_at[side], timeline.now + transit_s)
        self._last_arrival_at[side] = arrival_at
        timeline.at(arrival_at, lambda: self._deliver(side, frame))

    def _deliver(self, side: int, frame: Any) -> None:
        """Deliver a frame. Frames sent before ``side`` closed still arrive, even if it has another connection."""
        endpoint = self.endpoints[1 - side]
        if not self.is_open(1 - side) or endpoint is None:
            return
        if frame is not _CLOSE_FRAME:
            endpoint.received(self, frame)
            return
        self._has_closed[1 - side] = self.is_closed = True
        endpoint.closed(self)

    def send_waiting(self, side: int) -> None:
        """Send the waiting frames if the link is restored."""
        if self.is_closed or not self._unsent[side]:
            return
        if not self._is_passable(side):
            self.network.timeline.after(RETRANSMIT_S, lambda: self.send_waiting(side))
            return
        unsent, self._unsent[side] = self._unsent[side], []
        for frame in unsent:
            self._transmit(side, frame)

    def close(self, side: int) -> None:
        """Close ``side``, as its process or the kernel after its death does.

        The other end sees the close after all earlier frames.
        """
        if not self.is_open(side):
            return
        self._has_closed[side] = True
        if self._has_closed[1 - side] or self.endpoints[1 - side] is None:
            self.is_closed = True
        else:
            self._send(side, _CLOSE_FRAME)

    def drop_unsent(self, side: int) -> None:
        """End ``side`` without a close: its host lost power. Frames on their way still arrive."""
        self._has_closed[side] = True
        self._unsent[side].clear()

    def reset(self) -> None:
        """Reset the connection from the network. Both ends see the close."""
        if self.is_closed:
            return
        self.is_closed = True
        for endpoint in self.endpoints:
            if endpoint is not None:
                self.network.timeline.after(
                    self.network.delay_s,
                    lambda endpoint=endpoint: endpoint.closed(self),  # type: ignore[misc]
                )
