"""The breaker latches for an eviction that the fleet's budget alone holds, and opens where that budget covers it again;
a job's budget holds a node for as long as the job has it."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import Finding, JobState, NodeState
from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet, audits, decisions
from tests.support.findings import uncorrectable_ecc, xid


def _fleet(**policy: object) -> CoreFleet:
    return CoreFleet(msgspec.structs.replace(CorePolicy.lab(), eviction_window_s=3600.0, **policy))


def _ill(node: str) -> Finding:
    """Each falls ill in its own way."""
    return xid(100 + int(node[1:]))


# --- what latches it ---------------------------------------------------------------------------------------------


@pytest.mark.promise("eviction-budget")
def test_a_node_that_its_job_needs_latches_nothing_however_often_it_is_asked_again() -> None:
    fleet = _fleet(eviction_count=2)
    fleet.start(4, min_nodes=4)
    fleet.register("n7", "n8")
    for node in ("n7", "n8"):
        fleet.beat(node)
    for node in ("n1", "n7", "n8"):
        fleet.raise_finding(node, _ill(node))
    fleet.advance(20.0, *fleet.state.nodes)
    assert (fleet.state.nodes["n1"].eviction_deferred_by, fleet.state.fleet.breaker_reason) == ("needed:job", "")


def test_a_node_that_its_rack_holds_latches_nothing() -> None:
    fleet = _fleet(eviction_count=2, eviction_rack_count=1)
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "c"), ("n5", "d"), ("n6", "e")):
        fleet.register(node, domain=Domain(rack=rack))
        fleet.beat(node)
    for node in ("n1", "n3", "n2"):
        fleet.raise_finding(node, _ill(node))
    assert (fleet.state.nodes["n2"].eviction_deferred_by, fleet.state.fleet.breaker_reason) == ("rack:a", "")
    fleet.raise_finding("n4", _ill("n4"))
    assert fleet.state.nodes["n4"].eviction_deferred_by == "fleet"
    assert fleet.state.fleet.breaker_reason


# --- what opens it -----------------------------------------------------------------------------------------------


def _crowd(**policy: object) -> CoreFleet:
    fleet = _fleet(probe_required=False, eviction_count=4, eviction_share=1.0, **policy)
    for number in range(60):
        fleet.register(f"n{number}")
        fleet.beat(f"n{number}")
    return fleet


@pytest.mark.promise("eviction-budget")
def test_evictions_that_an_outbreak_takes_back_cover_what_latched_the_breaker() -> None:
    fleet = _crowd()
    for number in range(4):
        fleet.raise_finding(f"n{number}", uncorrectable_ecc())
    fleet.raise_finding("n50", xid())
    assert (fleet.state.nodes["n50"].eviction_deferred_by, bool(fleet.state.fleet.breaker_reason)) == ("fleet", True)
    before = len(fleet.effects)
    for number in range(4, 9):
        fleet.raise_finding(f"n{number}", uncorrectable_ecc())
    assert len(audits(fleet.effects[before:], "fleet.breaker_reset")) == 1
    assert fleet.state.fleet.breaker_reason == ""
    assert ("n50", "evict") in decisions(fleet.effects[before:])
    assert [one.node for one in fleet.state.fleet.recent_evictions] == ["n50"]


def test_a_breaker_that_latched_for_the_first_of_an_outbreak_stays_for_another() -> None:
    fleet = _crowd(eviction_rack_count=9)
    for node in ("n10", "n11", "n12", "n13"):
        fleet.raise_finding(node, _ill(node))
    fleet.raise_finding("n20", xid())
    fleet.raise_finding("n30", _ill("n30"))
    assert fleet.state.fleet.breaker_reason
    for node in ("n21", "n22", "n23"):
        fleet.raise_finding(node, xid())
    assert fleet.state.nodes["n20"].eviction_deferred_by == ""
    assert fleet.state.fleet.breaker_reason, "another eviction is held by it"
    assert fleet.state.nodes["n30"].eviction_deferred_by == "fleet"
    fleet.clear_finding("n30", _ill("n30").key)
    assert fleet.state.fleet.breaker_reason, "nobody takes it back any more: it is a person's to reset"


def test_a_breaker_that_latched_for_an_outbreak_alone_holds_nobody_afterwards() -> None:
    fleet = _crowd()
    for node in ("n10", "n11", "n12", "n13"):
        fleet.raise_finding(node, _ill(node))
    for node in ("n20", "n21", "n22", "n23"):
        fleet.raise_finding(node, xid())
    assert fleet.state.fleet.breaker_reason == ""
    assert len(audits(fleet.effects, "fleet.breaker_tripped")) == len(audits(fleet.effects, "fleet.breaker_reset")) == 1


def test_a_breaker_stays_where_what_is_taken_back_used_no_budget() -> None:
    fleet = _crowd(eviction_rack_count=9)
    for node in ("n10", "n11", "n12", "n13", "n14"):
        fleet.raise_finding(node, _ill(node))
    assert fleet.state.fleet.breaker_reason
    fleet.now += 3700.0  # the window has passed; a latched breaker does not care
    for number in range(4):
        fleet.register(f"m{number}", findings=(uncorrectable_ecc(),))
    for number in range(4, 9):
        fleet.register(f"m{number}", findings=(uncorrectable_ecc(),))
    assert audits(fleet.effects, "node.eviction_rolled_back")
    assert fleet.state.fleet.breaker_reason


# --- what a job holds --------------------------------------------------------------------------------------------


def _held_by_its_job() -> CoreFleet:
    fleet = _fleet(eviction_count=10, eviction_job_count=1)
    fleet.start(6, min_nodes=2, max_nodes=6)
    fleet.raise_finding("n1", _ill("n1"))
    fleet.raise_finding("n2", _ill("n2"))
    assert fleet.state.nodes["n2"].eviction_deferred_by == "job:job"
    fleet.resume(step=50)
    return fleet


@pytest.mark.promise("eviction-budget")
def test_a_job_that_is_over_holds_nobody() -> None:
    fleet = _held_by_its_job()
    fleet.finish()
    assert fleet.job_state() is JobState.FINISHED
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].eviction_deferred_by) == (NodeState.QUARANTINED, "")


def test_a_job_that_has_left_a_node_holds_it_no_more() -> None:
    fleet = _held_by_its_job()
    rank = next(m.rank for m in fleet.running().roster if m.node == "n2")
    fleet.lose_rank(rank, replacement=False)
    assert "n2" not in fleet.seats()
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].eviction_deferred_by) == (NodeState.QUARANTINED, "")


def test_a_job_that_goes_on_with_the_node_holds_it_until_its_window_has_passed() -> None:
    fleet = _held_by_its_job()
    fleet.lose_rank(0)
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].eviction_deferred_by) == (NodeState.HEALTHY, "job:job")


def test_a_job_that_a_person_stops_holds_nobody() -> None:
    fleet = _held_by_its_job()
    fleet.order(OperatorAction.STOP_JOB, job="job")
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].eviction_deferred_by) == (NodeState.QUARANTINED, "")
