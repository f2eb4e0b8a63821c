"""Queue the requests of agents that change the fleet, and carry them out in the loop's transactions.

``everstep_controller.server`` calls this module and waits for the futures; the loop calls nothing of the server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from everstep.errors import EverstepError, NotFound, StaleGeneration, Unavailable
from everstep.wire.v1.agent import Heartbeat, Register, Reports
from everstep.wire.v1.training import AnyReport, LauncherJoined
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.intake import Urgency
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.rate_limits import NodeLog
from everstep_controller.runtime.transaction import Transaction, new_trace

log = logging.getLogger(__name__)


class AgentRequests:
    """Requests of agents that need a transaction. Methods raise Unavailable if the queue is full.

    Args:
        acknowledged_reports: (node, incarnation) to the newest report number taken, as stored.
        poisoned_reports: (node, incarnation, number) of reports that ended an earlier controller process.
    """

    def __init__(
        self,
        loop: FleetLoop,
        metrics: Metrics,
        acknowledged_reports: dict[tuple[str, int], int],
        poisoned_reports: frozenset[tuple[str, int, int]],
    ) -> None:
        self._loop = loop
        self._state = loop.state
        self._outbox = loop.outbox
        self._metrics = metrics
        self._marks = {
            node: (incarnation, through) for (node, incarnation), through in sorted(acknowledged_reports.items())
        }
        self._poisoned = poisoned_reports
        self._first_heartbeats: dict[str, int] = {}
        self.log_line = NodeLog(log, loop.now)

    def check_incarnation(self, node: str, incarnation: int) -> None:
        """Raise NotFound if the node or incarnation must register first, StaleGeneration if it is outdated."""
        record = self._state.nodes.get(node)
        if record is None:
            raise NotFound(f"node {node} is unknown to this controller: register first")
        known = record.identity.incarnation
        if incarnation < known:
            raise StaleGeneration(f"incarnation {incarnation} of node {node} is outdated: {known} has registered since")
        if incarnation > known:
            raise NotFound(f"incarnation {incarnation} of node {node} is unknown to this controller: register first")

    def register(self, register: Register) -> asyncio.Future[int]:
        """Begin an incarnation, or register the same one again. Return the number of its first directive."""

        def begin_incarnation(tx: Transaction, now: float) -> int:
            node, outbox = register.node, self._outbox
            known = self._state.nodes.get(node)
            is_new = known is None or known.identity.incarnation != register.incarnation
            first = outbox.next_seq(node) if is_new else outbox.oldest_seq(node)
            tx.handle_ephemeral(ev.AgentRegistered(register=register, trace=new_trace()), now)
            if is_new:  # directives for earlier incarnations are void
                outbox.acknowledge(node, first - 1)
                outbox.dismiss(node, register.incarnation)
            facts = (node, register.incarnation, register.agent_version, len(register.gpus))
            self.log_line(logging.INFO, node, "node %s registered: incarnation %d, agent %s, %d GPUs", *facts)
            return first

        return self._loop.enqueue(begin_incarnation, register.node)

    def change_heartbeat(self, node: str, beat: Heartbeat, urgency: Urgency) -> asyncio.Future[bool]:
        """Handle a heartbeat with news. Return False: the node need not send its findings again."""
        event = ev.HeartbeatChanged(
            node=node, incarnation=beat.incarnation, findings=beat.findings, ranks=beat.ranks, trace=new_trace()
        )

        def change(tx: Transaction, now: float) -> bool:
            tx.handle_ephemeral(event, now)
            return False

        return self._loop.enqueue(change, node, urgency)

    def add_first_heartbeat(self, node: str, incarnation: int) -> None:
        """Add the first heartbeat of a node since this controller started.

        After a start the whole fleet sends one within a second, so they reach the core as one event, before
        registrations.
        """
        is_queued = bool(self._first_heartbeats)
        self._first_heartbeats[node] = incarnation
        if is_queued:
            return
        try:
            handled = self._loop.enqueue(self._handle_first_heartbeats)
        except Unavailable:  # the nodes repeat them within a second
            self._first_heartbeats.clear()
        else:
            handled.add_done_callback(ignore_result)

    def _handle_first_heartbeats(self, tx: Transaction, now: float) -> None:
        seen, self._first_heartbeats = self._first_heartbeats, {}
        (node, incarnation), *others = seen.items()
        event = ev.NodeSeen(node=node, incarnation=incarnation, others=tuple(others), trace=new_trace())
        tx.handle_ephemeral(event, now)

    def take_reports(self, node: str, reports: Reports) -> asyncio.Future[int]:
        """Take reports. Return the number of the newest durable one."""
        bodies = [report.body for report in reports.reports]
        urgency = Urgency.ROUTINE if engine.can_defer_reports(self._state, node, bodies) else Urgency.URGENT
        return self._loop.enqueue(lambda tx, now: self._take_reports(node, reports, tx, now), node, urgency)

    def _take_reports(self, node: str, reports: Reports, tx: Transaction, now: float) -> int:
        incarnation = reports.incarnation
        self.check_incarnation(node, incarnation)
        marked_incarnation, before = self._marks.get(node, (incarnation, 0))
        before = through = before if marked_incarnation == incarnation else 0
        taken = 0
        for report in reports.reports:
            if report.number > through:
                through = report.number
                if (node, incarnation, report.number) not in self._poisoned:
                    taken += 1
                    self._take_report(node, incarnation, report.number, report.body, tx, now)
        self._metrics.count_reports(taken, len(reports.reports) - taken)
        if through > before:
            tx.acknowledge_reports(node, incarnation, through)
            self._marks[node] = (incarnation, through)
        return through

    def _take_report(
        self, node: str, incarnation: int, number: int, body: AnyReport, tx: Transaction, now: float
    ) -> None:
        event = ev.ReportArrived(
            node=node,
            incarnation=incarnation,
            number=number,
            body=body,
            entropy=secrets.token_hex(32) if isinstance(body, LauncherJoined) else "",
            trace=new_trace(),
        )
        try:
            tx.handle(event, now)
        except EverstepError as error:
            # For example about a deleted job: count it as taken so that others are not held up.
            self._metrics.count_refused("agents/reports/one", error.code)
            self.log_line(logging.WARNING, node, "report %d (%s) refused: %s", number, type(body).__name__, error)

    def take_disconnect(self, node: str, incarnation: int) -> None:
        """Record that the node closed its only connection."""
        event = ev.NodeDisconnected(node=node, incarnation=incarnation, trace=new_trace())
        try:
            handled = self._loop.enqueue(lambda tx, now: tx.handle_ephemeral(event, now), node)
        except EverstepError as error:  # the connection is gone, so no answer is possible
            self.log_line(logging.INFO, node, "the disconnect of node %s was not recorded: %s", node, error)
        else:
            handled.add_done_callback(ignore_result)


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Ignore a result that no request waits for: a refusal (the controller stops) is not an error."""
    if not future.cancelled():
        future.exception()
