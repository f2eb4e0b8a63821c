from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.clock import ManualClock
from everstep_controller.leadership.lease import (
    CONTACT_GAP_S,
    MAX_DOUBLINGS,
    LeaderReachability,
    LeadershipNotice,
    Resignation,
    StandbyContacts,
    is_cut_off,
)
from everstep_controller.store.rows import StandbyReport

AFTER_S, GAP_S = 15.0, 5.0


def found(
    looks: Iterable[tuple[int, dict[str, int]]], *, resignations: int = 0, every_s: float = 1.0
) -> list[tuple[float, Resignation | LeadershipNotice]]:
    """Return the messages and their times for a series of reachable node counts and standby reports."""
    reach = LeaderReachability(AFTER_S, GAP_S)
    messages = []
    for look, (seen, contacts) in enumerate(looks):
        result = reach.evaluate(look * every_s, seen, StandbyReport(contacts=contacts, resignations=resignations))
        if result is not None:
            messages.append((look * every_s, result))
    return messages


def resigned(messages: list[tuple[float, Resignation | LeadershipNotice]]) -> list[tuple[float, str]]:
    return [(at, message.successor) for at, message in messages if isinstance(message, Resignation)]


def kinds(messages: list[tuple[float, Resignation | LeadershipNotice]]) -> list[str]:
    return [message.kind for _, message in messages if isinstance(message, LeadershipNotice)]


def test_deaf_leader_resigns_to_most_contacted_standby() -> None:
    (at, result), *_ = found([(0, {"b": 40, "c": 3})] * 20)
    assert at == AFTER_S
    assert isinstance(result, Resignation)
    assert result.successor == "b"
    assert "for 15 s 40 nodes kept contacting standby b while" in result.sentence


def test_split_fleet_keeps_leader_and_is_reported_once() -> None:
    looks = [(20, {"b": 20})] * 300 + [(40, {})] * 30
    assert resigned(found(looks)) == []
    assert kinds(found(looks)) == ["controller.partition_suspected", "controller.partition_cleared"]
    (at, _), _over = found(looks)
    assert at == 2 * AFTER_S


def test_resignation_needs_nine_tenths_of_nodes_elsewhere() -> None:
    assert is_cut_off(10, 100)
    assert not is_cut_off(11, 100)
    assert is_cut_off(0, 1)
    assert not is_cut_off(1, 9)
    assert not is_cut_off(0, 0)


def test_resignation_wait_restarts_after_a_process_pause() -> None:
    reach, report = LeaderReachability(AFTER_S, GAP_S), StandbyReport(contacts={"b": 40})
    assert all(reach.evaluate(at, 0, report) is None for at in (0.0, 1.0, 2.0, 3.0))
    assert all(reach.evaluate(at, 0, report) is None for at in (60.0, 61.0, 62.0, 74.0))


@pytest.mark.promise("unreachable-leader")
def test_resignation_wait_doubles_after_each_resignation() -> None:
    looks = [(0, {"b": 40})] * 2000
    waited = [resigned(found(looks, resignations=many))[0][0] for many in (0, 1, 2, MAX_DOUBLINGS, 99)]
    assert waited == [15.0, 30.0, 60.0, 960.0, 960.0]


@pytest.mark.promise("unreachable-leader")
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.dictionaries(st.sampled_from("bc"), st.integers(0, 50))),
        max_size=60,
    ),
    st.integers(0, 2),
)
def test_resignation_needs_continuous_deafness(looks: list[tuple[int, dict[str, int]]], resignations: int) -> None:
    waits = int(AFTER_S * 2**resignations)
    for at, heir in resigned(found(looks, resignations=resignations)):
        last = int(at)
        assert last >= waits
        for seen, contacts in looks[last - waits : last + 1]:
            assert 0 < max(contacts.values(), default=0) >= 10 * seen
        assert looks[last][1][heir] == max(looks[last][1].values())


@pytest.mark.promise("unreachable-leader")
def test_agent_trying_addresses_in_turn_is_not_insistent() -> None:
    clock = ManualClock()
    contacts = StandbyContacts(clock, persistent_after_s=5.0)
    for node in range(100):  # a rolling restart: each knocks a few times, and is at the leader's then
        for _ in range(3):
            contacts.record(f"n{node}")
            clock.advance(0.2)
    assert contacts.count_persistent() == 0


def test_insistent_agent_counts_once_until_contacts_stop() -> None:
    clock = ManualClock()
    contacts = StandbyContacts(clock, persistent_after_s=5.0)
    for _ in range(6):
        contacts.record("n1")
        contacts.record("n2")
        clock.advance(1.0)
    assert contacts.count_persistent() == 2
    clock.advance(CONTACT_GAP_S - 2.0)
    contacts.record("n2")
    clock.advance(1.1)
    assert contacts.count_persistent() == 1
