"""What people are shown of a breaker that is latched."""

from __future__ import annotations

import msgspec
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models.fleet_views import budget_status

from tests.support.core_fleet import CoreFleet
from tests.support.findings import xid
from tests.support.shown import desk_of


def _latched() -> CoreFleet:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy(), probe_required=False, eviction_count=1))
    fleet.register(*(f"n{number}" for number in range(1, 41)))
    for number, node in enumerate(("n1", "n2")):
        fleet.raise_finding(node, xid(100 + number))
    return fleet


def test_budget_shows_no_free_time_while_breaker_is_tripped() -> None:
    fleet = _latched()
    shown = budget_status(desk_of(fleet))
    assert [(scope.remaining, scope.next_free_at) for scope in shown.scopes] == [(0, 0.0)]
    assert shown.breaker.endswith("until an operator resets the breaker: everstep reset-breaker --reason WHY")


def test_budget_shows_free_time_while_evictions_are_allowed() -> None:
    fleet = _latched()
    fleet.state.fleet.breaker_reason = ""
    (scope,) = budget_status(desk_of(fleet)).scopes
    assert scope.next_free_at == fleet.now + fleet.policy.eviction_window_s
