"""The first beats after a controller began come before the core together, however often each node says them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from everstep_controller.core.events import NodeSeen
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.push import Outbox
from everstep_controller.server.agent_service import AgentService
from everstep_controller.server.connections import DescriptorBudget

from everstep.clock import ManualClock
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Heartbeat
from tests.support.core_fleet import CoreFleet


class Waiting:
    """A loop that has not come to anything yet."""

    def __init__(self, fleet: CoreFleet) -> None:
        self.state, self.outbox, self.stimuli = fleet.state, Outbox(1), list[Any]()
        self.now = lambda: fleet.now
        self.read_models = ReadModels()

    def check_leading(self) -> None: ...

    def expedite(self, source: str) -> None: ...

    def enqueue(self, stimulus: Any, *_: Any) -> Any:
        self.stimuli.append(stimulus)
        return SimpleNamespace(add_done_callback=lambda call: None)


def desk_before(loop: Waiting) -> AgentService:
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
    loop, heard = Waiting(fleet), list[NodeSeen]()
    desk = desk_before(loop)
    tx: Any = SimpleNamespace(handle_ephemeral=lambda event, now: heard.append(event))
    for node, seq in (("n1", 1), ("n1", 2), ("n2", 1), ("n1", 3)):
        desk.take_heartbeat(node, Heartbeat(incarnation=1, seq=seq, sent_at=0.0))
    for stimulus in loop.stimuli:
        stimulus(tx, fleet.now)
    assert [(event.node, [other for other, _ in event.others]) for event in heard] == [("n1", ["n2"])]


def test_only_routine_first_heartbeat_is_answered_early() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    grave = Finding(kind=FindingKind.GPU_XID, subject="0", severity=Severity.CRITICAL, message="XID 79", xid=79)

    def answered_at_once(node: str, *findings: Finding) -> bool:
        picture = Heartbeat(incarnation=1, seq=9, sent_at=0.0, findings=findings)
        return isinstance(desk_before(Waiting(fleet)).take_heartbeat(node, picture), bool)

    assert not answered_at_once("n1")
    fleet.restart()
    assert not answered_at_once("n1", grave)
    assert answered_at_once("n2")
