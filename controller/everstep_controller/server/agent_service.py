"""Handle the messages of agents' sessions. A heartbeat without news costs no transaction and no task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from everstep.clock import Clock
from everstep.errors import MalformedMessage, NotFound, Unavailable
from everstep.wire.framing import SUPPORTED_VERSIONS, negotiate
from everstep.wire.v1.agent import Heartbeat, Register, Registered, Reports
from everstep_controller.core import engine
from everstep_controller.leadership.leader_checks import EpochCheck
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.agent_requests import AgentRequests, ignore_result
from everstep_controller.runtime.intake import Urgency
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.push import EncodedDirective
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


@dataclass(eq=False, kw_only=True)
class AgentService:
    """Handles agents' messages. Every method raises the error that the agent should receive."""

    loop: FleetLoop
    requests: AgentRequests
    metrics: Metrics
    clock: Clock
    descriptors: DescriptorBudget
    defer: Defer  # runs work in a later turn of the event loop, in order
    name: str  # name of this controller, as told to agents
    heartbeat_interval_s: float
    # Called with a node and its number of reports; raises RateLimited for too many.
    charge_reports: Callable[[str, int], None] = lambda node, count: None
    epoch_check: EpochCheck | None = None  # asks agents about other leaders; None if there can be none

    def __post_init__(self) -> None:
        self.outbox = self.loop.outbox
        self.wall: Callable[[], float] = self.clock.wall
        self._state = self.loop.state
        self._gpu_gauges = self.loop.read_models.gpu_gauges
        self._now = self.loop.now
        self.log_line = self.requests.log_line

    def should_keep_open(self, node: str) -> bool:
        """Return whether the node's session stays open between heartbeats; see ``HeartbeatAnswer``."""
        budget = self.descriptors
        if budget.open < budget.scarce_from:
            return True
        live = self._state.node_runtime.get(node)
        has_active_job = live is not None and bool(live.open_jobs)  # it may need directives at any moment
        return has_active_job and budget.open < budget.exhausted_from

    def unconfirmed_epoch(self) -> int:
        """Return the epoch to check; see ``HeartbeatAnswer``."""
        return self.epoch_check.unconfirmed_epoch() if self.epoch_check is not None else 0

    # --- registration

    def register(self, node: str, register: Register) -> asyncio.Future[int]:
        """Register an incarnation. Return the number of its first directive, for ``registered``."""
        if register.node != node:
            raise MalformedMessage(f"the body is about node {register.node}, the path about node {node}")
        negotiate(register.protocols)
        return self.requests.register(register)

    def registered(self, register: Register, first_directive: int) -> Registered:
        """Return the answer to a registration."""
        return Registered(
            protocol=negotiate(register.protocols),
            heartbeat_interval_s=self.heartbeat_interval_s,
            next_directive=first_directive,
            controller=self.name,
            server_at=self.wall(),
            keep_open=self.should_keep_open(register.node),
        )

    # --- heartbeats

    def take_heartbeat(self, node: str, beat: Heartbeat) -> asyncio.Future[bool] | bool:
        """Take a heartbeat, now or in a transaction. True: the node must send its findings again."""
        self.loop.check_leading()
        if beat.leadership_proof is not None and self.epoch_check is not None:
            self.epoch_check.take_proof(beat.leadership_proof)
        result = engine.HeartbeatResult.NEEDS_EVENT
        if beat.findings is None:
            result = engine.apply_heartbeat(self._state, node, beat.incarnation, self._now(), beat.ranks)
        if result is not engine.HeartbeatResult.UNEVENTFUL:
            self.requests.check_incarnation(node, beat.incarnation)
        if beat.gpu_gauges and node in self._state.nodes:
            self._gpu_gauges.record(node, beat.gpu_gauges, self.wall())
        if beat.directives_through:
            self.outbox.acknowledge(node, beat.directives_through)
        if result is not engine.HeartbeatResult.UNEVENTFUL:
            self._check_offers(node, beat)
        findings = beat.findings
        is_routine = findings is not None and engine.can_defer_findings(self._state, node, findings, beat.ranks)
        is_first = bool(self._state.rejoin_window.unseen_nodes) and node in self._state.rejoin_window.unseen_nodes
        if is_first and (is_routine or result is not engine.HeartbeatResult.NEEDS_EVENT):
            self.requests.add_first_heartbeat(node, beat.incarnation)
        if result is not engine.HeartbeatResult.NEEDS_EVENT:
            return result is engine.HeartbeatResult.UNKNOWN
        try:
            taken = self.requests.change_heartbeat(node, beat, Urgency.ROUTINE if is_routine else Urgency.URGENT)
        except Unavailable:
            # The node has been heard from all the same.
            engine.apply_heartbeat(self._state, node, beat.incarnation, self._now())
            raise
        if not (is_first and is_routine):
            return taken
        taken.add_done_callback(ignore_result)  # the next leader asks for the findings again
        return False

    def _check_offers(self, node: str, beat: Heartbeat) -> None:
        """Raise NotFound if this controller's records are insufficient for a node whose first findings are due."""
        live = self._state.node_runtime.get(node)
        if live is None or live.has_full_findings:
            return
        if job := engine.job_to_rejoin(self._state, node, beat.ranks):
            raise NotFound(
                f"the launcher of job {job} on node {node} is unknown to this controller: register and join again"
            )

    # --- reports

    def take_reports(self, node: str, reports: Reports) -> asyncio.Future[int]:
        """Take reports, and return the number of the newest durable one."""
        self.charge_reports(node, len(reports.reports))
        return self.requests.take_reports(node, reports)


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
