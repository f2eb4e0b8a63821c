"""Limit this process's connections to its file descriptors, and name the connection's entries in a request's scope."""

from __future__ import annotations

import resource
from collections import OrderedDict
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep_controller.server.session import AgentSession

RESERVED = 256
"""File descriptors reserved for the database, logs, libraries and operators."""
SCARCE_SHARE = 0.75
"""Share of descriptors from which agents without an active job close their sessions between heartbeats."""
CROWDED_SHARE = 0.8
"""Share from which each new connection closes others. It is above SCARCE_SHARE: otherwise an idle fleet of that size
would lose two sessions per heartbeat and open them again."""
EXHAUSTED_SHARE = 0.85
"""Share from which all agents close their sessions: late directives are better than refused agents. In a fleet of a
million GPUs with a heartbeat every 20 s, thousands of connections can be in progress within half a second."""


CLOSE_PER_CONNECTION = 2
"""Sessions closed per new connection above CROWDED_SHARE: more leave than arrive."""
SCAN_PER_CONNECTION = 8
"""Sessions examined for that, at most: it bounds the cost of a connection when all sessions are needed."""
MAX_SESSIONS_OF_NODE = 8
"""Most sessions of one node: its agent needs one, and a few more may be left from connections that broke unnoticed."""
USUAL_SESSIONS_OF_NODE = 2
"""Sessions of a node whose agent reconnects: the one that broke unnoticed, and the new one."""


class DescriptorBudget:
    """Counts connections, and closes the least needed ones under pressure.

    One node's sessions are bounded always: the oldest in which no frame was accepted makes room for the newest. Under
    pressure, nodes with unusually many sessions lose such sessions before others are asked to hang up.

    A fleet may have more agents than a process may have files. When thousands of agents have news at once (their jobs
    start, a switch fails), agents that only wait for their next heartbeat make room. Connections over ``limit`` are
    closed on arrival.
    """

    __slots__ = ("_of_node", "_sessions", "_unusual", "crowded_from", "exhausted_from", "limit", "open", "scarce_from")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.scarce_from = round(limit * SCARCE_SHARE)
        self.crowded_from = round(limit * CROWDED_SHARE)
        self.exhausted_from = round(limit * EXHAUSTED_SHARE)
        self._sessions: OrderedDict[AgentSession, None] = OrderedDict()
        self._of_node: dict[str, list[AgentSession]] = {}
        self._unusual: dict[str, None] = {}  # nodes with more than USUAL_SESSIONS_OF_NODE

    def add(self, session: AgentSession) -> None:
        """Add an open session, and close another one of its node if there are too many."""
        self._sessions[session] = None
        of_node = self._of_node.setdefault(session.node, [])
        of_node.append(session)
        if len(of_node) > USUAL_SESSIONS_OF_NODE:
            self._unusual[session.node] = None
        if len(of_node) > MAX_SESSIONS_OF_NODE:
            self._close_oldest(session.node)

    def remove(self, session: AgentSession) -> None:
        """Remove a closed session."""
        self._sessions.pop(session, None)
        self._leave_node(session)

    def _leave_node(self, session: AgentSession) -> None:
        of_node = self._of_node.get(session.node, [])
        if session in of_node:
            of_node.remove(session)
            if len(of_node) <= USUAL_SESSIONS_OF_NODE:
                self._unusual.pop(session.node, None)
            if not of_node:
                del self._of_node[session.node]

    def _close_oldest(self, node: str) -> bool:
        """Close the oldest session of ``node`` in which no frame was accepted. Return False if there is none."""
        of_node = self._of_node[node]
        for session in of_node:
            if session.close_surplus(len(of_node)):
                self._leave_node(session)
                return True
        return False

    def make_room(self) -> None:
        """Close dispensable sessions if connections are crowded: surplus ones of one node, then the oldest."""
        if self.open < self.crowded_from:
            return
        left = CLOSE_PER_CONNECTION
        while self._unusual and left:
            node = max(islice(self._unusual, SCAN_PER_CONNECTION), key=lambda one: len(self._of_node[one]))
            if not self._close_oldest(node):
                break
            left -= 1
        if not left:
            return
        for _ in range(min(SCAN_PER_CONNECTION, len(self._sessions))):
            session, _ = self._sessions.popitem(last=False)
            if not session.request_close():
                self._sessions[session] = None
            elif not (left := left - 1):
                return


@cache
def process_descriptors() -> DescriptorBudget:
    """Return this process's budget, from its file limit at the first call."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorBudget(max(soft - RESERVED, soft // 2))


SCOPE_KEY = "everstep.peer"
"""Key in each request's ASGI scope for the connection's ``ConnectionPeer``."""
CLOSE_CONNECTION_KEY = "everstep.hang_up"
"""Key for a function without arguments that aborts the connection and discards unsent data."""
READ_PAUSE_KEY = "everstep.rest"
"""Key for a function that stops reading further requests for a number of seconds."""
