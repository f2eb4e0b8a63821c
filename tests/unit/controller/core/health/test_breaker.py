"""The breaker trips for an eviction that only the fleet's budget defers, and resets once the budget covers it again.

A job's budget defers the eviction of a node for as long as the job has it.
"""

from __future__ import annotations

from typing import Any

import pytest

from everstep.vocabulary import Finding, JobState, NodeState
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models.fleet_views import budget_status
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import uncorrectable_ecc, xid
from tests.unit.controller.core.health.view_context import view_context_of


def _fleet(**policy: Any) -> CoreFleet:
    return CoreFleet(CorePolicy.lab_preset().with_values(budget={"window_s": 3600.0}).with_values(**policy))


def _ill(node: str) -> Finding:
    """A finding of its own kind for each node."""
    return xid(100 + int(node[1:]))


@pytest.mark.promise("eviction-budget")
def test_breaker_ignores_deferral_of_node_needed_by_job() -> None:
    fleet = _fleet(budget={"count": 2})
    fleet.start(4, min_nodes=4)
    fleet.register("n7", "n8")
    for node in ("n7", "n8"):
        fleet.beat(node)
    for node in ("n1", "n7", "n8"):
        fleet.raise_finding(node, _ill(node))
    fleet.advance(20.0, *fleet.state.nodes)
    assert (fleet.state.nodes["n1"].health.eviction_deferred_by, fleet.state.fleet.breaker_reason) == ("needed:job", "")


def _crowd(rack_count: int = 4) -> CoreFleet:
    fleet = _fleet(probes={"required": False}, budget={"count": 4, "share": 1.0, "rack_count": rack_count})
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
    assert len(logged_sentences(fleet.effects[before:], "fleet.breaker_reset")) == 1
    assert fleet.state.fleet.breaker_reason == ""
    assert ("n50", "evict") in decisions(fleet.effects[before:])
    assert [eviction.node for eviction in fleet.state.fleet.recent_evictions] == ["n50"]


def test_breaker_stays_tripped_while_another_eviction_waits() -> None:
    fleet = _crowd(rack_count=9)
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
    assert fleet.state.fleet.breaker_reason, "no rollback resets the breaker any more; an operator must"


def test_breaker_tripped_only_by_outbreak_defers_no_eviction() -> None:
    fleet = _crowd()
    for node in ("n10", "n11", "n12", "n13"):
        fleet.raise_finding(node, _ill(node))
    for node in ("n20", "n21", "n22", "n23"):
        fleet.raise_finding(node, xid())
    assert fleet.state.fleet.breaker_reason == ""
    assert (
        len(logged_sentences(fleet.effects, "fleet.breaker_tripped"))
        == len(logged_sentences(fleet.effects, "fleet.breaker_reset"))
        == 1
    )


def _held_by_its_job() -> CoreFleet:
    fleet = _fleet(budget={"count": 10, "job_count": 1})
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


def _latched() -> CoreFleet:
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}, budget={"count": 1}))
    fleet.register(*(f"n{number}" for number in range(1, 41)))
    for number, node in enumerate(("n1", "n2")):
        fleet.raise_finding(node, xid(100 + number))
    return fleet


def test_budget_shows_no_free_time_while_breaker_is_tripped() -> None:
    fleet = _latched()
    shown = budget_status(view_context_of(fleet))
    assert [(scope.remaining, scope.next_free_at) for scope in shown.scopes] == [(0, 0.0)]
    assert shown.breaker.endswith("until an operator resets the breaker: everstep reset-breaker --reason WHY")


def test_budget_shows_free_time_while_evictions_are_allowed() -> None:
    fleet = _latched()
    fleet.state.fleet.breaker_reason = ""
    (scope,) = budget_status(view_context_of(fleet)).scopes
    assert scope.next_free_at == fleet.now + fleet.policy.budget.window_s
