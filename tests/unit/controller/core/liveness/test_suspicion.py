"""The suspicion of one node, against its definition replayed from all words that were ever said."""

from __future__ import annotations

import msgspec
from everstep_controller.core.liveness.node_liveness import (
    PAUSE_DECAY_S,
    PAUSE_MARGIN,
    Liveness,
    classify_silence,
    decayed_longest_pause_s,
    loss_timeout_s,
    observer_stall_s,
    record_message,
    suspect_timeout_after_peer_loss_s,
    suspect_timeout_s,
)
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import HeartbeatState, ObserverState
from hypothesis import given
from hypothesis import strategies as st

POLICY = CorePolicy()
pauses = st.lists(st.tuples(st.floats(0.001, 40.0), st.sampled_from("abc")), max_size=40)


def _naive(words: list[tuple[float, str]], node: str) -> float:
    """The longest pause of ``node``, from everything that was ever heard."""
    began_listening, heard, told = 0.0, None, list[float]()
    before = 0.0
    for at, who in words:
        if at - before > POLICY.suspect_after_s / 2:
            began_listening = at
        before = at
        if who == node:
            pause = at - max(began_listening, 0.0 if heard is None else heard)
            told.append(min(pause, POLICY.suspect_after_max_s / PAUSE_MARGIN))
            heard = at
    faded = [0.0]
    for index, pause in enumerate(told):
        for later in told[index + 1 :]:
            pause *= 1 - later / PAUSE_DECAY_S
        faded.append(pause)
    return max(faded)


@given(pauses)
def test_longest_pause_matches_full_history(steps: list[tuple[float, str]]) -> None:
    hearing, pulses, now = ObserverState(), {name: HeartbeatState() for name in "abc"}, 0.0
    words = []
    for gap, who in steps:
        now += gap
        record_message(POLICY, hearing, pulses[who], now)
        words.append((now, who))
    for name in "abc":
        assert abs(pulses[name].longest_pause_s - _naive(words, name)) < 1e-9


@given(st.floats(0, 100), st.floats(0, 100))
def test_liveness_answers_are_monotonic(longest_s: float, silent_s: float) -> None:
    order = [Liveness.PRESENT, Liveness.SUSPECT, Liveness.LOST]
    answer = classify_silence(POLICY, longest_s, silent_s)
    assert order.index(classify_silence(POLICY, longest_s, silent_s + 1.0)) >= order.index(answer)
    assert order.index(classify_silence(POLICY, longest_s + 1.0, silent_s)) <= order.index(answer)
    assert (answer is Liveness.PRESENT) == (silent_s < suspect_timeout_s(POLICY, longest_s))
    assert (answer is Liveness.LOST) == (silent_s >= loss_timeout_s(POLICY, longest_s))


@given(st.floats(0, 1000))
def test_suspicion_timeout_stays_between_bounds(longest_s: float) -> None:
    patience = suspect_timeout_s(POLICY, longest_s)
    assert POLICY.suspect_after_s <= patience <= POLICY.suspect_after_max_s
    assert POLICY.suspect_after_peer_loss_s <= suspect_timeout_after_peer_loss_s(POLICY, longest_s) <= patience


def test_recent_pause_doubles_the_timeout_and_decays() -> None:
    pause = decayed_longest_pause_s(1.0, 6.0)
    assert suspect_timeout_s(POLICY, pause) == 12.0
    for _ in range(int(PAUSE_DECAY_S)):
        pause = decayed_longest_pause_s(pause, 1.0)
    assert POLICY.suspect_after_s <= suspect_timeout_s(POLICY, pause) < 6.0


def test_silence_of_all_nodes_is_not_learned() -> None:
    hearing, first, second = ObserverState(), HeartbeatState(), HeartbeatState()
    for now in (1.0, 2.0, 3.0):
        record_message(POLICY, hearing, first, now)
        record_message(POLICY, hearing, second, now)
    after = 3.0 + observer_stall_s(POLICY) + 5.0
    record_message(POLICY, hearing, first, after)
    assert hearing.receiving_since == after
    assert first.longest_pause_s <= 1.0
    record_message(POLICY, hearing, second, after + 0.2)
    assert second.longest_pause_s <= 1.0


def test_slow_heartbeat_interval_is_learned_from_one_gap() -> None:
    policy = msgspec.structs.replace(POLICY, suspect_after_max_s=60.0)
    assert classify_silence(policy, 0.0, 20.0) is Liveness.LOST
    assert classify_silence(policy, 20.0, 30.0) is Liveness.PRESENT


def test_occasional_pause_is_suspected_only_once() -> None:
    """Eight seconds every five minutes, for an hour; beside it the estimator of RFC 6298, mean plus four deviations."""
    pulse, hearing, mean, deviation, now = HeartbeatState(), ObserverState(), 1.0, 0.0, 0.0
    suspected = by_mean = 0
    for beat in range(1, 3600):
        gap = 8.0 if beat % 300 == 0 else 1.0
        for second in range(int(gap)):  # others beat meanwhile: we are not deaf
            record_message(POLICY, hearing, HeartbeatState(), now + second)
        now += gap
        suspected += classify_silence(POLICY, pulse.longest_pause_s, gap) is not Liveness.PRESENT
        by_mean += gap > max(POLICY.suspect_after_s, mean + 4 * deviation)
        record_message(POLICY, hearing, pulse, now)
        deviation += (abs(gap - mean) - deviation) / 4
        mean += (gap - mean) / 8
    assert (suspected, by_mean) == (1, 11)
