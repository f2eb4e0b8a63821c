from __future__ import annotations

import pytest

from everstep.clock import ManualClock
from everstep_controller.leadership.lease import LeaseTenure, NotLeadingError, reason_to_lead
from everstep_controller.store.rows import LeaseView


def seen(**changed: object) -> LeaseView:
    facts = {"epoch": 3, "newest_epoch": 3, "holder": "c1", "address": "", "expires_in_s": 4.0, "is_lock_free": False}
    return LeaseView(**facts | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"holder": "", "is_lock_free": True, "expires_in_s": -1e9}, "no controller has led before"),
        ({"is_lock_free": True}, "the database session of c1 has ended"),
        ({"expires_in_s": -0.5}, "the lease of c1 expired 0.5 s ago"),
        ({"holder": "c2", "is_lock_free": True}, "before its restart"),
    ],
)
def test_standby_leads_when_lease_is_available(facts: dict[str, object], why: str) -> None:
    assert why in reason_to_lead(seen(**facts), "c2", database_was_unavailable=False)


def test_lease_of_living_leader_is_respected() -> None:
    assert reason_to_lead(seen(), "c2", database_was_unavailable=False) == ""
    assert reason_to_lead(seen(), "c1", database_was_unavailable=False) == ""


@pytest.mark.parametrize("facts", [{"is_lock_free": True}, {"expires_in_s": -9.0}])
def test_previous_leader_has_priority_after_database_outage(facts: dict[str, object]) -> None:
    assert reason_to_lead(seen(**facts), "c2", database_was_unavailable=True) == ""
    assert reason_to_lead(seen(holder="", is_lock_free=True), "c2", database_was_unavailable=True) != ""


@pytest.mark.parametrize("facts", [{"is_lock_free": True}, {"expires_in_s": -9.0}])
def test_resigned_lease_goes_only_to_its_successor(facts: dict[str, object]) -> None:
    given_up = seen(successor="c3", **facts)
    assert [reason_to_lead(given_up, name, database_was_unavailable=False) for name in ("c1", "c2")] == ["", ""]
    assert reason_to_lead(given_up, "c3", database_was_unavailable=False) != ""


def test_lease_is_valid_until_shortly_before_its_end() -> None:
    clock = ManualClock()
    tenure = LeaseTenure(clock, 10.0)
    with pytest.raises(NotLeadingError):
        tenure.check()
    tenure.confirm_renewal(requested_at=clock.monotonic())
    clock.advance(8.9)
    tenure.check()
    clock.advance(0.2)
    assert not tenure.is_certain()


def test_long_first_lease_ends_with_first_renewal_request() -> None:
    clock = ManualClock()
    tenure = LeaseTenure(clock, 10.0)
    tenure.start(clock.monotonic(), 30.0)
    clock.advance(20.0)
    tenure.check()
    tenure.begin_renewal()  # its answer is lost, and the database may have cut the lease to its usual length
    clock.advance(9.5)
    assert not tenure.is_certain()


def test_leader_continues_while_database_is_unreachable() -> None:
    clock = ManualClock()
    tenure = LeaseTenure(clock, 10.0)
    tenure.confirm_renewal(clock.monotonic())
    for _ in range(30):
        clock.advance(2.0)
        tenure.fail_renewal()
        tenure.check()


@pytest.mark.promise("old-leader-fenced")
def test_paused_leader_must_renew_before_acting() -> None:
    clock = ManualClock()
    tenure = LeaseTenure(clock, 10.0)
    tenure.confirm_renewal(clock.monotonic())
    clock.advance(2.0)
    tenure.fail_renewal()
    clock.advance(30.0)  # SIGSTOP; another one may have been elected meanwhile
    with pytest.raises(NotLeadingError, match="no longer certain"):
        tenure.check()
    tenure.fail_renewal()
    assert not tenure.is_certain()
    tenure.confirm_renewal(clock.monotonic())
    tenure.check()
