"""How the demonstration follows a fault through the controller's log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire.v1.operator import Event
from examples.demo.stage import Stage
from examples.demo.story import FaultRecord
from examples.demo.view import View
from examples.demo.watch import Watch


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(Stage, "finish", lambda *_: None)
    nobody: Any = None
    return Stage(SimpleNamespace(), Watch(nobody, "demo", nobody), View(10, 0.0), nobody, 10)  # type: ignore[arg-type]


def test_a_lost_node_is_found_with_the_first_word_about_it_and_told_by_the_trace_that_answers_it(stage: Stage) -> None:
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


def test_a_fault_is_found_when_its_node_saw_it_where_the_event_says_when(stage: Stage) -> None:
    stage.watch.events += [
        Event(id=1, at=10.4, kind="finding", sentence="XID 79", node="n1", detail={"seen_at": "10.1"}),
        Event(id=2, at=10.4, kind="generation", sentence="without n1", job="demo", generation=5, trace="t"),
    ]
    record = FaultRecord("xid_79", "XID 79", "n1", injected_at=10.0)
    stage.follow(record, {"finding"}, "n1")
    assert record.found_at == 10.1


def test_a_node_that_was_evicted_and_came_back_is_not_the_one_to_evict_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "node_of", lambda _, rank: SimpleNamespace(name={3: "n2", 2: "n4", 1: "n5"}[rank]))
    assert stage.node_to_evict(3, 2, 1).name == "n2"
    stage.faults.append(FaultRecord("node_killed", "SIGKILL to all of n4", "n4"))
    stage.faults.append(FaultRecord("xid_79", "XID 79", "n2", expected_eviction="n2"))
    assert stage.node_to_evict(3, 2, 1).name == "n4"
