"""Limit each node's events in the audit log, so that one node cannot displace the history of others.

Each node has an allowance per kind of event. Events beyond it are counted but neither stored nor shown, and one event
per minute reports the counts. Decisions are not affected. A kind that is rare on a node is stored even while the node
floods the log with another kind.
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
"""Kind of the event that reports how many events were not stored."""
REPORT_INTERVAL_S = 60.0


class AuditWriter(Protocol):
    """A transaction, as far as it takes entries for the audit log."""

    def add_audit_entry(self, entry: AuditEntry) -> None:
        """Add an entry to the log."""


class _Allowance:
    """A node's remaining allowance for one kind, as of ``at``."""

    __slots__ = ("at", "left")

    def __init__(self, remaining: float, at: float) -> None:
        self.left = remaining
        self.at = at


class EventQuota:
    """Counts events by node and kind. For the event loop's thread.

    Args:
        burst: events of one kind that a node may cause at once.
        per_s: further events of one kind per second.
        on_suppressed: called for each event beyond that.
    """

    def __init__(self, burst: int, per_s: float, on_suppressed: Callable[[], None] = lambda: None) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._note = on_suppressed
        self._allowances: dict[tuple[str, str], _Allowance] = {}
        self._suppressed: dict[str, dict[str, int]] = {}

    def is_allowed(self, node: str, kind: str, now: float) -> bool:
        """Return whether one more event of ``kind`` from ``node`` is stored."""
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
        """Return the suppressed events since the last call, by node and kind. Full allowances are dropped."""
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
    """Return the node whose agent caused the event, or ""."""
    match event:
        case ev.AgentRegistered(register=register):
            return register.node
        case ev.HeartbeatChanged() | ev.ReportArrived() | ev.NodeDisconnected() | ev.NodeSeen():
            return event.node
    return ""


def record_suppressed(quota: EventQuota, transaction: AuditWriter, now: float) -> int:
    """Add one event for each node beyond its allowance. Return their number."""
    told = quota.take_suppressed(now)
    for node, kinds in sorted(told.items()):
        most = sorted(kinds.items(), key=lambda one: (-one[1], one[0]))
        which = ", ".join(f"{count} of {kind}" for kind, count in most)
        sentence = (
            f"{node} caused more events than are stored: {which} were left out. Look at its agent and its jobs; the "
            "limits are audit_entries_per_node_burst and audit_entries_per_node_per_s"
        )
        data = {kind: str(count) for kind, count in most}
        transaction.add_audit_entry(AuditEntry(kind=SUPPRESSED, sentence=sentence, at=now, node=node, data=data))
    return len(told)


async def run_suppressed_reports(
    submit: Callable[[Callable[[AuditWriter, float], int]], Awaitable[int]], quota: EventQuota
) -> None:
    """Report suppressed events once per minute, until cancelled.

    Args:
        submit: runs a stimulus in a transaction (``FleetLoop.submit``).
    """
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        try:
            await submit(lambda transaction, now: record_suppressed(quota, transaction, now))
        except Unavailable as error:
            log.warning("events that were left out are told later: %s", error)
