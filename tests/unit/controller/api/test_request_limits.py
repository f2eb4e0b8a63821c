from __future__ import annotations

import logging
from pathlib import Path

import pytest
from everstep_controller.api.auth import MAX_REPORTS, FailedAuthentications, RequestLimits, network_of
from everstep_controller.config import ControllerSettings
from starlette.testclient import TestClient

from everstep.bearer_tokens import Identity, TokenRole
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, RateLimited
from everstep.wire.v1.training import FindingCleared
from tests.support.controllers import InProcess, Refused, Speaker

N1, N2 = Identity(TokenRole.AGENT, "n1"), Identity(TokenRole.AGENT, "n2")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic=1000.0)


def limits(clock: ManualClock, **given: float) -> RequestLimits:
    chosen = {"agent_requests_per_s": 8.0, "agent_reports_per_s": 1024.0, "requests_per_s": 4.0, **given}
    return RequestLimits(ControllerSettings(**chosen, request_burst_s=2.0), clock.monotonic)


def spend(charge: RequestLimits, identity: Identity, most: int = 1000) -> int:
    """How many requests pass before one is refused."""
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


def test_report_limit_admits_one_full_request_at_any_rate(clock: ManualClock) -> None:
    limit = limits(clock, agent_reports_per_s=1.0)
    for _ in range(2):
        limit.charge_reports("n1", MAX_REPORTS)
        clock.advance(MAX_REPORTS)


def test_reports_over_limit_are_refused_then_accepted(clock: ManualClock, tmp_path: Path) -> None:
    application = InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock, agent_reports_per_s=100.0)
    with TestClient(application) as client:
        speaker = Speaker(client, "n1")
        speaker.register()
        many = [FindingCleared(key=f"host.disk/{i}") for i in range(MAX_REPORTS)]
        assert speaker.report(*many).through == MAX_REPORTS
        with pytest.raises(Refused, match="429 rate_limited: too many reports of node n1"):
            speaker.report(*many)
        speaker.beat()
        clock.advance(MAX_REPORTS / 100.0)
        assert speaker.report(*many, first=MAX_REPORTS + 1).through == 2 * MAX_REPORTS


def test_rate_limits_are_independent_per_identity(clock: ManualClock) -> None:
    limit = limits(clock)
    spend(limit, N1)
    assert spend(limit, N2) == 16
    assert spend(limit, Identity(TokenRole.VIEWER, "n1")) == 8
    assert spend(limit, Identity(TokenRole.JOIN, "*", "n1")) == 16


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
