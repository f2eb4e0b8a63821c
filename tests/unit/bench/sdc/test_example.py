"""The example follows the controller's rule: who is replaced, and when."""

from __future__ import annotations

import pytest

from bench.sdc.judging import Judgement, Outcome
from bench.sdc.training import StrikeRule


def judgement(outcome: Outcome, rank: int | None = 2) -> Judgement:
    return Judgement("matmul", 1, outcome, rank)


def test_conviction_replaces_at_once() -> None:
    assert StrikeRule().replaced([judgement(Outcome.CONVICTED)]) == [2]


@pytest.mark.parametrize("second", [Outcome.STRIKE, Outcome.AUDITOR_STRIKE])
def test_second_strike_of_a_rank_replaces_it(second: Outcome) -> None:
    rule = StrikeRule()
    assert rule.replaced([judgement(Outcome.STRIKE), judgement(Outcome.STRIKE, 1)]) == []
    assert rule.replaced([judgement(second)]) == [2]


@pytest.mark.parametrize("outcome", [Outcome.SUSPICION, Outcome.TIE, Outcome.INCONCLUSIVE])
def test_other_outcomes_replace_nobody(outcome: Outcome) -> None:
    rule = StrikeRule()
    for _ in range(3):
        assert rule.replaced([judgement(outcome)]) == []
