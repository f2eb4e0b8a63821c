"""Jobs that compete for nodes: each node runs one job, the job of higher priority comes first, and no job thrashes."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.ids import Version
from everstep.vocabulary import GenerationReason, JobState
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.seats.membership import next_seats, no_seat_reason
from tests.support.fleet.core_fleet import CoreFleet, generations, logged_sentences


def _fleet(nodes: int) -> CoreFleet:
    fleet = CoreFleet()
    fleet.register(*[f"n{at + 1}" for at in range(nodes)])
    return fleet


def _start(fleet: CoreFleet, job: str, *nodes: str, min_nodes: int = 1, max_nodes: int = 0, **spec: Any) -> None:
    fleet.join(*nodes, job=job, min_nodes=min_nodes, max_nodes=max_nodes or len(nodes), **spec)
    if fleet.job_state(job) is JobState.RUNNING:
        fleet.resume(job)


def _reason(fleet: CoreFleet, job: str, node: str) -> str:
    return no_seat_reason(fleet.state, fleet.job(job), node)


@pytest.mark.promise("job-priorities")
def test_node_runs_one_job_at_a_time() -> None:
    fleet = _fleet(2)
    _start(fleet, "one", "n1", "n2")
    _start(fleet, "two", "n1", "n2")
    assert fleet.job_state("two") is JobState.FORMING
    assert _reason(fleet, "two", "n1") == "it computes for job one"
    fleet.finish(job="one")
    fleet.advance(0.1, "n1", "n2")
    assert fleet.seats("two") == ["n1", "n2"]


def test_free_node_goes_to_job_of_higher_priority() -> None:
    fleet = _fleet(5)
    _start(fleet, "low", "n1", "n2", min_nodes=1, max_nodes=2)
    _start(fleet, "high", "n3", "n4", min_nodes=1, max_nodes=2, priority=5)
    fleet.leave("n4", job="high")
    fleet.leave("n2", job="low")
    fleet.join("n5", job="low")
    fleet.join("n5", job="high")
    assert "n5" not in fleet.seats("low")
    assert _reason(fleet, "low", "n5") == "job high comes first (priority 5 over 0)"
    fleet.resume("high")
    fleet.resume("low")
    fleet.advance(1.2, "n1", "n3", "n5")
    assert fleet.seats("high") == ["n3", "n5"]
    assert fleet.seats("low") == ["n1"]


def test_clean_spares_precede_repeat_offenders() -> None:
    fleet = CoreFleet()
    fleet.start(2, 3)
    for node, offences in (("n3", 2.0), ("n4", 0.0), ("n5", 1.0)):
        record = fleet.state.nodes[node]
        record.history.offence_score, record.history.offence_score_at = offences, fleet.now
    assert next_seats(fleet.state, fleet.job(), {"n1"}) == ["n4", "n2"]
    assert next_seats(fleet.state, fleet.job(), {"n1", "n4"}) == ["n5", "n2"]


def _crowded(**low: Any) -> CoreFleet:
    """`low` runs on four nodes and needs two; `high` wants two nodes, which have launchers of both jobs."""
    fleet = _fleet(4)
    _start(fleet, "low", "n1", "n2", "n3", "n4", **{"min_nodes": 2} | low)
    fleet.seal(30, job="low")
    fleet.progress(30, job="low")
    _start(fleet, "high", "n1", "n2", "n3", "n4", min_nodes=2, max_nodes=3, join_wait_s=0, priority=5)
    return fleet


def _wait(fleet: CoreFleet, seconds: float) -> None:
    fleet.advance(seconds, "n1", "n2", "n3", "n4")


@pytest.mark.promise("job-priorities")
def test_preemption_takes_needed_nodes_at_a_boundary() -> None:
    fleet = _crowded()
    _wait(fleet, 1.9)
    assert fleet.spec("low").number == 1, "preemption comes after a wait"
    _wait(fleet, 0.2)
    spec = fleet.spec("low")
    assert (spec.reason, spec.after_step is not None) == (GenerationReason.PRIORITY, True)
    assert fleet.seats("low") == ["n1", "n2"], "no more than it needs to run"
    assert "job high (priority 5) needs at least 2 nodes and takes n4, n3 of job low" in spec.sentence
    assert fleet.job_state("high") is JobState.FORMING, "its nodes still compute up to the boundary"
    fleet.resume("low", restored=Version(1, 40), step=41)
    _wait(fleet, 0.1)
    assert fleet.seats("high") == ["n3", "n4"]


def test_preemption_is_skipped_when_insufficient() -> None:
    fleet = _crowded(min_nodes=3)
    _wait(fleet, 20.0)
    assert fleet.seats("low") == ["n1", "n2", "n3", "n4"]
    assert _reason(fleet, "high", "n4") == "it computes for job low"


def test_preemption_needs_higher_priority() -> None:
    fleet = _fleet(4)
    _start(fleet, "one", "n1", "n2", "n3", "n4", min_nodes=1)
    _start(fleet, "two", "n1", "n2", "n3", "n4", min_nodes=2, join_wait_s=0)
    fleet.progress(30, job="one")
    _wait(fleet, 20.0)
    assert fleet.job_state("two") is JobState.FORMING


@pytest.mark.promise("job-priorities")
def test_preempted_job_does_not_take_nodes_back() -> None:
    fleet = _crowded()
    _wait(fleet, 2.1)
    fleet.resume("low", restored=Version(1, 40), step=41)
    _wait(fleet, 0.1)
    fleet.resume("high")
    for step in (60, 80, 100):
        fleet.progress(step, job="low")
        fleet.progress(step, job="high")
        _wait(fleet, 5.0)
    assert (fleet.seats("low"), fleet.seats("high")) == (["n1", "n2"], ["n3", "n4"])
    assert len(logged_sentences(fleet.effects, "job.preempts")) == 1


def test_short_node_absence_triggers_no_preemption() -> None:
    fleet = _fleet(5)
    _start(fleet, "low", "n1", "n2", "n3", min_nodes=1)
    fleet.progress(30, job="low")
    _start(fleet, "high", "n4", "n5", min_nodes=2, max_nodes=2, priority=5)
    fleet.join("n3", job="high")
    fleet.leave("n5", job="high")
    assert fleet.job_state("high") is JobState.PAUSED
    fleet.advance(1.0, "n1", "n2", "n3", "n4", "n5")
    fleet.join("n5", job="high")
    assert fleet.seats("high") == ["n4", "n5"]
    fleet.resume("high")
    fleet.advance(10.0, "n1", "n2", "n3", "n4", "n5")
    assert fleet.seats("low") == ["n1", "n2", "n3"]


def test_preemption_of_one_job_is_rate_limited() -> None:
    fleet = _crowded(min_nodes=1)
    _wait(fleet, 2.1)
    fleet.resume("low", restored=Version(1, 40), step=41)
    _wait(fleet, 0.1)
    fleet.resume("high")
    gave = fleet.now
    _start(fleet, "higher", "n2", "n1", min_nodes=1, max_nodes=1, join_wait_s=0, priority=9)
    fleet.progress(45, job="low")
    while "higher" not in {spec.job for spec in generations(fleet.effects)} and fleet.now < gave + 30.0:
        _wait(fleet, 0.5)
        fleet.progress(45 + int(10 * (fleet.now - gave)), job="low")
        if fleet.job("low").outgoing_generation is not None:
            fleet.resume("low", restored=Version(2, 50), step=51)
    assert fleet.now - gave >= fleet.policy.jobs.preempt_after_s - 0.3
    assert fleet.seats("higher") == ["n2"]


def test_node_without_seat_has_a_reason() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1, max_nodes=2)
    assert _reason(fleet, "job", "n1") == ""
    assert _reason(fleet, "job", "n3") == "it is a spare: the job has its 2 nodes"
    assert _reason(fleet, "job", "n9") == "no launcher on it has joined job"
    fleet.order(OperatorAction.HOLD, node="n3")
    assert "ada ordered to hold n3" in _reason(fleet, "job", "n3")
    fleet.disconnect("n3")
    assert _reason(fleet, "job", "n3") == "its agent's connection is closed"


def test_node_waiting_for_growth_has_a_reason() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.join("n2")
    assert _reason(fleet, "job", "n2") == "it gets a seat at the next boundary"
