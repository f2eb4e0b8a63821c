"""How the demonstration follows a fault through the controller's log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.operator import Event
from examples.demo.stage import RANKS, Stage
from examples.demo.story import FaultRecord
from examples.demo.view import View
from examples.demo.watch import Watch
from examples.demo.world import last_row


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Stage, "finish", lambda *_: None)
    nobody: Any = None
    return Stage(SimpleNamespace(), Watch(nobody, "demo", nobody), View(10, 0.0), nobody, 10)  # type: ignore[arg-type]


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


def test_demo_evicts_no_node_twice(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "node_of", lambda _, rank: SimpleNamespace(name={3: "n2", 2: "n4", 1: "n5"}[rank]))
    assert stage.node_to_evict(3, 2, 1).name == "n2"
    stage.faults.append(FaultRecord("node_killed", "SIGKILL to all of n4", "n4"))
    stage.faults.append(FaultRecord("xid_79", "XID 79", "n2", expected_eviction="n2"))
    assert stage.node_to_evict(3, 2, 1).name == "n4"


class Playing:
    """A job of generation 3 on a whole roster, as the controller tells it and as its nodes' step logs do."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.logged = {f"n{rank + 1}": 3 for rank in range(RANKS)}
        self.nodes = dict.fromkeys(self.logged, NodeState.HEALTHY)
        self.roster = list(self.logged)
        self.job = SimpleNamespace(state=JobState.RUNNING, generation=3, spares=1)
        self.resumed = RANKS
        stage.world.nodes = {
            name: SimpleNamespace(
                name=name, rank_pid=lambda number, name=name: 77 if self.logged[name] == number else None
            )
            for name in self.logged
        }

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
        lambda playing: playing.logged.update(n2=2),  # a replacement that has not made a step yet
        lambda playing: playing.logged.update(n2=4),  # the controller's view is behind
        lambda playing: playing.nodes.update(n4=NodeState.SUSPECT),
        lambda playing: playing.roster.pop(),
        lambda playing: setattr(playing, "resumed", RANKS - 1),
        lambda playing: setattr(playing.job, "spares", 0),
        lambda playing: setattr(playing.job, "state", JobState.PAUSED),
    ],
)
def test_demo_fault_waits_for_complete_stepping_roster(stage: Stage, spoil: Callable[[Playing], None]) -> None:
    playing = Playing(stage)
    assert playing.is_ready()
    assert stage.rank_of(stage.node_of(1)) == 77
    spoil(playing)
    assert not playing.is_ready()


def test_demo_reports_training_ending_before_last_fault(stage: Stage) -> None:
    playing = Playing(stage)
    playing.is_ready()
    stage.ready(spares=1)
    playing.job.state = JobState.FINISHED
    with pytest.raises(TimeoutError, match="give it more --steps"):
        stage.ready()


def test_last_log_row_skips_truncated_lines(tmp_path: Path) -> None:
    log = tmp_path / "n1-5.jsonl"
    assert last_row(log) is None
    log.write_text("")
    assert last_row(log) is None
    rows = [{"generation": 3, "step": step, "samples": [step] * 2000} for step in (1, 2)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"generation": 4, "st')
    assert last_row(log) is None, "the whole row lies before what is read"
    log.write_text(json.dumps({"generation": 3, "step": 1}) + '\n{"generation": 4, "st')
    assert last_row(log) == {"generation": 3, "step": 1}
