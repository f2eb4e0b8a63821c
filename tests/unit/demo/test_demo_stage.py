"""The demonstration follows a fault through the controller's log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.operator import Event
from examples.demo.stage import RANKS, Stage
from examples.demo.story import FaultRecord
from examples.demo.view import View
from examples.demo.watch import Watch


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Stage, "finish", lambda *_: None)
    unused: Any = None
    return Stage(SimpleNamespace(), Watch(unused, "demo", unused), View(10, 0.0), unused, 10)  # type: ignore[arg-type]


def test_demo_fault_is_followed_by_event_and_trace(stage: Stage) -> None:
    stage.watch.events += [
        Event(id=1, at=9.0, kind="node.disconnected", sentence="before the fault", node="n2", trace="early"),
        Event(id=2, at=10.2, kind="node.disconnected", sentence="another node", node="n3", trace="other"),
        Event(id=3, at=10.3, kind="node.disconnected", sentence="n2 closed its connection", node="n2", trace="seen"),
        Event(id=4, at=10.5, kind="generation", sentence="n5 for n2", job="demo", generation=4, trace="answered"),
    ]
    record = FaultRecord("node_killed", "SIGKILL to all of n2", "n2", injected_at=10.0)
    stage.follow(record, {"node.disconnected", "generation"}, "n2")
    assert (record.found_at, record.decided_at) == (10.3, 10.5)
    assert (record.generation, record.trace, record.sentence) == (4, "answered", "n5 for n2")


def test_demo_fault_detection_time_is_the_node_time(stage: Stage) -> None:
    stage.watch.events += [
        Event(id=1, at=10.4, kind="finding", sentence="XID 79", node="n1", detail={"seen_at": "10.1"}),
        Event(id=2, at=10.4, kind="generation", sentence="without n1", job="demo", generation=5, trace="t"),
    ]
    record = FaultRecord("xid_79", "XID 79", "n1", injected_at=10.0)
    stage.follow(record, {"finding"}, "n1")
    assert record.found_at == 10.1


class PlayedJob:
    """A job of generation 3 on a whole roster, as the controller and the nodes' step logs show it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.logged = {f"n{rank + 1}": 3 for rank in range(RANKS)}
        self.nodes = dict.fromkeys(self.logged, NodeState.HEALTHY)
        self.roster = list(self.logged)
        self.job = SimpleNamespace(state=JobState.RUNNING, generation=3, spares=1)
        self.resumed = RANKS
        nodes: dict[str, Any] = {
            name: SimpleNamespace(name=name, rank_pid=partial(self._rank_pid, name)) for name in self.logged
        }
        stage.world.nodes = nodes

    def _rank_pid(self, node: str, number: int) -> int | None:
        return 77 if self.logged[node] == number else None

    def is_ready(self, spares: int = 1) -> bool:
        recovery = SimpleNamespace(generation=3, world_size=RANKS, resumed_ranks=self.resumed)
        roster = [SimpleNamespace(node=name, rank=rank) for rank, name in enumerate(self.roster)]
        watch: Any = self.stage.watch
        watch.job = SimpleNamespace(summary=self.job, roster=roster, recoveries=[recovery])
        watch.nodes = [SimpleNamespace(node=name, state=state) for name, state in self.nodes.items()]
        return self.stage.is_ready(spares)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda played: played.logged.update(n2=2),  # a replacement without a finished step
        lambda played: played.logged.update(n2=4),  # the controller lags behind
        lambda played: played.nodes.update(n4=NodeState.SUSPECT),
        lambda played: played.roster.pop(),
        lambda played: setattr(played, "resumed", RANKS - 1),
        lambda played: setattr(played.job, "spares", 0),
        lambda played: setattr(played.job, "state", JobState.PAUSED),
    ],
)
def test_demo_fault_waits_for_complete_stepping_roster(stage: Stage, spoil: Callable[[PlayedJob], None]) -> None:
    played = PlayedJob(stage)
    assert played.is_ready()
    assert stage.rank_of(stage.node_of(1)) == 77
    spoil(played)
    assert not played.is_ready()
