from __future__ import annotations

import logging

import pytest

from controller.api.limits import Buckets, FailedAuthentications, RequestLimits, network_of
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, RateLimited
from everstep.tokens import Identity, TokenRole

N1, N2 = Identity(TokenRole.AGENT, "n1"), Identity(TokenRole.AGENT, "n2")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic=1000.0)


def limits(clock: ManualClock, **given: float) -> RequestLimits:
    chosen = {"agents_per_s": 8.0, "others_per_s": 4.0, "burst_s": 2.0, **given}
    return RequestLimits(**chosen, monotonic=clock.monotonic)


def spend(charge: RequestLimits, identity: Identity, most: int = 1000) -> int:
    """How many requests pass before one is refused."""
    for passed in range(most):
        try:
            charge.charge(identity)
        except RateLimited:
            return passed
    return most


def test_a_burst_passes_and_then_as_many_as_come_in_a_second(clock: ManualClock) -> None:
    limit = limits(clock)
    assert spend(limit, N1) == 16
    clock.advance(1.0)
    assert spend(limit, N1) == 8
    clock.advance(3600.0)
    assert spend(limit, N1) == 16


def test_a_refusal_says_when_to_come_again_and_that_is_the_truth(clock: ManualClock) -> None:
    limit = limits(clock)
    spend(limit, N1)
    with pytest.raises(RateLimited) as caught:
        limit.charge(N1)
    assert 0 < caught.value.retry_after_s <= 0.125
    clock.advance(caught.value.retry_after_s + 1e-9)
    limit.charge(N1)


def test_one_identity_does_not_use_up_what_another_may(clock: ManualClock) -> None:
    limit = limits(clock)
    spend(limit, N1)
    assert spend(limit, N2) == 16
    assert spend(limit, Identity(TokenRole.VIEWER, "n1")) == 8
    assert spend(limit, Identity(TokenRole.JOIN, "*", "n1")) == 16


def test_idle_buckets_cost_no_memory_and_busy_ones_a_bounded_amount(clock: ManualClock) -> None:
    buckets: Buckets[int] = Buckets(1.0, 5.0, clock.monotonic, most=100)
    for key in range(10_000):
        buckets.take(key)
        assert len(buckets) <= 101
    clock.advance(10.0)
    for key in range(101):
        buckets.take(key)
    clock.advance(10.0)
    buckets.take(-1)
    assert len(buckets) <= 101


def test_failures_of_one_address_are_slowed_down_and_said_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailedAuthentications(per_s=1.0, burst_s=3.0, monotonic=clock.monotonic)
    wrong = AuthenticationError("the token does not verify")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            failures.note("10.0.0.1", wrong)
        with pytest.raises(RateLimited, match=r"from 10\.0\.0\.1"):
            failures.note("10.0.0.1", wrong)
        failures.note("10.0.0.2", wrong)
    assert len(caplog.records) == 1
    clock.advance(60.0)
    failures.note("10.0.0.1", wrong)
    assert "5 failed authentications" in caplog.text


def test_an_attacker_with_a_whole_ipv6_network_is_one(clock: ManualClock) -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert network_of("") == ""
