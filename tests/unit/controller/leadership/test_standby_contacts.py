from __future__ import annotations

import pytest
from everstep_controller.leadership.lease import CONTACT_GAP_S, StandbyContacts

from everstep.clock import ManualClock


@pytest.mark.promise("unreachable-leader")
def test_agent_trying_addresses_in_turn_is_not_insistent() -> None:
    clock = ManualClock()
    knocks = StandbyContacts(clock, persistent_after_s=5.0)
    for node in range(100):  # a rolling restart: each knocks a few times, and is at the leader's then
        for _ in range(3):
            knocks.record(f"n{node}")
            clock.advance(0.2)
    assert knocks.count_persistent() == 0


def test_insistent_agent_counts_once_until_contacts_stop() -> None:
    clock = ManualClock()
    knocks = StandbyContacts(clock, persistent_after_s=5.0)
    for _ in range(6):
        knocks.record("n1")
        knocks.record("n2")
        clock.advance(1.0)
    assert knocks.count_persistent() == 2
    clock.advance(CONTACT_GAP_S - 2.0)
    knocks.record("n2")
    clock.advance(1.1)
    assert knocks.count_persistent() == 1


def test_contact_count_restarts_after_a_pause() -> None:
    clock = ManualClock()
    knocks = StandbyContacts(clock, persistent_after_s=5.0)
    knocks.record("n1")
    clock.advance(CONTACT_GAP_S + 0.1)
    knocks.record("n1")
    assert knocks.count_persistent() == 0
