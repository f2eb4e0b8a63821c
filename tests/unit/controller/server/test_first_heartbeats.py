"""The first heartbeats after a controller's start reach the core together and once each."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, EverstepError, RateLimited, TooLarge, Unavailable
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Heartbeat
from everstep_controller.core.events import NodeSeen
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.push import Outbox
from everstep_controller.server import responses
from everstep_controller.server.agent_service import AgentService
from everstep_controller.server.connections import DescriptorBudget
from everstep_controller.server.responses import TITLES, Problem, problem, problem_of
from tests.support.fleet.core_fleet import CoreFleet


class Waiting:
    """A loop that has not come to anything yet."""

    def __init__(self, fleet: CoreFleet) -> None:
        self.state, self.outbox, self.stimuli = fleet.state, Outbox(1), list[Any]()
        self.read_models = ReadModels()
        self._fleet = fleet

    def now(self) -> float:
        return self._fleet.now

    def check_leading(self) -> None: ...

    def expedite(self, source: str) -> None: ...

    def enqueue(self, stimulus: Any, *_: Any) -> Any:
        self.stimuli.append(stimulus)
        return SimpleNamespace(add_done_callback=lambda call: None)


def service_before(loop: Waiting) -> AgentService:
    return AgentService(
        loop=loop,  # type: ignore[arg-type]
        requests=AgentRequests(loop, Metrics(), {}, frozenset()),  # type: ignore[arg-type]
        metrics=Metrics(),
        clock=ManualClock(wall=loop.now()),
        descriptors=DescriptorBudget(100),
        defer=lambda work: work(),
        name="c1",
        heartbeat_interval_s=1.0,
    )


def test_repeated_first_heartbeat_is_handled_once() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.restart()
    loop, handled = Waiting(fleet), list[NodeSeen]()
    service = service_before(loop)
    tx: Any = SimpleNamespace(handle_ephemeral=lambda event, now: handled.append(event))
    for node, seq in (("n1", 1), ("n1", 2), ("n2", 1), ("n1", 3)):
        service.take_heartbeat(node, Heartbeat(incarnation=1, seq=seq, sent_at=0.0))
    for stimulus in loop.stimuli:
        stimulus(tx, fleet.now)
    assert [(event.node, [other for other, _ in event.others]) for event in handled] == [("n1", ["n2"])]


def test_only_routine_first_heartbeat_is_answered_early() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    grave = Finding(kind=FindingKind.GPU_XID, subject="0", severity=Severity.CRITICAL, message="XID 79", xid=79)

    def answered_at_once(node: str, *findings: Finding) -> bool:
        heartbeat = Heartbeat(incarnation=1, seq=9, sent_at=0.0, findings=findings)
        return isinstance(service_before(Waiting(fleet)).take_heartbeat(node, heartbeat), bool)

    assert not answered_at_once("n1")
    fleet.restart()
    assert not answered_at_once("n1", grave)
    assert answered_at_once("n2")


def kinds(kind: type[EverstepError]) -> Iterator[type[EverstepError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def test_every_error_has_title_and_error_status() -> None:
    for kind in kinds(EverstepError):
        assert kind.code in TITLES, kind.__name__
        assert 400 <= kind.status < 600, kind.__name__


def test_problem_contains_type_code_and_detail() -> None:
    problem = msgspec.json.decode(problem_of(AuthenticationError("mint it again")), type=Problem)
    assert (problem.type, problem.status, problem.code) == (
        "urn:everstep:error:unauthenticated",
        401,
        "unauthenticated",
    )
    assert problem.detail == "mint it again"
    assert problem.title == TITLES["unauthenticated"]


def test_unknown_code_is_its_own_title() -> None:
    assert msgspec.json.decode(problem(418, "teapot", "x"), type=Problem).title == "teapot"


def test_retry_after_is_rounded_up_to_seconds() -> None:
    assert responses.error_headers(Unavailable("away", 0.2)) == [(b"retry-after", b"1")]
    assert responses.error_headers(RateLimited("too many", 2.1)) == [(b"retry-after", b"3")]
    assert responses.error_headers(AuthenticationError("who?")) == [(b"www-authenticate", b"Bearer")]
    assert responses.error_headers(TooLarge("so much")) == [(b"connection", b"close")]
