"""Mutants of controllers: reports, directives and takeovers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from everstep.wire.v1.agent import FrameKind, Register
from everstep_agent.uplink.session import ControllerSession, UplinkState
from everstep_controller.core import startup
from everstep_controller.core.jobs import lifecycle
from everstep_controller.core.liveness import registration
from everstep_controller.leadership import lease
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.server import session
from tests.sim.mutants.mutant import Mutant, do_nothing, return_false
from tests.sim.mutants.patching import edited_method, replaced_function, replaced_method


@contextmanager
def _accept_earlier_incarnations() -> Iterator[None]:
    """Keep sessions that were replaced, and accept reports of any incarnation of the agent."""
    with (
        replaced_function(registration.check_incarnation, do_nothing),
        replaced_method(AgentRequests, "check_incarnation", do_nothing),
        replaced_method(session.AgentSession, "dismiss", do_nothing),
    ):
        yield


def _send_before_write() -> AbstractContextManager[None]:
    """Send directives as they are decided, before they are written."""
    real = Transaction._send

    def send(self: Transaction, node: str, body: Any) -> None:
        real(self, node, body)
        self.outbox.deliver([self.outgoing[-1]])

    return replaced_method(Transaction, "_send", send)


def _lose_waiting_directives() -> AbstractContextManager[None]:
    """Drop the directives that wait for an agent when it connects again."""
    real = Outbox.attach

    def attach(self: Outbox, node: str, receiver: Any) -> tuple[Any, ...]:
        for directive in real(self, node, receiver):
            self.acknowledge(node, directive.seq)
        return ()

    return replaced_method(Outbox, "attach", attach)


def _drop_sent_reports() -> AbstractContextManager[None]:
    """Let an agent drop its sent reports on the next connection, acknowledged or not."""
    real = ControllerSession.__init__

    def begin(self: ControllerSession, state: UplinkState, *arguments: Any, **options: Any) -> None:
        state.spool.acknowledge(state.spool.sent_through)
        real(self, state, *arguments, **options)

    return replaced_method(ControllerSession, "__init__", begin)


def _never_request_answers() -> AbstractContextManager[None]:
    """Never request an answer after the first heartbeat, so that an agent stays with a controller that is dead."""

    def choose_kind(self: ControllerSession, message: Any, now: float) -> FrameKind:
        if isinstance(message, Register):
            return FrameKind.REGISTER
        return FrameKind.HEARTBEAT if self._answer_due_at == -math.inf else FrameKind.ONE_WAY_HEARTBEAT

    return replaced_method(ControllerSession, "_choose_heartbeat_kind", choose_kind)


MESSAGE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "reports are acknowledged before they are written",
        lambda: replaced_method(Transaction, "acknowledge_reports", do_nothing),
    ),
    Mutant("late reports on a replaced connection count", _accept_earlier_incarnations, seeds=(32,)),
    Mutant(
        "a repeated report is taken again",
        lambda: edited_method(AgentRequests, "_take_reports", "report.number > through", "True"),
    ),
    Mutant("directives are sent before they are written", _send_before_write),
    Mutant("waiting directives are lost", _lose_waiting_directives, seeds=(93,)),
    Mutant("reports of an earlier session count as acknowledged", _drop_sent_reports, seeds=(1,)),
    Mutant("an agent never requests an answer", _never_request_answers, seeds=(42,)),
)

TAKEOVER_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a new controller forgets its deadlines",
        lambda: replaced_function(startup.handle_controller_started, do_nothing),
    ),
    Mutant(
        "a leader that no node reaches stays", lambda: replaced_function(lease.is_cut_off, return_false), seeds=(4, 34)
    ),
    Mutant("a resumed generation is not noticed", lambda: replaced_function(lifecycle.handle_resumed, do_nothing)),
)
