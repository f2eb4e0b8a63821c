"""Bound how many events each node may put into the audit log, so that one node cannot push out the history of others.

Each node has an allowance of events of each kind. What exceeds it is not stored and not shown: it is counted, and one
event a minute tells how many of which kind there were. Decisions are not affected, and a kind that is rare on a node
is stored even while the node floods the log with another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from everstep.errors import Unavailable
from everstep_controller.core import events as ev
from everstep_controller.core.effects import AuditEntry

log = logging.getLogger(__name__)

SUPPRESSED = "events.suppressed"
"""Kind of the event that tells how many were not stored."""
REPORT_INTERVAL_S = 60.0


class AuditWriter(Protocol):
    """A transaction, which takes lines for the audit log."""

    def add_audit_entry(self, entry: AuditEntry) -> None:
        """Puts a line in the log."""


class _Allowance:
    """What a node has left of one kind, as of ``at``."""

    __slots__ = ("at", "left")

    def __init__(self, left: float, at: float) -> None:
        self.left = left
        self.at = at


class EventQuota:
    """Counts events by node and kind. For the event loop's thread.

    Args:
        burst: events of a kind that a node may cause at once.
        per_s: how many more it may cause each second.
        suppressed: called for each event that exceeds that.
    """

    def __init__(self, burst: int, per_s: float, on_suppressed: Callable[[], None] = lambda: None) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._note = on_suppressed
        self._allowances: dict[tuple[str, str], _Allowance] = {}
        self._suppressed: dict[str, dict[str, int]] = {}

    def is_allowed(self, node: str, kind: str, now: float) -> bool:
        """Whether one more event of ``kind`` that ``node`` caused is stored."""
        allowance = self._allowances.get((node, kind))
        if allowance is None:
            allowance = self._allowances[node, kind] = _Allowance(self._burst, now)
        else:
            allowance.left = min(self._burst, allowance.left + (now - allowance.at) * self._per_s)
            allowance.at = now
        if allowance.left >= 1.0:
            allowance.left -= 1.0
            return True
        of_node = self._suppressed.setdefault(node, {})
        of_node[kind] = of_node.get(kind, 0) + 1
        self._note()
        return False

    def take_suppressed(self, now: float) -> dict[str, dict[str, int]]:
        """How many events of which kind each node caused beyond its allowance since the last call. Allowances that are
        full again are forgotten."""
        full = [
            place
            for place, allowance in self._allowances.items()
            if allowance.left + (now - allowance.at) * self._per_s >= self._burst
        ]
        for place in full:
            del self._allowances[place]
        told, self._suppressed = self._suppressed, {}
        return told


def causing_node(event: ev.Event) -> str:
    """The node whose agent caused the event; empty where none did."""
    match event:
        case ev.AgentRegistered(register=register):
            return register.node
        case ev.HeartbeatChanged() | ev.ReportArrived() | ev.NodeDisconnected() | ev.NodeSeen():
            return event.node
    return ""


def record_suppressed(quota: EventQuota, transaction: AuditWriter, now: float) -> int:
    """Puts an event in the log for each node that exceeded its allowance. Returns how many."""
    told = quota.take_suppressed(now)
    for node, kinds in sorted(told.items()):
        most = sorted(kinds.items(), key=lambda one: (-one[1], one[0]))
        which = ", ".join(f"{count} of {kind}" for kind, count in most)
        sentence = (
            f"{node} caused more events than are stored: {which} were left out. Look at its agent and its jobs; the "
            "limits are node_events_burst and node_events_per_s"
        )
        data = {kind: str(count) for kind, count in most}
        transaction.add_audit_entry(AuditEntry(kind=SUPPRESSED, sentence=sentence, at=now, node=node, data=data))
    return len(told)


async def run_suppressed_reports(
    submit: Callable[[Callable[[AuditWriter, float], int]], Awaitable[int]], quota: EventQuota
) -> None:
    """Tells once a minute what was not stored. Runs until cancelled.

    Args:
        submit: runs a stimulus in a transaction (``FleetLoop.submit``).
    """
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        try:
            await submit(lambda transaction, now: record_suppressed(quota, transaction, now))
        except Unavailable as error:
            log.warning("events that were left out are told later: %s", error)
