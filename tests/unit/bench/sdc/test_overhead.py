"""The overhead of presets in percent of a step, computed from rounds."""

from __future__ import annotations

import pytest

from bench.sdc.overhead import OFF, ON, Timing, percent_with_range, rows_of

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


def test_rows_hold_presets_to_their_share() -> None:
    light, turns, idle, standard, _, unknown = rows_of(timing(light=0.0402, standard=0.042))
    assert (light.name, light.met) == ("light, steps of 40 ms, sum of audits", "floor")
    assert turns.value == pytest.approx(0.5)
    assert "20 of 20 rounds" in turns.against
    assert (idle.met, standard.met) == ("aim", "aim")
    assert (idle.value, standard.value) == pytest.approx((0.1, 1.0))
    assert unknown.value is None
    assert "peer_replay 6.6 ms every 33" in light.against
