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

from tests.integration.checkpoints.torture import STEPS_A_ROUND, WORLD, Round, draw_plan, lost_or_repeated, tortured
from tests.support.ranks.exact_training import SAMPLES, read_step_logs

SEED = int(os.environ.get("EVERSTEP_TORTURE_SEED") or 1)
ROUNDS = int(os.environ.get("EVERSTEP_TORTURE_ROUNDS", "30"))
PLAN = os.environ.get("EVERSTEP_TORTURE_PLAN", "")
LAST_STEPS = 20
Row = dict[str, Any]

pytestmark = pytest.mark.slow


def run_through(plan: list[Round], until: int) -> list[Row]:
    """Run with the kills of ``plan``, and return the step logs of the ranks."""
    with tortured(until) as torture:
        try:
            torture.run_plan(plan)
            torture.launcher.eventually(lambda: not torture.vaults() and not torture.left(), "nothing is left")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{_again(plan)}\n{error}\n{torture.logs()}") from error
        rows = read_step_logs(torture.folder)
    print(f"{len(plan)} rounds, {torture.launchers} launchers, {_generations(rows)} generations that stepped")
    return rows


def _again(plan: list[Round]) -> str:
    return f'seed {SEED}; again: EVERSTEP_TORTURE_PLAN="{" ".join(map(str, plan))}"'


def _generations(rows: list[Row]) -> int:
    return len({row["generation"] for row in rows})


def computed(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("generation", "rank", "step")}


@pytest.mark.promise("torture")
@pytest.mark.nightly
@pytest.mark.timeout(240 + 40 * ROUNDS)
def test_run_after_random_kills_matches_undisturbed_run() -> None:
    plan = [*map(Round.parse, PLAN.split())] if PLAN else draw_plan(SEED, ROUNDS)
    print(_again(plan))
    until = STEPS_A_ROUND * len(plan) + LAST_STEPS
    undisturbed = {(row["rank"], row["step"]): computed(row) for row in run_through([], until)}
    assert undisturbed.keys() == {(rank, step) for rank in range(WORLD) for step in range(1, until + 1)}
    rows = run_through(plan, until)
    differ = sorted(
        (row["step"], row["rank"], row["generation"])
        for row in rows
        if computed(row) != undisturbed[row["rank"], row["step"]]
    )
    assert not differ, f"{_again(plan)}; steps that were computed again count too: {differ}"
    made = {(row["rank"], row["step"]): row for row in sorted(rows, key=lambda row: int(row["generation"]))}
    assert {step for _, step in made} == set(range(1, until + 1))
    unsaid = {step for _, step in undisturbed.keys() - made.keys()}
    assert len(unsaid) <= len(plan), "a step that a killed rank had finished is not made again, others say it"
    whole = [row for row in made.values() if row["step"] not in unsaid]
    whole += [{"rank": rank, "step": step, **undisturbed[rank, step]} for step in unsaid for rank in range(WORLD)]
    assert not lost_or_repeated(whole, SAMPLES), _again(plan)
