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
    return CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), eviction_window_s=3600.0, **policy))


def _ill(node: str) -> Finding:
    """Each falls ill in its own way."""
    return xid(100 + int(node[1:]))


# --- what latches it ---------------------------------------------------------------------------------------------


@pytest.mark.promise("eviction-budget")
def test_breaker_ignores_deferral_of_node_needed_by_job() -> None:
    fleet = _fleet(eviction_count=2)
    fleet.start(4, min_nodes=4)
    fleet.register("n7", "n8")
    for node in ("n7", "n8"):
        fleet.beat(node)
    for node in ("n1", "n7", "n8"):
        fleet.raise_finding(node, _ill(node))
    fleet.advance(20.0, *fleet.state.nodes)
    assert (fleet.state.nodes["n1"].health.eviction_deferred_by, fleet.state.fleet.breaker_reason) == ("needed:job", "")


def test_breaker_ignores_deferral_by_rack_budget() -> None:
    fleet = _fleet(eviction_count=2, eviction_rack_count=1)
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "c"), ("n5", "d"), ("n6", "e")):
        fleet.register(node, domain=Domain(rack=rack))
        fleet.beat(node)
    for node in ("n1", "n3", "n2"):
        fleet.raise_finding(node, _ill(node))
    assert (fleet.state.nodes["n2"].health.eviction_deferred_by, fleet.state.fleet.breaker_reason) == ("rack:a", "")
    fleet.raise_finding("n4", _ill("n4"))
    assert fleet.state.nodes["n4"].health.eviction_deferred_by == "fleet"
    assert fleet.state.fleet.breaker_reason


# --- what opens it -----------------------------------------------------------------------------------------------


def _crowd(**policy: object) -> CoreFleet:
    fleet = _fleet(probe_required=False, eviction_count=4, eviction_share=1.0, **policy)
    for number in range(60):
        fleet.register(f"n{number}")
        fleet.beat(f"n{number}")
    return fleet


@pytest.mark.promise("eviction-budget")
def test_breaker_resets_when_outbreak_rollback_frees_budget() -> None:
    fleet = _crowd()
    for number in range(4):
        fleet.raise_finding(f"n{number}", uncorrectable_ecc())
    fleet.raise_finding("n50", xid())
    assert (fleet.state.nodes["n50"].health.eviction_deferred_by, bool(fleet.state.fleet.breaker_reason)) == (
        "fleet",
        True,
    )
    before = len(fleet.effects)
    for number in range(4, 9):
        fleet.raise_finding(f"n{number}", uncorrectable_ecc())
    assert len(audits(fleet.effects[before:], "fleet.breaker_reset")) == 1
    assert fleet.state.fleet.breaker_reason == ""
    assert ("n50", "evict") in decisions(fleet.effects[before:])
    assert [one.node for one in fleet.state.fleet.recent_evictions] == ["n50"]


def test_breaker_stays_tripped_while_another_eviction_waits() -> None:
    fleet = _crowd(eviction_rack_count=9)
    for node in ("n10", "n11", "n12", "n13"):
        fleet.raise_finding(node, _ill(node))
    fleet.raise_finding("n20", xid())
    fleet.raise_finding("n30", _ill("n30"))
    assert fleet.state.fleet.breaker_reason
    for node in ("n21", "n22", "n23"):
        fleet.raise_finding(node, xid())
    assert fleet.state.nodes["n20"].health.eviction_deferred_by == ""
    assert fleet.state.fleet.breaker_reason, "another eviction is held by it"
    assert fleet.state.nodes["n30"].health.eviction_deferred_by == "fleet"
    fleet.clear_finding("n30", _ill("n30").key)
    assert fleet.state.fleet.breaker_reason, "nobody takes it back any more: it is a person's to reset"


def test_breaker_tripped_only_by_outbreak_defers_no_eviction() -> None:
    fleet = _crowd()
    for node in ("n10", "n11", "n12", "n13"):
        fleet.raise_finding(node, _ill(node))
    for node in ("n20", "n21", "n22", "n23"):
        fleet.raise_finding(node, xid())
    assert fleet.state.fleet.breaker_reason == ""
    assert len(audits(fleet.effects, "fleet.breaker_tripped")) == len(audits(fleet.effects, "fleet.breaker_reset")) == 1


def test_breaker_stays_tripped_when_rollback_frees_no_budget() -> None:
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
    assert fleet.state.nodes["n2"].health.eviction_deferred_by == "job:job"
    fleet.resume(step=50)
    return fleet


@pytest.mark.promise("eviction-budget")
def test_finished_job_defers_no_eviction() -> None:
    fleet = _held_by_its_job()
    fleet.finish()
    assert fleet.job_state() is JobState.FINISHED
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].health.eviction_deferred_by) == (NodeState.QUARANTINED, "")


def test_job_defers_no_eviction_after_leaving_the_node() -> None:
    fleet = _held_by_its_job()
    rank = next(m.rank for m in fleet.running().roster if m.node == "n2")
    fleet.lose_rank(rank, replacement=False)
    assert "n2" not in fleet.seats()
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].health.eviction_deferred_by) == (NodeState.QUARANTINED, "")


def test_job_budget_defers_eviction_of_seated_node() -> None:
    fleet = _held_by_its_job()
    fleet.lose_rank(0)
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].health.eviction_deferred_by) == (
        NodeState.HEALTHY,
        "job:job",
    )


def test_stopped_job_defers_no_eviction() -> None:
    fleet = _held_by_its_job()
    fleet.order(OperatorAction.STOP_JOB, job="job")
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].health.eviction_deferred_by) == (NodeState.QUARANTINED, "")
