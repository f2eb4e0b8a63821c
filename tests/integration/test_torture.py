"""Random processes of a training run are killed at random moments, round after round; the run is, to the last bit, the
run that nothing happened to.

The nightly test plays ``EVERSTEP_TORTURE_ROUNDS`` (30) of the seed ``EVERSTEP_TORTURE_SEED`` (1; it is printed);
test_exactness.py and test_commit_protocol.py are the smaller ones of every suite. A failure prints the rounds that
led to it: ``EVERSTEP_TORTURE_PLAN="4:vault+rank1 0:launcher"`` plays just these instead.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.support.exact_training import SAMPLES, read_diaries
from tests.support.torture import KINDS, STEPS_A_ROUND, WORLD, Round, draw_plan, lost_or_repeated, tortured

SEED = int(os.environ.get("EVERSTEP_TORTURE_SEED") or 1)
ROUNDS = int(os.environ.get("EVERSTEP_TORTURE_ROUNDS", "30"))
PLAN = os.environ.get("EVERSTEP_TORTURE_PLAN", "")
LAST_STEPS = 20
Row = dict[str, Any]

pytestmark = pytest.mark.slow


def run_through(plan: list[Round], until: int) -> list[Row]:
    """What the ranks wrote down of a run in which ``plan`` was played."""
    with tortured(until) as torture:
        try:
            torture.play(plan)
            torture.launcher.eventually(lambda: not torture.vaults() and not torture.left(), "nothing is left")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{_again(plan)}\n{error}\n{torture.said()}") from error
        rows = read_diaries(torture.folder)
    print(f"{len(plan)} rounds, {torture.lives} lives of the launcher, {_generations(rows)} generations that stepped")
    return rows


def _again(plan: list[Round]) -> str:
    return f'seed {SEED}; again: EVERSTEP_TORTURE_PLAN="{" ".join(map(str, plan))}"'


def _generations(rows: list[Row]) -> int:
    return len({row["generation"] for row in rows})


def told(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("generation", "rank", "step")}


@pytest.mark.promise("torture")
@pytest.mark.nightly
@pytest.mark.timeout(240 + 40 * ROUNDS)
def test_run_after_random_kills_matches_undisturbed_run() -> None:
    plan = [*map(Round.parse, PLAN.split())] if PLAN else draw_plan(SEED, ROUNDS)
    print(_again(plan))
    until = STEPS_A_ROUND * len(plan) + LAST_STEPS
    undisturbed = {(row["rank"], row["step"]): told(row) for row in run_through([], until)}
    assert undisturbed.keys() == {(rank, step) for rank in range(WORLD) for step in range(1, until + 1)}
    rows = run_through(plan, until)
    differ = sorted(
        (row["step"], row["rank"], row["generation"])
        for row in rows
        if told(row) != undisturbed[row["rank"], row["step"]]
    )
    assert not differ, f"{_again(plan)}; steps that were computed again count too: {differ}"
    made = {(row["rank"], row["step"]): row for row in sorted(rows, key=lambda row: int(row["generation"]))}
    assert {step for _, step in made} == set(range(1, until + 1))
    unsaid = {step for _, step in undisturbed.keys() - made.keys()}
    assert len(unsaid) <= len(plan), "a step that a killed rank had finished is not made again, others say it"
    whole = [row for row in made.values() if row["step"] not in unsaid]
    whole += [{"rank": rank, "step": step, **undisturbed[rank, step]} for step in unsaid for rank in range(WORLD)]
    assert not lost_or_repeated(whole, SAMPLES), _again(plan)


def test_torture_plan_is_seeded_and_round_trips_as_text() -> None:
    plan = draw_plan(5, 200)
    assert plan == draw_plan(5, 200) != draw_plan(6, 200)
    assert [Round.parse(str(one)) for one in plan] == plan
    assert {victim for one in plan for victim in one.victims} == set(KINDS)
    assert {one.after == 0 for one in plan} == {True, False}


def test_sample_check_reports_missing_and_repeated_samples() -> None:
    def rows(*samples: list[int]) -> list[Row]:
        return [{"step": step, "rank": 0, "samples": some} for step, some in enumerate(samples, start=1)]

    assert not lost_or_repeated(rows([0, 1], [2, 1], [0, 2]), 3)
    assert lost_or_repeated(rows([0, 1], [1, 2], [0]), 3) == [1, 2]
