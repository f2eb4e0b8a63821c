from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.vocabulary import FindingKind, Severity
from everstep_agent.policy.rules import ClearEvent, Criterion, FindingRule, RuleHistory


def rule(**values: object) -> FindingRule:
    base = {
        "id": "r",
        "kind": FindingKind.GPU_TEMPERATURE,
        "metric": "gpu.temperature_c",
        "criterion": Criterion.AT_LEAST,
        "threshold": 90.0,
        "severity": Severity.WARNING,
        "message": "hot",
        "source": "test",
        "clear_after_s": 10.0,
    }
    return FindingRule(**{**base, **values})  # type: ignore[arg-type]


def feed(history: RuleHistory, values: Sequence[float | None], start: float = 0.0) -> list[bool]:
    standing = []
    for second, value in enumerate(values):
        history.add_value(value, start + second, None)
        standing.append(history.is_active)
    return standing


@given(
    n_of_m=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda pair: (min(pair), max(pair))),
    bad=st.lists(st.booleans(), max_size=60),
)
def test_n_of_m_agrees_with_counting_by_hand(n_of_m: tuple[int, int], bad: list[bool]) -> None:
    n, m = n_of_m
    stood = feed(RuleHistory(rule(n_of_m=n_of_m, clear_after_s=1e9)), [95 if each else 20 for each in bad])
    by_hand = [sum(bad[max(0, end - m) : end]) >= n for end in range(1, len(bad) + 1)]
    assert stood == [any(by_hand[: end + 1]) for end in range(len(by_hand))]


def test_rule_clears_only_after_the_whole_clearing_time() -> None:
    history = RuleHistory(rule(clear_after_s=5.0))
    assert feed(history, [95, 20, 20, 20, 20, 95, 20, 20, 20, 20, 20, 20])[-1] is False
    assert feed(RuleHistory(rule(clear_after_s=5.0)), [95, 20, 20, 20, 20, 95, 20, 20, 20, 20])[-1] is True


def test_counter_reset_is_no_increase() -> None:
    history = RuleHistory(rule(criterion=Criterion.INCREASE, threshold=1, window_s=60.0))
    assert not any(feed(history, [1000, 1000, 0, 0]))
    assert feed(history, [1], start=4.0) == [True]


def test_unchanged_value_over_the_window_is_stale() -> None:
    history = RuleHistory(rule(criterion=Criterion.UNCHANGED, threshold=0, window_s=5.0))
    assert feed(history, [7] * 6) == [False] * 5 + [True]


@pytest.mark.parametrize("event", list(ClearEvent))
def test_any_event_voids_the_counts_so_far(event: ClearEvent) -> None:
    history = RuleHistory(rule(n_of_m=(2, 2)))
    history.add_value(95, 0.0, None)
    history.apply_clear_event(event)
    history.add_value(95, 1.0, None)
    assert not history.is_active


def test_value_that_stays_unknown_clears_where_the_rule_says_so() -> None:
    known = [95] + [None] * 9
    assert feed(RuleHistory(rule(clear_unknown_after_s=5.0)), known).index(False) == 6
    assert all(feed(RuleHistory(rule()), known))


def test_known_value_restarts_the_wait_for_unknown_ones() -> None:
    history = RuleHistory(rule(clear_unknown_after_s=5.0))
    assert all(feed(history, [95, None, None, None, 95, None, None, None, 95, None, None]))
