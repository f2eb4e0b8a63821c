"""Days of large fleets: skipping heartbeats changes no decision, and long times are quick to play."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields
from pathlib import Path

import pytest

from bench.failures import Failure, frailties, load, schedule
from bench.goodput.accounts import Accounts
from bench.goodput.fleet_days import FleetDays, FleetPlan
from bench.goodput.recovery_model import RecoveryModel
from bench.goodput.restart_all import RestartAll
from bench.goodput.runs import Assumptions, play, replays, repricings, site_policy
from bench.goodput.symptoms import SYMPTOMS
from tests.sim.month import play_month

TOLERANCE_S = 3.0
"""Beats come once a second, so what follows from their end may come a beat later, and what follows from that too."""


def _decisions(seed: int, *, eager: bool) -> list[tuple[str, float]]:
    """What was decided, and when; what falls into one moment in an order of its own."""
    plan = FleetPlan(nodes=20, spares=4, hours=3.0, per_rack=6, transients_per_node_day=40.0)
    failures = schedule(24, plan.hours, random.Random(seed), per_rack=6, rate=1500.0)
    fleet = FleetDays(plan, failures, site_policy(20, Assumptions()), RecoveryModel(), seed, eager=eager)
    return sorted((_without_figures(words), at) for at, words in fleet.run().decisions)


def _without_figures(words: str) -> str:
    return re.sub(r"step \d+|\d+\.\d+ s|\d+ clean heartbeats", "#", words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_skipped_heartbeats_change_no_decision(seed: int) -> None:
    lazy, eager = _decisions(seed, eager=False), _decisions(seed, eager=True)
    assert [words for words, _ in lazy] == [words for words, _ in eager]
    assert max(abs(one - other) for (_, one), (_, other) in zip(lazy, eager, strict=True)) < TOLERANCE_S
    assert len(lazy) > 10


def test_fleet_month_has_high_goodput_and_no_false_eviction() -> None:
    month = play_month(nodes=240, spares=10, days=12.0, seed=1)
    assert month.fleet.false_evictions == []
    assert month.fleet.accounts.stops > 5
    assert month.fleet.accounts.ratio() > 0.99


def test_every_cause_of_the_table_has_its_symptom() -> None:
    assert {cause.name for cause in load()} <= SYMPTOMS.keys()
    assert all(cause.source for cause in load())


def test_frailties_are_one_on_average_and_few_nodes_have_most() -> None:
    drawn = sorted(frailties(2000, random.Random(1)), reverse=True)
    assert sum(drawn) == pytest.approx(2000)
    assert sum(drawn[:100]) > 0.3 * 2000


def test_schedule_draws_as_many_failures_as_the_table() -> None:
    failures = schedule(2048, 54 * 24, random.Random(1))
    assert 350 < len(failures) < 490  # 419 of the same causes were counted on as many GPUs
    assert all(0 <= node < 2048 for failure in failures for node in failure.nodes)


def test_accounts_book_every_second_once() -> None:
    accounts = Accounts(nodes=10)
    accounts.step(100.0, 10)
    accounts.stop(200.0, "gpu", undone_s=5.0)
    accounts.step(220.0, 8, "gpu")
    accounts.close(300.0)
    assert accounts.trained == pytest.approx(95.0 * 10 + 80.0 * 8)
    assert accounts.trained + sum(accounts.lost.values()) == pytest.approx(300.0 * 10)
    assert accounts.lost == pytest.approx({"forming": 1000.0, "gpu": 250.0, "too few nodes (gpu)": 160.0})


def test_restart_all_policy_loses_unsaved_work() -> None:
    policy = RestartAll(checkpoint_every_s=600.0, death_noticed_s=0.0, allocation_s=100.0, meet_s_per_rank=0.0)
    start_s = policy.start_s(1)
    failure = Failure((start_s + 1500.0) / 3600.0, "software_bug", (0,))
    expected = 1200.0 + (7200.0 - start_s - 1500.0 - start_s)
    assert policy.ratio(1, 2.0, [failure]) == pytest.approx(expected / 7200.0, abs=1e-3)


def test_outcome_is_repriced_by_another_model() -> None:
    outcome = play(64, Assumptions(days=20.0))
    model = RecoveryModel()
    assert outcome.repriced(model, model) == outcome.ratio
    assert outcome.repriced(model, RecoveryModel(meet_s=100.0)) < outcome.ratio


def test_every_assumption_has_a_sensitivity_row() -> None:
    assumptions = Assumptions()
    changed = {
        one.name
        for model in (*repricings(assumptions.model).values(), *(a.model for a in replays(assumptions).values()))
        for one in fields(model)
        if getattr(model, one.name) != getattr(assumptions.model, one.name)
    }
    assert changed == {one.name for one in fields(RecoveryModel)}
    played = {
        one.name
        for other in replays(assumptions).values()
        for one in fields(other)
        if getattr(other, one.name) != getattr(assumptions, one.name)
    }
    assert played == {one.name for one in fields(Assumptions)} - {"days"}


def test_recovery_model_reads_measured_times(tmp_path: Path) -> None:
    phases = {"abort": 0.001, "teardown": 0.012, "rendezvous": 0.014, "build": 0.032, "first_step": 0.07}
    rows = [{"name": f"ddp SIGKILL rank 3 between, {name}", "value": value} for name, value in phases.items()]
    rows += [{"name": "fsdp2 SIGKILL rank 3 between, build", "value": 9.0}]
    file = tmp_path / "recovery.json"
    file.write_text(json.dumps({"rows": rows}))
    with pytest.raises(ValueError, match="no row for a step with hooks"):
        RecoveryModel.measured(file)
    rows.append({"name": "step with hooks and a snapshot every step, median", "value": 50.0})
    file.write_text(json.dumps({"rows": rows}))
    model = RecoveryModel.measured(file)
    assert (model.leave_s, model.meet_s, model.build_s) == pytest.approx((0.013, 0.014, 0.32))
    assert model.first_step_factor == pytest.approx(0.4)
    file.write_text(json.dumps({"rows": rows[-1:]}))
    with pytest.raises(ValueError, match="no rows for 'abort'"):
        RecoveryModel.measured(file)
