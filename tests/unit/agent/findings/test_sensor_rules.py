from __future__ import annotations

import pytest
from everstep_agent.findings.rules import MAX_WINDOW_SAMPLES, ClearEvent, Criterion, FindingRule, RuleHistory
from hypothesis import given
from hypothesis import strategies as st

from everstep.vocabulary import FindingKind, Severity


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


def feed(history: RuleHistory, values: list[float | None], start: float = 0.0) -> list[bool]:
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


def test_an_unknown_value_neither_raises_nor_clears() -> None:
    history = RuleHistory(rule())
    assert feed(history, [95] + [None] * 100)[-1]
    assert not any(feed(RuleHistory(rule()), [None] * 100))


def test_rule_clears_only_after_the_whole_clearing_time() -> None:
    history = RuleHistory(rule(clear_after_s=5.0))
    assert feed(history, [95, 20, 20, 20, 20, 95, 20, 20, 20, 20, 20, 20])[-1] is False
    assert feed(RuleHistory(rule(clear_after_s=5.0)), [95, 20, 20, 20, 20, 95, 20, 20, 20, 20])[-1] is True


def test_nothing_is_judged_in_the_grace_period_after_boot() -> None:
    history = RuleHistory(rule(boot_grace_s=300.0))
    history.add_value(95.0, 0.0, 299.0)
    assert not history.is_active
    history.add_value(95.0, 1.0, 300.0)
    assert history.is_active


def test_an_increase_counts_within_its_window_only() -> None:
    history = RuleHistory(rule(criterion=Criterion.INCREASE, threshold=10, window_s=60.0))
    slow = [float(second // 10) for second in range(600)]
    assert not any(feed(history, slow))
    assert feed(history, [slow[-1] + 10], start=600.0) == [True]


def test_counter_reset_is_no_increase() -> None:
    history = RuleHistory(rule(criterion=Criterion.INCREASE, threshold=1, window_s=60.0))
    assert not any(feed(history, [1000, 1000, 0, 0]))
    assert feed(history, [1], start=4.0) == [True]


def test_a_long_window_is_remembered_in_bounded_space() -> None:
    history = RuleHistory(rule(criterion=Criterion.INCREASE, threshold=1e9, window_s=3600.0))
    feed(history, [float(second) for second in range(10_000)])
    assert len(history._window) <= MAX_WINDOW_SAMPLES + 2


def test_unchanged_value_over_the_window_is_stale() -> None:
    history = RuleHistory(rule(criterion=Criterion.UNCHANGED, threshold=0, window_s=5.0))
    assert feed(history, [7] * 6) == [False] * 5 + [True]


def test_sticky_rule_clears_only_on_its_event() -> None:
    history = RuleHistory(rule(clear_after_s=None, clear_on=(ClearEvent.REPLACED,)))
    assert feed(history, [95] + [20] * 10_000)[-1]
    assert not history.apply_clear_event(ClearEvent.RESET)
    assert history.is_active
    assert history.apply_clear_event(ClearEvent.REPLACED)
    assert not history.is_active


@pytest.mark.parametrize("event", list(ClearEvent))
def test_any_event_voids_the_counts_so_far(event: ClearEvent) -> None:
    history = RuleHistory(rule(n_of_m=(2, 2)))
    history.add_value(95, 0.0, None)
    history.apply_clear_event(event)
    history.add_value(95, 1.0, None)
    assert not history.is_active
