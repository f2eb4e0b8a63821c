"""The way to a controller is checked: certificates, keys, tokens, clocks and versions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep import __version__
from everstep.clock import ManualClock
from everstep.doctor.access import (
    DAY_S,
    AccessFacts,
    check_access,
    check_secret_file,
    check_tls,
    read_access,
    read_end,
)
from everstep.doctor.results import CheckResult, Status
from everstep.errors import NotFound
from everstep.wire.v1 import operator as op
from tests.support.services.certificates import Authority

NOW = 1_700_000_000.0


def by_check(results: Iterable[CheckResult]) -> dict[str, tuple[Status, str]]:
    return {result.check: (result.status, result.sentence) for result in results}


def facts(**changed: Any) -> AccessFacts:
    identity = op.CallerIdentity(role="viewer", subject="olga")
    return msgspec.structs.replace(AccessFacts(url="http://c:7700", version=__version__, identity=identity), **changed)


class PlayedController:
    """Answers half a second after each request, with a clock that is ahead."""

    def __init__(self, clock: ManualClock, ahead_s: float) -> None:
        self.clock, self.ahead_s = clock, ahead_s

    def get(self, url: str, kind: Any, **_: Any) -> Any:
        self.clock.advance(0.25)
        now = self.clock.wall() + self.ahead_s
        self.clock.advance(0.25)
        if url.startswith("/v1/nodes/"):
            raise NotFound("no such node")
        if kind is op.FleetStatus:
            return op.FleetStatus(version="9.9.9", epoch=1, now=now, started_at=0.0, nodes={})
        return op.CallerIdentity(role="operator", subject="olga")


def test_controllers_clock_is_compared_in_the_middle() -> None:
    clock = ManualClock()
    found = read_access(PlayedController(clock, 7.0).get, "http://c:7700", clock)
    assert (found.version, found.agent_version, found.error) == ("9.9.9", "", "")
    assert found.ahead_s == pytest.approx(7.0, abs=1e-3)
    assert found.uncertain_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("ahead_s", "uncertain_s", "status"),
    [(0.1, 0.0, Status.OK), (-2.5, 0.0, Status.WARN), (2.5, 1.0, Status.OK), (90.0, 1.0, Status.FAIL)],
)
def test_clock_offset_counts_beyond_the_round_trip(ahead_s: float, uncertain_s: float, status: Status) -> None:
    found = by_check(check_access(facts(ahead_s=ahead_s, uncertain_s=uncertain_s), NOW))
    assert found["clock"][0] is status


@pytest.mark.parametrize(
    ("days", "status"), [(None, Status.OK), (30.0, Status.OK), (3.0, Status.WARN), (-1.0, Status.FAIL)]
)
def test_token_should_not_end_soon(days: float | None, status: Status) -> None:
    ends_at = None if days is None else NOW + days * DAY_S
    identity = op.CallerIdentity(role="viewer", subject="olga", expires_at=ends_at)
    assert by_check(check_access(facts(identity=identity), NOW))["token"][0] is status


def test_versions_may_be_one_minor_apart() -> None:
    major, minor = map(int, __version__.split(".")[:2])
    for version, status in (
        (__version__, Status.OK),
        (f"{major}.{minor + 1}.0", Status.WARN),
        (f"{major}.{minor + 2}.0", Status.FAIL),
        (f"{major + 1}.{minor}.0", Status.FAIL),
        ("unknown", Status.FAIL),
    ):
        found = by_check(check_access(facts(version=version, agent_version=version), NOW))
        assert {found["controller version"][0], found["agent version"][0]} == {status}


def test_secret_file_is_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("viewer:olga:mac")
    file.chmod(0o600)
    assert [result.status for result in check_secret_file("token file", str(file))] == [Status.OK]
    file.chmod(0o644)
    (open_to_all,) = check_secret_file("token file", str(file))
    assert open_to_all.sentence == f"{file} has mode 644, so others can read it: chmod 600 {file}"
    (missing,) = check_secret_file("token file", str(tmp_path / "none"))
    assert missing.status is Status.FAIL


def test_certificates_are_checked_with_their_keys(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client, other = authority.client("everstep://agent/n1"), authority.server()
    ca_file, certificate = str(authority.pair.certificate), str(client.certificate)
    ends_at = read_end(certificate)
    client.key.chmod(0o600)
    found = by_check(check_tls(ca_file, certificate, str(client.key), ends_at - 30 * DAY_S))
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(
        ("authority", "certificate", "private key"), Status.OK
    )
    expired = by_check(check_tls(ca_file, certificate, str(client.key), ends_at + DAY_S))
    assert expired["certificate"][0] is Status.FAIL
    assert "expired 1.0 days ago" in expired["certificate"][1]
    mixed = by_check(check_tls("", certificate, str(other.key), ends_at - DAY_S))
    assert mixed["private key"][0] is Status.FAIL
    assert mixed["certificate"][0] is Status.WARN
    nothing = by_check(check_tls(str(client.key), "", "", NOW))
    assert nothing["authority"][0] is Status.FAIL
    assert by_check(check_tls("", "", "", NOW)) == {}
