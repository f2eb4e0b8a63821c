"""Test days of large fleets: skipped heartbeats change no decision, and a month plays quickly."""

from __future__ import annotations

import random
import re

import pytest

from bench.failures import Failure, schedule
from bench.goodput.fleet_days import FleetDays
from bench.goodput.fleet_nodes import FleetPlan
from bench.goodput.recovery_model import RecoveryModel
from bench.goodput.restart_all import RestartAll
from bench.goodput.runs import Assumptions, play, repricings, site_policy
from tests.sim.fleet_month import play_month

TOLERANCE_S = 3.0
"""Heartbeats come once a second, so each consequence of a silence may come a heartbeat later."""


def _decisions(seed: int, *, eager: bool) -> list[tuple[str, float]]:
    """Return the decisions with their times, those of one time sorted."""
    plan = FleetPlan(nodes=20, spares=4, hours=3.0, per_rack=6, transients_per_node_day=40.0)
    failures = schedule(24, plan.hours, random.Random(seed), per_rack=6, rate=1500.0)
    fleet = FleetDays(plan, failures, site_policy(20), RecoveryModel(), seed, eager=eager)
    return sorted((_without_figures(decision), at) for at, decision in fleet.run().decisions)


def _without_figures(decision: str) -> str:
    return re.sub(r"step \d+|\d+\.\d+ s|\d+ clean heartbeats", "#", decision)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_skipped_heartbeats_change_no_decision(seed: int) -> None:
    lazy, eager = _decisions(seed, eager=False), _decisions(seed, eager=True)
    assert [decision for decision, _ in lazy] == [decision for decision, _ in eager]
    assert max(abs(lazy_at - eager_at) for (_, lazy_at), (_, eager_at) in zip(lazy, eager, strict=True)) < TOLERANCE_S
    assert len(lazy) > 10


def test_fleet_month_has_high_goodput_and_no_false_eviction() -> None:
    month = play_month(nodes=240, spares=10, days=12.0, seed=1)
    assert month.fleet.false_evictions == []
    assert month.fleet.accounts.stops > 5
    assert month.fleet.accounts.ratio() > 0.99


def test_restart_all_policy_loses_unsaved_work() -> None:
    policy = RestartAll(checkpoint_every_s=600.0, death_noticed_s=0.0, allocation_s=100.0, meet_s_per_rank=0.0)
    start_s = policy.start_s(1)
    failure = Failure((start_s + 1500.0) / 3600.0, "software_bug", (0,))
    expected = 1200.0 + (7200.0 - start_s - 1500.0 - start_s)
    assert policy.ratio(1, 2.0, [failure]) == pytest.approx(expected / 7200.0, abs=1e-3)


def test_death_seen_by_socket_costs_training_time() -> None:
    outcome = play(64, Assumptions(days=20.0))
    model = RecoveryModel()
    by_socket = repricings(model)["a death is seen by the end of a socket"]
    assert outcome.stops
    expected = outcome.ratio - outcome.stops * model.touched_gib * model.free_s_per_gib / (20 * 86400.0)
    assert outcome.repriced(model, by_socket) == pytest.approx(expected)
