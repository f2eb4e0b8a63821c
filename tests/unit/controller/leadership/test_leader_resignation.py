"""What a leader makes of nodes at other doors: whom it heard itself, and that nothing is given up untold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from everstep_controller.config import ControllerSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import HeartbeatState, NodeRuntime
from everstep_controller.leadership.leader_checks import StandbyMonitor
from everstep_controller.leadership.lease import Resignation, StandbyReport

from everstep.clock import ManualClock
from everstep.errors import Unavailable

AT_THE_OTHER_DOOR = StandbyReport(contacts={"b": 19})


class Loop:
    """Stands for the fleet's loop: two nodes, and an audit log that may be away."""

    def __init__(self, clock: ManualClock) -> None:
        self.now = clock.monotonic
        self.state = SimpleNamespace(
            node_runtime={node: NodeRuntime(heartbeats=HeartbeatState()) for node in ("n1", "n2")}
        )
        self.away = False
        self.kinds: list[str] = []

    async def submit(self, stimulus: Any) -> None:
        if self.away:
            raise Unavailable("the database is away")
        stimulus(SimpleNamespace(add_audit_entry=lambda entry: self.kinds.append(entry.kind)), 0.0)

    def hear(self, node: str) -> None:
        self.state.node_runtime[node].heartbeats.last_seen_at = self.now()


def watch(loop: Loop, clock: ManualClock, **settings: Any) -> StandbyMonitor:
    given = ControllerSettings(secret_file="unused", policy=CorePolicy.lab_preset(), **settings)
    return StandbyMonitor(given, loop, clock)  # type: ignore[arg-type]


def looks(elsewhere: StandbyMonitor, clock: ManualClock, times: int) -> Resignation | None:
    """What the last of so many looks, a second apart, came to."""

    async def last() -> Resignation | None:
        found = None
        for _ in range(times):
            clock.advance(1.0)
            found = await elsewhere.check(AT_THE_OTHER_DOOR)
        return found

    return asyncio.run(last())


def test_node_counts_as_seen_for_seconds_after_its_last_message() -> None:
    clock = ManualClock(monotonic=1000.0)
    loop = Loop(clock)
    elsewhere = watch(loop, clock)
    for node in ("n1", "n2"):
        loop.hear(node)
        clock.advance(1.0)
    loop.hear("n1")
    assert looks(elsewhere, clock, 19) is None  # nineteen against two for the first four looks, and then against fewer
    assert (found := looks(elsewhere, clock, 1)) is not None
    assert found.successor == "b"
    assert loop.kinds == ["controller.resigned"]


def test_resignation_waits_until_its_event_is_writable() -> None:
    clock = ManualClock(monotonic=1000.0)
    loop = Loop(clock)
    elsewhere = watch(loop, clock)
    loop.away = True
    assert looks(elsewhere, clock, 30) is None
    loop.away = False
    assert looks(elsewhere, clock, 1) is not None
    assert loop.kinds == ["controller.resigned"]


def test_resignation_can_be_disabled() -> None:
    clock = ManualClock(monotonic=1000.0)
    loop = Loop(clock)
    assert looks(watch(loop, clock, resign_after_s=0.0), clock, 1000) is None
    assert loop.kinds == []
