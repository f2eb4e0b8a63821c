"""A leader resigns when a standby reaches more nodes, and records the event first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from everstep.clock import ManualClock
from everstep.errors import Unavailable
from everstep_controller.core.state import HeartbeatState, NodeRuntime
from everstep_controller.leadership.leader_checks import StandbyMonitor
from everstep_controller.leadership.lease import Resignation
from everstep_controller.store.rows import StandbyReport
from tests.support.fleet.controllers import make_settings

STANDBY_REPORT = StandbyReport(contacts={"b": 19})


class Loop:
    """A stand-in for the fleet loop, with two nodes and an event log that may be unavailable."""

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
        stimulus(SimpleNamespace(add_event_log_entry=lambda entry: self.kinds.append(entry.kind)), 0.0)

    def hear(self, node: str) -> None:
        self.state.node_runtime[node].heartbeats.last_seen_at = self.now()


def watch(loop: Loop, clock: ManualClock, **settings: Any) -> StandbyMonitor:
    return StandbyMonitor(make_settings(**settings), loop, clock)  # type: ignore[arg-type]


def check_times(monitor: StandbyMonitor, clock: ManualClock, times: int) -> Resignation | None:
    """The result of the last of `times` checks, one second apart."""

    async def last() -> Resignation | None:
        found = None
        for _ in range(times):
            clock.advance(1.0)
            found = await monitor.check(STANDBY_REPORT)
        return found

    return asyncio.run(last())


def test_resignation_waits_until_its_event_is_writable() -> None:
    clock = ManualClock(monotonic=1000.0)
    loop = Loop(clock)
    monitor = watch(loop, clock)
    loop.away = True
    assert check_times(monitor, clock, 30) is None
    loop.away = False
    assert check_times(monitor, clock, 1) is not None
    assert loop.kinds == ["controller.resigned"]


def test_resignation_can_be_disabled() -> None:
    clock = ManualClock(monotonic=1000.0)
    loop = Loop(clock)
    assert check_times(watch(loop, clock, resign_after_s=0.0), clock, 1000) is None
    assert loop.kinds == []
