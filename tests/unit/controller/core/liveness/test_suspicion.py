"""Compare the suspicion of a node with its definition, replayed from all messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep_controller.core.liveness.suspicion import (
    PAUSE_DECAY_S,
    PAUSE_MARGIN,
    decayed_longest_pause_s,
    observer_stall_s,
    record_message,
    suspect_timeout_s,
)
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import HeartbeatState, ObserverState

POLICY = CorePolicy()
pauses = st.lists(st.tuples(st.floats(0.001, 40.0), st.sampled_from("abc")), max_size=40)


def _naive(words: list[tuple[float, str]], node: str) -> float:
    """Return the longest pause of ``node`` in the whole history of messages."""
    began_listening, last_heartbeat, answers = 0.0, None, list[float]()
    before = 0.0
    for at, source in words:
        if at - before > POLICY.liveness.suspect_after_s / 2:
            began_listening = at
        before = at
        if source == node:
            pause = at - max(began_listening, 0.0 if last_heartbeat is None else last_heartbeat)
            answers.append(min(pause, POLICY.liveness.suspect_after_max_s / PAUSE_MARGIN))
            last_heartbeat = at
    faded = [0.0]
    for index, pause in enumerate(answers):
        for later in answers[index + 1 :]:
            pause *= 1 - later / PAUSE_DECAY_S
        faded.append(pause)
    return max(faded)


@given(pauses)
def test_longest_pause_matches_full_history(steps: list[tuple[float, str]]) -> None:
    hearing, pulses, now = ObserverState(), {name: HeartbeatState() for name in "abc"}, 0.0
    words = []
    for gap, source in steps:
        now += gap
        record_message(POLICY, hearing, pulses[source], now)
        words.append((now, source))
    for name in "abc":
        assert abs(pulses[name].longest_pause_s - _naive(words, name)) < 1e-9


def test_recent_pause_doubles_the_timeout_and_decays() -> None:
    pause = decayed_longest_pause_s(1.0, 6.0)
    assert suspect_timeout_s(POLICY, pause) == 12.0
    for _ in range(int(PAUSE_DECAY_S)):
        pause = decayed_longest_pause_s(pause, 1.0)
    assert POLICY.liveness.suspect_after_s <= suspect_timeout_s(POLICY, pause) < 6.0


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
