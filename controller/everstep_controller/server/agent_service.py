"""Handle the requests of agents' sessions.

A fleet of 12,500 nodes sends 12,500 heartbeats per second. A heartbeat without news costs one ``apply_heartbeat``, no
transaction and no task.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep.errors import EverstepError, MalformedMessage, NotFound, StaleGeneration, Unavailable
from everstep.wire.framing import SUPPORTED_VERSIONS, negotiate
from everstep.wire.v1.agent import Heartbeat, Register, Registered, Reports
from everstep.wire.v1.training import AnyReport, LauncherJoined
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.leadership.leader_checks import EpochCheck
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.intake import Urgency
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.push import EncodedDirective
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.server import responses
from everstep_controller.server.connections import DescriptorBudget

# ---- serial work
# Slow work runs one item per turn of the event loop, so that heartbeats are answered in between.

Defer = Callable[[Callable[[], None]], None]


class SerialQueue:
    """Runs work in order, one item per turn of the event loop. For the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __call__(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        work = self._waiting[0]
        try:
            work()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)


log = logging.getLogger(__name__)

_REGISTER = msgspec.json.Decoder(Register)


class EncodedHeartbeatAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``HeartbeatAnswer`` with encoded directives."""

    server_at: float
    resend: bool = False
    directives: tuple[EncodedDirective, ...] = ()
    keep_open: bool = True
    unconfirmed_epoch: int = 0


class _Offer(msgspec.Struct):
    """The part of Register that all protocol versions share."""

    protocols: tuple[int, ...]


_OFFER = msgspec.json.Decoder(_Offer)


class AgentService:
    """Handles agents' messages. Every method raises the error that the agent should receive.

    Args:
        defer: runs work in a later turn of the event loop, in order.
        name: name of this controller, as told to agents.
        heartbeat_interval_s: interval of heartbeats, as told to agents.
        acknowledged_reports: (node, incarnation) to the newest report number taken, as stored.
        poisoned_reports: (node, incarnation, number) of reports that ended an earlier controller process.
        charge_reports: called with a node and its number of reports; raises RateLimited for too many.
        epoch_check: asks agents about other leaders; None if there can be none.
    """

    def __init__(
        self,
        *,
        loop: FleetLoop,
        metrics: Metrics,
        clock: Clock,
        descriptors: DescriptorBudget,
        defer: Defer,
        name: str,
        heartbeat_interval_s: float,
        acknowledged_reports: dict[tuple[str, int], int],
        poisoned_reports: frozenset[tuple[str, int, int]],
        charge_reports: Callable[[str, int], None] = lambda node, count: None,
        epoch_check: EpochCheck | None = None,
    ) -> None:
        self._charge_reports = charge_reports
        self._epoch_check = epoch_check
        self.outbox = loop.outbox
        self.metrics = metrics
        self.descriptors = descriptors
        self.defer = defer
        self.wall: Callable[[], float] = clock.wall
        self._loop = loop
        self._state = loop.state
        self._now = loop.now
        self._name = name
        self._heartbeat_interval_s = heartbeat_interval_s
        self._marks = {
            node: (incarnation, through) for (node, incarnation), through in sorted(acknowledged_reports.items())
        }
        self._poisoned = poisoned_reports
        self._first_heard: dict[str, int] = {}

    def check_incarnation(self, node: str, incarnation: int) -> None:
        """Raise NotFound if the node or incarnation must register first, StaleGeneration if it is over."""
        record = self._state.nodes.get(node)
        if record is None:
            raise NotFound(f"node {node} is not known here: register first")
        if incarnation < record.identity.incarnation:
            raise StaleGeneration(
                f"incarnation {incarnation} of node {node} is over: {record.identity.incarnation} registered since"
            )
        if incarnation > record.identity.incarnation:
            raise NotFound(f"incarnation {incarnation} of node {node} is not known here: register first")

    def should_keep_open(self, node: str) -> bool:
        """Return whether the node's session stays open between heartbeats; see ``HeartbeatAnswer``."""
        if not self.descriptors.is_scarce:
            return True
        return not self.descriptors.is_exhausted and self._has_active_job(node)

    def unconfirmed_epoch(self) -> int:
        """Return the epoch to check; see ``HeartbeatAnswer``."""
        return self._epoch_check.unconfirmed_epoch() if self._epoch_check is not None else 0

    def _has_active_job(self, node: str) -> bool:
        """Return whether an active job has a launcher on the node: it may need directives at any moment."""
        live = self._state.node_runtime.get(node)
        return live is not None and bool(live.open_jobs)

    # --- registration

    def register(self, node: str, register: Register) -> asyncio.Future[Registered]:
        """Begin an incarnation of the node, or register the same one again."""
        if register.node != node:
            raise MalformedMessage(f"the body speaks of node {register.node}, the path of {node}")
        protocol = negotiate(register.protocols)
        return self._loop.enqueue(lambda tx, now: self._begin_incarnation(register, protocol, tx, now), node)

    def _begin_incarnation(self, register: Register, protocol: int, tx: Transaction, now: float) -> Registered:
        """Answer with the number of this incarnation's first directive.

        In a new incarnation older directives are void.
        """
        node, outbox = register.node, self.outbox
        known = self._state.nodes.get(node)
        fresh = known is None or known.identity.incarnation != register.incarnation
        first = outbox.next_seq(node) if fresh else outbox.oldest_seq(node)
        tx.handle_ephemeral(ev.AgentRegistered(register=register, trace=new_trace()), now)
        if fresh:
            outbox.acknowledge(node, first - 1)
            outbox.dismiss(node, register.incarnation)
        log.info(
            "node %s registers: incarnation %d, agent %s, %d GPUs",
            node,
            register.incarnation,
            register.agent_version,
            len(register.gpus),
            extra={"node": node},
        )
        return Registered(
            protocol=protocol,
            heartbeat_interval_s=self._heartbeat_interval_s,
            next_directive=first,
            controller=self._name,
            server_at=self.wall(),
            keep_open=self.should_keep_open(node),
        )

    # --- heartbeats

    def take_heartbeat(self, node: str, beat: Heartbeat) -> asyncio.Future[bool] | bool:
        """Take a heartbeat, now or in a transaction. True: the node must send its findings again."""
        self._loop.check_leading()
        if beat.leadership_proof is not None and self._epoch_check is not None:
            self._epoch_check.take_proof(beat.leadership_proof)
        heard = engine.HeartbeatResult.NEEDS_EVENT
        if beat.findings is None:
            heard = engine.apply_heartbeat(self._state, node, beat.incarnation, self._now(), beat.ranks)
        if heard is not engine.HeartbeatResult.UNEVENTFUL:
            self.check_incarnation(node, beat.incarnation)
        if beat.directives_through:
            self.outbox.acknowledge(node, beat.directives_through)
        if heard is not engine.HeartbeatResult.UNEVENTFUL:
            self._check_offers(node, beat)
        findings = beat.findings
        waits = findings is not None and engine.can_defer_findings(self._state, node, findings, beat.ranks)
        comes = bool(self._state.unseen_nodes) and node in self._state.unseen_nodes
        if comes and (waits or heard is not engine.HeartbeatResult.NEEDS_EVENT):
            self._record_first_heartbeat(node, beat.incarnation)
        if heard is not engine.HeartbeatResult.NEEDS_EVENT:
            return heard is engine.HeartbeatResult.UNKNOWN
        urgency = Urgency.ROUTINE if waits else Urgency.URGENT
        try:
            taken = self._loop.enqueue(lambda tx, now: self._take_changed_heartbeat(node, beat, tx, now), node, urgency)
        except Unavailable:
            # The node counts as heard all the same.
            engine.apply_heartbeat(self._state, node, beat.incarnation, self._now())
            raise
        if not (comes and waits):
            return taken
        taken.add_done_callback(_ignore_result)  # the next leader asks for it again
        return False

    def _check_offers(self, node: str, beat: Heartbeat) -> None:
        """Raise NotFound if this controller's records are insufficient for a node whose first findings are due."""
        live = self._state.node_runtime.get(node)
        if live is None or live.has_full_findings:
            return
        if job := engine.job_to_rejoin(self._state, node, beat.ranks):
            raise NotFound(f"the launcher of job {job} on node {node} is not known here: register and join again")

    def _record_first_heartbeat(self, node: str, incarnation: int) -> None:
        """Record the first heartbeat of a node since this controller started.

        After a start the whole fleet sends one within a second, so they reach the core as one event, before
        registrations.
        """
        asked = bool(self._first_heard)
        self._first_heard[node] = incarnation
        if asked:
            return
        try:
            told = self._loop.enqueue(self._flush_first_heartbeats)
        except Unavailable:  # the node repeats it within a second
            self._first_heard.clear()
        else:
            told.add_done_callback(_ignore_result)

    def _flush_first_heartbeats(self, tx: Transaction, now: float) -> None:
        met, self._first_heard = self._first_heard, {}
        (node, incarnation), *others = met.items()
        tx.handle_ephemeral(
            ev.NodeSeen(node=node, incarnation=incarnation, others=tuple(others), trace=new_trace()), now
        )

    @staticmethod
    def _take_changed_heartbeat(node: str, beat: Heartbeat, tx: Transaction, now: float) -> bool:
        event = ev.HeartbeatChanged(
            node=node, incarnation=beat.incarnation, findings=beat.findings, ranks=beat.ranks, trace=new_trace()
        )
        tx.handle_ephemeral(event, now)
        return False

    # --- reports

    def take_reports(self, node: str, reports: Reports) -> asyncio.Future[int]:
        """Take reports, and return the number of the newest durable one."""
        self._charge_reports(node, len(reports.reports))
        bodies = [report.body for report in reports.reports]
        urgency = Urgency.ROUTINE if engine.can_defer_reports(self._state, node, bodies) else Urgency.URGENT
        return self._loop.enqueue(lambda tx, now: self._take_reports(node, reports, tx, now), node, urgency)

    def expedite(self, node: str) -> None:
        """Make the node's waiting reports urgent, because more have arrived."""
        self._loop.expedite(node)

    def _take_reports(self, node: str, reports: Reports, tx: Transaction, now: float) -> int:
        """Handle every new report, and return the newest number taken."""
        incarnation = reports.incarnation
        self.check_incarnation(node, incarnation)
        life, before = self._marks.get(node, (incarnation, 0))
        before = through = before if life == incarnation else 0
        taken = 0
        for report in reports.reports:
            if report.number > through:
                through = report.number
                if (node, incarnation, report.number) in self._poisoned:
                    continue
                taken += 1
                self._take_report(node, incarnation, report.number, report.body, tx, now)
        self.metrics.count_reports(taken, len(reports.reports) - taken)
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
            self.metrics.count_refused("agents/reports/one", error.code)
            log.warning("report %d (%s) refused: %s", number, type(body).__name__, error, extra={"node": node})

    # --- connections

    def take_disconnect(self, node: str, incarnation: int) -> None:
        """Record that the node closed its only connection."""
        event = ev.NodeDisconnected(node=node, incarnation=incarnation, trace=new_trace())
        try:
            told = self._loop.enqueue(lambda tx, now: tx.handle_ephemeral(event, now), node)
        except EverstepError as error:  # nobody is left to answer
            log.info("the end of a connection of node %s was not taken up: %s", node, error, extra={"node": node})
        else:
            told.add_done_callback(_ignore_result)


def _ignore_result(future: asyncio.Future[Any]) -> None:
    """Ignore a result that nobody waits for: a refusal (the controller stops) is not an error."""
    if not future.cancelled():
        future.exception()


def decode_register(body: bytes) -> Register:
    """Decode a Register. Raises VersionMismatch for an unknown protocol, else MalformedMessage."""
    try:
        return responses.decode(_REGISTER, body)
    except MalformedMessage:
        try:
            offer = responses.decode(_OFFER, body)
        except MalformedMessage:
            offer = _Offer(protocols=SUPPORTED_VERSIONS)
        negotiate(offer.protocols)
        raise
