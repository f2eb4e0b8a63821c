"""Limit rates with token buckets, and limit each node's entries in the event log.

Each node has an allowance per kind of entry, so that one node cannot displace the history of others. Entries
beyond it are counted but not stored, and one entry per minute reports the counts. Decisions are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from everstep.errors import Unavailable
from everstep.log_lines import PERIOD_S, shortened
from everstep_controller.core import events as ev
from everstep_controller.core.effects import EventLogEntry

if TYPE_CHECKING:
    from everstep_controller.runtime.transaction import Transaction

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MAX_BUCKETS = 1 << 17
"""Maximum number of buckets: larger than any fleet, some 20 MiB when all are in use."""
SUPPRESSED = "events.suppressed"
"""Kind of the entry that reports how many entries were not stored."""
REPORT_INTERVAL_S = 60.0
NODE_LINES = 10
"""Lines that one node may cause at once in the controller's log."""


class TokenBuckets(Generic[K]):
    """A token bucket per key, by the generic cell rate algorithm (ITU-T I.371).

    A bucket is one number: the time at which it would be full again without further requests. A bucket whose time is
    past equals no bucket, so idle ones cost nothing. A bucket holds ``burst_s`` seconds of tokens.
    """

    def __init__(self, per_s: float, burst_s: float, max_keys: int = MAX_BUCKETS) -> None:
        self._cost_s = 1.0 / per_s
        self._burst_s = burst_s
        self._max_keys = max_keys
        self._full_at: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, key: K, now: float, tokens: int = 1) -> float:
        """Take ``tokens`` from the bucket of ``key``. Return 0.0, or the seconds until it holds that many."""
        full_at = self._full_at.get(key, now)
        if full_at < now:
            full_at = now
        full_at += tokens * self._cost_s
        wait_s = full_at - now - self._burst_s
        if wait_s > 0:
            return wait_s
        self._full_at[key] = full_at
        if len(self._full_at) > self._max_keys:
            self._forget(now)
        return 0.0

    def _forget(self, now: float) -> None:
        """Drop full buckets, or all if less than half are full: a burst too many is better than unbounded memory."""
        self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}
        if len(self._full_at) > self._max_keys // 2:
            self._full_at.clear()


class NodeLog:
    """Logs lines that a node's agent can cause: ``NODE_LINES`` at once, then one in each period of a log throttle.

    Each node has its own allowance, so one of them hides no line of others when a whole fleet registers. The number of
    lines left out precedes the node's next line.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        half_a_line = 0.5  # absorbs rounding of large times
        self._log = logger
        self._now = now
        self._buckets: TokenBuckets[str] = TokenBuckets(1.0 / PERIOD_S, (NODE_LINES + half_a_line) * PERIOD_S)
        self._left_out: Counter[str] = Counter()

    def __call__(self, level: int, node: str, message: str, *args: object) -> None:
        """Log a line about ``node``, shortened, or count it."""
        if self._buckets.take(node, self._now()):
            self._left_out[node] += 1
            return
        extra = {"node": node}
        if left_out := self._left_out.pop(node, 0):
            self._log.log(level, "%d lines about node %s were left out of the log", left_out, node, extra=extra)
        self._log.log(level, "%s", shortened(message % args), extra=extra)


class EventQuota:
    """Limits events in the log: a node may cause ``burst`` entries of one kind at once, and ``per_s`` further ones.

    For the event loop's thread. ``on_suppressed`` is called for each entry beyond that.
    """

    def __init__(self, burst: int, per_s: float, on_suppressed: Callable[[], None] = lambda: None) -> None:
        half_an_entry = 0.5  # absorbs rounding of large times
        self._buckets: TokenBuckets[tuple[str, str]] = TokenBuckets(per_s, (burst + half_an_entry) / per_s)
        self._on_suppressed = on_suppressed
        self._suppressed: dict[str, Counter[str]] = defaultdict(Counter)

    def is_allowed(self, node: str, kind: str, now: float) -> bool:
        """Return whether one more entry of ``kind`` from ``node`` is stored."""
        if not self._buckets.take((node, kind), now):
            return True
        self._suppressed[node][kind] += 1
        self._on_suppressed()
        return False

    def record_suppressed(self, transaction: Transaction, now: float) -> int:
        """Add one entry for each node beyond its allowance since the last call. Return their number."""
        suppressed, self._suppressed = self._suppressed, defaultdict(Counter)
        for node, kinds in sorted(suppressed.items()):
            counts = sorted(kinds.items(), key=lambda one: (-one[1], one[0]))
            sentence = (
                f"{node} caused more events than are stored: {', '.join(f'{n} of {kind}' for kind, n in counts)} were "
                "left out. Check the node's agent and jobs; the limits are events_per_node_burst and "
                "events_per_node_per_s"
            )
            data = {kind: str(count) for kind, count in counts}
            transaction.add_event_log_entry(
                EventLogEntry(kind=SUPPRESSED, sentence=sentence, at=now, node=node, data=data)
            )
        return len(suppressed)


def causing_node(event: ev.Event) -> str:
    """Return the node whose agent caused the event, or ""."""
    match event:
        case ev.AgentRegistered(register=register):
            return register.node
        case ev.HeartbeatChanged() | ev.ReportArrived() | ev.NodeDisconnected() | ev.NodeSeen():
            return event.node
    return ""


async def run_suppressed_reports(
    submit: Callable[[Callable[[Transaction, float], int]], Awaitable[int]], quota: EventQuota
) -> None:
    """Report suppressed entries once per minute, until cancelled; ``submit`` is ``FleetLoop.submit``."""
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        try:
            await submit(quota.record_suppressed)
        except Unavailable as error:
            log.warning("suppressed entries of the event log could not be reported, retrying later: %s", error)
