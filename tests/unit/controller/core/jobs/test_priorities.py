"""Jobs that want the same node: one job at a time on each, the more important one first, and nobody thrashes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.jobs import membership
from everstep_controller.core.jobs.membership import next_seats, no_seat_reason
from everstep_controller.read_models.fleet_views import ineligible_nodes

from everstep.ids import Version
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet, audits, generations


def _fleet(nodes: int) -> CoreFleet:
    fleet = CoreFleet()
    fleet.register(*[f"n{at + 1}" for at in range(nodes)])
    return fleet


def _start(fleet: CoreFleet, job: str, *nodes: str, **shape: object) -> None:
    fleet.join(*nodes, job=job, **{"min_nodes": 1, "max_nodes": len(nodes), **shape})
    if fleet.job_state(job) is JobState.RUNNING:
        fleet.resume(job)


def _why(fleet: CoreFleet, job: str, node: str) -> str:
    return no_seat_reason(fleet.state, fleet.job(job), node)


# --- one at a time -----------------------------------------------------------------------------------------------


@pytest.mark.promise("job-priorities")
def test_node_runs_one_job_at_a_time() -> None:
    fleet = _fleet(2)
    _start(fleet, "one", "n1", "n2")
    _start(fleet, "two", "n1", "n2")
    assert fleet.job_state("two") is JobState.FORMING
    assert _why(fleet, "two", "n1") == "it computes for job one"
    fleet.finish(job="one")
    fleet.advance(0.1, "n1", "n2")
    assert fleet.seats("two") == ["n1", "n2"]


def test_node_released_by_one_job_joins_another() -> None:
    fleet = _fleet(3)
    _start(fleet, "one", "n1", "n2")
    _start(fleet, "two", "n3", "n2", min_nodes=1)
    fleet.advance(31.0, "n1", "n2", "n3")
    assert fleet.seats("two") == ["n3"]
    fleet.resume("two")
    fleet.leave("n2", job="one")
    fleet.advance(1.2, "n1", "n2", "n3")
    assert fleet.seats("two") == ["n3", "n2"]


# --- spares ------------------------------------------------------------------------------------------------------


def test_free_node_goes_to_job_of_higher_priority() -> None:
    fleet = _fleet(5)
    _start(fleet, "low", "n1", "n2", min_nodes=1, max_nodes=2)
    _start(fleet, "high", "n3", "n4", min_nodes=1, max_nodes=2, priority=5)
    fleet.leave("n4", job="high")
    fleet.leave("n2", job="low")
    fleet.join("n5", job="low")
    fleet.join("n5", job="high")
    assert "n5" not in fleet.seats("low")
    assert _why(fleet, "low", "n5") == "job high comes first (priority 5 over 0)"
    fleet.resume("high")
    fleet.resume("low")
    fleet.advance(1.2, "n1", "n3", "n5")
    assert fleet.seats("high") == ["n3", "n5"]
    assert fleet.seats("low") == ["n1"]


def test_runnable_higher_priority_jobs_reserve_their_nodes() -> None:
    fleet = _fleet(5)
    _start(fleet, "forming", "n1", "n2", min_nodes=2, max_nodes=3, join_wait_s=1e6, priority=3)
    _start(fleet, "paused", "n3", "n4", min_nodes=2, priority=2)
    _start(fleet, "low", "n1", "n2", "n3", "n4", "n5", max_nodes=6, join_wait_s=1e6)
    fleet.job("paused").status.state = JobState.PAUSED
    assert next_seats(fleet.state, fleet.job("low")) == ["n5"]


def test_complete_higher_priority_job_reserves_no_node() -> None:
    fleet = _fleet(3)
    _start(fleet, "high", "n1", max_nodes=1, priority=5)
    _start(fleet, "low", "n2", max_nodes=1)
    fleet.join("n3", job="high")
    fleet.join("n3", job="low")
    fleet.leave("n2", job="low")
    fleet.advance(0.1, "n1", "n3")
    assert fleet.seats("low") == ["n3"]


def test_clean_spares_precede_repeat_offenders() -> None:
    fleet = CoreFleet()
    fleet.start(2, 3)
    for node, offences in (("n3", 2.0), ("n4", 0.0), ("n5", 1.0)):
        record = fleet.state.nodes[node]
        record.history.offence_score, record.history.offence_score_at = offences, fleet.now
    assert next_seats(fleet.state, fleet.job(), {"n1"}) == ["n4", "n2"]
    assert next_seats(fleet.state, fleet.job(), {"n1", "n4"}) == ["n5", "n2"]


def test_old_offence_weighs_less_than_recent_one() -> None:
    fleet = CoreFleet()
    fleet.start(2, 2)
    for node, age in (("n3", 0.0), ("n4", 3.0)):
        record = fleet.state.nodes[node]
        record.history.offence_score, record.history.offence_score_at = (
            1.0,
            fleet.now - age * fleet.policy.offender_half_life_s,
        )
    assert next_seats(fleet.state, fleet.job(), {"n1"}) == ["n4", "n2"]


def test_contended_node_goes_down_the_priority_order() -> None:
    """Each job is asked once: twenty in a line would otherwise be asked a million times."""
    fleet = _fleet(21)
    for number in range(20):
        _start(fleet, f"job{number}", f"n{number + 1}", "n21", min_nodes=1, max_nodes=2, priority=number)
    assert [job for job in fleet.state.jobs if "n21" in next_seats(fleet.state, fleet.job(job))] == ["job0"]
    fleet.leave("n21", job="job0")
    assert _why(fleet, "job18", "n21") == "job job19 comes first (priority 19 over 18)"
    fleet.advance(1.2, *fleet.state.nodes)
    assert "n21" in fleet.seats("job19")


# --- taking ------------------------------------------------------------------------------------------------------


def _crowded(**low: int) -> CoreFleet:
    """``low`` runs on four nodes and needs two; ``high`` wants two nodes, which offer themselves to both."""
    fleet = _fleet(4)
    _start(fleet, "low", "n1", "n2", "n3", "n4", **{"min_nodes": 2, **low})
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
    assert fleet.spec("low").number == 1, "it waits first"
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
    assert _why(fleet, "high", "n4") == "it computes for job low"


def test_preemption_falls_back_to_another_job() -> None:
    """``low`` can go on without n1 only on n2, which ``high`` counts on as well; ``middle`` can spare n3."""
    fleet = _fleet(4)
    _start(fleet, "low", "n1", "n2", max_nodes=1)
    _start(fleet, "middle", "n3", "n4", max_nodes=2, priority=1)
    for job in ("low", "middle"):
        fleet.seal(30, job=job)
        fleet.progress(30, job=job)
    _start(fleet, "high", "n1", "n2", "n3", min_nodes=2, max_nodes=2, join_wait_s=0, priority=5)
    _wait(fleet, 2.1)
    assert audits(fleet.effects, "job.preempts")[0].endswith(
        "takes n3 of job middle (priority 1), which stays above its minimum"
    )


def test_preemption_takes_a_block_from_one_rack() -> None:
    """``low`` can spare two nodes. One of rack b and one of rack a would make no block."""
    fleet = CoreFleet()
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "c")):
        fleet.register(node, domain=Domain(rack=rack))
    _start(fleet, "low", "n1", "n2", "n3", "n4", min_nodes=2)
    fleet.seal(30, job="low")
    fleet.progress(30, job="low")
    shape = {"min_nodes": 2, "max_nodes": 2, "block_nodes": 2, "block_within": "rack"}
    _start(fleet, "high", "n1", "n2", "n3", "n4", **shape, join_wait_s=0, priority=5)
    _wait(fleet, 2.1)
    assert fleet.seats("low") == ["n3", "n4"]


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
    assert len(audits(fleet.effects, "job.preempts")) == 1


def test_preempted_nodes_stay_released_after_missed_boundary() -> None:
    fleet = _crowded()
    _wait(fleet, 2.1)
    fleet.lose_rank(0, job="low")
    assert fleet.seats("low") == ["n1", "n2"]
    _wait(fleet, 0.1)
    assert fleet.seats("high") == ["n3", "n4"]


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
    assert fleet.now - gave >= fleet.policy.preempt_after_s - 0.3
    assert fleet.seats("higher") == ["n2"]


# --- reasons -----------------------------------------------------------------------------------------------------


def test_node_without_seat_has_a_reason() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1, max_nodes=2)
    assert _why(fleet, "job", "n1") == ""
    assert _why(fleet, "job", "n3") == "it is a spare: the job has its 2 nodes"
    assert _why(fleet, "job", "n9") == "no launcher on it has joined job"
    fleet.order(OperatorAction.HOLD, node="n3")
    assert "ada ordered to hold n3" in _why(fleet, "job", "n3")
    fleet.disconnect("n3")
    assert _why(fleet, "job", "n3") == "its agent's connection is closed"


def test_node_waiting_for_growth_has_a_reason() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.join("n2")
    assert _why(fleet, "job", "n2") == "it gets a seat at the next boundary"


def test_rival_roster_is_computed_once_for_all_nodes() -> None:
    fleet, names = _fleet(8), [f"n{at}" for at in range(3, 9)]
    _start(fleet, "high", "n1", "n2", max_nodes=8, priority=5, join_wait_s=0)
    fleet.join(*names, job="high")
    _start(fleet, "low", *names, join_wait_s=1e6)
    with patch.object(membership, "next_seats", wraps=membership.next_seats) as asked:
        reasons = ineligible_nodes(fleet.state, fleet.job("low"))
    assert set(reasons) == set(names)
    assert all("job high comes first" in why for why in reasons.values())
    assert asked.call_count == 1
