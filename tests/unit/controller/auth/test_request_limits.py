from __future__ import annotations

import logging

import pytest

from everstep.bearer_tokens import Identity, TokenRole
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, RateLimited
from everstep_controller.auth.authenticator import MAX_REPORTS, FailedAuthentications, RequestLimits, network_of
from everstep_controller.config import RequestLimitSettings

N1, N2 = Identity(TokenRole.AGENT, "n1"), Identity(TokenRole.AGENT, "n2")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic=1000.0)


def limits(clock: ManualClock, agent_reports_per_s: float = 1024.0) -> RequestLimits:
    settings = RequestLimitSettings(
        agent_requests_per_s=8.0, agent_reports_per_s=agent_reports_per_s, requests_per_s=4.0, request_burst_s=2.0
    )
    return RequestLimits(settings, clock.monotonic)


def spend(charge: RequestLimits, identity: Identity, most: int = 1000) -> int:
    """Return the number of requests before the first refusal."""
    for passed in range(most):
        try:
            charge.charge(identity)
        except RateLimited:
            return passed
    return most


def test_rate_limit_allows_burst_then_steady_rate(clock: ManualClock) -> None:
    limit = limits(clock)
    assert spend(limit, N1) == 16
    clock.advance(1.0)
    assert spend(limit, N1) == 8
    clock.advance(3600.0)
    assert spend(limit, N1) == 16


def test_report_limit_counts_reports_per_node(clock: ManualClock) -> None:
    limit = limits(clock)
    for _ in range(2):
        limit.charge_reports("n1", MAX_REPORTS)
    with pytest.raises(RateLimited, match=r"too many reports of node n1: send these 512 again in 0\.5 s") as caught:
        limit.charge_reports("n1", 512)
    limit.charge_reports("n2", 512)
    clock.advance(caught.value.retry_after_s)
    limit.charge_reports("n1", 512)


def test_failed_authentications_are_limited_and_logged_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailedAuthentications(per_s=1.0, burst_s=3.0, monotonic=clock.monotonic)
    wrong = AuthenticationError("the token does not verify")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            failures.record("10.0.0.1", wrong)
        with pytest.raises(RateLimited, match=r"from 10\.0\.0\.1"):
            failures.record("10.0.0.1", wrong)
        failures.record("10.0.0.2", wrong)
    assert len(caplog.records) == 1
    clock.advance(60.0)
    failures.record("10.0.0.1", wrong)
    assert "5 failed authentications" in caplog.text


def test_ipv6_addresses_share_a_limit_per_network(clock: ManualClock) -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert network_of("") == ""
