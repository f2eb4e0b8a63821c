"""Eviction budgets of the fleet, a rack and a job; a deferred eviction names its budget and is judged anew later."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.errors import ConfigurationError, Unavailable
from everstep.vocabulary import Finding, NodeState
from everstep.wire.v1.agent import Domain
from everstep_controller.core.effects import Effect, PutVerdict
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction, ProbeRequested
from everstep_controller.core.health.eviction import budget_left, eviction_scopes
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import xid

NODES = [f"n{number}" for number in range(1, 9)]


def _fleet(racks: int = 0, **policy: Any) -> CoreFleet:
    """Eight nodes; with ``racks``, in so many of them, one after the other."""
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(budget={"window_s": 60.0}).with_values(**policy))
    for index, node in enumerate(NODES):
        fleet.register(node, domain=Domain(rack=f"r{index % racks}") if racks else None)
        fleet.beat(node)
    return fleet


def _sick(fleet: CoreFleet, *nodes: str) -> list[Effect]:
    """Each falls ill in its own way, so that no sickness is taken for that of many."""
    return [effect for node in nodes for effect in fleet.raise_finding(node, _ill(node))]


def _ill(node: str) -> Finding:
    return xid(100 + int(node[1:]))


def _sentences(effects: list[Effect]) -> list[str]:
    return [effect.verdict.sentence for effect in effects if isinstance(effect, PutVerdict)]


def test_rack_budget_defers_only_its_nodes() -> None:
    fleet = _fleet(racks=2, budget={"rack_count": 1})
    effects = _sick(fleet, "n1", "n3", "n2")
    assert decisions(effects) == [("n1", "evict"), ("n3", "defer_eviction"), ("n2", "evict")]
    assert "rack r0 has used up its eviction budget (1 eviction in 60 s)" in _sentences(effects)[1]
    assert fleet.state.nodes["n3"].health.eviction_deferred_by == "rack:r0"
    assert fleet.state.fleet.breaker_reason == ""


def test_job_budget_defers_only_its_nodes() -> None:
    fleet = _fleet(budget={"job_count": 1})
    fleet.join("n1", "n2", "n3", "n4", min_nodes=1, max_nodes=4)
    effects = _sick(fleet, "n1", "n2", "n8")
    assert decisions(effects) == [("n1", "evict"), ("n2", "defer_eviction"), ("n8", "evict")]
    assert "job job has used up its eviction budget" in _sentences(effects)[1]


def test_budget_status_lists_limits_and_remaining_evictions() -> None:
    fleet = _fleet(racks=2)
    fleet.join("n1", "n2", min_nodes=1, max_nodes=2)
    assert [scope.id for scope in eviction_scopes(fleet.state, fleet.now)] == ["fleet"]
    _sick(fleet, "n1")
    scopes = eviction_scopes(fleet.state, fleet.now)
    assert [(scope.id, scope.used, scope.remaining) for scope in scopes] == [
        ("fleet", 1, 3),
        ("rack:r0", 1, 3),
        ("job:job", 1, 1),
    ]
    assert scopes[0].next_free_at == fleet.now + 60.0
    assert budget_left(fleet.state, fleet.now + 61.0) == 4


def test_breaker_trips_on_eviction_beyond_fleet_budget() -> None:
    fleet = _fleet(budget={"count": 2})
    effects = _sick(fleet, "n1", "n2", "n3", "n4")
    assert [decision for _, decision in decisions(effects)] == ["evict", "evict", "defer_eviction", "defer_eviction"]
    assert len(logged_sentences(effects, "fleet.breaker_tripped")) == 1
    assert "the fleet has used up its eviction budget of 2 evictions in 60 s" in fleet.state.fleet.breaker_reason
    assert budget_left(fleet.state, fleet.now) == 0
    assert decisions(fleet.advance(300.0, *NODES)) == []


def test_breaker_allows_clearing_and_readmission() -> None:
    fleet = _fleet(budget={"count": 1}, probes={"required": False})
    _sick(fleet, "n1", "n2")
    fleet.clear_finding("n1", _ill("n1").key)
    assert ("n1", "readmit") in decisions(fleet.advance(30.0, *NODES))
    fleet.clear_finding("n2", _ill("n2").key)
    _sick(fleet, "n3")
    assert fleet.state.nodes["n3"].health.eviction_deferred_by == "fleet"
    assert list(fleet.state.evictions.deferred["fleet"]) == ["n3"]


def test_breaker_reset_judges_only_standing_findings() -> None:
    fleet = _fleet(budget={"count": 1})
    _sick(fleet, "n1", "n2", "n3", "n4")
    fleet.clear_finding("n2", _ill("n2").key)
    effects = fleet.order(OperatorAction.RESET_BREAKER)
    assert decisions(effects) == [("n3", "evict")]
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert fleet.state.fleet.breaker_reason != ""
    assert list(fleet.state.evictions.deferred["fleet"]) == ["n4"]


def test_required_nodes_are_deferred_individually() -> None:
    fleet = _fleet()
    fleet.join(*NODES, min_nodes=8, max_nodes=8)
    fleet.resume()
    effects = _sick(fleet, *NODES)
    assert decisions(effects) == [(node, "defer_eviction") for node in NODES]
    assert {record.health.eviction_deferred_by for record in fleet.state.nodes.values()} == {"needed:job"}
    fleet.register("n9")
    fleet.join("n9")
    assert [node for node in NODES if fleet.node_state(node) is NodeState.QUARANTINED] == ["n1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": {"rack_count": 0}},
        {"budget": {"job_count": 0}},
        {"budget": {"rack_share": 0.0}},
        {"budget": {"job_share": 1.1}},
        {"liveness": {"suspect_after_max_s": 1.0}},
        {"liveness": {"suspect_after_peer_loss_s": 5.0}},
        {"liveness": {"min_peer_witnesses": 0}},
        {"liveness": {"rejoin_window_s": -1.0}},
        {"liveness": {"suspect_after_s": 30.0}},
        {"liveness": {"suspect_after_s": 0.5}},
        {"liveness": {"disconnect_grace_s": 30.0}},
        {"budget": {"share": 0.0}},
        {"regroups": {"rank_flap_count": 0}},
        {"jobs": {"growth_interval_s": -1.0}},
        {"regroups": {"collective_settle_s": 9.0}},
        {"remediation": {"rank_restarts_per_fleet": 0}},
        {"jobs": {"per_node": 0}},
        {"correlated_silence": {"group_share": 1.5}},
        {"retention": {"forget_nodes_after_s": -1.0}},
    ],
    ids=str,
)
def test_contradictory_policy_settings_are_refused(wrong: dict[str, dict[str, float]]) -> None:
    ((table, values),) = wrong.items()
    with pytest.raises(ConfigurationError, match=rf"{table}\.{next(iter(values))}"):
        CorePolicy.lab_preset().with_values(**wrong).validate()


@pytest.mark.promise("database-outage")
def test_eviction_is_deferred_during_database_outage() -> None:
    fleet = _fleet()
    away = fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="connection refused"))
    assert "the database is unavailable (connection refused)" in logged_sentences(away, "database.unavailable")[0]
    effects = _sick(fleet, "n1", "n2")
    assert [decision for _, decision in decisions(effects)] == ["defer_eviction", "defer_eviction"]
    assert fleet.state.nodes["n1"].health.eviction_deferred_by == "database"
    assert fleet.state.fleet.recent_evictions == []
    fleet.clear_finding("n2", _ill("n2").key)
    back = fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    assert len(logged_sentences(back, "database.available")) == 1
    assert decisions(back) == [("n1", "evict")]


def test_orders_are_refused_during_database_outage() -> None:
    fleet = _fleet()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk still full"))
    assert len(logged_sentences(fleet.effects, "database.unavailable")) == 1
    with pytest.raises(Unavailable, match="disk still full"):
        fleet.order(OperatorAction.HOLD, node="n1")
    with pytest.raises(Unavailable, match="repeat it once"):
        fleet.feed(ProbeRequested(nodes=("n1", "n2"), actor="ada"))
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    fleet.order(OperatorAction.HOLD, node="n1")
    assert fleet.node_state("n1") is NodeState.HELD
