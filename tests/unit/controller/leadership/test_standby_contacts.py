from __future__ import annotations

import pytest
from everstep_controller.leadership.lease import PAUSE_S, Knocks

from everstep.clock import ManualClock


@pytest.mark.promise("unreachable-leader")
def test_an_agent_that_tries_addresses_in_turn_is_not_insistent() -> None:
    clock = ManualClock()
    knocks = Knocks(clock, insistent_s=5.0)
    for node in range(100):  # a rolling restart: each knocks a few times, and is at the leader's then
        for _ in range(3):
            knocks.hear(f"n{node}")
            clock.advance(0.2)
    assert knocks.insistent() == 0


def test_who_comes_again_and_again_counts_once_until_it_comes_no_more() -> None:
    clock = ManualClock()
    knocks = Knocks(clock, insistent_s=5.0)
    for _ in range(6):
        knocks.hear("n1")
        knocks.hear("n2")
        clock.advance(1.0)
    assert knocks.insistent() == 2
    clock.advance(PAUSE_S - 2.0)
    knocks.hear("n2")
    clock.advance(1.1)
    assert knocks.insistent() == 1


def test_who_comes_back_after_a_pause_begins_anew() -> None:
    clock = ManualClock()
    knocks = Knocks(clock, insistent_s=5.0)
    knocks.hear("n1")
    clock.advance(PAUSE_S + 0.1)
    knocks.hear("n1")
    assert knocks.insistent() == 0
