"""Turns of presets become percent of a step."""

from __future__ import annotations

import pytest

from bench.sdc.models import Config
from bench.sdc.overhead import OFF, ON, Timing, percent_with_range, rows_of, sum_of_links, undisturbed
from bench.sdc.ranks import Ranks

STEP_S = 0.04


def timing(light: float, standard: float, rounds: int = 20) -> Timing:
    turns = {OFF: [STEP_S] * rounds, "light": [light] * rounds, "standard": [standard] * rounds}
    intervals = {"light": {"peer_replay": 33}, "standard": {"matmul": 17}}
    audits = {
        "peer_replay": {OFF: [STEP_S] * 4, ON: [STEP_S + 0.0033] * 4},
        "matmul": {OFF: [STEP_S] * 4, ON: [STEP_S + 0.0034, STEP_S + 0.0034, STEP_S + 0.0034, 9.0]},
    }
    return Timing(4, turns, {OFF: [], "light": [0.0001, 0.0001, 0.004], "standard": []}, intervals, audits)


def test_overhead_is_that_of_all_rounds_together() -> None:
    share, low, high = percent_with_range([1.0, 1.0, 1.3], [1.0, 1.0, 1.0])
    assert share == pytest.approx(10.0)
    assert low <= share <= high


def test_rounds_with_a_disturbed_turn_are_left_out() -> None:
    turns = {OFF: [1.0, 1.0, 1.0, 2.0], "light": [1.1, 1.7, 1.1, 1.1]}
    assert undisturbed(turns) == {OFF: [1.0, 1.0], "light": [1.1, 1.1]}


def test_links_add_up_at_the_intervals_of_a_preset() -> None:
    found = timing(light=STEP_S, standard=STEP_S)
    assert sum_of_links(found, "light") == pytest.approx((0.75, 0.0))
    assert sum_of_links(found, "standard") == pytest.approx((1.0, 0.0)), "the disturbed round is left out"


def test_rows_hold_presets_to_their_share() -> None:
    light, turns, idle, standard, _, unknown = rows_of(timing(light=0.0402, standard=0.042))
    assert (light.name, light.met) == ("light, steps of 40 ms, sum of links", "floor")
    assert turns.value == pytest.approx(0.5)
    assert "20 of 20 rounds" in turns.against
    assert (idle.value, idle.met) == (pytest.approx(0.1), "aim")
    assert (standard.value, standard.met) == (pytest.approx(1.0), "aim")
    assert unknown.value is None
    assert "peer_replay 6.6 ms every 33" in light.against


@pytest.mark.slow
def test_presets_take_turns_on_real_ranks() -> None:
    with Ranks(world=2, warm_steps=1) as ranks:
        found = ranks.call(Config("mlp"), "time_presets", 0.001, 0.1)
    assert [set(one.turns) for one in found] == [{OFF, "light", "standard"}] * 2
    assert {len(turns) for turns in found[0].turns.values()} == {2}
    assert set(found[0].intervals["light"]) == {"gradient_norm", "gradient_buffer", "peer_replay"}
    assert found[0].intervals == found[1].intervals
